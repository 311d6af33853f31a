// SPDX-License-Identifier: Apache-2.0
// The pool of threads that share one memory-bound operation.
#ifndef OFFLOAD_THREADS_H
#define OFFLOAD_THREADS_H

#include <signal.h>
#include <sys/types.h>

#include <atomic>
#include <condition_variable>
#include <cstdint>
#include <mutex>
#include <thread>
#include <vector>

#include "offload.h"

namespace offload {

// While it lives, this thread computes with round-to-nearest and with denormals, whatever its owner had set:
// torch.set_flush_denormal must not change an update.
class DefaultFloatMode {
  public:
    DefaultFloatMode();
    ~DefaultFloatMode();
    DefaultFloatMode(const DefaultFloatMode&) = delete;
    DefaultFloatMode& operator=(const DefaultFloatMode&) = delete;

  private:
    uint64_t saved_;
};

// What tools that list threads show for this one; at most 15 characters.
void name_this_thread(const char* name);

// Blocks every signal in the threads that are started while it lives, so that the program's own threads get them.
class SignalsBlocked {
  public:
    SignalsBlocked();
    ~SignalsBlocked();
    SignalsBlocked(const SignalsBlocked&) = delete;
    SignalsBlocked& operator=(const SignalsBlocked&) = delete;

  private:
    sigset_t saved_;
};

} // namespace offload

// Invariants, under mutex_: a worker counts in joined_count_ exactly while it may take tasks; the caller leaves run()
// only when nobody does, so the caller's stack outlives every use of it.
struct offload_threads {
  public:
    explicit offload_threads(int count);
    ~offload_threads();
    offload_threads(const offload_threads&) = delete;
    offload_threads& operator=(const offload_threads&) = delete;

    int count() const { return count_; }

    void stay_awake() { stays_awake_.store(true, std::memory_order_relaxed); }

    // Whether this process made the pool; in a forked child there are no workers.
    bool is_ours() const;

    // Call body(task) for every task in [0, task_count), in any order, on this thread and the workers. Callers take
    // turns. In a forked child the calling thread does it all.
    template <class Body> void run(int64_t task_count, const Body& body) {
        run_tasks(task_count, [](const void* context, int64_t task) { (*static_cast<const Body*>(context))(task); }, &body);
    }

  private:
    using TaskFunction = void (*)(const void* context, int64_t task);

    void run_tasks(int64_t task_count, TaskFunction function, const void* context);
    void take_tasks();
    void work();
    void stop();

    const int count_;
    const pid_t owner_;
    std::vector<std::thread> workers_;

    std::atomic<bool> stays_awake_{false};

    std::mutex callers_; // held through one run()
    std::mutex mutex_;
    std::condition_variable work_wanted_;
    std::condition_variable work_left_;
    std::atomic<uint64_t> generation_{0}; // written under mutex_; read without it only to decide whether to sleep
    bool open_ = false;
    bool stopping_ = false;
    int joined_count_ = 0;

    // The operation under way: written before open_ becomes true.
    TaskFunction function_ = nullptr;
    const void* context_ = nullptr;
    int64_t task_count_ = 0;
    std::atomic<int64_t> next_task_{0};
};

#endif
