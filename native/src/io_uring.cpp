// The I/O engine on io_uring: one thread owns the ring, submits blocks and reaps completions.
#include <cerrno>

#include "io.h"

#if defined(OFFLOAD_HAVE_IO_URING)

#include <liburing.h>
#include <sys/eventfd.h>
#include <sys/uio.h>
#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <iterator>
#include <map>
#include <memory>
#include <thread>
#include <vector>

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
        if (ring_made_) io_uring_queue_exit(&ring_);
    }

    int start() {
        wake_fd_ = eventfd(0, EFD_CLOEXEC);
        if (wake_fd_ < 0) return -errno;
        // One entry more than the depth: the read of wake_fd_.
        const int status = io_uring_queue_init(static_cast<unsigned>(queue_depth_) + 1, &ring_, 0);
        if (status != 0) return status;
        ring_made_ = true;
        if (!knows_operations()) return -ENOSYS;
        has_table_ = io_uring_register_buffers_sparse(&ring_, kRegisteredMax) == 0;
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
            status = set_slot(slot, begin, end - begin);
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
    int set_slot(unsigned slot, char* begin, int64_t nbytes) {
        const iovec range = {begin, static_cast<size_t>(nbytes)};
        const int status = io_uring_register_buffers_update_tag(&ring_, slot, &range, nullptr, 1);
        return status == 1 ? 0 : status < 0 ? status : -EIO;
    }

    int give_back(unsigned slot) {
        free_slots_.push_back(slot);
        return set_slot(slot, nullptr, 0);
    }

    // The table's entry that holds the whole range, or -1. The caller holds mutex_.
    int slot_of(const char* begin, int64_t nbytes) const {
        auto entry = registered_.upper_bound(const_cast<char*>(begin));
        if (entry == registered_.begin()) return -1;
        --entry;
        return begin + nbytes <= entry->second.end ? static_cast<int>(entry->second.slot) : -1;
    }

    bool knows_operations() {
        io_uring_probe* const probe = io_uring_get_probe_ring(&ring_);
        if (probe == nullptr) return false;
        const bool knows = io_uring_opcode_supported(probe, IORING_OP_READ) != 0 &&
                           io_uring_opcode_supported(probe, IORING_OP_WRITE) != 0 && io_uring_opcode_supported(probe, IORING_OP_FSYNC) != 0;
        io_uring_free_probe(probe);
        return knows;
    }

    void serve() {
        while (fill()) {
            const int status = io_uring_submit_and_wait(&ring_, 1);
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
            io_uring_sqe* const entry = io_uring_get_sqe(&ring_);
            io_uring_prep_read(entry, wake_fd_, &wake_count_, sizeof wake_count_, 0);
            io_uring_sqe_set_data64(entry, kWakeData);
            wake_prepared_ = true;
        }
        return true;
    }

    // The caller holds mutex_. The ring has an entry for each block and one for wake_fd_, and all entries are submitted before more are
    // prepared, so that there always is one.
    void prepare(size_t slot) {
        IoBlock& block = blocks_[slot];
        io_uring_sqe* const entry = io_uring_get_sqe(&ring_);
        const unsigned nbytes = static_cast<unsigned>(block.next_nbytes()); // a block is at most 1 GiB
        const uint64_t offset = static_cast<uint64_t>(block.next_offset());
        const int known = block.op == OFFLOAD_IO_FDATASYNC ? -1 : slot_of(block.next_buffer(), block.next_nbytes());
        block.fixed = known >= 0;
        if (block.op == OFFLOAD_IO_FDATASYNC) {
            io_uring_prep_fsync(entry, block.fd, IORING_FSYNC_DATASYNC);
        } else if (block.op == OFFLOAD_IO_READ) {
            if (block.fixed)
                io_uring_prep_read_fixed(entry, block.fd, block.next_buffer(), nbytes, offset, known);
            else
                io_uring_prep_read(entry, block.fd, block.next_buffer(), nbytes, offset);
        } else {
            if (block.fixed)
                io_uring_prep_write_fixed(entry, block.fd, block.next_buffer(), nbytes, offset, known);
            else
                io_uring_prep_write(entry, block.fd, block.next_buffer(), nbytes, offset);
        }
        io_uring_sqe_set_data64(entry, slot);
    }

    void reap() {
        const std::lock_guard<std::mutex> lock(mutex_);
        unsigned head = 0;
        unsigned count = 0;
        io_uring_cqe* completion = nullptr;
        io_uring_for_each_cqe(&ring_, head, completion) {
            ++count;
            const uint64_t data = io_uring_cqe_get_data64(completion);
            if (data == kWakeData) {
                wake_prepared_ = false;
                continue;
            }
            const size_t slot = static_cast<size_t>(data);
            if (complete(&blocks_[slot], completion->res)) {
                again_.push_back(slot);
            } else {
                free_.push_back(slot);
            }
        }
        io_uring_cq_advance(&ring_, count);
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

    io_uring ring_ = {};
    bool ring_made_ = false;
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

#else

namespace offload {

int make_uring_io(int32_t, int64_t, offload_io**) { return -ENOSYS; }

} // namespace offload

#endif
