// SPDX-License-Identifier: Apache-2.0
// The arithmetic, one table of functions for each SIMD level. Every table gives the same bits.
#ifndef OFFLOAD_KERNELS_H
#define OFFLOAD_KERNELS_H

#include <cstdint>

#include "checksum.h"
#include "offload.h"

namespace offload {

namespace { // as in element.h

constexpr bool is_dtype(int32_t dtype) { return dtype >= OFFLOAD_F32 && dtype <= OFFLOAD_F16; }
constexpr int64_t element_nbytes(int32_t dtype) { return dtype == OFFLOAD_F32 ? 4 : 2; }

} // namespace

// The scalars of one segment of an optimizer step, each rounded once from double to float. Which rule uses which is
// written in offload.h.
struct UpdateScalars {
    int32_t rule; // one of OFFLOAD_RULE_*
    float grad_factor;
    float decay;            // multiplies the weight (AdamW, Lion), or is the L2 coefficient
    float lerp_coefficient; // Adam: 1 - beta1, or (1 - beta1) - 1 where the interpolation starts from the gradient
    float beta1;            // SGD: the momentum
    float one_minus_beta1;  // SGD: 1 - dampening
    float beta2;
    float one_minus_beta2;
    float sqrt_bias_correction2;
    float eps;
    float negative_step_size;
    float folded_eps;                // eps * sqrt(bias_correction2)
    float folded_negative_step_size; // negative_step_size * sqrt(bias_correction2)
    float average_factor;            // Adam with rounded moments: what multiplies the gradient for exp_avg
    float square_factor;             // and before it is squared
    float root_decay;                // what multiplies the root of exp_avg_sq: Adam: sqrt(beta2)
    uint32_t rounding_key;
    bool l2; // decay is an L2 coefficient
    bool lerp_from_grad;
    bool has_momentum; // SGD
    bool nesterov;
    bool is_first;
};

// Elements that share the two scales of 8-bit moments. A piece begins at a multiple of it.
constexpr int64_t kScaleGroup = OFFLOAD_SCALE_GROUP;

// See offload_update_segment. What `master` and the moments point to depends on state_format.
struct UpdatePiece {
    const void* grad;
    void* master;
    void* exp_avg;
    void* exp_avg_sq;
    uint8_t* exp_avg_scale;
    uint8_t* exp_avg_sq_scale;
    void* values;
    int32_t grad_dtype;
    int32_t values_dtype;
    int32_t state_format;
    int64_t first_index; // of the parameter's elements
    int64_t numel;
};

// At most one block of 4096 flat indices, beginning at lane 0.
struct IngestPiece {
    void* dst; // may be null
    const void* src;
    double* block_sum; // may be null
    int32_t dst_dtype;
    int32_t src_dtype;
    int64_t numel;
    bool accumulate;
};

constexpr int kStreamArraysMax = 8;

// numel is a multiple of kStreamStep; an array has `nbytes` bytes for each element, 1 to 4.
constexpr int64_t kStreamStep = 64;
struct StreamPiece {
    const uint8_t* reads[kStreamArraysMax];
    uint8_t* writes[kStreamArraysMax];
    int32_t read_nbytes[kStreamArraysMax];
    int32_t write_nbytes[kStreamArraysMax];
    int32_t read_count;
    int32_t write_count;
    int64_t numel;
};

struct Kernels {
    int32_t level; // one of OFFLOAD_SIMD_*
    void (*update)(const UpdateScalars& scalars, const UpdatePiece& piece);
    void (*ingest)(const IngestPiece& piece);
    void (*convert)(void* dst, int32_t dst_dtype, const void* src, int32_t src_dtype, int64_t numel);
    void (*stream)(const StreamPiece& piece);
    // Of so many lines of a block.
    void (*checksum)(ChecksumLanes& lanes, const uint8_t* bytes, int64_t line_count);
};

extern const Kernels kKernelsScalar;
#if defined(OFFLOAD_HAVE_X86)
extern const Kernels kKernelsAvx2;
extern const Kernels kKernelsAvx512;
#endif
#if defined(OFFLOAD_HAVE_NEON)
extern const Kernels kKernelsNeon;
#endif

// Of a level that has no form of its own.
void checksum_words(ChecksumLanes& lanes, const uint8_t* bytes, int64_t line_count);

// The table in use. Thread-safe.
const Kernels& kernels();

} // namespace offload

#endif
