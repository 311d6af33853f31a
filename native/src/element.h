// One element at a time: the meaning of the 16-bit types and the vector of width 1.
//
// Everything is in an unnamed namespace because this file is compiled with different instruction sets: an inline
// function with external linkage could be taken by the linker from an object that the processor cannot run.
#ifndef OFFLOAD_ELEMENT_H
#define OFFLOAD_ELEMENT_H

#include <cstdint>
#include <cstring>

#include "offload.h"

namespace offload {
namespace {

template <class To, class From> inline To bits_as(From from) {
    static_assert(sizeof(To) == sizeof(From), "same size");
    To to;
    std::memcpy(&to, &from, sizeof to);
    return to;
}

// memcpy, because no address needs alignment.
template <class T> inline T load_element(const void* address) {
    T value;
    std::memcpy(&value, address, sizeof value);
    return value;
}

template <class T> inline void store_element(void* address, T value) { std::memcpy(address, &value, sizeof value); }

template <int Dtype> struct ElementSize {
    static constexpr int64_t value = Dtype == OFFLOAD_F32 ? 4 : 2;
};

constexpr uint32_t kFloatInfinity = 0x7f800000u;
constexpr uint32_t kFloatNan = 0x7fc00000u;

inline uint16_t bf16_from_float(float value) {
    const uint32_t bits = bits_as<uint32_t>(value);
    if ((bits & 0x7fffffffu) > kFloatInfinity) return 0x7fc0;
    return static_cast<uint16_t>((bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16);
}

inline float bf16_to_float(uint16_t half) { return bits_as<float>(static_cast<uint32_t>(half) << 16); }

inline uint16_t f16_from_float(float value) {
    const uint32_t bits = bits_as<uint32_t>(value);
    const uint32_t sign = (bits >> 16) & 0x8000u;
    const uint32_t magnitude = bits & 0x7fffffffu;
    if (magnitude > kFloatInfinity) return 0x7e00;
    if (magnitude >= 0x477ff000u) return static_cast<uint16_t>(sign | 0x7c00u); // 65520: half way to 2^16
    if (magnitude < 0x38800000u) {
        // Below 2^-14 the result counts units of 2^-24, the spacing of floats just above 0.5: the addition rounds.
        const float shifted = bits_as<float>(magnitude) + 0.5f;
        return static_cast<uint16_t>(sign | (bits_as<uint32_t>(shifted) - 0x3f000000u));
    }
    const uint32_t rounded = magnitude + 0xfffu + ((magnitude >> 13) & 1u);
    return static_cast<uint16_t>(sign | ((rounded - 0x38000000u) >> 13));
}

inline float f16_to_float(uint16_t half) {
    const uint32_t sign = static_cast<uint32_t>(half & 0x8000u) << 16;
    const uint32_t exponent = (half >> 10) & 31u;
    const uint32_t mantissa = half & 0x3ffu;
    if (exponent == 31) return bits_as<float>(sign | kFloatInfinity | (mantissa << 13) | (mantissa != 0 ? 0x400000u : 0u));
    if (exponent == 0) {
        const float magnitude = static_cast<float>(mantissa) * 0x1p-24f;
        return bits_as<float>(sign | bits_as<uint32_t>(magnitude));
    }
    return bits_as<float>(sign | ((exponent + 112u) << 23) | (mantissa << 13));
}

// The sum of squares of 32 lanes, folded in the order that defines it.
inline double fold_lanes(double lanes[32]) {
    for (int width = 16; width >= 1; width /= 2)
        for (int lane = 0; lane < width; ++lane) lanes[lane] += lanes[lane + width];
    return lanes[0];
}

// The vector of width 1: the tails of every path.
struct ElementVector {
    static constexpr int kWidth = 1;
    using Float = float;
    using Half = uint16_t;

    static Float broadcast(float value) { return value; }
    static Float load(const float* address) { return load_element<float>(address); }
    static void store(float* address, Float value) { store_element(address, value); }
    static Half load_half(const uint16_t* address) { return load_element<uint16_t>(address); }
    static void store_half(uint16_t* address, Half value) { store_element(address, value); }
    static Float add(Float a, Float b) { return a + b; }
    static Float sub(Float a, Float b) { return a - b; }
    static Float mul(Float a, Float b) { return a * b; }
    static Float div(Float a, Float b) { return a / b; }
    static Float sqrt(Float a) { return __builtin_sqrtf(a); }
    static Float fma(Float a, Float b, Float c) { return __builtin_fmaf(a, b, c); }
    static Half to_bf16(Float a) { return bf16_from_float(a); }
    static Half to_f16(Float a) { return f16_from_float(a); }
    static Float from_bf16(Half a) { return bf16_to_float(a); }
    static Float from_f16(Half a) { return f16_to_float(a); }

    struct Squares {
        double lanes[32] = {};
        void add(int index, Float value) { lanes[index] += static_cast<double>(value) * static_cast<double>(value); }
        void store(double* out) const { std::memcpy(out, lanes, sizeof lanes); }
    };
};

// `Count` vectors that are loaded, computed and stored together. Every path works on 64 bytes of an array at a time: when
// arrays lie a multiple of 4 KiB apart, as they do in the optimizer's records, touching a cache line of one array again
// after the lines of the others finds it pushed out of the first-level cache on some processors.
template <class V, int Count> struct Together {
    static constexpr int kWidth = Count * V::kWidth;
    struct Float {
        typename V::Float part[Count];
    };
    struct Half {
        typename V::Half part[Count];
    };

    template <class Out, class Make> static Out each(const Make& make) {
        Out out;
        for (int i = 0; i < Count; ++i) out.part[i] = make(i);
        return out;
    }

    static Float broadcast(float value) {
        return each<Float>([=](int) { return V::broadcast(value); });
    }
    static Float load(const float* address) {
        return each<Float>([=](int i) { return V::load(address + i * V::kWidth); });
    }
    static void store(float* address, const Float& value) {
        for (int i = 0; i < Count; ++i) V::store(address + i * V::kWidth, value.part[i]);
    }
    static Half load_half(const uint16_t* address) {
        return each<Half>([=](int i) { return V::load_half(address + i * V::kWidth); });
    }
    static void store_half(uint16_t* address, const Half& value) {
        for (int i = 0; i < Count; ++i) V::store_half(address + i * V::kWidth, value.part[i]);
    }
    static Float add(const Float& a, const Float& b) {
        return each<Float>([&](int i) { return V::add(a.part[i], b.part[i]); });
    }
    static Float sub(const Float& a, const Float& b) {
        return each<Float>([&](int i) { return V::sub(a.part[i], b.part[i]); });
    }
    static Float mul(const Float& a, const Float& b) {
        return each<Float>([&](int i) { return V::mul(a.part[i], b.part[i]); });
    }
    static Float div(const Float& a, const Float& b) {
        return each<Float>([&](int i) { return V::div(a.part[i], b.part[i]); });
    }
    static Float sqrt(const Float& a) {
        return each<Float>([&](int i) { return V::sqrt(a.part[i]); });
    }
    static Float fma(const Float& a, const Float& b, const Float& c) {
        return each<Float>([&](int i) { return V::fma(a.part[i], b.part[i], c.part[i]); });
    }
    static Half to_bf16(const Float& a) {
        return each<Half>([&](int i) { return V::to_bf16(a.part[i]); });
    }
    static Half to_f16(const Float& a) {
        return each<Half>([&](int i) { return V::to_f16(a.part[i]); });
    }
    static Float from_bf16(const Half& a) {
        return each<Float>([&](int i) { return V::from_bf16(a.part[i]); });
    }
    static Float from_f16(const Half& a) {
        return each<Float>([&](int i) { return V::from_f16(a.part[i]); });
    }

    struct Squares : V::Squares {
        void add(int index, const Float& value) {
            for (int i = 0; i < Count; ++i) V::Squares::add(index * Count + i, value.part[i]);
        }
    };
};

} // namespace
} // namespace offload

#endif
