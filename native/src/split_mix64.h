// SPDX-License-Identifier: Apache-2.0
#ifndef OFFLOAD_SPLIT_MIX64_H
#define OFFLOAD_SPLIT_MIX64_H

#include <cstdint>

namespace offload {

// Number `index`, from 1, that SplitMix64 (Steele, Lea, Flood 2014) gives after this seed.
constexpr uint64_t split_mix64(uint64_t seed, uint64_t index) {
    uint64_t z = seed + index * 0x9e3779b97f4a7c15u;
    z = (z ^ (z >> 30)) * 0xbf58476d1ce4e5b9u;
    z = (z ^ (z >> 27)) * 0x94d049bb133111ebu;
    return z ^ (z >> 31);
}

} // namespace offload

#endif
