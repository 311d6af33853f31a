// SPDX-License-Identifier: Apache-2.0
// One element at a time: the meaning of the 16-bit types and the vector of width 1.
//
// Everything is in an unnamed namespace because this file is compiled with different instruction sets: an inline
// function with external linkage could be taken by the linker from an object that the processor cannot run.
#ifndef OFFLOAD_ELEMENT_H
#define OFFLOAD_ELEMENT_H

#include <cstdint>
#include <cstring>

#include "offload.h"

// What a loop works on stays in registers, which a call would spill. Not where all is compiled for size.
#if defined(__OPTIMIZE_SIZE__)
#define OFFLOAD_INLINE inline
#else
#define OFFLOAD_INLINE inline __attribute__((always_inline))
#endif

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
    using Int = uint32_t;
    using Byte = uint8_t;

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
    static Float one_nan(Float a) { return a != a ? bits_as<Float>(kFloatNan) : a; }
    static Half to_bf16(Float a) { return bf16_from_float(a); }
    static Half to_f16(Float a) { return f16_from_float(a); }
    static Float from_bf16(Half a) { return bf16_to_float(a); }
    static Float from_f16(Half a) { return f16_to_float(a); }

    static Float sign(Float a) { return a > 0.0f ? 1.0f : (a < 0.0f ? -1.0f : 0.0f); }
    static Int ibroadcast(uint32_t value) { return value; }
    static Int iota(uint32_t) { return 0; }
    static Int iadd(Int a, Int b) { return a + b; }
    static Int imul(Int a, Int b) { return a * b; }
    static Int iand(Int a, Int b) { return a & b; }
    static Int ixor(Int a, Int b) { return a ^ b; }
    static Int umax(Int a, Int b) { return a > b ? a : b; }
    template <int Count> static Int shift_left(Int a) { return a << Count; }
    template <int Count> static Int shift_right(Int a) { return a >> Count; }
    template <int Count> static Int shift_right_signed(Int a) { return static_cast<Int>(static_cast<int32_t>(a) >> Count); }
    static uint32_t reduce_max(Int a) { return a; }
    static Int bits(Float a) { return bits_as<Int>(a); }
    static Float as_float(Int a) { return bits_as<Float>(a); }
    static Float from_int(Int a) { return static_cast<float>(static_cast<int32_t>(a)); }
    static Int round_to_int(Float a) { return static_cast<Int>(static_cast<int32_t>(__builtin_rintf(a))); }
    static Int load_int(const uint8_t* address) { return load_element<uint32_t>(address); }
    static void store_int(uint8_t* address, Int value) { store_element(address, value); }
    static Int widen(Half a) { return a; }
    static Int widen_signed(Half a) { return static_cast<Int>(static_cast<int32_t>(static_cast<int16_t>(a))); }
    static Half narrow(Int a) { return static_cast<Half>(a); }
    static Byte load_byte(const uint8_t* address) { return *address; }
    static void store_byte(uint8_t* address, Byte value) { *address = value; }
    static Int widen_byte(Byte a) { return a; }
    static Int widen_byte_signed(Byte a) { return static_cast<Int>(static_cast<int32_t>(static_cast<int8_t>(a))); }
    static Byte narrow_byte(Int a) { return static_cast<Byte>(a); }

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
    struct Int {
        typename V::Int part[Count];
    };
    struct Byte {
        typename V::Byte part[Count];
    };

    // A function of V on the parts of each argument.
    template <class Out, auto Function, class... In> static Out each(const In&... in) {
        Out out;
        for (int i = 0; i < Count; ++i) out.part[i] = Function(in.part[i]...);
        return out;
    }
    // Each part made by its number.
    template <class Out, class Make> static Out made(const Make& make) {
        Out out;
        for (int i = 0; i < Count; ++i) out.part[i] = make(i);
        return out;
    }

    static Float broadcast(float value) {
        return made<Float>([=](int) { return V::broadcast(value); });
    }
    static Float load(const float* address) {
        return made<Float>([=](int i) { return V::load(address + i * V::kWidth); });
    }
    static void store(float* address, const Float& value) {
        for (int i = 0; i < Count; ++i) V::store(address + i * V::kWidth, value.part[i]);
    }
    static Half load_half(const uint16_t* address) {
        return made<Half>([=](int i) { return V::load_half(address + i * V::kWidth); });
    }
    static void store_half(uint16_t* address, const Half& value) {
        for (int i = 0; i < Count; ++i) V::store_half(address + i * V::kWidth, value.part[i]);
    }
    static Float add(const Float& a, const Float& b) { return each<Float, V::add>(a, b); }
    static Float sub(const Float& a, const Float& b) { return each<Float, V::sub>(a, b); }
    static Float mul(const Float& a, const Float& b) { return each<Float, V::mul>(a, b); }
    static Float div(const Float& a, const Float& b) { return each<Float, V::div>(a, b); }
    static Float sqrt(const Float& a) { return each<Float, V::sqrt>(a); }
    static Float fma(const Float& a, const Float& b, const Float& c) { return each<Float, V::fma>(a, b, c); }
    static Float one_nan(const Float& a) { return each<Float, V::one_nan>(a); }
    static Half to_bf16(const Float& a) { return each<Half, V::to_bf16>(a); }
    static Half to_f16(const Float& a) { return each<Half, V::to_f16>(a); }
    static Float from_bf16(const Half& a) { return each<Float, V::from_bf16>(a); }
    static Float from_f16(const Half& a) { return each<Float, V::from_f16>(a); }

    static Float sign(const Float& a) { return each<Float, V::sign>(a); }
    static Int ibroadcast(uint32_t value) {
        return made<Int>([=](int) { return V::ibroadcast(value); });
    }
    static Int iota(uint32_t step) {
        return made<Int>([=](int i) { return V::iadd(V::iota(step), V::ibroadcast(static_cast<uint32_t>(i * V::kWidth) * step)); });
    }
    static Int iadd(const Int& a, const Int& b) { return each<Int, V::iadd>(a, b); }
    static Int imul(const Int& a, const Int& b) { return each<Int, V::imul>(a, b); }
    static Int iand(const Int& a, const Int& b) { return each<Int, V::iand>(a, b); }
    static Int ixor(const Int& a, const Int& b) { return each<Int, V::ixor>(a, b); }
    static Int umax(const Int& a, const Int& b) { return each<Int, V::umax>(a, b); }
    template <int Bits> static Int shift_left(const Int& a) { return each<Int, V::template shift_left<Bits>>(a); }
    template <int Bits> static Int shift_right(const Int& a) { return each<Int, V::template shift_right<Bits>>(a); }
    template <int Bits> static Int shift_right_signed(const Int& a) { return each<Int, V::template shift_right_signed<Bits>>(a); }
    static uint32_t reduce_max(const Int& a) {
        auto all = a.part[0];
        for (int i = 1; i < Count; ++i) all = V::umax(all, a.part[i]);
        return V::reduce_max(all);
    }
    static Int bits(const Float& a) { return each<Int, V::bits>(a); }
    static Float as_float(const Int& a) { return each<Float, V::as_float>(a); }
    static Float from_int(const Int& a) { return each<Float, V::from_int>(a); }
    static Int round_to_int(const Float& a) { return each<Int, V::round_to_int>(a); }
    static Int widen(const Half& a) { return each<Int, V::widen>(a); }
    static Int widen_signed(const Half& a) { return each<Int, V::widen_signed>(a); }
    static Half narrow(const Int& a) { return each<Half, V::narrow>(a); }
    static Int widen_byte(const Byte& a) { return each<Int, V::widen_byte>(a); }
    static Int widen_byte_signed(const Byte& a) { return each<Int, V::widen_byte_signed>(a); }
    static Byte narrow_byte(const Int& a) { return each<Byte, V::narrow_byte>(a); }
    static Int load_int(const uint8_t* address) {
        return made<Int>([=](int i) { return V::load_int(address + 4 * i * V::kWidth); });
    }
    static void store_int(uint8_t* address, const Int& value) {
        for (int i = 0; i < Count; ++i) V::store_int(address + 4 * i * V::kWidth, value.part[i]);
    }
    static Byte load_byte(const uint8_t* address) {
        return made<Byte>([=](int i) { return V::load_byte(address + i * V::kWidth); });
    }
    static void store_byte(uint8_t* address, const Byte& value) {
        for (int i = 0; i < Count; ++i) V::store_byte(address + i * V::kWidth, value.part[i]);
    }

    struct Squares : V::Squares {
        void add(int index, const Float& value) {
            for (int i = 0; i < Count; ++i) V::Squares::add(index * Count + i, value.part[i]);
        }
    };
};

