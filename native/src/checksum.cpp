// SPDX-License-Identifier: Apache-2.0
// A checksum of memory, as fast as one core reads it.
#include "checksum.h"

#include <cerrno>
#include <cstring>

#include "kernels.h"
#include "offload.h"

namespace offload {
namespace {

// One to one in each argument: a single changed word always changes the result. The rotation brings the highest bits,
// which a product only passes upwards, back to where the next product spreads them.
uint64_t step(uint64_t chain, uint64_t word) {
    const uint64_t product = (chain ^ word) * kChecksumMultiplier;
    return product << kChecksumRotation | product >> (64 - kChecksumRotation);
}

uint64_t word_at(const uint8_t* bytes) {
    uint64_t word = 0;
    std::memcpy(&word, bytes, sizeof word);
    return word;
}

} // namespace

// Block by block, each in the first-level cache, and of a block line by line: a line's chains stay in registers.
void checksum_words(uint64_t* chains, const uint8_t* bytes, int64_t nbytes) {
    constexpr int64_t kBlock = 16 * kChecksumStride;
    for (int64_t begin = 0; begin < nbytes; begin += kBlock) {
        const int64_t end = begin + kBlock < nbytes ? begin + kBlock : nbytes;
        for (int line = 0; line < kChecksumLines; ++line) {
            uint64_t* const of_line = chains + line * kChecksumLineChains;
            uint64_t now[kChecksumLineChains];
            std::memcpy(now, of_line, sizeof now);
            for (int64_t at = begin; at < end; at += kChecksumStride) {
                const uint8_t* const words = bytes + at + line * int64_t{sizeof now};
                for (int chain = 0; chain < kChecksumLineChains; ++chain)
                    now[chain] = step(now[chain], word_at(words + chain * int64_t{sizeof(uint64_t)}));
            }
            std::memcpy(of_line, now, sizeof now);
        }
    }
}

} // namespace offload

extern "C" int offload_checksum(const void* address, int64_t nbytes, uint64_t* out) {
    using namespace offload;
    if (out == nullptr || nbytes < 0 || (address == nullptr && nbytes > 0)) return -EINVAL;
    const uint8_t* bytes = static_cast<const uint8_t*>(address);
    uint64_t chains[kChecksumChains];
    for (int chain = 0; chain < kChecksumChains; ++chain) chains[chain] = static_cast<uint64_t>(chain + 1) * kChecksumMultiplier;
    int64_t at = nbytes - nbytes % kChecksumStride;
    if (at > 0) kernels().checksum(chains, bytes, at);
    uint64_t total = static_cast<uint64_t>(nbytes);
    for (const uint64_t chain : chains) total = step(total, chain);
    for (; at + int64_t{sizeof(uint64_t)} <= nbytes; at += sizeof(uint64_t)) total = step(total, word_at(bytes + at));
    for (; at < nbytes; ++at) total = step(total, bytes[at]);
    *out = total;
    return 0;
}
