// SPDX-License-Identifier: Apache-2.0
// Tickets, and the cutting of requests in blocks: what both kinds of I/O engine share.
#ifndef OFFLOAD_IO_H
#define OFFLOAD_IO_H

#include <sys/types.h>

#include <cerrno>
#include <condition_variable>
#include <cstdint>
#include <deque>
#include <memory>
#include <mutex>
#include <unordered_map>

#include "offload.h"

namespace offload {

struct IoTicket;

// One transfer that the kernel is asked for: a part of a ticket. Owned by the backend while in flight; the ticket
// outlives it, because a ticket with a block in flight is not settled.
struct IoBlock {
    IoTicket* ticket = nullptr;
    int32_t op = OFFLOAD_IO_READ;
    int fd = -1;
    bool direct = false; // fd is O_DIRECT
    char* buffer = nullptr;
    int64_t nbytes = 0;
    int64_t offset = 0;
    int64_t begin_nbytes = 0;  // where the next attempt starts: what lies before it was transferred
    int32_t attempt_count = 0; // attempts in a row that moved nothing forward
    bool fixed = false;        // the last attempt was from or to registered memory

    char* next_buffer() const { return buffer + begin_nbytes; }
    int64_t next_nbytes() const { return nbytes - begin_nbytes; }
    int64_t next_offset() const { return offset + begin_nbytes; }
};

struct IoTicket {
    int32_t op = OFFLOAD_IO_READ;
    int fd = -1;
    bool direct = false;
    bool background = false;
    char* buffer = nullptr;
    int64_t nbytes = 0;
    int64_t offset = 0;
    int64_t cut_nbytes = 0; // handed out in blocks so far
    bool all_cut = false;
    int64_t in_flight_count = 0; // blocks
    int64_t status = 0;
    int64_t transferred_nbytes = 0;
    int64_t failed_offset = -1;
    int64_t began_ns = 0; // its first block was taken; 0: none was yet
    int64_t ended_ns = 0;
    bool settled = false; // all_cut and no block in flight
    bool released = false;
    std::condition_variable settled_changed;
};

} // namespace offload

// Locking: mutex_ guards everything below it, the tickets included. A backend calls take_block and complete; it
// transfers without the lock.
struct offload_io {
  public:
    offload_io(int32_t queue_depth, int64_t block_nbytes);
    virtual ~offload_io() = default;
    offload_io(const offload_io&) = delete;
    offload_io& operator=(const offload_io&) = delete;

    bool is_ours() const;
    void submit(int32_t op, int fd, void* buffer, int64_t nbytes, int64_t offset, int32_t priority, uint64_t* ticket);
    // `times` may be null.
    int wait(uint64_t ticket, int64_t timeout_ns, offload_io_result* result, offload_io_times* times);
    void stats(offload_io_statistics* statistics);

    // As offload_io_register and offload_io_unregister. Where there is no such thing nothing can be registered.
    virtual int register_memory(char*, int64_t) { return -EOPNOTSUPP; }
    virtual int unregister_memory(char*) { return -ENOENT; }

    // Wait for everything submitted, then end the backend's threads. Called once, before the destructor.
    void close();

  protected:
    // The next block to transfer, high priority first. False: nothing to do until another block ends or comes. The caller
    // holds mutex_.
    bool take_block(offload::IoBlock* block);

    // Whether there is a block that was not taken yet. The caller holds mutex_.
    bool is_queued() const;

    // Account for one attempt, `result` being bytes or a negated errno value. True: the block goes on and is to be
    // attempted again. The caller holds mutex_.
    bool complete(offload::IoBlock* block, int64_t result);

    // Blocks were queued, or stopping_ was set. Called without mutex_.
    virtual void wake() = 0;
    virtual void join() = 0;

    const int32_t queue_depth_;
    const int64_t block_nbytes_;
    std::mutex mutex_;
    bool stopping_ = false;
    int64_t registered_nbytes_ = 0;

  private:
    // Time in which at least one block of a kind was in flight.
    struct Busy {
        int64_t in_flight_count = 0;
        int64_t since_ns = 0;
        int64_t total_ns = 0;
        int64_t transferred_nbytes = 0;
    };

    bool takes_background() const;
    Busy& busy_of(int32_t op) { return busy_[op == OFFLOAD_IO_READ ? 0 : 1]; }
    bool end_block(const offload::IoBlock& block, int64_t transferred_nbytes, int64_t status);
    bool continue_after_short(offload::IoBlock* block, int64_t transferred_nbytes);
    void settle_if_over(offload::IoTicket* ticket);

    const pid_t owner_;
    uint64_t next_ticket_ = 1;
    int64_t unsettled_count_ = 0;
    int64_t fixed_nbytes_ = 0;
    std::condition_variable all_settled_;
    std::unordered_map<uint64_t, std::shared_ptr<offload::IoTicket>> tickets_;
    std::deque<std::shared_ptr<offload::IoTicket>> queues_[3]; // by priority; tickets not cut to the end
    int64_t in_flight_count_[2] = {0, 0};                      // blocks, of requests that are not background and that are
    Busy busy_[2];                                             // reads; writes and fdatasync
};

namespace offload {

// Each makes its kind of engine: 0 or a negated errno value. May throw std::bad_alloc and std::system_error.
int make_uring_io(int32_t queue_depth, int64_t block_nbytes, offload_io** out);
int make_threads_io(int32_t queue_depth, int64_t block_nbytes, offload_io** out);

} // namespace offload

#endif
