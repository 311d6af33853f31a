// SPDX-License-Identifier: Apache-2.0
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

// Of the 32 elements of a block a holds the even ones and b the odd ones: the words of a pair share a dword, so that nothing
// crosses a 128-bit lane when they are widened and narrowed.
struct Block {
    using Int = __m512i;
    struct Floats {
        __m512 a, b;
    };

    static __m512i load_words(const void* address) { return _mm512_loadu_si512(address); }
    static __m512i upper_words() { return _mm512_set1_epi32(static_cast<int>(0xffff0000u)); }
    // Each dword of two words: the low one of `even` or `odd`, the high ones.
    static __m512i low_words(__m512i even, __m512i odd) {
        return _mm512_mask_shuffle_epi8(even, 0xccccccccccccccccu, odd, _mm512_set4_epi32(0x0d0c0000, 0x09080000, 0x05040000, 0x01000000));
    }
    static __m512i high_words(__m512i even, __m512i odd) {
        return _mm512_mask_shuffle_epi8(odd, 0x3333333333333333u, even, _mm512_set4_epi32(0x0f0e, 0x0b0a, 0x0706, 0x0302));
    }

    static Floats load_f32(const float* address) {
        const __m512 first = _mm512_loadu_ps(address), second = _mm512_loadu_ps(address + 16);
        const __m512i even = _mm512_setr_epi32(0, 2, 4, 6, 8, 10, 12, 14, 16, 18, 20, 22, 24, 26, 28, 30);
        const __m512i odd = _mm512_add_epi32(even, _mm512_set1_epi32(1));
        return {_mm512_permutex2var_ps(first, even, second), _mm512_permutex2var_ps(first, odd, second)};
    }
    static Floats load_bf16(const uint16_t* address) {
        const __m512i words = load_words(address);
        return {_mm512_castsi512_ps(_mm512_slli_epi32(words, 16)), _mm512_castsi512_ps(_mm512_and_si512(words, upper_words()))};
    }
    static Floats load_f16(const uint16_t* address) {
        const __m512i words = load_words(address);
        return {_mm512_cvtph_ps(_mm512_cvtepi32_epi16(words)), _mm512_cvtph_ps(_mm512_cvtepi32_epi16(_mm512_srli_epi32(words, 16)))};
    }
    static void make_one_nan(Floats& value) {
        if (__builtin_expect(_mm512_cmp_ps_mask(value.a, value.b, _CMP_UNORD_Q) != 0, 0)) {
            value = {Vector::one_nan(value.a), Vector::one_nan(value.b)};
        }
    }

    // As words: bits = (upper - carry) << 16 | rest, where the carry is the highest bit of the rest.
    static Floats join(const uint16_t* upper, const uint16_t* rest) {
        const __m512i low = load_words(rest);
        const __m512i high = _mm512_sub_epi16(load_words(upper), _mm512_srli_epi16(low, 15));
        return {_mm512_castsi512_ps(low_words(low, high)), _mm512_castsi512_ps(high_words(low, high))};
    }
    static void split(uint16_t* upper, uint16_t* rest, Floats value) {
        make_one_nan(value);
        const __m512i a = _mm512_castps_si512(value.a), b = _mm512_castps_si512(value.b);
        const __m512i low = low_words(a, b);
        _mm512_storeu_si512(upper, _mm512_add_epi16(high_words(a, b), _mm512_srli_epi16(low, 15)));
        _mm512_storeu_si512(rest, low);
    }

    // `random`: 16 bits for each element, in order; Swapped: the elements of a pair have each other's.
    template <bool Swapped> static void round_bf16(uint16_t* address, Floats value, Int random) {
        make_one_nan(value);
        const __m512i even = _mm512_and_si512(random, _mm512_set1_epi32(0xffff)), odd = _mm512_srli_epi32(random, 16);
        const __m512i a = _mm512_add_epi32(_mm512_castps_si512(value.a), Swapped ? odd : even);
        const __m512i b = _mm512_add_epi32(_mm512_castps_si512(value.b), Swapped ? even : odd);
        _mm512_storeu_si512(address, high_words(a, b));
    }
};

