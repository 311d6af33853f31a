// SPDX-License-Identifier: Apache-2.0
#include "io.h"

#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <chrono>
#include <iterator>
#include <new>
#include <system_error>

namespace offload {
namespace {

constexpr int32_t kQueueDepthMax = 4096;
constexpr int64_t kBlockNbytesMin = 512;
constexpr int64_t kBlockNbytesMax = int64_t{1} << 30;
// What O_DIRECT may ask of an offset: a transfer that stopped elsewhere is taken up again before that point.
constexpr int64_t kDirectAlignment = 4096;
// Attempts in a row without progress before a kernel that keeps saying EINTR, EAGAIN or "a few bytes" is believed.
constexpr int32_t kAttemptsMax = 10000;

int64_t now_ns() {
    return std::chrono::duration_cast<std::chrono::nanoseconds>(std::chrono::steady_clock::now().time_since_epoch()).count();
}

bool is_direct(int fd) {
    const int flags = fcntl(fd, F_GETFL);
    return flags >= 0 && (flags & O_DIRECT) != 0;
}

bool ends_at_or_before(int fd, int64_t offset) {
    struct stat status;
    return fstat(fd, &status) == 0 && S_ISREG(status.st_mode) && status.st_size <= offset;
}

} // namespace
} // namespace offload

using offload::IoBlock;
using offload::IoTicket;

offload_io::offload_io(int32_t queue_depth, int64_t block_nbytes)
    : queue_depth_(queue_depth), block_nbytes_(block_nbytes), owner_(getpid()) {}

bool offload_io::is_ours() const { return getpid() == owner_; }

void offload_io::submit(int32_t op, int fd, void* buffer, int64_t nbytes, int64_t offset, int32_t priority, uint64_t* ticket) {
    const bool transfers = op != OFFLOAD_IO_FDATASYNC;
    auto request = std::make_shared<IoTicket>();
    request->op = op;
    request->fd = fd;
    request->direct = transfers && offload::is_direct(fd);
    request->background = priority == OFFLOAD_IO_BACKGROUND;
    request->buffer = static_cast<char*>(buffer);
    request->nbytes = transfers ? nbytes : 0;
    request->offset = transfers ? offset : 0;
    const bool empty = transfers && nbytes == 0;
    {
        const std::lock_guard<std::mutex> lock(mutex_);
        const uint64_t name = next_ticket_;
        tickets_.emplace(name, request);
        if (empty) {
            request->all_cut = true;
            request->settled = true;
            request->began_ns = request->ended_ns = offload::now_ns();
        } else {
            try {
                queues_[priority].push_back(request);
            } catch (const std::bad_alloc&) {
                tickets_.erase(name);
                throw;
            }
            ++unsettled_count_;
        }
        ++next_ticket_;
        *ticket = name;
    }
    if (!empty) wake();
}

int offload_io::wait(uint64_t ticket, int64_t timeout_ns, offload_io_result* result, offload_io_times* times) {
    std::unique_lock<std::mutex> lock(mutex_);
    const auto found = tickets_.find(ticket);
    if (found == tickets_.end()) return -ENOENT;
    const std::shared_ptr<IoTicket> request = found->second; // keeps it while another thread may release it
    const auto is_over = [&] { return request->settled; };
    if (timeout_ns < 0) {
        request->settled_changed.wait(lock, is_over);
    } else if (!is_over()) {
        // Longer than a year is for ever; the sum with the clock must not overflow.
        const std::chrono::nanoseconds limit(std::min<int64_t>(timeout_ns, int64_t{366} * 24 * 3600 * 1000000000));
        const auto deadline = std::chrono::steady_clock::now() + limit;
        if (timeout_ns == 0 || !request->settled_changed.wait_until(lock, deadline, is_over)) return -ETIMEDOUT;
    }
    if (request->released) return -ENOENT;
    request->released = true;
    tickets_.erase(ticket);
    result->status = request->status;
    result->transferred_nbytes = request->transferred_nbytes;
    result->failed_offset = request->failed_offset;
    if (times != nullptr) {
        times->began_ns = request->began_ns;
        times->ended_ns = request->ended_ns;
    }
    return 0;
}

void offload_io::stats(offload_io_statistics* statistics) {
    const std::lock_guard<std::mutex> lock(mutex_);
    const auto busy_ns = [](const Busy& busy) {
        return busy.total_ns + (busy.in_flight_count > 0 ? offload::now_ns() - busy.since_ns : 0);
    };
    statistics->read_nbytes = busy_[0].transferred_nbytes;
    statistics->written_nbytes = busy_[1].transferred_nbytes;
    statistics->read_busy_ns = busy_ns(busy_[0]);
    statistics->write_busy_ns = busy_ns(busy_[1]);
    statistics->in_flight_count = unsettled_count_;
    statistics->registered_nbytes = registered_nbytes_;
    statistics->fixed_nbytes = fixed_nbytes_;
}

