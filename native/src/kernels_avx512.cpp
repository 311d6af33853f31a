// Compiled with -mavx512f -mavx512dq -mavx512bw -mavx512vl -mfma -mf16c.
#include <immintrin.h>

#include "checksum.h"
#include "element.h"

namespace offload {
namespace {

struct Vector {
    static constexpr int kWidth = 16;
    using Float = __m512;
    using Half = __m256i;
    using Int = __m512i;
    using Byte = __m128i;

    static Float broadcast(float value) { return _mm512_set1_ps(value); }
    static Float load(const float* address) { return _mm512_loadu_ps(address); }
    static void store(float* address, Float value) { _mm512_storeu_ps(address, value); }
    static Half load_half(const uint16_t* address) { return _mm256_loadu_si256(reinterpret_cast<const __m256i*>(address)); }
    static void store_half(uint16_t* address, Half value) { _mm256_storeu_si256(reinterpret_cast<__m256i*>(address), value); }
    static Float add(Float a, Float b) { return _mm512_add_ps(a, b); }
    static Float sub(Float a, Float b) { return _mm512_sub_ps(a, b); }
    static Float mul(Float a, Float b) { return _mm512_mul_ps(a, b); }
    static Float div(Float a, Float b) { return _mm512_div_ps(a, b); }
    static Float sqrt(Float a) { return _mm512_sqrt_ps(a); }
    static Float fma(Float a, Float b, Float c) { return _mm512_fmadd_ps(a, b, c); }

    // One NaN for all, so that narrowing gives the canonical NaN of the 16-bit type.
    static Float one_nan(Float a) {
        const __m512 nan = _mm512_castsi512_ps(_mm512_set1_epi32(static_cast<int>(kFloatNan)));
        return _mm512_mask_mov_ps(a, _mm512_cmp_ps_mask(a, a, _CMP_UNORD_Q), nan);
    }
    static Half to_bf16(Float a) {
        const __m512i bits = _mm512_castps_si512(one_nan(a));
        const __m512i odd = _mm512_and_si512(_mm512_srli_epi32(bits, 16), _mm512_set1_epi32(1));
        const __m512i rounded = _mm512_add_epi32(_mm512_add_epi32(bits, _mm512_set1_epi32(0x7fff)), odd);
        return _mm512_cvtepi32_epi16(_mm512_srli_epi32(rounded, 16));
    }
    static Half to_f16(Float a) { return _mm512_cvtps_ph(one_nan(a), _MM_FROUND_TO_NEAREST_INT); }
    static Float from_bf16(Half a) { return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(a), 16)); }
    static Float from_f16(Half a) { return _mm512_cvtph_ps(a); }

    static Float sign(Float a) {
        const __m512 zero = _mm512_setzero_ps();
        const __m512 positive = _mm512_maskz_mov_ps(_mm512_cmp_ps_mask(a, zero, _CMP_GT_OQ), _mm512_set1_ps(1.0f));
        return _mm512_mask_mov_ps(positive, _mm512_cmp_ps_mask(a, zero, _CMP_LT_OQ), _mm512_set1_ps(-1.0f));
    }
    static Int ibroadcast(uint32_t value) { return _mm512_set1_epi32(static_cast<int>(value)); }
    static Int iota(uint32_t step) {
        return _mm512_mullo_epi32(_mm512_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15), ibroadcast(step));
    }
    static Int iadd(Int a, Int b) { return _mm512_add_epi32(a, b); }
    static Int isub(Int a, Int b) { return _mm512_sub_epi32(a, b); }
    static Int imul(Int a, Int b) { return _mm512_mullo_epi32(a, b); }
    static Int iand(Int a, Int b) { return _mm512_and_si512(a, b); }
    static Int ixor(Int a, Int b) { return _mm512_xor_si512(a, b); }
    static Int umax(Int a, Int b) { return _mm512_max_epu32(a, b); }
    template <int Count> static Int shift_left(Int a) { return _mm512_slli_epi32(a, Count); }
    template <int Count> static Int shift_right(Int a) { return _mm512_srli_epi32(a, Count); }
    template <int Count> static Int shift_right_signed(Int a) { return _mm512_srai_epi32(a, Count); }
    static uint32_t reduce_max(Int a) { return _mm512_reduce_max_epu32(a); }
    static Int bits(Float a) { return _mm512_castps_si512(a); }
    static Float as_float(Int a) { return _mm512_castsi512_ps(a); }
    static Float from_int(Int a) { return _mm512_cvtepi32_ps(a); }
    static Int round_to_int(Float a) { return _mm512_cvtps_epi32(a); }
    static Int load_int(const uint8_t* address) { return _mm512_loadu_si512(address); }
    static void store_int(uint8_t* address, Int value) { _mm512_storeu_si512(address, value); }
    static Int widen(Half a) { return _mm512_cvtepu16_epi32(a); }
    static Int widen_signed(Half a) { return _mm512_cvtepi16_epi32(a); }
    static Half narrow(Int a) { return _mm512_cvtepi32_epi16(a); }
    static Byte load_byte(const uint8_t* address) { return _mm_loadu_si128(reinterpret_cast<const __m128i*>(address)); }
    static void store_byte(uint8_t* address, Byte value) { _mm_storeu_si128(reinterpret_cast<__m128i*>(address), value); }
    static Int widen_byte(Byte a) { return _mm512_cvtepu8_epi32(a); }
    static Int widen_byte_signed(Byte a) { return _mm512_cvtepi8_epi32(a); }
    static Byte narrow_byte(Int a) { return _mm512_cvtepi32_epi8(a); }

    // The square of a float is exact in double, so that fma rounds as multiply and add do.
    struct Squares {
        __m512d sums[4];
        Squares() {
            for (auto& sum : sums) sum = _mm512_setzero_pd();
        }
        void add(int index, Float value) {
            const __m512d low = _mm512_cvtps_pd(_mm512_castps512_ps256(value));
            const __m512d high = _mm512_cvtps_pd(_mm512_extractf32x8_ps(value, 1));
            sums[2 * index] = _mm512_fmadd_pd(low, low, sums[2 * index]);
            sums[2 * index + 1] = _mm512_fmadd_pd(high, high, sums[2 * index + 1]);
        }
        void store(double* out) const {
            for (int i = 0; i < 4; ++i) _mm512_storeu_pd(out + 8 * i, sums[i]);
        }
    };
};