// 64 elements with 8-bit codes, in two blocks.
struct Group {
    using Int = __m512i;
    struct Floats {
        Block::Floats first, second;
    };

    // A code becomes the low bits of the float 2^23 + code, and `minus` is -2^23 * scale (of signed codes, which are taken as
    // code + 128: -(2^23 + 128) * scale), which is exact: fma rounds once, as a product of the code would.
    static Floats scaled(__m512i codes, float scale, float minus) {
        const __m512i exponent = _mm512_set1_epi32(0x4b000000);
        const __m512i lanes = _mm512_permutexvar_epi64(_mm512_setr_epi64(0, 4, 1, 5, 2, 6, 3, 7), codes);
        const __m512 by = _mm512_set1_ps(scale), and_minus = _mm512_set1_ps(minus);
        const auto value = [&](int first) {
            const __m512i order = _mm512_set4_epi32(first + 6, first + 4, first + 2, first);
            const __m512i wide = _mm512_mask_shuffle_epi8(exponent, 0x1111111111111111u, lanes, order);
            return _mm512_fmadd_ps(_mm512_castsi512_ps(wide), by, and_minus);
        };
        return {{value(0), value(1)}, {value(8), value(9)}};
    }
    static Floats load_signed(const uint8_t* codes, float scale, float minus) {
        return scaled(_mm512_xor_si512(_mm512_loadu_si512(codes), _mm512_set1_epi8(-128)), scale, minus);
    }
    static Floats load_unsigned(const uint8_t* codes, float scale, float minus) { return scaled(_mm512_loadu_si512(codes), scale, minus); }

    static __m512i largest_bits(const Floats& x) {
        const auto larger = [](__m512 a, __m512 b) { return _mm512_max_epu32(_mm512_castps_si512(a), _mm512_castps_si512(b)); };
        return _mm512_max_epu32(larger(x.first.a, x.first.b), larger(x.second.a, x.second.b));
    }
    static uint32_t largest_average(const Floats& x) {
        const __m512 zero = _mm512_set1_ps(-0.0f);
        const auto magnitude = [&](__m512 value) { return _mm512_andnot_ps(zero, value); };
        return _mm512_reduce_max_epu32(
            largest_bits({{magnitude(x.first.a), magnitude(x.first.b)}, {magnitude(x.second.a), magnitude(x.second.b)}}));
    }
    static uint32_t largest_root(const Floats& x) { return _mm512_reduce_max_epu32(largest_bits(x)); }

    static uint32_t smallest_word(__m256i words) {
        const __m128i half = _mm_min_epu16(_mm256_castsi256_si128(words), _mm256_extracti128_si256(words, 1));
        return static_cast<uint32_t>(_mm_cvtsi128_si32(_mm_minpos_epu16(half)));
    }
    // Only the upper 16 bits of the two are right, which is all that a scale depends on: a search in words takes half the
    // steps, and the processor has one for the smallest of eight. A NaN among the averages is not seen; there is one only
    // where the gradient makes the root infinite or one too.
    static void largest_of_both(const Floats& averages, const Floats& roots, uint32_t& average, uint32_t& root) {
        constexpr int kLargerMagnitude = 11;
        const auto larger = [](__m512 a, __m512 b) { return _mm512_range_ps(a, b, kLargerMagnitude); };
        const __m512 all = larger(larger(averages.first.a, averages.first.b), larger(averages.second.a, averages.second.b));
        __m512i words = _mm512_permutex2var_epi16(_mm512_castps_si512(all), every_other_word(1), largest_bits(roots));
        words = _mm512_xor_si512(words, _mm512_set1_epi32(-1));
        average = ~smallest_word(_mm512_castsi512_si256(words)) << 16;
        root = ~smallest_word(_mm512_extracti64x4_epi64(words, 1)) << 16;
    }

