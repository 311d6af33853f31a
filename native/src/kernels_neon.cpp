// AArch64, where NEON is part of the base.
#include <arm_neon.h>

#include "element.h"

namespace offload {
namespace {

struct NeonVector {
    static constexpr int kWidth = 4;
    using Float = float32x4_t;
    using Half = uint16x4_t;

    // Bytes, because no address needs the alignment of its element.
    static Float broadcast(float value) { return vdupq_n_f32(value); }
    static Float load(const float* address) { return vreinterpretq_f32_u8(vld1q_u8(reinterpret_cast<const uint8_t*>(address))); }
    static void store(float* address, Float value) { vst1q_u8(reinterpret_cast<uint8_t*>(address), vreinterpretq_u8_f32(value)); }
    static Half load_half(const uint16_t* address) { return vreinterpret_u16_u8(vld1_u8(reinterpret_cast<const uint8_t*>(address))); }
    static void store_half(uint16_t* address, Half value) { vst1_u8(reinterpret_cast<uint8_t*>(address), vreinterpret_u8_u16(value)); }
    static Float add(Float a, Float b) { return vaddq_f32(a, b); }
    static Float sub(Float a, Float b) { return vsubq_f32(a, b); }
    static Float mul(Float a, Float b) { return vmulq_f32(a, b); }
    static Float div(Float a, Float b) { return vdivq_f32(a, b); }
    static Float sqrt(Float a) { return vsqrtq_f32(a); }
    static Float fma(Float a, Float b, Float c) { return vfmaq_f32(c, a, b); }

    // One NaN for all, so that narrowing gives the canonical NaN of the 16-bit type.
    static Float one_nan(Float a) { return vbslq_f32(vceqq_f32(a, a), a, vreinterpretq_f32_u32(vdupq_n_u32(kFloatNan))); }
    static Half to_bf16(Float a) {
        const uint32x4_t bits = vreinterpretq_u32_f32(one_nan(a));
        const uint32x4_t odd = vandq_u32(vshrq_n_u32(bits, 16), vdupq_n_u32(1));
        return vshrn_n_u32(vaddq_u32(vaddq_u32(bits, vdupq_n_u32(0x7fff)), odd), 16);
    }
    static Half to_f16(Float a) { return vreinterpret_u16_f16(vcvt_f16_f32(one_nan(a))); }
    static Float from_bf16(Half a) { return vreinterpretq_f32_u32(vshll_n_u16(a, 16)); }
    static Float from_f16(Half a) { return vcvt_f32_f16(vreinterpret_f16_u16(a)); }

    // The square of a float is exact in double, so that fma rounds as multiply and add do.
    struct Squares {
        float64x2_t sums[16];
        Squares() {
            for (auto& sum : sums) sum = vdupq_n_f64(0.0);
        }
        void add(int index, Float value) {
            const float64x2_t low = vcvt_f64_f32(vget_low_f32(value));
            const float64x2_t high = vcvt_high_f64_f32(value);
            sums[2 * index] = vfmaq_f64(sums[2 * index], low, low);
            sums[2 * index + 1] = vfmaq_f64(sums[2 * index + 1], high, high);
        }
        void store(double* out) const {
            for (int i = 0; i < 16; ++i) vst1q_f64(out + 2 * i, sums[i]);
        }
    };
};

using Vector = Together<NeonVector, 4>;

} // namespace
} // namespace offload

#include "kernels.inc"

namespace offload {
const Kernels kKernelsNeon = make_kernels(OFFLOAD_SIMD_NEON);
}