void offload_io::close() {
    {
        std::unique_lock<std::mutex> lock(mutex_);
        all_settled_.wait(lock, [this] { return unsettled_count_ == 0; });
        stopping_ = true;
    }
    wake();
    join();
}

bool offload_io::takes_background() const {
    const int64_t most = in_flight_count_[false] > 0 ? 1 : std::max(1, queue_depth_ / 8);
    return in_flight_count_[true] < most;
}

bool offload_io::is_queued() const {
    return std::any_of(std::begin(queues_), std::end(queues_), [](const auto& queue) { return !queue.empty(); });
}

bool offload_io::take_block(IoBlock* block) {
    for (auto& queue : queues_) {
        if (queue.empty()) continue;
        IoTicket& ticket = *queue.front();
        if (ticket.background && !takes_background()) return false; // its queue is the last one
        *block = IoBlock();
        block->ticket = &ticket;
        block->op = ticket.op;
        block->fd = ticket.fd;
        block->direct = ticket.direct;
        if (ticket.op != OFFLOAD_IO_FDATASYNC) {
            block->buffer = ticket.buffer + ticket.cut_nbytes;
            block->offset = ticket.offset + ticket.cut_nbytes;
            block->nbytes = std::min(block_nbytes_, ticket.nbytes - ticket.cut_nbytes);
            ticket.cut_nbytes += block->nbytes;
        }
        ++ticket.in_flight_count;
        ++in_flight_count_[ticket.background];
        ticket.all_cut = ticket.cut_nbytes == ticket.nbytes;
        Busy& busy = busy_of(ticket.op);
        if (ticket.began_ns == 0) ticket.began_ns = offload::now_ns();
        if (busy.in_flight_count++ == 0) busy.since_ns = offload::now_ns();
        if (ticket.all_cut) queue.pop_front(); // the map of tickets still holds it
        return true;
    }
    return false;
}

bool offload_io::complete(IoBlock* block, int64_t result) {
    if (result == -EINTR || result == -EAGAIN) {
        if (++block->attempt_count < offload::kAttemptsMax) return true;
        return end_block(*block, block->begin_nbytes, result);
    }
    if (result < 0) return end_block(*block, block->begin_nbytes, result);
    if (block->op == OFFLOAD_IO_FDATASYNC) return end_block(*block, 0, 0);
    const int64_t transferred_nbytes = block->begin_nbytes + result;
    if (transferred_nbytes == block->nbytes) return end_block(*block, transferred_nbytes, 0);
    // A file that takes no bytes and gives no reason has failed; one that gives none has ended.
    if (result == 0) return end_block(*block, transferred_nbytes, block->op == OFFLOAD_IO_READ ? -ENODATA : -EIO);
    return continue_after_short(block, transferred_nbytes);
}

bool offload_io::continue_after_short(IoBlock* block, int64_t transferred_nbytes) {
    int64_t begin_nbytes = transferred_nbytes;
    if (block->direct) {
        const int64_t beyond = (block->offset + transferred_nbytes) % offload::kDirectAlignment;
        begin_nbytes = std::max(block->begin_nbytes, transferred_nbytes - beyond);
    }
    if (begin_nbytes > block->begin_nbytes) {
        block->begin_nbytes = begin_nbytes;
        block->attempt_count = 0;
        return true;
    }
    // O_DIRECT stopped within one aligned piece, which at the end of a file it does every time.
    if (block->op == OFFLOAD_IO_READ && offload::ends_at_or_before(block->fd, block->offset + transferred_nbytes))
        return end_block(*block, transferred_nbytes, -ENODATA);
    if (++block->attempt_count < offload::kAttemptsMax) return true;
    return end_block(*block, transferred_nbytes, -EIO);
}

bool offload_io::end_block(const IoBlock& block, int64_t transferred_nbytes, int64_t status) {
    IoTicket* const ticket = block.ticket;
    Busy& busy = busy_of(block.op);
    busy.transferred_nbytes += transferred_nbytes;
    if (block.fixed) fixed_nbytes_ += transferred_nbytes;
    if (--busy.in_flight_count == 0) busy.total_ns += offload::now_ns() - busy.since_ns;
    ticket->transferred_nbytes += transferred_nbytes;
    const int64_t failed_offset = block.offset + transferred_nbytes;
    // Blocks end in any order: the lowest failure is the one reported, whatever came first.
    if (status != 0 && (ticket->status == 0 || failed_offset < ticket->failed_offset)) {
        ticket->status = status;
        ticket->failed_offset = failed_offset;
    }
    if (status != 0 && !ticket->all_cut) {
        ticket->all_cut = true;
        for (auto& queue : queues_) {
            const auto same = [ticket](const std::shared_ptr<IoTicket>& queued) { return queued.get() == ticket; };
            queue.erase(std::remove_if(queue.begin(), queue.end(), same), queue.end());
        }
    }
    --ticket->in_flight_count;
    --in_flight_count_[ticket->background];
    settle_if_over(ticket);
    return false;
}

