// SPDX-License-Identifier: Apache-2.0
// A ring of io_uring by the kernel's system calls alone: no liburing to be found at build or at run time.
#ifndef OFFLOAD_IO_RING_H
#define OFFLOAD_IO_RING_H

#include <cstddef>
#include <cstdint>

namespace offload {

// As <linux/io_uring.h> lays them out, which may be older where this is built than the kernel it runs on.
struct RingEntry {
    uint8_t opcode;
    uint8_t flags;
    uint16_t ioprio;
    int32_t fd;
    uint64_t offset;
    uint64_t address;
    uint32_t nbytes;
    uint32_t op_flags;
    uint64_t data; // comes back with the completion
    uint16_t buffer_index;
    uint16_t personality;
    int32_t file_index;
    uint64_t reserved[2];
};
static_assert(sizeof(RingEntry) == 64, "the kernel's submission entry");

struct RingCompletion {
    uint64_t data;
    int32_t result;
    uint32_t flags;
};
static_assert(sizeof(RingCompletion) == 16, "the kernel's completion entry");

// Each function returns 0 or what is said, else -errno. One thread prepares, submits and reaps; registering is for any thread.
class Ring {
  public:
    Ring() = default;
    ~Ring();
    Ring(const Ring&) = delete;
    Ring& operator=(const Ring&) = delete;

    // A ring for `entry_count` entries. -ENOSYS: the kernel has none, or none that reads, writes and syncs.
    int open(unsigned entry_count);

    // The next entry, zeroed but for what is given; it is submitted with the others. At most `entry_count` are under way.
    RingEntry& prepare(uint8_t opcode, int fd, uint64_t data);

    // Submit what was prepared and wait for a completion.
    int submit_and_wait();

    // Take the oldest completion; false: there is none.
    bool reap(RingCompletion* completion);

    int register_empty_table(unsigned slot_count);
    int set_table_slot(unsigned slot, const void* begin, size_t nbytes);

  private:
    bool knows_operations() const;

    int fd_ = -1;
    void* rings_ = nullptr; // head, tail and completions, shared with the kernel
    size_t rings_nbytes_ = 0;
    RingEntry* entries_ = nullptr;
    size_t entries_nbytes_ = 0;
    uint32_t* submitted_ = nullptr; // the kernel's head of the submissions
    uint32_t* prepared_ = nullptr;  // our tail of them
    uint32_t tail_ = 0;             // what prepared_ will be
    uint32_t entry_mask_ = 0;
    uint32_t* reaped_ = nullptr;    // our head of the completions
    uint32_t* completed_ = nullptr; // the kernel's tail of them
    uint32_t completion_mask_ = 0;
    RingCompletion* completions_ = nullptr;
};

constexpr uint8_t kRingFsync = 3;
constexpr uint8_t kRingReadFixed = 4;
constexpr uint8_t kRingWriteFixed = 5;
constexpr uint8_t kRingRead = 22;
constexpr uint8_t kRingWrite = 23;
constexpr uint32_t kRingDataSync = 1; // op_flags of kRingFsync

} // namespace offload

#endif