// A weight of its bf16 upper half and its remainder: bits = (upper << 16) + signed rest; and back.
template <class V> OFFLOAD_INLINE typename V::Float join_weight(const uint16_t* upper, const uint16_t* rest) {
    const auto high = V::template shift_left<16>(V::widen(V::load_half(upper)));
    return V::as_float(V::iadd(high, V::widen_signed(V::load_half(rest))));
}
template <class V> OFFLOAD_INLINE void split_weight(uint16_t* upper, uint16_t* rest, typename V::Float value) {
    const auto bits = V::bits(V::one_nan(value));
    V::store_half(upper, V::narrow(V::template shift_right<16>(V::iadd(bits, V::ibroadcast(0x8000u)))));
    V::store_half(rest, V::narrow(bits));
}

// 32 elements in two vectors of 16, in an order that may be the level's own: the formats whose every array is narrow work on
// these, and one order for all of an element's numbers is as good as another.
template <class V> struct PlainBlock {
    static_assert(V::kWidth == 16, "a block is two vectors");
    using Int = typename V::Int;
    struct Floats {
        typename V::Float a, b;
    };

    static OFFLOAD_INLINE Floats load_f32(const float* address) { return {V::load(address), V::load(address + 16)}; }
    static OFFLOAD_INLINE Floats load_bf16(const uint16_t* address) {
        return {V::from_bf16(V::load_half(address)), V::from_bf16(V::load_half(address + 16))};
    }
    static OFFLOAD_INLINE Floats load_f16(const uint16_t* address) {
        return {V::from_f16(V::load_half(address)), V::from_f16(V::load_half(address + 16))};
    }

    static OFFLOAD_INLINE Floats join(const uint16_t* upper, const uint16_t* rest) {
        return {join_weight<V>(upper, rest), join_weight<V>(upper + 16, rest + 16)};
    }
    static OFFLOAD_INLINE void split(uint16_t* upper, uint16_t* rest, const Floats& value) {
        split_weight<V>(upper, rest, value.a);
        split_weight<V>(upper + 16, rest + 16, value.b);
    }

    // `random`: 16 bits for each element, in order; Swapped: the elements of a pair have each other's.
    template <bool Swapped> static OFFLOAD_INLINE void round_bf16(uint16_t* address, const Floats& value, const Int& random) {
        uint16_t words[32];
        const auto swapped = V::iadd(V::template shift_left<16>(random), V::template shift_right<16>(random));
        V::store_int(reinterpret_cast<uint8_t*>(words), Swapped ? swapped : random);
        V::store_half(address, drawn(value.a, words));
        V::store_half(address + 16, drawn(value.b, words + 16));
    }
    static OFFLOAD_INLINE typename V::Half drawn(const typename V::Float& value, const uint16_t* random) {
        return V::narrow(V::template shift_right<16>(V::iadd(V::bits(V::one_nan(value)), V::widen(V::load_half(random)))));
    }
};

