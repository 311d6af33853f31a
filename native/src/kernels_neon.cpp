// SPDX-License-Identifier: Apache-2.0
// AArch64, where NEON is part of the base.
#include <arm_neon.h>

#include "element.h"

namespace offload {
namespace {

struct NeonVector {
    static constexpr int kWidth = 4;
    using Float = float32x4_t;
    using Half = uint16x4_t;
    using Int = uint32x4_t;
    using Byte = uint32_t;

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

    static Float sign(Float a) {
        const float32x4_t zero = vdupq_n_f32(0.0f);
        const float32x4_t positive = vbslq_f32(vcgtq_f32(a, zero), vdupq_n_f32(1.0f), zero);
        return vbslq_f32(vcltq_f32(a, zero), vdupq_n_f32(-1.0f), positive);
    }
    static Int ibroadcast(uint32_t value) { return vdupq_n_u32(value); }
    static Int iota(uint32_t step) {
        const uint32_t lanes[4] = {0, step, 2 * step, 3 * step};
        return vld1q_u32(lanes);
    }
    static Int iadd(Int a, Int b) { return vaddq_u32(a, b); }
    static Int imul(Int a, Int b) { return vmulq_u32(a, b); }
    static Int iand(Int a, Int b) { return vandq_u32(a, b); }
    static Int ixor(Int a, Int b) { return veorq_u32(a, b); }
    static Int umax(Int a, Int b) { return vmaxq_u32(a, b); }
    template <int Count> static Int shift_left(Int a) { return vshlq_n_u32(a, Count); }
    template <int Count> static Int shift_right(Int a) { return vshrq_n_u32(a, Count); }
    template <int Count> static Int shift_right_signed(Int a) {
        return vreinterpretq_u32_s32(vshrq_n_s32(vreinterpretq_s32_u32(a), Count));
    }
    static uint32_t reduce_max(Int a) { return vmaxvq_u32(a); }
    static Int bits(Float a) { return vreinterpretq_u32_f32(a); }
    static Float as_float(Int a) { return vreinterpretq_f32_u32(a); }
    static Float from_int(Int a) { return vcvtq_f32_s32(vreinterpretq_s32_u32(a)); }
    static Int round_to_int(Float a) { return vreinterpretq_u32_s32(vcvtnq_s32_f32(a)); }
    static Int load_int(const uint8_t* address) { return vreinterpretq_u32_u8(vld1q_u8(address)); }
    static void store_int(uint8_t* address, Int value) { vst1q_u8(address, vreinterpretq_u8_u32(value)); }
    static Int widen(Half a) { return vmovl_u16(a); }
    static Int widen_signed(Half a) { return vreinterpretq_u32_s32(vmovl_s16(vreinterpret_s16_u16(a))); }
    static Half narrow(Int a) { return vmovn_u32(a); }
    static Byte load_byte(const uint8_t* address) { return load_element<uint32_t>(address); }
    static void store_byte(uint8_t* address, Byte value) { store_element(address, value); }
    static Int widen_byte(Byte a) { return vmovl_u16(vget_low_u16(vmovl_u8(vcreate_u8(a)))); }
    static Int widen_byte_signed(Byte a) { return vreinterpretq_u32_s32(vmovl_s16(vget_low_s16(vmovl_s8(vcreate_s8(a))))); }
    static Byte narrow_byte(Int a) {
        const uint16x4_t words = vmovn_u32(a);
        return vget_lane_u32(vreinterpret_u32_u8(vmovn_u16(vcombine_u16(words, words))), 0);
    }

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
using Block = PlainBlock<Vector>;
using Group = PlainGroup<Vector>;

} // namespace
} // namespace offload

#include "kernels.inc"

namespace offload {
namespace {

// A line is four registers.
void checksum(ChecksumLanes& lanes, const uint8_t* bytes, int64_t line_count) {
    constexpr int kParts = kChecksumLanes / 2;
    uint64x2_t products[kParts], sums[kParts];
    for (int part = 0; part < kParts; ++part) products[part] = sums[part] = vdupq_n_u64(0);
    for (int64_t line = 0; line < line_count; ++line) {
        const uint8_t* const at = bytes + line * kChecksumLine;
        __builtin_prefetch(at + kChecksumAhead, 0, 2);
        for (int part = 0; part < kParts; ++part) {
            const uint64x2_t words = vreinterpretq_u64_u8(vld1q_u8(at + 16 * part));
            const uint64x2_t mixed = veorq_u64(words, vld1q_u64(kChecksumKeys.keys + line + 2 * part));
            products[part] = vmlal_u32(products[part], vmovn_u64(mixed), vshrn_n_u64(mixed, 32));
            sums[part] = vaddq_u64(sums[part], words);
        }
    }
    for (int part = 0; part < kParts; ++part) {
        vst1q_u64(lanes.products + 2 * part, products[part]);
        vst1q_u64(lanes.sums + 2 * part, sums[part]);
    }
}

} // namespace

const Kernels kKernelsNeon = make_kernels(OFFLOAD_SIMD_NEON, checksum);
} // namespace offload
