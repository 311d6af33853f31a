// SPDX-License-Identifier: Apache-2.0
#include "summed_memory.h"

#include <algorithm>

namespace offload {
namespace {

const uint8_t* block_of(const offload_summed_memory& memory, int64_t block) {
    return static_cast<const uint8_t*>(memory.address) + block * kChecksumBlock;
}

uint64_t sum_of(const offload_summed_memory& memory, int64_t block) {
    return block_checksum(block_of(memory, block), std::min(kChecksumBlock, memory.nbytes - block * kChecksumBlock));
}

} // namespace

SummedMemories::SummedMemories(const offload_summed_memory* memories, int64_t count) : memories_(memories) {
    for (int64_t i = 0; i < count; ++i) expected_.emplace_back(checksum_block_count(memories[i].nbytes));
}

void SummedMemories::expect(const void* begin, int64_t nbytes) {
    const Blocks blocks = blocks_in(begin, nbytes);
    if (blocks.memory == nullptr) return;
    auto& expected = expected_[static_cast<size_t>(blocks.memory - memories_)];
    std::fill(expected.begin() + blocks.first, expected.begin() + blocks.last, true);
}

void SummedMemories::sum(Sums sums, const void* begin, int64_t nbytes) const {
    const Blocks blocks = blocks_in(begin, nbytes);
    uint64_t* const out = blocks.memory != nullptr ? blocks.memory->*sums : nullptr;
    if (out == nullptr) return;
    for (int64_t block = blocks.first; block < blocks.last; ++block) out[block] = sum_of(*blocks.memory, block);
}

// Nothing where no memory has these bytes.
SummedMemories::Blocks SummedMemories::blocks_in(const void* begin, int64_t nbytes) const {
    const uint8_t* const bytes = static_cast<const uint8_t*>(begin);
    for (size_t i = 0; bytes != nullptr && i < expected_.size(); ++i) {
        const offload_summed_memory& memory = memories_[i];
        const uint8_t* const base = static_cast<const uint8_t*>(memory.address);
        if (bytes < base || bytes + nbytes > base + memory.nbytes) continue;
        const int64_t first = (bytes - base + kChecksumBlock - 1) / kChecksumBlock;
        const int64_t last = (bytes + nbytes - base) / kChecksumBlock;
        return {&memory, first, std::max(first, last)};
    }
    return {nullptr, 0, 0};
}

void SummedMemories::sum_rest(Sums sums) const {
    for (size_t i = 0; i < expected_.size(); ++i) {
        uint64_t* const out = memories_[i].*sums;
        const int64_t count = checksum_block_count(memories_[i].nbytes);
        for (int64_t block = 0; out != nullptr && block < count; ++block)
            if (!expected_[i][static_cast<size_t>(block)]) out[block] = sum_of(memories_[i], block);
    }
}

} // namespace offload
