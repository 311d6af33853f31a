// Compiled with -mavx2 -mfma -mf16c.
#include <immintrin.h>

#include "element.h"

namespace offload {
namespace {

struct Avx2Vector {
    static constexpr int kWidth = 8;
    using Float = __m256;
    using Half = __m128i;

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

} // namespace
} // namespace offload

#include "kernels.inc"

namespace offload {
const Kernels kKernelsAvx2 = make_kernels(OFFLOAD_SIMD_AVX2);
}
