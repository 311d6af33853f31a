// SPDX-License-Identifier: Apache-2.0
// A checksum of memory, as fast as one core reads it, put together from those of its blocks.
#include "checksum.h"

#include <algorithm>
#include <cerrno>
#include <cstring>

#include "kernels.h"
#include "split_mix64.h"

namespace offload {
namespace {

constexpr uint64_t kMultiplier = 0x9e3779b97f4a7c15u; // odd, so that a step is one to one in each argument
constexpr int kRotation = 29;

// The rotation brings the highest bits, which a product only passes upwards, back to where the next product spreads them.
uint64_t step(uint64_t total, uint64_t word) {
    const uint64_t product = (total ^ word) * kMultiplier;
    return product << kRotation | product >> (64 - kRotation);
}

uint64_t word_at(const uint8_t* bytes) {
    uint64_t word = 0;
    std::memcpy(&word, bytes, sizeof word);
    return word;
}

constexpr ChecksumKeys made_keys() {
    ChecksumKeys made{};
    uint64_t index = 0;
    for (uint64_t& key : made.keys) key = split_mix64(0, ++index);
    return made;
}

} // namespace

const ChecksumKeys kChecksumKeys = made_keys();

// Lane by lane: the two numbers of one stay in registers, and a block in the first-level cache.
void checksum_words(ChecksumLanes& lanes, const uint8_t* bytes, int64_t line_count) {
    for (int lane = 0; lane < kChecksumLanes; ++lane) {
        uint64_t product = 0, sum = 0;
        for (int64_t line = 0; line < line_count; ++line) {
            const uint64_t word = word_at(bytes + line * kChecksumLine + lane * int64_t{sizeof(uint64_t)});
            const uint64_t mixed = word ^ kChecksumKeys.keys[line + lane];
            product += (mixed & 0xffffffffu) * (mixed >> 32);
            sum += word;
        }
        lanes.products[lane] = product;
        lanes.sums[lane] = sum;
    }
}

uint64_t block_checksum(const uint8_t* bytes, int64_t nbytes) {
    ChecksumLanes lanes;
    kernels().checksum(lanes, bytes, nbytes / kChecksumLine);
    uint64_t total = static_cast<uint64_t>(nbytes);
    for (int lane = 0; lane < kChecksumLanes; ++lane) total = step(total, step(step(0, lanes.products[lane]), lanes.sums[lane]));
    int64_t at = nbytes - nbytes % kChecksumLine;
    for (; at + int64_t{sizeof(uint64_t)} <= nbytes; at += sizeof(uint64_t)) total = step(total, word_at(bytes + at));
    for (; at < nbytes; ++at) total = step(total, bytes[at]);
    return total;
}

} // namespace offload

extern "C" {

int offload_checksum(const void* address, int64_t nbytes, const uint64_t* sums, uint64_t* out) {
    using namespace offload;
    if (out == nullptr || nbytes < 0 || (address == nullptr && nbytes > 0)) return -EINVAL;
    const uint8_t* const bytes = static_cast<const uint8_t*>(address);
    uint64_t total = static_cast<uint64_t>(nbytes);
    for (int64_t block = 0; block < checksum_block_count(nbytes); ++block) {
        const int64_t at = block * kChecksumBlock;
        const bool known = sums != nullptr && sums[block] != 0;
        total = step(total, known ? sums[block] : block_checksum(bytes + at, std::min(kChecksumBlock, nbytes - at)));
    }
    *out = total;
    return 0;
}

int offload_checksum_of_blocks(const uint64_t* sums, int64_t nbytes, uint64_t* out) {
    using namespace offload;
    if (out == nullptr || nbytes < 0 || (sums == nullptr && nbytes > 0)) return -EINVAL;
    uint64_t total = static_cast<uint64_t>(nbytes);
    for (int64_t block = 0; block < checksum_block_count(nbytes); ++block) total = step(total, sums[block]);
    *out = total;
    return 0;
}

} // extern "C"
