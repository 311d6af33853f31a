// The I/O engine on io_uring: one thread owns the ring, submits blocks and reaps completions.
#include <cerrno>

#include "io.h"

#if defined(OFFLOAD_HAVE_IO_URING)

#include <liburing.h>
#include <sys/eventfd.h>
#include <unistd.h>

#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <thread>
#include <vector>

#include "threads.h"

namespace offload {
namespace {

constexpr uint64_t kWakeData = ~uint64_t{0};

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
        const SignalsBlocked blocked;
        thread_ = std::thread([this] { serve(); });
        return 0;
    }

  private:
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

    // The ring has an entry for each block and one for wake_fd_, and all entries are submitted before more are
    // prepared, so that there always is one.
    void prepare(size_t slot) {
        const IoBlock& block = blocks_[slot];
        io_uring_sqe* const entry = io_uring_get_sqe(&ring_);
        const unsigned nbytes = static_cast<unsigned>(block.next_nbytes()); // a block is at most 1 GiB
        const uint64_t offset = static_cast<uint64_t>(block.next_offset());
        switch (block.op) {
        case OFFLOAD_IO_READ: io_uring_prep_read(entry, block.fd, block.next_buffer(), nbytes, offset); break;
        case OFFLOAD_IO_WRITE: io_uring_prep_write(entry, block.fd, block.next_buffer(), nbytes, offset); break;
        default: io_uring_prep_fsync(entry, block.fd, IORING_FSYNC_DATASYNC); break;
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
