// SPDX-License-Identifier: Apache-2.0
// The I/O engine on io_uring: one thread owns the ring, submits blocks and reaps completions.
#include <sys/eventfd.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <iterator>
#include <map>
#include <memory>
#include <thread>
#include <vector>

#include "io.h"
#include "io_ring.h"
#include "threads.h"

namespace offload {
namespace {

constexpr uint64_t kWakeData = ~uint64_t{0};
// Of the ring's table of registered memory, and what the kernel takes in one entry.
constexpr unsigned kRegisteredMax = 1024;
constexpr int64_t kRegisteredNbytesMax = int64_t{1} << 30;

// One entry of the table.
struct Registered {
    char* end = nullptr;
    unsigned slot = 0;
    bool first = false; // of those that one offload_io_register made
};

class UringIo final : public offload_io {
  public:
    UringIo(int32_t queue_depth, int64_t block_nbytes) : offload_io(queue_depth, block_nbytes), blocks_(static_cast<size_t>(queue_depth)) {
        free_.reserve(blocks_.size());
        again_.reserve(blocks_.size());
        for (size_t slot = blocks_.size(); slot > 0; --slot) free_.push_back(slot - 1);
    }

    ~UringIo() override {
        if (wake_fd_ >= 0) ::close(wake_fd_);
    }

    int start() {
        wake_fd_ = eventfd(0, EFD_CLOEXEC);
        if (wake_fd_ < 0) return -errno;
        // One entry more than the depth: the read of wake_fd_.
        const int status = ring_.open(static_cast<unsigned>(queue_depth_) + 1);
        if (status != 0) return status;
        has_table_ = ring_.register_empty_table(kRegisteredMax) == 0;
        for (unsigned slot = has_table_ ? kRegisteredMax : 0; slot > 0; --slot) free_slots_.push_back(slot - 1);
        const SignalsBlocked blocked;
        thread_ = std::thread([this] { serve(); });
        return 0;
    }

    int register_memory(char* address, int64_t nbytes) override {
        if (!has_table_) return -EOPNOTSUPP;
        const std::lock_guard<std::mutex> changing(table_mutex_);
        const size_t count = static_cast<size_t>((nbytes + kRegisteredNbytesMax - 1) / kRegisteredNbytesMax);
        if (count > free_slots_.size()) return -ENOSPC;
        {
            const std::lock_guard<std::mutex> lock(mutex_);
            const auto after = registered_.lower_bound(address + nbytes);
            if (after != registered_.begin() && std::prev(after)->second.end > address) return -EEXIST;
        }
        std::map<char*, Registered> made;
        int status = 0;
        for (char* begin = address; status == 0 && begin < address + nbytes; begin += kRegisteredNbytesMax) {
            char* const end = begin + std::min<int64_t>(kRegisteredNbytesMax, address + nbytes - begin);
            const unsigned slot = free_slots_.back();
            status = ring_.set_table_slot(slot, begin, static_cast<size_t>(end - begin));
            if (status != 0) break;
            made.emplace(begin, Registered{end, slot, begin == address});
            free_slots_.pop_back();
        }
        if (status != 0) {
            for (const auto& entry : made) give_back(entry.second.slot);
            return status;
        }
        const std::lock_guard<std::mutex> lock(mutex_);
        registered_.merge(made);
        registered_nbytes_ += nbytes;
        return 0;
    }

    int unregister_memory(char* address) override {
        const std::lock_guard<std::mutex> changing(table_mutex_);
        std::vector<unsigned> slots;
        slots.reserve(kRegisteredMax);
        {
            const std::lock_guard<std::mutex> lock(mutex_);
            auto entry = registered_.find(address);
            if (entry == registered_.end() || !entry->second.first) return -ENOENT;
            do {
                registered_nbytes_ -= entry->second.end - entry->first;
                slots.push_back(entry->second.slot);
                entry = registered_.erase(entry);
            } while (entry != registered_.end() && !entry->second.first);
        }
        int status = 0;
        for (const unsigned slot : slots) {
            const int result = give_back(slot);
            if (status == 0) status = result;
        }
        return status;
    }

  private:
    int give_back(unsigned slot) {
        free_slots_.push_back(slot);
        return ring_.set_table_slot(slot, nullptr, 0);
    }

    // The table's entry that holds the whole range, or -1. The caller holds mutex_.
    int slot_of(const char* begin, int64_t nbytes) const {
        auto entry = registered_.upper_bound(const_cast<char*>(begin));
        if (entry == registered_.begin()) return -1;
        --entry;
        return begin + nbytes <= entry->second.end ? static_cast<int>(entry->second.slot) : -1;
    }

