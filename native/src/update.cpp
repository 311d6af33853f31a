// SPDX-License-Identifier: Apache-2.0
// Cuts the segments of an optimizer step in tasks for the pool.
#include <algorithm>
#include <cerrno>
#include <cmath>
#include <cstring>
#include <new>
#include <vector>

#include "kernels.h"
#include "offload.h"
#include "split_mix64.h"
#include "summed_memory.h"
#include "threads.h"

namespace offload {
namespace {

// Elements of one task: so many that its streams are long (on two cores 32 Ki left a seventh of the memory's speed), and so
// few that threads end together. Multiples of kScaleGroup and kStreamStep.
constexpr int64_t kTaskNumelMin = 32768;
constexpr int64_t kTaskNumelMax = 262144;
constexpr int64_t kTasksPerThread = 4;
// Of states that are read elsewhere than written, or of which checksums are taken: so many at a time, which are then in a core's
// own cache. A multiple of kScaleGroup and kStreamStep.
constexpr int64_t kTileNumel = 4096;
// Under this much work in all, waking another thread costs more than it saves.
constexpr int64_t kAloneNumel = 8192;

bool is_flag(int32_t value) { return value == 0 || value == 1; }

// Which moments a segment's rule has.
bool has_average(const offload_update_segment& s) {
    return s.rule == OFFLOAD_RULE_ADAM || s.rule == OFFLOAD_RULE_LION || (s.rule == OFFLOAD_RULE_SGD && s.beta1 != 0.0);
}

bool has_square(const offload_update_segment& s) { return s.rule == OFFLOAD_RULE_ADAM || s.rule == OFFLOAD_RULE_ADAGRAD; }

bool is_valid(const offload_update_segment& s) {
    if (s.numel < 0 || s.step < 1 || s.first_index < 0 || !is_dtype(s.grad_dtype)) return false;
    if (s.rule < OFFLOAD_RULE_ADAM || s.rule > OFFLOAD_RULE_SGD || !is_flag(s.decoupled) || !is_flag(s.nesterov)) return false;
    if (s.state_format < OFFLOAD_STATE_FP32 || s.state_format > OFFLOAD_STATE_8BIT) return false;
    if (s.values != nullptr && !is_dtype(s.values_dtype)) return false;
    if (s.numel == 0) return true;
    if (s.grad == nullptr || s.master == nullptr) return false;
    if ((has_average(s) && s.exp_avg == nullptr) || (has_square(s) && s.exp_avg_sq == nullptr)) return false;
    if (s.state_format == OFFLOAD_STATE_FP32) return true;
    if (s.values == nullptr || s.values_dtype != OFFLOAD_BF16) return false;
    if (s.state_format != OFFLOAD_STATE_8BIT) return true;
    if ((has_average(s) && s.exp_avg_scale == nullptr) || (has_square(s) && s.exp_avg_sq_scale == nullptr)) return false;
    return s.first_index % kScaleGroup == 0;
}

UpdateScalars scalars_of(const offload_update_segment& s) {
    const bool is_adam = s.rule == OFFLOAD_RULE_ADAM;
    const double step = static_cast<double>(s.step);
    const double bias_correction1 = is_adam ? 1.0 - std::pow(s.beta1, step) : 1.0;
    const double bias_correction2 = is_adam ? 1.0 - std::pow(s.beta2, step) : 1.0;
    const double root_correction2 = std::sqrt(bias_correction2);
    const double step_size = s.lr / bias_correction1;
    const float weight = static_cast<float>(1.0 - s.beta1);
    const bool shrinks = s.rule == OFFLOAD_RULE_LION || (is_adam && s.decoupled != 0);
    UpdateScalars scalars = {};
    scalars.rule = s.rule;
    scalars.grad_factor = s.grad_factor;
    scalars.l2 = !shrinks && s.weight_decay != 0.0;
    // Without decay Adam's weight is multiplied by exactly 1, which is no operation.
    scalars.decay = static_cast<float>(scalars.l2 ? s.weight_decay : (shrinks ? 1.0 - s.lr * s.weight_decay : 1.0));
    scalars.lerp_from_grad = !(std::fabs(weight) < 0.5f);
    scalars.lerp_coefficient = scalars.lerp_from_grad ? weight - 1.0f : weight;
    scalars.beta1 = static_cast<float>(s.beta1);
    scalars.one_minus_beta1 = s.rule == OFFLOAD_RULE_SGD ? static_cast<float>(1.0 - s.beta2) : weight;
    scalars.beta2 = static_cast<float>(s.beta2);
    scalars.one_minus_beta2 = static_cast<float>(1.0 - s.beta2);
    scalars.sqrt_bias_correction2 = static_cast<float>(root_correction2);
    scalars.eps = static_cast<float>(s.eps);
    scalars.negative_step_size = static_cast<float>(-step_size);
    scalars.folded_eps = static_cast<float>(s.eps * root_correction2);
    scalars.folded_negative_step_size = static_cast<float>(-(step_size * root_correction2));
    const double gradient = scalars.l2 ? 1.0 : static_cast<double>(s.grad_factor);
    scalars.average_factor = static_cast<float>((1.0 - s.beta1) * gradient);
    scalars.square_factor = static_cast<float>(std::sqrt(1.0 - s.beta2) * gradient);
    scalars.root_decay = is_adam ? static_cast<float>(std::sqrt(s.beta2)) : 1.0f;
    scalars.rounding_key = static_cast<uint32_t>(split_mix64(s.rounding_seed, static_cast<uint64_t>(s.step)));
    scalars.has_momentum = has_average(s);
    scalars.nesterov = s.nesterov != 0;
    scalars.is_first = s.step == 1;
    return scalars;
}

int64_t task_numel_of(int64_t numel, const offload_threads& threads) {
    const int64_t wanted = numel / (threads.count() * kTasksPerThread);
    return std::clamp(wanted / kTaskNumelMin * kTaskNumelMin, kTaskNumelMin, kTaskNumelMax);
}

int64_t master_nbytes(const offload_update_segment& s) { return s.state_format == OFFLOAD_STATE_FP32 ? 4 : 2; }

int64_t moment_nbytes(const offload_update_segment& s) {
    constexpr int64_t kNbytes[] = {4, 4, 2, 1}; // by state format
    return kNbytes[s.state_format];
}

uint8_t* advanced(void* base, int64_t nbytes) { return base == nullptr ? nullptr : static_cast<uint8_t*>(base) + nbytes; }

// `begin` is a multiple of kScaleGroup.
UpdatePiece piece_of(const offload_update_segment& s, int64_t begin, int64_t numel) {
    UpdatePiece piece = {};
    piece.grad = static_cast<const uint8_t*>(s.grad) + begin * element_nbytes(s.grad_dtype);
    piece.master = advanced(s.master, begin * master_nbytes(s));
    piece.exp_avg = advanced(s.exp_avg, begin * moment_nbytes(s));
    piece.exp_avg_sq = advanced(s.exp_avg_sq, begin * moment_nbytes(s));
    piece.exp_avg_scale = advanced(s.exp_avg_scale, begin / kScaleGroup);
    piece.exp_avg_sq_scale = advanced(s.exp_avg_sq_scale, begin / kScaleGroup);
    piece.values = advanced(s.values, begin * element_nbytes(s.values_dtype));
    piece.grad_dtype = s.grad_dtype;
    piece.values_dtype = s.values_dtype;
    piece.state_format = s.state_format;
    piece.first_index = s.first_index + begin;
    piece.numel = numel;
    return piece;
}

// Calls visit(address, nbytes) for each array of the piece; what is not there has no address.
template <class Visit> void for_each_array(const offload_update_segment& s, const UpdatePiece& piece, const Visit& visit) {
    const int64_t scales = (piece.numel + kScaleGroup - 1) / kScaleGroup;
    visit(piece.grad, piece.numel * element_nbytes(s.grad_dtype));
    visit(piece.master, piece.numel * master_nbytes(s));
    visit(piece.exp_avg, piece.numel * moment_nbytes(s));
    visit(piece.exp_avg_sq, piece.numel * moment_nbytes(s));
    visit(piece.exp_avg_scale, scales);
    visit(piece.exp_avg_sq_scale, scales);
    visit(piece.values, piece.numel * element_nbytes(s.values_dtype));
}

void bring(void* to, int64_t distance, int64_t nbytes) {
    if (to != nullptr) std::memcpy(to, static_cast<const uint8_t*>(to) + distance, static_cast<size_t>(nbytes));
}

// The states of a piece come to where they are updated.
void bring_states(const offload_update_segment& s, const UpdatePiece& piece) {
    const int64_t scales = (piece.numel + kScaleGroup - 1) / kScaleGroup;
    if (s.values != nullptr) bring(piece.master, s.source_distance, piece.numel * master_nbytes(s));
    bring(piece.exp_avg, s.source_distance, piece.numel * moment_nbytes(s));
    bring(piece.exp_avg_sq, s.source_distance, piece.numel * moment_nbytes(s));
    bring(piece.exp_avg_scale, s.source_distance, scales);
    bring(piece.exp_avg_sq_scale, s.source_distance, scales);
}

// The segments of a step, cut in tasks and these in tiles.
class Step {
  public:
    Step(const offload_threads& threads, const offload_update_segment* segments, int64_t segment_count) : segments_(segments) {
        scalars_.reserve(static_cast<size_t>(segment_count));
        first_task_.reserve(static_cast<size_t>(segment_count) + 1);
        for (int64_t i = 0; i < segment_count; ++i) numel_ += segments[i].numel;
        task_numel_ = task_numel_of(numel_, threads);
        for (int64_t i = 0; i < segment_count; ++i) {
            scalars_.push_back(scalars_of(segments[i]));
            first_task_.push_back(task_count_);
            task_count_ += (segments[i].numel + task_numel_ - 1) / task_numel_;
        }
        first_task_.push_back(task_count_);
    }

