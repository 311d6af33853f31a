// Compiled with -mavx512f -mavx512dq -mavx512bw -mavx512vl -mfma -mf16c.
#include <immintrin.h>

#include "element.h"

namespace offload {
namespace {

struct Vector {
    static constexpr int kWidth = 16;
    using Float = __m512;
    using Half = __m256i;

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

} // namespace
} // namespace offload

#include "kernels.inc"

namespace offload {
const Kernels kKernelsAvx512 = make_kernels(OFFLOAD_SIMD_AVX512);
}
