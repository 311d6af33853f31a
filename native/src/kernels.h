// The arithmetic, one table of functions for each SIMD level. Every table gives the same bits.
#ifndef OFFLOAD_KERNELS_H
#define OFFLOAD_KERNELS_H

#include <cstdint>

namespace offload {

// The scalars of one Adam segment, each rounded once from double to float.
struct AdamScalars {
    float grad_factor;
    float weight_decay;     // decoupled: 1 - lr * weight_decay, multiplies the weight; else the L2 coefficient
    float lerp_coefficient; // 1 - beta1, or (1 - beta1) - 1 where the interpolation starts from the gradient
    float beta2;
    float one_minus_beta2;
    float sqrt_bias_correction2;
    float eps;
    float negative_step_size; // -lr / (1 - beta1^step)
    bool l2;                  // weight_decay is an L2 coefficient
    bool lerp_from_grad;
};

struct AdamPiece {
    const void* grad;
    float* master;
    float* exp_avg;
    float* exp_avg_sq;
    void* emit; // may be null
    int32_t grad_dtype;
    int32_t emit_dtype;
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

constexpr int kStreamReadsMax = 4;
constexpr int kStreamWritesMax = 4;

struct StreamPiece {
    const float* reads[kStreamReadsMax];
    float* writes[kStreamWritesMax];
    int32_t read_count;
    int32_t write_count;
    int64_t numel;
};

struct Kernels {
    int32_t level; // one of OFFLOAD_SIMD_*
    void (*adam)(const AdamScalars& scalars, const AdamPiece& piece);
    void (*ingest)(const IngestPiece& piece);
    void (*convert)(void* dst, int32_t dst_dtype, const void* src, int32_t src_dtype, int64_t numel);
    void (*stream)(const StreamPiece& piece);
};

extern const Kernels kKernelsScalar;
#if defined(OFFLOAD_HAVE_X86)
extern const Kernels kKernelsAvx2;
extern const Kernels kKernelsAvx512;
#endif
#if defined(OFFLOAD_HAVE_NEON)
extern const Kernels kKernelsNeon;
#endif

// The table in use. Thread-safe.
const Kernels& kernels();

} // namespace offload

#endif
