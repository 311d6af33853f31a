// SPDX-License-Identifier: Apache-2.0
// Compiled with -mavx2 -mfma -mf16c.
#include <immintrin.h>

#include "element.h"

namespace offload {
namespace {

struct Avx2Vector {
    static constexpr int kWidth = 8;
    using Float = __m256;
    using Half = __m128i;
    using Int = __m256i;
    using Byte = uint64_t;

    static Float broadcast(float value) { return _mm256_set1_ps(value); }
    static Float load(const float* address) { return _mm256_loadu_ps(address); }
    static void store(float* address, Float value) { _mm256_storeu_ps(address, value); }
    static Half load_half(const uint16_t* address) { return _mm_loadu_si128(reinterpret_cast<const __m128i*>(address)); }
    static void store_half(uint16_t* address, Half value) { _mm_storeu_si128(reinterpret_cast<__m128i*>(address), value); }
    static Float add(Float a, Float b) { return _mm256_add_ps(a, b); }
    static Float sub(Float a, Float b) { return _mm256_sub_ps(a, b); }
    static Float mul(Float a, Float b) { return _mm256_mul_ps(a, b); }
    static Float div(Float a, Float b) { return _mm256_div_ps(a, b); }
    static Float sqrt(Float a) { return _mm256_sqrt_ps(a); }
    static Float fma(Float a, Float b, Float c) { return _mm256_fmadd_ps(a, b, c); }

    // One NaN for all, so that narrowing gives the canonical NaN of the 16-bit type.
    static Float one_nan(Float a) {
        const __m256 nan = _mm256_castsi256_ps(_mm256_set1_epi32(static_cast<int>(kFloatNan)));
        return _mm256_blendv_ps(a, nan, _mm256_cmp_ps(a, a, _CMP_UNORD_Q));
    }
    static Half to_bf16(Float a) {
        const __m256i bits = _mm256_castps_si256(one_nan(a));
        const __m256i odd = _mm256_and_si256(_mm256_srli_epi32(bits, 16), _mm256_set1_epi32(1));
        const __m256i rounded = _mm256_add_epi32(_mm256_add_epi32(bits, _mm256_set1_epi32(0x7fff)), odd);
        const __m256i high = _mm256_srli_epi32(rounded, 16);
        return _mm_packus_epi32(_mm256_castsi256_si128(high), _mm256_extracti128_si256(high, 1));
    }
    static Half to_f16(Float a) { return _mm256_cvtps_ph(one_nan(a), _MM_FROUND_TO_NEAREST_INT); }
    static Float from_bf16(Half a) { return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(a), 16)); }
    static Float from_f16(Half a) { return _mm256_cvtph_ps(a); }