    int64_t numel() const { return numel_; }
    int64_t task_count() const { return task_count_; }

    // Takes the checksums of these memories too.
    void sum(SummedMemories& memories) {
        summed_ = &memories;
        for (int64_t task = 0; task < task_count_; ++task)
            for_each_tile(task, [&](const UpdateScalars&, const offload_update_segment& s, const UpdatePiece& piece) {
                for_each_array(s, piece, [&](const void* address, int64_t nbytes) { memories.expect(address, nbytes); });
            });
    }

    void run(const Kernels& table, int64_t task) const {
        for_each_tile(task, [&](const UpdateScalars& scalars, const offload_update_segment& s, const UpdatePiece& piece) {
            if (summed_ != nullptr)
                for_each_array(s, piece, [&](const void* address, int64_t nbytes) { summed_->sum(kBefore, address, nbytes); });
            if (s.source_distance != 0) bring_states(s, piece);
            table.update(scalars, piece);
            if (summed_ != nullptr)
                for_each_array(s, piece, [&](const void* address, int64_t nbytes) { summed_->sum(kAfter, address, nbytes); });
        });
    }

  private:
    template <class Visit> void for_each_tile(int64_t task, const Visit& visit) const {
        const auto after = std::upper_bound(first_task_.begin(), first_task_.end(), task);
        const auto index = static_cast<size_t>(after - first_task_.begin() - 1);
        const offload_update_segment& s = segments_[index];
        const int64_t begin = (task - first_task_[index]) * task_numel_;
        const int64_t end = std::min(begin + task_numel_, s.numel);
        const int64_t step = s.source_distance == 0 && summed_ == nullptr ? task_numel_ : kTileNumel;
        for (int64_t first = begin; first < end; first += step) visit(scalars_[index], s, piece_of(s, first, std::min(step, end - first)));
    }

