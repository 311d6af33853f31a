// SPDX-License-Identifier: Apache-2.0
// The checksum of a block of memory. See offload_checksum.
//
// Word i of line j of a block, 64 bits w, and the key k = w ^ key[j + i] add to lane i: w to its sum, and the product of the
// halves of k to its product. Sums find what changes one word. Products find what only moves, or changes two words alike, since
// no two lines of a block have the same keys. Both need no product of 64 bits, which takes vectors three to fifteen cycles.
#ifndef OFFLOAD_CHECKSUM_H
#define OFFLOAD_CHECKSUM_H

#include <cstdint>

#include "offload.h"

namespace offload {

constexpr int kChecksumLanes = 8;
constexpr int64_t kChecksumLine = kChecksumLanes * int64_t{sizeof(uint64_t)};
constexpr int64_t kChecksumBlock = OFFLOAD_CHECKSUM_BLOCK_NBYTES;
constexpr int64_t kChecksumLinesMax = kChecksumBlock / kChecksumLine;
static_assert(kChecksumBlock % kChecksumLine == 0, "a whole block has no rest");

struct ChecksumLanes {
    uint64_t products[kChecksumLanes];
    uint64_t sums[kChecksumLanes];
};

struct alignas(64) ChecksumKeys {
    uint64_t keys[kChecksumLinesMax + kChecksumLanes];
};
extern const ChecksumKeys kChecksumKeys;

// Where a core that sums memory has what it reads next brought to its caches: a tile of an update ahead.
constexpr int64_t kChecksumAhead = 16384;

constexpr int64_t checksum_block_count(int64_t nbytes) { return (nbytes + kChecksumBlock - 1) / kChecksumBlock; }

// Of one block, the last one of its memory with what is left: at most kChecksumBlock bytes.
uint64_t block_checksum(const uint8_t* bytes, int64_t nbytes);

} // namespace offload

#endif
