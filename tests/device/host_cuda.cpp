// SPDX-License-Identifier: Apache-2.0
// Runs offload/device/arithmetic/cuda_kernels/kernels.cu on the host, thread by thread: the same source as C++, with CUDA's built-in
// variables, operations and warp exchange in place. Compiled by tests/device/host_kernels.py with -ffp-contract=off.
#include <cmath>
#include <condition_variable>
#include <cstdint>
#include <cstring>
#include <mutex>
#include <thread>
#include <vector>

#define __device__
#define __global__
#define __grid_constant__

struct float4 {
    float x, y, z, w;
};
struct ushort4 {
    unsigned short x, y, z, w;
};
struct Dimensions {
    unsigned int x;
};

thread_local Dimensions threadIdx, blockIdx;
static Dimensions blockDim, gridDim;

// 32 threads that exchange a double, all at the same place in their program.
class Warp {
  public:
    double shift_down(unsigned lane, double value, unsigned width) {
        values_[lane] = value;
        wait();
        const double other = lane + width < 32 ? values_[lane + width] : value;
        wait();
        return other;
    }

  private:
    void wait() {
        std::unique_lock<std::mutex> lock(mutex_);
        const unsigned round = round_;
        if (++arrived_ == 32) {
            arrived_ = 0;
            ++round_;
            changed_.notify_all();
        } else {
            changed_.wait(lock, [&] { return round_ != round; });
        }
    }

    double values_[32];
    std::mutex mutex_;
    std::condition_variable changed_;
    unsigned arrived_ = 0, round_ = 0;
};

thread_local Warp* warp = nullptr;

static float __uint_as_float(unsigned bits) {
    float value;
    std::memcpy(&value, &bits, sizeof value);
    return value;
}
static unsigned __float_as_uint(float value) {
    unsigned bits;
    std::memcpy(&bits, &value, sizeof bits);
    return bits;
}
static float __fadd_rn(float a, float b) { return a + b; }
static float __fsub_rn(float a, float b) { return a - b; }
static float __fmul_rn(float a, float b) { return a * b; }
static float __fdiv_rn(float a, float b) { return a / b; }
static float __fsqrt_rn(float a) { return std::sqrt(a); }
static float __fmaf_rn(float a, float b, float c) { return std::fma(a, b, c); }
static double __dadd_rn(double a, double b) { return a + b; }
static double __dmul_rn(double a, double b) { return a * b; }
static double __shfl_down_sync(unsigned, double value, unsigned width) { return warp->shift_down(threadIdx.x % 32, value, width); }

#include "kernels.cu"

namespace {

// Every block in turn; with `together`, the threads of a block at once, so that warps can exchange values.
template <class Kernel> void launch(int blocks, int threads, bool together, const Kernel& kernel) {
    gridDim.x = static_cast<unsigned>(blocks);
    blockDim.x = static_cast<unsigned>(threads);
    std::vector<Warp> warps(static_cast<size_t>(threads) / 32);
    const auto run = [&](unsigned thread) {
        threadIdx.x = thread;
        warp = &warps[thread / 32];
        for (unsigned block = 0; block < gridDim.x; ++block) {
            blockIdx.x = block;
            kernel();
        }
    };
    if (!together) {
        for (unsigned thread = 0; thread < blockDim.x; ++thread) run(thread);
        return;
    }
    std::vector<std::thread> running;
    for (unsigned thread = 0; thread < blockDim.x; ++thread) running.emplace_back(run, thread);
    for (std::thread& one : running) one.join();
}

template <class Parameter> using Kernel = void (*)(Parameter);

#define ROW(what, source) {what##_##source##_0, what##_##source##_1, what##_##source##_2, what##_##source##_3}
const Kernel<AdamPieces> adam_kernels[3][4] = {ROW(offload_adam_pieces, 0), ROW(offload_adam_pieces, 1), ROW(offload_adam_pieces, 2)};
const Kernel<IngestPieces> ingest_kernels[3][4] = {ROW(offload_ingest_pieces, 0), ROW(offload_ingest_pieces, 1),
                                                   ROW(offload_ingest_pieces, 2)};
const Kernel<Convert> convert_kernels[3][3] = {{nullptr, offload_convert_0_1, offload_convert_0_2},
                                               {offload_convert_1_0, nullptr, offload_convert_1_2},
                                               {offload_convert_2_0, offload_convert_2_1, nullptr}};

// `bytes`: of the parameter.
template <class Parameter> void launch_with(Kernel<Parameter> kernel, int blocks, int threads, bool together, const void* bytes) {
    Parameter parameter;
    std::memcpy(&parameter, bytes, sizeof parameter);
    launch(blocks, threads, together, [&] { kernel(parameter); });
}

} // namespace

extern "C" {

void run_adam(int source, int target, int blocks, int threads, const void* parameter) {
    launch_with(adam_kernels[source][target], blocks, threads, false, parameter);
}

void run_ingest(int source, int target, int blocks, int threads, const void* parameter) {
    launch_with(ingest_kernels[source][target], blocks, threads, true, parameter);
}

void run_convert(int source, int target, int blocks, int threads, const void* parameter) {
    launch_with(convert_kernels[source][target], blocks, threads, false, parameter);
}

} // extern "C"