    const offload_update_segment* segments_;
    const SummedMemories* summed_ = nullptr;
    std::vector<UpdateScalars> scalars_;
    std::vector<int64_t> first_task_; // of each segment, and the number of tasks
    int64_t numel_ = 0;
    int64_t task_numel_ = 0;
    int64_t task_count_ = 0;
};

int update(offload_threads& threads, const offload_update_segment* segments, int64_t segment_count, SummedMemories* memories) {
    for (int64_t i = 0; i < segment_count; ++i)
        if (!is_valid(segments[i])) return -EINVAL;
    Step step(threads, segments, segment_count);
    const Kernels& table = kernels();
    if (memories != nullptr) {
        step.sum(*memories);
        memories->sum_rest(kBefore);
    }
    if (step.numel() > kAloneNumel) {
        threads.run(step.task_count(), [&](int64_t task) { step.run(table, task); });
    } else {
        threads.run(1, [&](int64_t) {
            for (int64_t task = 0; task < step.task_count(); ++task) step.run(table, task);
        });
    }
    if (memories != nullptr) memories->sum_rest(kAfter);
    return 0;
}

void stream(offload_threads& threads, const StreamPiece& whole) {
    const Kernels& table = kernels();
    const int64_t task_numel = task_numel_of(whole.numel, threads);
    threads.run((whole.numel + task_numel - 1) / task_numel, [&](int64_t task) {
        const int64_t begin = task * task_numel;
        StreamPiece piece = whole;
        for (int32_t i = 0; i < whole.read_count; ++i) piece.reads[i] += begin * whole.read_nbytes[i];
        for (int32_t i = 0; i < whole.write_count; ++i) piece.writes[i] += begin * whole.write_nbytes[i];
        piece.numel = std::min(task_numel, whole.numel - begin);
        table.stream(piece);
    });
}

} // namespace
} // namespace offload

