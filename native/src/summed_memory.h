// SPDX-License-Identifier: Apache-2.0
// Memory of which an update takes the checksums as it passes over it. See offload_update_summed.
#ifndef OFFLOAD_SUMMED_MEMORY_H
#define OFFLOAD_SUMMED_MEMORY_H

#include <cstdint>
#include <vector>

#include "checksum.h"
#include "offload.h"

namespace offload {

// Which of a memory's sums: of what an update finds in it, or of what it leaves.
using Sums = uint64_t* offload_summed_memory::*;
constexpr Sums kBefore = &offload_summed_memory::before;
constexpr Sums kAfter = &offload_summed_memory::after;

class SummedMemories {
  public:
    SummedMemories(const offload_summed_memory* memories, int64_t count);

    // There is a call of `sum` for either sums of these bytes to come.
    void expect(const void* begin, int64_t nbytes);

    // Of the blocks that lie wholly in these bytes. From any thread.
    void sum(Sums sums, const void* begin, int64_t nbytes) const;

    // Of all others.
    void sum_rest(Sums sums) const;

  private:
    struct Blocks {
        const offload_summed_memory* memory;
        int64_t first, last;
    };

    Blocks blocks_in(const void* begin, int64_t nbytes) const;

    const offload_summed_memory* memories_;
    std::vector<std::vector<bool>> expected_; // of each memory, by block
};

} // namespace offload

#endif