// 64 elements with 8-bit codes, in two blocks.
template <class V> struct PlainGroup {
    using Int = typename V::Int;
    struct Floats {
        typename PlainBlock<V>::Floats first, second;
    };

    // Codes times scale.
    static Floats load_signed(const uint8_t* codes, float scale, float) {
        const auto value = [&](int at) { return V::mul(V::from_int(V::widen_byte_signed(V::load_byte(codes + at))), V::broadcast(scale)); };
        return {{value(0), value(16)}, {value(32), value(48)}};
    }
    static Floats load_unsigned(const uint8_t* codes, float scale, float) {
        const auto value = [&](int at) { return V::mul(V::from_int(V::widen_byte(V::load_byte(codes + at))), V::broadcast(scale)); };
        return {{value(0), value(16)}, {value(32), value(48)}};
    }

    // The bits of the largest magnitudes; a NaN is larger than every number. A root is never negative.
    static uint32_t largest_average(const Floats& x) {
        const auto magnitude = [](const typename V::Float& value) { return V::iand(V::bits(value), V::ibroadcast(0x7fffffffu)); };
        return V::reduce_max(
            V::umax(V::umax(magnitude(x.first.a), magnitude(x.first.b)), V::umax(magnitude(x.second.a), magnitude(x.second.b))));
    }
    static uint32_t largest_root(const Floats& x) {
        return V::reduce_max(V::umax(V::umax(V::bits(x.first.a), V::bits(x.first.b)), V::umax(V::bits(x.second.a), V::bits(x.second.b))));
    }
    static void largest_of_both(const Floats& averages, const Floats& roots, uint32_t& average, uint32_t& root) {
        average = largest_average(averages);
        root = largest_root(roots);
    }

    // value / 2^(k - 8), rounded to an integer, plus 8 random bits, without its low 8 bits. `random`: those bits of each
    // element, in order; roots take those of the other element of a pair.
    static typename V::Float up(int k) { return V::broadcast(bits_as<float>(static_cast<uint32_t>(127 + 8 - k) << 23)); }
    static void store_signed(uint8_t* codes, const Floats& value, int k, const Int& random) {
        uint8_t bytes[64];
        V::store_int(bytes, random);
        const auto store = [&](const typename V::Float& x, int at) {
            const auto drawn = V::iadd(V::round_to_int(V::mul(x, up(k))), V::widen_byte(V::load_byte(bytes + at)));
            V::store_byte(codes + at, V::narrow_byte(V::template shift_right_signed<8>(drawn)));
        };
        store(value.first.a, 0);
        store(value.first.b, 16);
        store(value.second.a, 32);
        store(value.second.b, 48);
    }
    static void store_unsigned(uint8_t* codes, const Floats& value, int k, const Int& random) {
        uint8_t bytes[64];
        const auto low = V::ibroadcast(0x00ff00ffu);
        V::store_int(bytes, V::iadd(V::template shift_left<8>(V::iand(random, low)), V::iand(V::template shift_right<8>(random), low)));
        const auto store = [&](const typename V::Float& x, int at) {
            const auto drawn = V::iadd(V::round_to_int(V::mul(x, up(k))), V::widen_byte(V::load_byte(bytes + at)));
            V::store_byte(codes + at, V::narrow_byte(V::umax(V::template shift_right<8>(drawn), V::ibroadcast(1))));
        };
        store(value.first.a, 0);
        store(value.first.b, 16);
        store(value.second.a, 32);
        store(value.second.b, 48);
    }
};

} // namespace
} // namespace offload

#endif