extern "C" {

int offload_update(offload_threads* threads, const offload_update_segment* segments, int64_t segment_count) {
    if (threads == nullptr || segment_count < 0 || (segments == nullptr && segment_count > 0)) return -EINVAL;
    try {
        return offload::update(*threads, segments, segment_count, nullptr);
    } catch (const std::bad_alloc&) { return -ENOMEM; }
}

int offload_update_summed(offload_threads* threads, const offload_update_segment* segments, int64_t segment_count,
                          const offload_summed_memory* memories, int64_t memory_count) {
    if (threads == nullptr || segment_count < 0 || (segments == nullptr && segment_count > 0)) return -EINVAL;
    if (memory_count < 0 || (memories == nullptr && memory_count > 0)) return -EINVAL;
    for (int64_t i = 0; i < memory_count; ++i)
        if (memories[i].nbytes < 0 || (memories[i].address == nullptr && memories[i].nbytes > 0)) return -EINVAL;
    try {
        offload::SummedMemories summed(memories, memory_count);
        return offload::update(*threads, segments, segment_count, &summed);
    } catch (const std::bad_alloc&) { return -ENOMEM; }
}

int offload_stream(offload_threads* threads, const void* const* reads, const int32_t* read_nbytes, int32_t read_count, void* const* writes,
                   const int32_t* write_nbytes, int32_t write_count, int64_t numel) {
    using namespace offload;
    if (threads == nullptr || numel < 0 || numel % kStreamStep != 0) return -EINVAL;
    if (read_count < 0 || read_count > kStreamArraysMax || write_count < 0 || write_count > kStreamArraysMax) return -EINVAL;
    if (read_count + write_count == 0) return -EINVAL;
    if ((read_count > 0 && (reads == nullptr || read_nbytes == nullptr)) ||
        (write_count > 0 && (writes == nullptr || write_nbytes == nullptr)))
        return -EINVAL;
    StreamPiece piece = {};
    piece.read_count = read_count;
    piece.write_count = write_count;
    piece.numel = numel;
    const auto is_size = [](int32_t nbytes) { return nbytes >= 1 && nbytes <= 4; };
    for (int32_t i = 0; i < read_count; ++i) {
        if (reads[i] == nullptr || !is_size(read_nbytes[i])) return -EINVAL;
        piece.reads[i] = static_cast<const uint8_t*>(reads[i]);
        piece.read_nbytes[i] = read_nbytes[i];
    }
    for (int32_t i = 0; i < write_count; ++i) {
        if (writes[i] == nullptr || !is_size(write_nbytes[i])) return -EINVAL;
        piece.writes[i] = static_cast<uint8_t*>(writes[i]);
        piece.write_nbytes[i] = write_nbytes[i];
    }
    stream(*threads, piece);
    return 0;
}

} // extern "C"
