// SPDX-License-Identifier: Apache-2.0
// Memory of which an update takes the checksums as it passes over it. See offload_update_summed.
#ifndef OFFLOAD_SUMMED_MEMORY_H
#define OFFLOAD_SUMMED_MEMORY_H

#include <cstdint>
#include <vector>

#include "checksum.h"
#include "offload.h"

namespace offload {

class SummedMemories {
  public:
    SummedMemories(const offload_summed_memory* memories, int64_t count);

    // There is a call of `sum_before` and of `sum_after` for these bytes to come.
    void expect(const void* begin, int64_t nbytes);

    // Of the blocks that lie wholly in these bytes. From any thread.
    void sum_before(const void* begin, int64_t nbytes) const;
    void sum_after(const void* begin, int64_t nbytes) const;

    // Of all others.
    void sum_rest_before() const;
    void sum_rest_after() const;

  private:
    struct Blocks {
        const offload_summed_memory* memory;
        int64_t first, last;
    };

    Blocks blocks_in(const void* begin, int64_t nbytes) const;
    void sum_rest(uint64_t* offload_summed_memory::* sums) const;

    const offload_summed_memory* memories_;
    std::vector<std::vector<bool>> expected_; // of each memory, by block
};

} // namespace offload

#endif
