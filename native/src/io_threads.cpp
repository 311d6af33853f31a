// SPDX-License-Identifier: Apache-2.0
// The portable kind of I/O engine: threads that call pread, pwrite and fdatasync.
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <memory>
#include <thread>
#include <vector>

#include "io.h"
#include "threads.h"

namespace offload {
namespace {

// A blocked thread costs a stack; a drive gains nothing from more.
constexpr int32_t kIoThreadsMax = 128;

int64_t transfer(const IoBlock& block) {
    const size_t nbytes = static_cast<size_t>(block.next_nbytes());
    ssize_t result = 0;
    switch (block.op) {
    case OFFLOAD_IO_READ: result = pread(block.fd, block.next_buffer(), nbytes, block.next_offset()); break;
    case OFFLOAD_IO_WRITE: result = pwrite(block.fd, block.next_buffer(), nbytes, block.next_offset()); break;
    default: result = fdatasync(block.fd); break;
    }
    return result < 0 ? -errno : result;
}

class ThreadsIo final : public offload_io {
  public:
    ThreadsIo(int32_t queue_depth, int64_t block_nbytes) : offload_io(queue_depth, block_nbytes) {
        const SignalsBlocked blocked;
        const int32_t count = std::min(queue_depth, kIoThreadsMax);
        threads_.reserve(static_cast<size_t>(count));
        try {
            for (int32_t i = 0; i < count; ++i) threads_.emplace_back([this] { serve(); });
        } catch (...) {
            close();
            throw;
        }
    }

  private:
    void serve() {
        name_this_thread("offload-io");
        std::unique_lock<std::mutex> lock(mutex_);
        for (;;) {
            IoBlock block;
            while (!take_block(&block)) {
                if (stopping_) return;
                work_wanted_.wait(lock);
            }
            if (is_queued()) work_wanted_.notify_one(); // the end of one block may let several go
            for (bool again = true; again;) {
                lock.unlock();
                const int64_t result = transfer(block);
                lock.lock();
                again = complete(&block, result);
            }
        }
    }

    void wake() override {
        // Between a thread's look at the queue and its wait no notice may be lost.
        { const std::lock_guard<std::mutex> lock(mutex_); }
        work_wanted_.notify_all();
    }

    void join() override {
        for (std::thread& thread : threads_) thread.join();
    }

    std::condition_variable work_wanted_;
    std::vector<std::thread> threads_;
};

} // namespace

int make_threads_io(int32_t queue_depth, int64_t block_nbytes, offload_io** out) {
    *out = new ThreadsIo(queue_depth, block_nbytes);
    return 0;
}

} // namespace offload