void offload_io::settle_if_over(IoTicket* ticket) {
    if (!ticket->all_cut || ticket->in_flight_count > 0) return;
    ticket->settled = true;
    ticket->ended_ns = offload::now_ns();
    ticket->settled_changed.notify_all();
    if (--unsettled_count_ == 0) all_settled_.notify_all();
}

extern "C" {

int offload_io_create(int32_t kind, int32_t queue_depth, int64_t block_nbytes, offload_io** out) {
    using namespace offload;
    if (out == nullptr || (kind != OFFLOAD_IO_URING && kind != OFFLOAD_IO_THREADS)) return -EINVAL;
    if (queue_depth < 1 || queue_depth > kQueueDepthMax) return -EINVAL;
    if (block_nbytes < kBlockNbytesMin || block_nbytes > kBlockNbytesMax || block_nbytes % kBlockNbytesMin != 0) return -EINVAL;
    try {
        return kind == OFFLOAD_IO_URING ? make_uring_io(queue_depth, block_nbytes, out) : make_threads_io(queue_depth, block_nbytes, out);
    } catch (const std::bad_alloc&) { return -ENOMEM; } catch (const std::system_error&) {
        return -EAGAIN;
    }
}

int offload_io_destroy(offload_io* io) {
    if (io == nullptr) return -EINVAL;
    if (!io->is_ours()) return 0;
    io->close();
    delete io;
    return 0;
}

int offload_io_submit(offload_io* io, int32_t op, int32_t fd, void* buffer, int64_t nbytes, int64_t offset, int32_t priority,
                      uint64_t* ticket) {
    if (io == nullptr || ticket == nullptr || priority < OFFLOAD_IO_HIGH || priority > OFFLOAD_IO_BACKGROUND) return -EINVAL;
    if (op < OFFLOAD_IO_READ || op > OFFLOAD_IO_FDATASYNC) return -EINVAL;
    if (op != OFFLOAD_IO_FDATASYNC) {
        if (nbytes < 0 || offset < 0 || offset > INT64_MAX - nbytes || (buffer == nullptr && nbytes > 0)) return -EINVAL;
    }
    if (!io->is_ours()) return -ECHILD;
    try {
        io->submit(op, fd, buffer, nbytes, offset, priority, ticket);
        return 0;
    } catch (const std::bad_alloc&) { return -ENOMEM; }
}

int offload_io_register(offload_io* io, void* address, int64_t nbytes) {
    if (io == nullptr || address == nullptr || nbytes < 1 || nbytes > INT64_MAX / 2) return -EINVAL;
    if (!io->is_ours()) return -ECHILD;
    try {
        return io->register_memory(static_cast<char*>(address), nbytes);
    } catch (const std::bad_alloc&) { return -ENOMEM; }
}

int offload_io_unregister(offload_io* io, void* address) {
    if (io == nullptr || address == nullptr) return -EINVAL;
    if (!io->is_ours()) return -ECHILD;
    return io->unregister_memory(static_cast<char*>(address));
}

int offload_io_wait(offload_io* io, uint64_t ticket, int64_t timeout_ns, offload_io_result* result) {
    return offload_io_wait_timed(io, ticket, timeout_ns, result, nullptr);
}

int offload_io_wait_timed(offload_io* io, uint64_t ticket, int64_t timeout_ns, offload_io_result* result, offload_io_times* times) {
    if (io == nullptr || result == nullptr) return -EINVAL;
    if (!io->is_ours()) return -ECHILD;
    return io->wait(ticket, timeout_ns, result, times);
}

int offload_io_poll(offload_io* io, uint64_t ticket, offload_io_result* result) {
    const int status = offload_io_wait(io, ticket, 0, result);
    return status == -ETIMEDOUT ? -EAGAIN : status;
}

int offload_io_stats(offload_io* io, offload_io_statistics* statistics) {
    if (io == nullptr || statistics == nullptr) return -EINVAL;
    if (!io->is_ours()) return -ECHILD;
    io->stats(statistics);
    return 0;
}

} // extern "C"