// The words of 32 elements are widened by interleaving them with others, which keeps 128-bit lanes: a holds the elements
// 0-3, 8-11, 16-19, 24-27, b the rest. Half the instructions that an order of its own would take.
struct Block {
    using Int = __m512i;
    struct Floats {
        __m512 a, b;
    };

    static __m512i load_words(const void* address) { return _mm512_loadu_si512(address); }
    static __m512 interleaved_low(__m512i low, __m512i high) { return _mm512_castsi512_ps(_mm512_unpacklo_epi16(low, high)); }
    static __m512 interleaved_high(__m512i low, __m512i high) { return _mm512_castsi512_ps(_mm512_unpackhi_epi16(low, high)); }

    static Floats load_f32(const float* address) {
        const __m512 first = _mm512_loadu_ps(address), second = _mm512_loadu_ps(address + 16);
        const __m512i even = _mm512_setr_epi32(0, 1, 2, 3, 8, 9, 10, 11, 16, 17, 18, 19, 24, 25, 26, 27);
        const __m512i odd = _mm512_add_epi32(even, _mm512_set1_epi32(4));
        return {_mm512_permutex2var_ps(first, even, second), _mm512_permutex2var_ps(first, odd, second)};
    }
    static Floats load_bf16(const uint16_t* address) {
        const __m512i words = load_words(address), zero = _mm512_setzero_si512();
        return {interleaved_low(zero, words), interleaved_high(zero, words)};
    }
    static Floats load_f16(const uint16_t* address) {
        const __m512i order = _mm512_setr_epi64(0, 2, 4, 6, 1, 3, 5, 7);
        const __m512i words = _mm512_permutexvar_epi64(order, load_words(address));
        return {_mm512_cvtph_ps(_mm512_castsi512_si256(words)), _mm512_cvtph_ps(_mm512_extracti64x4_epi64(words, 1))};
    }

    // The low (High: high) words of the elements, in their order: word w of 128-bit lane l is from dword w % 4 of lane l of a
    // (of b, from the fifth on).
    template <bool High> static __m512i order() {
        alignas(64) uint16_t indices[32];
        for (int word = 0; word < 32; ++word) {
            const int dword = word / 8 * 4 + word % 4;
            indices[word] = static_cast<uint16_t>((word % 8 < 4 ? 0 : 32) + 2 * dword + (High ? 1 : 0));
        }
        return _mm512_load_si512(indices);
    }
    static __m512i low_words(__m512i a, __m512i b) { return _mm512_permutex2var_epi16(a, order<false>(), b); }
    static __m512i high_words(__m512i a, __m512i b) { return _mm512_permutex2var_epi16(a, order<true>(), b); }
    static void make_one_nan(Floats& value) {
        if (__builtin_expect(_mm512_cmp_ps_mask(value.a, value.b, _CMP_UNORD_Q) != 0, 0)) {
            value = {Vector::one_nan(value.a), Vector::one_nan(value.b)};
        }
    }

    // As words: bits = (upper - carry) << 16 | rest, where the carry is the highest bit of the rest.
    static Floats join(const uint16_t* upper, const uint16_t* rest) {
        const __m512i low = load_words(rest);
        const __m512i high = _mm512_sub_epi16(load_words(upper), _mm512_srli_epi16(low, 15));
        return {interleaved_low(low, high), interleaved_high(low, high)};
    }
    static void split(uint16_t* upper, uint16_t* rest, Floats value) {
        make_one_nan(value);
        const __m512i a = _mm512_castps_si512(value.a), b = _mm512_castps_si512(value.b);
        const __m512i low = low_words(a, b);
        _mm512_storeu_si512(upper, _mm512_add_epi16(high_words(a, b), _mm512_srli_epi16(low, 15)));
        _mm512_storeu_si512(rest, low);
    }

