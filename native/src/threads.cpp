// SPDX-License-Identifier: Apache-2.0
#include "threads.h"

#include <pthread.h>
#include <signal.h>
#include <unistd.h>

#include <cerrno>
#include <new>
#include <system_error>

#include "cpu.h"

#if defined(__x86_64__)
#include <immintrin.h>
#endif

namespace offload {
namespace {

constexpr int kThreadsMax = 1024;

// About 20 us: a chunk's operations follow each other closely, and waking a sleeping thread costs more than that. To wake many
// takes as long as their share of a chunk: about 200 us then, in which the next chunk comes, where a core is free for each. Where
// the model computes on them too it would wait for those that only spin.
constexpr int kSpinCount = 500, kSpinCountOfMany = 5000, kMany = 8;

void pause_briefly() {
#if defined(__x86_64__)
    _mm_pause();
#elif defined(__aarch64__)
    asm volatile("yield");
#endif
}

} // namespace

#if defined(__x86_64__)
DefaultFloatMode::DefaultFloatMode() : saved_(_mm_getcsr()) { _mm_setcsr(0x1f80); }
DefaultFloatMode::~DefaultFloatMode() { _mm_setcsr(static_cast<unsigned>(saved_)); }
#elif defined(__aarch64__)
DefaultFloatMode::DefaultFloatMode() {
    asm volatile("mrs %0, fpcr" : "=r"(saved_));
    asm volatile("msr fpcr, %0" : : "r"(uint64_t{0}));
}
DefaultFloatMode::~DefaultFloatMode() { asm volatile("msr fpcr, %0" : : "r"(saved_)); }
#else
DefaultFloatMode::DefaultFloatMode() : saved_(0) {}
DefaultFloatMode::~DefaultFloatMode() { (void)saved_; }
#endif

SignalsBlocked::SignalsBlocked() {
    sigset_t all;
    sigfillset(&all);
    pthread_sigmask(SIG_SETMASK, &all, &saved_);
}

SignalsBlocked::~SignalsBlocked() { pthread_sigmask(SIG_SETMASK, &saved_, nullptr); }

// Fails only for a name that is too long, and nothing depends on it.
void name_this_thread(const char* name) { (void)pthread_setname_np(pthread_self(), name); }

} // namespace offload

offload_threads::offload_threads(int count) : count_(count), owner_(getpid()) {
    const offload::SignalsBlocked blocked;
    workers_.reserve(static_cast<size_t>(count - 1));
    try {
        for (int i = 1; i < count; ++i) workers_.emplace_back([this] { work(); });
    } catch (...) {
        stop();
        throw;
    }
}

offload_threads::~offload_threads() { stop(); }

bool offload_threads::is_ours() const { return getpid() == owner_; }

void offload_threads::stop() {
    {
        const std::lock_guard<std::mutex> lock(mutex_);
        stopping_ = true;
        generation_.fetch_add(1, std::memory_order_release);
    }
    work_wanted_.notify_all();
    for (std::thread& worker : workers_) worker.join();
}

void offload_threads::run_tasks(int64_t task_count, TaskFunction function, const void* context) {
    const offload::DefaultFloatMode mode;
    if (task_count <= 1 || count_ == 1 || !is_ours()) {
        for (int64_t task = 0; task < task_count; ++task) function(context, task);
        return;
    }
    const std::lock_guard<std::mutex> turn(callers_);
    {
        const std::lock_guard<std::mutex> lock(mutex_);
        function_ = function;
        context_ = context;
        task_count_ = task_count;
        next_task_.store(0, std::memory_order_relaxed);
        open_ = true;
        generation_.fetch_add(1, std::memory_order_release);
    }
    work_wanted_.notify_all();
    take_tasks();
    std::unique_lock<std::mutex> lock(mutex_);
    open_ = false;
    work_left_.wait(lock, [this] { return joined_count_ == 0; });
}

void offload_threads::take_tasks() {
    for (;;) {
        const int64_t task = next_task_.fetch_add(1, std::memory_order_relaxed);
        if (task >= task_count_) return;
        function_(context_, task);
    }
}

void offload_threads::work() {
    offload::name_this_thread("offload-kernels");
    const offload::DefaultFloatMode mode;
    uint64_t seen = 0;
    std::unique_lock<std::mutex> lock(mutex_);
    for (;;) {
        if (stopping_) return;
        seen = generation_.load(std::memory_order_relaxed);
        if (open_) {
            ++joined_count_;
            lock.unlock();
            take_tasks();
            lock.lock();
            if (--joined_count_ == 0) work_left_.notify_one();
            if (generation_.load(std::memory_order_relaxed) != seen) continue;
        }
        lock.unlock();
        const bool spins_long = count_ >= offload::kMany && stays_awake_.load(std::memory_order_relaxed);
        const int spin_count = spins_long ? offload::kSpinCountOfMany : offload::kSpinCount;
        for (int i = 0; i < spin_count && generation_.load(std::memory_order_acquire) == seen; ++i) offload::pause_briefly();
        lock.lock();
        work_wanted_.wait(lock, [&] { return generation_.load(std::memory_order_relaxed) != seen; });
    }
}

extern "C" {

int offload_threads_create(int32_t count, offload_threads** out) {
    if (out == nullptr || count < 0 || count > offload::kThreadsMax) return -EINVAL;
    try {
        const int wanted = count != 0 ? count : offload::physical_core_count();
        *out = new offload_threads(wanted < offload::kThreadsMax ? wanted : offload::kThreadsMax);
        return 0;
    } catch (const std::bad_alloc&) { return -ENOMEM; } catch (const std::system_error&) {
        return -EAGAIN;
    }
}

int offload_threads_destroy(offload_threads* threads) {
    if (threads == nullptr) return -EINVAL;
    // A child has copies of thread objects without threads: to end them would wait for ever, so they are left.
    if (threads->is_ours()) delete threads;
    return 0;
}

int offload_threads_stay_awake(offload_threads* threads) {
    if (threads == nullptr) return -EINVAL;
    threads->stay_awake();
    return 0;
}

int32_t offload_threads_count(const offload_threads* threads) { return threads == nullptr ? 0 : threads->count(); }

} // extern "C"
