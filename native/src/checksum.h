// SPDX-License-Identifier: Apache-2.0
// The checksum's chains of 64-bit words: word w of each stride goes into chain w. See offload_checksum.
#ifndef OFFLOAD_CHECKSUM_H
#define OFFLOAD_CHECKSUM_H

#include <cstdint>

namespace offload {

constexpr int kChecksumLineChains = 8; // of a cache line
constexpr int kChecksumLines = 4;      // of a stride: a product of 64 bits takes 15 cycles in vectors, and others go on meanwhile
constexpr int kChecksumChains = kChecksumLines * kChecksumLineChains;
constexpr int64_t kChecksumStride = kChecksumChains * int64_t{sizeof(uint64_t)};
constexpr uint64_t kChecksumMultiplier = 0x9e3779b97f4a7c15u; // odd, so that a step is one to one in the word and in the chain
constexpr int kChecksumRotation = 29;

} // namespace offload

#endif
