// SPDX-License-Identifier: Apache-2.0
#include "io_ring.h"

#include <sys/mman.h>
#include <sys/syscall.h>
#include <sys/uio.h>
#include <unistd.h>

#include <cerrno>
#include <initializer_list>

namespace offload {
namespace {

// The numbers are the same on all architectures but alpha.
constexpr long kSetup = 425;
constexpr long kEnter = 426;
constexpr long kRegister = 427;

constexpr unsigned kRegisterProbe = 8;
constexpr unsigned kRegisterBuffers2 = 15;
constexpr unsigned kRegisterBuffersUpdate = 16;
constexpr uint32_t kRegisterSparse = 1;
constexpr uint32_t kFeatureSingleMap = 1; // submissions and completions in one mapping; since Linux 5.4
constexpr unsigned kGetEvents = 1;
constexpr off_t kEntriesOffset = 0x10000000;
constexpr uint16_t kOperationSupported = 1;
constexpr size_t kSignalSetNbytes = 8;

struct SubmissionOffsets {
    uint32_t head, tail, ring_mask, ring_entries, flags, dropped, array, reserved;
    uint64_t user_address;
};

struct CompletionOffsets {
    uint32_t head, tail, ring_mask, ring_entries, overflow, entries, flags, reserved;
    uint64_t user_address;
};

struct Parameters {
    uint32_t submission_count, completion_count, flags, thread_cpu, thread_idle, features, workers_fd, reserved[3];
    SubmissionOffsets submission;
    CompletionOffsets completion;
};
static_assert(sizeof(Parameters) == 120, "io_uring_params");

struct TableRegister {
    uint32_t count, flags;
    uint64_t reserved, data, tags;
};
static_assert(sizeof(TableRegister) == 32, "io_uring_rsrc_register");

struct TableUpdate {
    uint32_t offset, reserved;
    uint64_t data, tags;
    uint32_t count, reserved2;
};
static_assert(sizeof(TableUpdate) == 32, "io_uring_rsrc_update2");

struct Probe {
    uint8_t last_op, op_count;
    uint16_t reserved;
    uint32_t reserved2[3];
    struct {
        uint8_t op, reserved;
        uint16_t flags;
        uint32_t reserved2;
    } ops[256];
};
static_assert(sizeof(Probe) == 16 + 256 * 8, "io_uring_probe");

int failure_of(long result) { return result < 0 ? -errno : static_cast<int>(result); }

template <class T> T* at(void* base, uint32_t offset_nbytes) { return reinterpret_cast<T*>(static_cast<char*>(base) + offset_nbytes); }

uint64_t address_of(const void* pointer) { return reinterpret_cast<uintptr_t>(pointer); }

} // namespace

Ring::~Ring() {
    if (entries_ != nullptr) munmap(entries_, entries_nbytes_);
    if (rings_ != nullptr) munmap(rings_, rings_nbytes_);
    if (fd_ >= 0) ::close(fd_);
}

int Ring::open(unsigned entry_count) {
    Parameters made = {};
    fd_ = failure_of(syscall(kSetup, entry_count, &made));
    if (fd_ < 0) return fd_;
    if ((made.features & kFeatureSingleMap) == 0 || !knows_operations()) return -ENOSYS;
    const size_t to_array = made.submission.array + made.submission_count * sizeof(uint32_t);
    const size_t to_completions = made.completion.entries + made.completion_count * sizeof(RingCompletion);
    rings_nbytes_ = to_array > to_completions ? to_array : to_completions;
    entries_nbytes_ = made.submission_count * sizeof(RingEntry);
    void* const rings = mmap(nullptr, rings_nbytes_, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_POPULATE, fd_, 0);
    if (rings == MAP_FAILED) return -errno;
    rings_ = rings;
    void* const entries = mmap(nullptr, entries_nbytes_, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_POPULATE, fd_, kEntriesOffset);
    if (entries == MAP_FAILED) return -errno;
    entries_ = static_cast<RingEntry*>(entries);
    submitted_ = at<uint32_t>(rings_, made.submission.head);
    prepared_ = at<uint32_t>(rings_, made.submission.tail);
    tail_ = *prepared_;
    entry_mask_ = *at<uint32_t>(rings_, made.submission.ring_mask);
    reaped_ = at<uint32_t>(rings_, made.completion.head);
    completed_ = at<uint32_t>(rings_, made.completion.tail);
    completion_mask_ = *at<uint32_t>(rings_, made.completion.ring_mask);
    completions_ = at<RingCompletion>(rings_, made.completion.entries);
    // Entries are taken in the order of the ring itself.
    for (uint32_t index = 0; index < made.submission_count; ++index) at<uint32_t>(rings_, made.submission.array)[index] = index;
    return 0;
}

bool Ring::knows_operations() const {
    Probe probe = {};
    if (syscall(kRegister, fd_, kRegisterProbe, &probe, 256) < 0) return false;
    for (const uint8_t op : {kRingFsync, kRingReadFixed, kRingWriteFixed, kRingRead, kRingWrite})
        if (op > probe.last_op || (probe.ops[op].flags & kOperationSupported) == 0) return false;
    return true;
}

RingEntry& Ring::prepare(uint8_t opcode, int fd, uint64_t data) {
    RingEntry& entry = entries_[tail_++ & entry_mask_];
    entry = RingEntry{};
    entry.opcode = opcode;
    entry.fd = fd;
    entry.data = data;
    return entry;
}

int Ring::submit_and_wait() {
    __atomic_store_n(prepared_, tail_, __ATOMIC_RELEASE);
    const uint32_t waiting = tail_ - __atomic_load_n(submitted_, __ATOMIC_ACQUIRE);
    const int status = failure_of(syscall(kEnter, fd_, waiting, 1U, kGetEvents, nullptr, kSignalSetNbytes));
    return status < 0 ? status : 0;
}

bool Ring::reap(RingCompletion* completion) {
    const uint32_t head = *reaped_;
    if (head == __atomic_load_n(completed_, __ATOMIC_ACQUIRE)) return false;
    *completion = completions_[head & completion_mask_];
    __atomic_store_n(reaped_, head + 1, __ATOMIC_RELEASE);
    return true;
}

int Ring::register_empty_table(unsigned slot_count) {
    TableRegister table = {};
    table.count = slot_count;
    table.flags = kRegisterSparse;
    return failure_of(syscall(kRegister, fd_, kRegisterBuffers2, &table, sizeof table));
}

int Ring::set_table_slot(unsigned slot, const void* begin, size_t nbytes) {
    const iovec range = {const_cast<void*>(begin), nbytes};
    TableUpdate update = {};
    update.offset = slot;
    update.data = address_of(&range);
    update.count = 1;
    const int status = failure_of(syscall(kRegister, fd_, kRegisterBuffersUpdate, &update, sizeof update));
    return status == 1 ? 0 : status < 0 ? status : -EIO;
}

} // namespace offload