    void serve() {
        name_this_thread("offload-io");
        while (fill()) {
            const int status = ring_.submit_and_wait();
            if (status < 0) pause_or_die(status);
            reap();
        }
    }

    // Prepare every block there is room for. False: stopping, and nothing is in flight: not the read of wake_fd_ either,
    // since the kernel would still write wake_count_ then.
    bool fill() {
        const std::lock_guard<std::mutex> lock(mutex_);
        for (const size_t slot : again_) prepare(slot);
        again_.clear();
        while (!free_.empty() && take_block(&blocks_[free_.back()])) {
            prepare(free_.back());
            free_.pop_back();
        }
        if (stopping_ && !wake_prepared_ && free_.size() == blocks_.size()) return false;
        if (!wake_prepared_) {
            RingEntry& entry = ring_.prepare(kRingRead, wake_fd_, kWakeData);
            entry.address = reinterpret_cast<uintptr_t>(&wake_count_);
            entry.nbytes = sizeof wake_count_;
            wake_prepared_ = true;
        }
        return true;
    }

    // The caller holds mutex_. The ring has an entry for each block and one for wake_fd_, and all entries are submitted before more are
    // prepared, so that there always is one.
    void prepare(size_t slot) {
        IoBlock& block = blocks_[slot];
        if (block.op == OFFLOAD_IO_FDATASYNC) {
            block.fixed = false;
            ring_.prepare(kRingFsync, block.fd, slot).op_flags = kRingDataSync;
            return;
        }
        const bool reads = block.op == OFFLOAD_IO_READ;
        const int known = slot_of(block.next_buffer(), block.next_nbytes());
        block.fixed = known >= 0;
        const uint8_t opcode = block.fixed ? (reads ? kRingReadFixed : kRingWriteFixed) : (reads ? kRingRead : kRingWrite);
        RingEntry& entry = ring_.prepare(opcode, block.fd, slot);
        entry.offset = static_cast<uint64_t>(block.next_offset());
        entry.address = reinterpret_cast<uintptr_t>(block.next_buffer());
        entry.nbytes = static_cast<uint32_t>(block.next_nbytes()); // a block is at most 1 GiB
        if (block.fixed) entry.buffer_index = static_cast<uint16_t>(known);
    }

    void reap() {
        const std::lock_guard<std::mutex> lock(mutex_);
        RingCompletion completion = {};
        while (ring_.reap(&completion)) {
            if (completion.data == kWakeData) {
                wake_prepared_ = false;
                continue;
            }
            const size_t slot = static_cast<size_t>(completion.data);
            if (complete(&blocks_[slot], completion.result)) {
                again_.push_back(slot);
            } else {
                free_.push_back(slot);
            }
        }
    }

    // A short of memory passes. Any other refusal means that the ring itself is wrong; then nobody can know which
    // buffers the kernel still writes to, and going on would corrupt them.
    static void pause_or_die(int status) {
        if (status == -EINTR) return;
        if (status == -EAGAIN || status == -EBUSY || status == -ENOMEM) {
            std::this_thread::sleep_for(std::chrono::milliseconds(1));
            return;
        }
        std::fprintf(stderr, "offload: io_uring_enter failed: %s\n", std::strerror(-status));
        std::abort();
    }

    void wake() override {
        const uint64_t one = 1;
        // Fails only when the counter is full, and then the reader is awake already.
        while (::write(wake_fd_, &one, sizeof one) < 0 && errno == EINTR) {}
    }

    void join() override { thread_.join(); }

    Ring ring_;
    int wake_fd_ = -1;
    uint64_t wake_count_ = 0; // written by the kernel
    bool wake_prepared_ = false;
    std::vector<IoBlock> blocks_; // slots; those not in free_ are in flight or in again_
    std::vector<size_t> free_;
    std::vector<size_t> again_;
    bool has_table_ = false;
    std::mutex table_mutex_;                 // held while the kernel's table changes; taken before mutex_
    std::vector<unsigned> free_slots_;       // of the table; guarded by table_mutex_
    std::map<char*, Registered> registered_; // by where it begins; guarded by mutex_
    std::thread thread_;
};

} // namespace

int make_uring_io(int32_t queue_depth, int64_t block_nbytes, offload_io** out) {
    auto io = std::make_unique<UringIo>(queue_depth, block_nbytes);
    const int status = io->start();
    if (status != 0) return status;
    *out = io.release();
    return 0;
}

} // namespace offload