    template <bool High> static __m512i sixteen(__m512i random) {
        return High ? _mm512_srli_epi32(random, 16) : _mm512_and_si512(random, _mm512_set1_epi32(0xffff));
    }
    template <bool High> static void round_bf16(uint16_t* address, Floats value, Int random_a, Int random_b) {
        make_one_nan(value);
        const __m512i a = _mm512_add_epi32(_mm512_castps_si512(value.a), sixteen<High>(random_a));
        const __m512i b = _mm512_add_epi32(_mm512_castps_si512(value.b), sixteen<High>(random_b));
        _mm512_storeu_si512(address, high_words(a, b));
    }
    static Int lanes_a(uint32_t step) {
        const __m512i lanes = _mm512_setr_epi32(0, 1, 2, 3, 8, 9, 10, 11, 16, 17, 18, 19, 24, 25, 26, 27);
        return _mm512_mullo_epi32(lanes, _mm512_set1_epi32(static_cast<int>(step)));
    }
    static Int lanes_b(uint32_t step) { return _mm512_add_epi32(lanes_a(step), _mm512_set1_epi32(static_cast<int>(4 * step))); }

    // A code becomes the low bits of the float 2^23 + code, from which fma subtracts 2^23 while it scales: exact.
    static Floats scaled(__m256i codes, float offset, float scale) {
        const __m512i words = _mm512_cvtepu8_epi16(codes);
        const __m512i exponent = _mm512_set1_epi16(0x4b00);
        const __m512 by = _mm512_set1_ps(scale), minus = _mm512_set1_ps(-offset * scale);
        return {_mm512_fmadd_ps(interleaved_low(words, exponent), by, minus),
                _mm512_fmadd_ps(interleaved_high(words, exponent), by, minus)};
    }
    static __m256i load_codes(const uint8_t* codes) { return _mm256_loadu_si256(reinterpret_cast<const __m256i*>(codes)); }
    static Floats load_signed(const uint8_t* codes, float scale) {
        return scaled(_mm256_xor_si256(load_codes(codes), _mm256_set1_epi8(-128)), 0x1p23f + 128.0f, scale);
    }
    static Floats load_unsigned(const uint8_t* codes, float scale) { return scaled(load_codes(codes), 0x1p23f, scale); }

    static void store_codes(uint8_t* codes, __m512i words) {
        _mm256_storeu_si256(reinterpret_cast<__m256i*>(codes), _mm512_cvtepi16_epi8(words));
    }
    // value * up, rounded to an integer of at most 16 bits: the low words of 1.5 * 2^23 + it.
    static __m512i rounded(const Floats& value, __m512 up) {
        const __m512 magic = _mm512_set1_ps(0x1.8p23f);
        return low_words(_mm512_castps_si512(_mm512_fmadd_ps(value.a, up, magic)),
                         _mm512_castps_si512(_mm512_fmadd_ps(value.b, up, magic)));
    }
    static void store_signed(uint8_t* codes, Floats value, __m512 up, Int random) {
        const __m512i drawn = _mm512_add_epi16(rounded(value, up), _mm512_and_si512(random, _mm512_set1_epi16(0xff)));
        store_codes(codes, _mm512_srai_epi16(drawn, 8));
    }
    static void store_unsigned(uint8_t* codes, Floats value, __m512 up, Int random) {
        const __m512i drawn = _mm512_add_epi16(rounded(value, up), _mm512_srli_epi16(random, 8));
        store_codes(codes, _mm512_max_epu16(_mm512_srli_epi16(drawn, 8), _mm512_set1_epi16(1)));
    }
};

} // namespace
} // namespace offload

#include "kernels.inc"

namespace offload {
namespace {

// All chains at once: as fast as memory, where eight products of words are not.
void checksum(uint64_t* chains, const uint8_t* bytes, int64_t nbytes) {
    const __m512i multiplier = _mm512_set1_epi64(static_cast<int64_t>(kChecksumMultiplier));
    __m512i now = _mm512_loadu_si512(chains);
    for (int64_t at = 0; at < nbytes; at += kChecksumStride) {
        const __m512i product = _mm512_mullo_epi64(_mm512_xor_si512(now, _mm512_loadu_si512(bytes + at)), multiplier);
        now = _mm512_rol_epi64(product, kChecksumRotation);
    }
    _mm512_storeu_si512(chains, now);
}

} // namespace

const Kernels kKernelsAvx512 = make_kernels(OFFLOAD_SIMD_AVX512, checksum);
} // namespace offload
