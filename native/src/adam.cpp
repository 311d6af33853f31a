// Cuts the segments of an Adam step in tasks for the pool.
#include <algorithm>
#include <cerrno>
#include <cmath>
#include <new>
#include <vector>

#include "kernels.h"
#include "offload.h"
#include "threads.h"

namespace offload {
namespace {

// Elements of one task. Large enough that the streams of a task are long, small enough that threads end together.
constexpr int64_t kTaskNumel = 32768;
// Under this much work in all, waking another thread costs more than it saves.
constexpr int64_t kAloneNumel = 8192;

bool is_dtype(int32_t dtype) { return dtype >= OFFLOAD_F32 && dtype <= OFFLOAD_F16; }

bool is_valid(const offload_adam_segment& s) {
    if (s.numel < 0 || s.step < 1 || !is_dtype(s.grad_dtype)) return false;
    if (s.decoupled != 0 && s.decoupled != 1) return false;
    if (s.emit != nullptr && !is_dtype(s.emit_dtype)) return false;
    if (s.numel == 0) return true;
    return s.grad != nullptr && s.master != nullptr && s.exp_avg != nullptr && s.exp_avg_sq != nullptr;
}

AdamScalars scalars_of(const offload_adam_segment& s) {
    const double step = static_cast<double>(s.step);
    const double bias_correction1 = 1.0 - std::pow(s.beta1, step);
    const double bias_correction2 = 1.0 - std::pow(s.beta2, step);
    const float weight = static_cast<float>(1.0 - s.beta1);
    AdamScalars scalars = {};
    scalars.grad_factor = s.grad_factor;
    scalars.l2 = s.decoupled == 0 && s.weight_decay != 0.0;
    // Without decay the weight is multiplied by exactly 1, which is no operation.
    scalars.weight_decay = static_cast<float>(scalars.l2 ? s.weight_decay : (s.decoupled != 0 ? 1.0 - s.lr * s.weight_decay : 1.0));
    scalars.lerp_from_grad = !(std::fabs(weight) < 0.5f);
    scalars.lerp_coefficient = scalars.lerp_from_grad ? weight - 1.0f : weight;
    scalars.beta2 = static_cast<float>(s.beta2);
    scalars.one_minus_beta2 = static_cast<float>(1.0 - s.beta2);
    scalars.sqrt_bias_correction2 = static_cast<float>(std::sqrt(bias_correction2));
    scalars.eps = static_cast<float>(s.eps);
    scalars.negative_step_size = static_cast<float>(-(s.lr / bias_correction1));
    return scalars;
}

AdamPiece piece_of(const offload_adam_segment& s, int64_t begin, int64_t numel) {
    const auto advanced = [begin](const void* base, int32_t dtype) {
        return static_cast<const char*>(base) + begin * (dtype == OFFLOAD_F32 ? 4 : 2);
    };
    AdamPiece piece = {};
    piece.grad = advanced(s.grad, s.grad_dtype);
    piece.master = s.master + begin;
    piece.exp_avg = s.exp_avg + begin;
    piece.exp_avg_sq = s.exp_avg_sq + begin;
    piece.emit = s.emit == nullptr ? nullptr : const_cast<char*>(advanced(s.emit, s.emit_dtype));
    piece.grad_dtype = s.grad_dtype;
    piece.emit_dtype = s.emit_dtype;
    piece.numel = numel;
    return piece;
}

int adam(offload_threads& threads, const offload_adam_segment* segments, int64_t segment_count) {
    std::vector<AdamScalars> scalars;
    std::vector<int64_t> first_task; // of each segment, and the number of tasks
    scalars.reserve(static_cast<size_t>(segment_count));
    first_task.reserve(static_cast<size_t>(segment_count) + 1);
    int64_t task_count = 0;
    int64_t total_numel = 0;
    for (int64_t i = 0; i < segment_count; ++i) {
        if (!is_valid(segments[i])) return -EINVAL;
        first_task.push_back(task_count);
        task_count += (segments[i].numel + kTaskNumel - 1) / kTaskNumel;
        total_numel += segments[i].numel;
    }
    first_task.push_back(task_count);
    for (int64_t i = 0; i < segment_count; ++i) scalars.push_back(scalars_of(segments[i]));

    const Kernels& table = kernels();
    const auto update_task = [&](int64_t task) {
        const auto after = std::upper_bound(first_task.begin(), first_task.end(), task);
        const int64_t index = after - first_task.begin() - 1;
        const offload_adam_segment& segment = segments[index];
        const int64_t begin = (task - first_task[static_cast<size_t>(index)]) * kTaskNumel;
        table.adam(scalars[static_cast<size_t>(index)], piece_of(segment, begin, std::min(kTaskNumel, segment.numel - begin)));
    };
    if (total_numel > kAloneNumel) {
        threads.run(task_count, update_task);
    } else {
        threads.run(1, [&](int64_t) {
            for (int64_t task = 0; task < task_count; ++task) update_task(task);
        });
    }
    return 0;
}

int stream(offload_threads& threads, const StreamPiece& whole) {
    const Kernels& table = kernels();
    threads.run((whole.numel + kTaskNumel - 1) / kTaskNumel, [&](int64_t task) {
        const int64_t begin = task * kTaskNumel;
        StreamPiece piece = whole;
        for (int32_t i = 0; i < whole.read_count; ++i) piece.reads[i] += begin;
        for (int32_t i = 0; i < whole.write_count; ++i) piece.writes[i] += begin;
        piece.numel = std::min(kTaskNumel, whole.numel - begin);
        table.stream(piece);
    });
    return 0;
}

} // namespace
} // namespace offload

extern "C" {

int offload_adam(offload_threads* threads, const offload_adam_segment* segments, int64_t segment_count) {
    if (threads == nullptr || segment_count < 0 || (segments == nullptr && segment_count > 0)) return -EINVAL;
    try {
        return offload::adam(*threads, segments, segment_count);
    } catch (const std::bad_alloc&) { return -ENOMEM; }
}

int offload_stream(offload_threads* threads, const float* const* reads, int32_t read_count, float* const* writes, int32_t write_count,
                   int64_t numel) {
    if (threads == nullptr || reads == nullptr || numel < 0) return -EINVAL;
    if (read_count < 1 || read_count > offload::kStreamReadsMax || write_count < 0 || write_count > offload::kStreamWritesMax)
        return -EINVAL;
    if (writes == nullptr && write_count > 0) return -EINVAL;
    offload::StreamPiece piece = {};
    piece.read_count = read_count;
    piece.write_count = write_count;
    piece.numel = numel;
    for (int32_t i = 0; i < read_count; ++i) {
        if (reads[i] == nullptr) return -EINVAL;
        piece.reads[i] = reads[i];
    }
    for (int32_t i = 0; i < write_count; ++i) {
        if (writes[i] == nullptr) return -EINVAL;
        piece.writes[i] = writes[i];
    }
    return offload::stream(*threads, piece);
}

} // extern "C"