    static Float sign(Float a) {
        const __m256 zero = _mm256_setzero_ps();
        const __m256 positive = _mm256_and_ps(_mm256_cmp_ps(a, zero, _CMP_GT_OQ), _mm256_set1_ps(1.0f));
        return _mm256_or_ps(positive, _mm256_and_ps(_mm256_cmp_ps(a, zero, _CMP_LT_OQ), _mm256_set1_ps(-1.0f)));
    }
    static Int ibroadcast(uint32_t value) { return _mm256_set1_epi32(static_cast<int>(value)); }
    static Int iota(uint32_t step) { return _mm256_mullo_epi32(_mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7), ibroadcast(step)); }
    static Int iadd(Int a, Int b) { return _mm256_add_epi32(a, b); }
    static Int imul(Int a, Int b) { return _mm256_mullo_epi32(a, b); }
    static Int iand(Int a, Int b) { return _mm256_and_si256(a, b); }
    static Int ixor(Int a, Int b) { return _mm256_xor_si256(a, b); }
    static Int umax(Int a, Int b) { return _mm256_max_epu32(a, b); }
    template <int Count> static Int shift_left(Int a) { return _mm256_slli_epi32(a, Count); }
    template <int Count> static Int shift_right(Int a) { return _mm256_srli_epi32(a, Count); }
    template <int Count> static Int shift_right_signed(Int a) { return _mm256_srai_epi32(a, Count); }
    static uint32_t reduce_max(Int a) {
        __m128i four = _mm_max_epu32(_mm256_castsi256_si128(a), _mm256_extracti128_si256(a, 1));
        four = _mm_max_epu32(four, _mm_shuffle_epi32(four, 0x4e));
        four = _mm_max_epu32(four, _mm_shuffle_epi32(four, 0xb1));
        return static_cast<uint32_t>(_mm_cvtsi128_si32(four));
    }
    static Int bits(Float a) { return _mm256_castps_si256(a); }
    static Float as_float(Int a) { return _mm256_castsi256_ps(a); }
    static Float from_int(Int a) { return _mm256_cvtepi32_ps(a); }
    static Int round_to_int(Float a) { return _mm256_cvtps_epi32(a); }
    static Int load_int(const uint8_t* address) { return _mm256_loadu_si256(reinterpret_cast<const __m256i*>(address)); }
    static void store_int(uint8_t* address, Int value) { _mm256_storeu_si256(reinterpret_cast<__m256i*>(address), value); }
    static Int widen(Half a) { return _mm256_cvtepu16_epi32(a); }
    static Int widen_signed(Half a) { return _mm256_cvtepi16_epi32(a); }
    static Half narrow(Int a) {
        const __m256i low = _mm256_and_si256(a, _mm256_set1_epi32(0xffff));
        return _mm_packus_epi32(_mm256_castsi256_si128(low), _mm256_extracti128_si256(low, 1));
    }
    static Byte load_byte(const uint8_t* address) { return load_element<uint64_t>(address); }
    static void store_byte(uint8_t* address, Byte value) { store_element(address, value); }
    static Int widen_byte(Byte a) { return _mm256_cvtepu8_epi32(_mm_cvtsi64_si128(static_cast<long long>(a))); }
    static Int widen_byte_signed(Byte a) { return _mm256_cvtepi8_epi32(_mm_cvtsi64_si128(static_cast<long long>(a))); }
    static Byte narrow_byte(Int a) {
        const __m256i low = _mm256_and_si256(a, _mm256_set1_epi32(0xff));
        const __m128i words = _mm_packus_epi32(_mm256_castsi256_si128(low), _mm256_extracti128_si256(low, 1));
        return static_cast<uint64_t>(_mm_cvtsi128_si64(_mm_packus_epi16(words, words)));
    }

    // The square of a float is exact in double, so that fma rounds as multiply and add do.
    struct Squares {
        __m256d sums[8];
        Squares() {
            for (auto& sum : sums) sum = _mm256_setzero_pd();
        }
        void add(int index, Float value) {
            const __m256d low = _mm256_cvtps_pd(_mm256_castps256_ps128(value));
            const __m256d high = _mm256_cvtps_pd(_mm256_extractf128_ps(value, 1));
            sums[2 * index] = _mm256_fmadd_pd(low, low, sums[2 * index]);
            sums[2 * index + 1] = _mm256_fmadd_pd(high, high, sums[2 * index + 1]);
        }
        void store(double* out) const {
            for (int i = 0; i < 8; ++i) _mm256_storeu_pd(out + 4 * i, sums[i]);
        }
    };
};

using Vector = Together<Avx2Vector, 2>;
using Block = PlainBlock<Vector>;
using Group = PlainGroup<Vector>;

} // namespace
} // namespace offload

#include "kernels.inc"

namespace offload {
namespace {

// A line is two registers.
void checksum(ChecksumLanes& lanes, const uint8_t* bytes, int64_t line_count) {
    __m256i products[2] = {_mm256_setzero_si256(), _mm256_setzero_si256()};
    __m256i sums[2] = {_mm256_setzero_si256(), _mm256_setzero_si256()};
    for (int64_t line = 0; line < line_count; ++line) {
        const uint8_t* const at = bytes + line * kChecksumLine;
        __builtin_prefetch(at + kChecksumAhead, 0, 2);
        for (int half = 0; half < 2; ++half) {
            const __m256i words = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(at) + half);
            const __m256i keys = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(kChecksumKeys.keys + line) + half);
            const __m256i mixed = _mm256_xor_si256(words, keys);
            products[half] = _mm256_add_epi64(products[half], _mm256_mul_epu32(mixed, _mm256_srli_epi64(mixed, 32)));
            sums[half] = _mm256_add_epi64(sums[half], words);
        }
    }
    for (int half = 0; half < 2; ++half) {
        _mm256_storeu_si256(reinterpret_cast<__m256i*>(lanes.products) + half, products[half]);
        _mm256_storeu_si256(reinterpret_cast<__m256i*>(lanes.sums) + half, sums[half]);
    }
}

} // namespace

const Kernels kKernelsAvx2 = make_kernels(OFFLOAD_SIMD_AVX2, checksum);
} // namespace offload