    // first, first + 2, first + 4, ... first + 62.
    static __m512i every_other_word(int first) {
        const __m512i dwords = _mm512_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15);
        const __m512i pairs = _mm512_add_epi32(_mm512_slli_epi32(dwords, 2), _mm512_slli_epi32(dwords, 18));
        return _mm512_add_epi32(pairs, _mm512_set1_epi32(first + ((first + 2) << 16)));
    }
    // value / 2^(k - 8), rounded to an integer of at most 16 bits: the low words of 1.5 * 2^(k + 15) + value.
    struct Fixed {
        __m512i even, odd;
    };
    static Fixed fixed(const Floats& value, int k) {
        const __m512 magic = _mm512_set1_ps(bits_as<float>(static_cast<uint32_t>(127 + 15 + k) << 23 | 0x400000u));
        const auto sum = [&](__m512 x) { return _mm512_castps_si512(_mm512_add_ps(x, magic)); };
        const __m512i low = every_other_word(0);
        return {_mm512_permutex2var_epi16(sum(value.first.a), low, sum(value.second.a)),
                _mm512_permutex2var_epi16(sum(value.first.b), low, sum(value.second.b))};
    }
    // The high byte of each word of both, in the order of the elements.
    static __m512i high_bytes(__m512i even, __m512i odd) {
        constexpr int kOrAnd = 0xf8; // a | (b & c)
        const __m512i high = _mm512_set1_epi16(static_cast<int16_t>(0xff00));
        return _mm512_ternarylogic_epi32(_mm512_srli_epi16(even, 8), odd, high, kOrAnd);
    }
    static __m512i even_bytes(__m512i random) { return _mm512_and_si512(random, _mm512_set1_epi16(0xff)); }
    static __m512i odd_bytes(__m512i random) { return _mm512_srli_epi16(random, 8); }
    // `random`: 8 bits of each element, in order; roots take those of the other element of a pair.
    static void store_signed(uint8_t* codes, const Floats& value, int k, __m512i random) {
        const Fixed x = fixed(value, k);
        const __m512i even = _mm512_add_epi16(x.even, even_bytes(random)), odd = _mm512_add_epi16(x.odd, odd_bytes(random));
        _mm512_storeu_si512(codes, high_bytes(even, odd));
    }
    static void store_unsigned(uint8_t* codes, const Floats& value, int k, __m512i random) {
        const Fixed x = fixed(value, k);
        const __m512i even = _mm512_add_epi16(x.even, odd_bytes(random)), odd = _mm512_add_epi16(x.odd, even_bytes(random));
        _mm512_storeu_si512(codes, _mm512_max_epu8(high_bytes(even, odd), _mm512_set1_epi8(1)));
    }
};

} // namespace
} // namespace offload

#include "kernels.inc"

namespace offload {
namespace {

// A line is a register.
void checksum(ChecksumLanes& lanes, const uint8_t* bytes, int64_t line_count) {
    __m512i products = _mm512_setzero_si512(), sums = _mm512_setzero_si512();
    for (int64_t line = 0; line < line_count; ++line) {
        const uint8_t* const at = bytes + line * kChecksumLine;
        __builtin_prefetch(at + kChecksumAhead, 0, 2);
        const __m512i words = _mm512_loadu_si512(at);
        const __m512i mixed = _mm512_xor_si512(words, _mm512_loadu_si512(kChecksumKeys.keys + line));
        products = _mm512_add_epi64(products, _mm512_mul_epu32(mixed, _mm512_srli_epi64(mixed, 32)));
        sums = _mm512_add_epi64(sums, words);
    }
    _mm512_storeu_si512(lanes.products, products);
    _mm512_storeu_si512(lanes.sums, sums);
}

} // namespace

const Kernels kKernelsAvx512 = make_kernels(OFFLOAD_SIMD_AVX512, checksum);
} // namespace offload
