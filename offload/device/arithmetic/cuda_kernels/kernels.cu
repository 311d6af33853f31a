// SPDX-License-Identifier: Apache-2.0
// The arithmetic of `offload.device.arithmetic.kernels` on a GPU, bit for bit that of native/src/kernels.inc.
//
// Every operation is written with its rounding (__fmul_rn and its kin are never contracted into a fused multiply-add),
// denormals are kept (no -ftz), divisions and roots are the IEEE ones, and 16-bit types are converted by integer
// operations that say what their bits become. A sum of squares is added by one warp, whose 32 threads are the 32 lanes
// of the definition, in the order of the definition. So nothing depends on the grid, the chip or the compiler.
//
// No header is included: the source is compiled by nvcc when the package is built, by NVRTC where it was not, and as
// C++ for the host by the tests, which run it thread by thread against the CPU's kernels.
//
// Adam and ingest take many pieces in one launch, in a table that is their parameter. Each piece is cut into tiles, which are
// numbered through all of them; who takes a tile finds its piece by that number.
//
// Any number of blocks may be launched, of any multiple of 32 threads.

#define OFFLOAD_F32 0
#define OFFLOAD_BF16 1
#define OFFLOAD_F16 2
#define OFFLOAD_NONE 3

namespace {

typedef long long Index;
typedef unsigned int Bits;
typedef unsigned short Half;

constexpr Index kBlockNumel = 4096;
constexpr int kLanes = 32;
constexpr Index kTileNumel = 1024;
constexpr int kParameterNbytes = 4096; // what the parameters of a kernel may take on every device

// ---- 16-bit types: the functions of native/src/element.h

__device__ inline Half bf16_from_float(float value) {
    const Bits bits = __float_as_uint(value);
    if ((bits & 0x7fffffffu) > 0x7f800000u) return 0x7fc0;
    return static_cast<Half>((bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16);
}

__device__ inline float bf16_to_float(Half half) { return __uint_as_float(static_cast<Bits>(half) << 16); }

__device__ inline Half f16_from_float(float value) {
    const Bits bits = __float_as_uint(value);
    const Bits sign = (bits >> 16) & 0x8000u;
    const Bits magnitude = bits & 0x7fffffffu;
    if (magnitude > 0x7f800000u) return 0x7e00;
    if (magnitude >= 0x477ff000u) return static_cast<Half>(sign | 0x7c00u); // 65520: half way to 2^16
    if (magnitude < 0x38800000u) {
        // Below 2^-14 the result counts units of 2^-24, the spacing of floats just above 0.5: the addition rounds.
        const float shifted = __fadd_rn(__uint_as_float(magnitude), 0.5f);
        return static_cast<Half>(sign | (__float_as_uint(shifted) - 0x3f000000u));
    }
    const Bits rounded = magnitude + 0xfffu + ((magnitude >> 13) & 1u);
    return static_cast<Half>(sign | ((rounded - 0x38000000u) >> 13));
}

__device__ inline float f16_to_float(Half half) {
    const Bits sign = static_cast<Bits>(half & 0x8000u) << 16;
    const Bits exponent = (half >> 10) & 31u;
    const Bits mantissa = half & 0x3ffu;
    if (exponent == 31) return __uint_as_float(sign | 0x7f800000u | (mantissa << 13) | (mantissa != 0 ? 0x400000u : 0u));
    if (exponent == 0) {
        const float magnitude = __fmul_rn(static_cast<float>(mantissa), 5.9604644775390625e-8f); // 2^-24
        return __uint_as_float(sign | __float_as_uint(magnitude));
    }
    return __uint_as_float(sign | ((exponent + 112u) << 23) | (mantissa << 13));
}

// ---- pieces

// The piece in which a tile lies. Those of each piece are numbered from its `first_tile` on; no piece has none.
template <class Pieces> __device__ inline int piece_of(const Pieces& all, Index tile) {
    int low = 0, high = all.count;
    while (high - low > 1) {
        const int middle = (low + high) / 2;
        if (all.pieces[middle].first_tile <= tile) {
            low = middle;
        } else {
            high = middle;
        }
    }
    return low;
}

// ---- elements

template <int Dtype> __device__ inline float load(const void* base, Index i) {
    if constexpr (Dtype == OFFLOAD_F32) return static_cast<const float*>(base)[i];
    const Half half = static_cast<const Half*>(base)[i];
    return Dtype == OFFLOAD_BF16 ? bf16_to_float(half) : f16_to_float(half);
}

// Stores `value` and returns what a reader will see.
template <int Dtype> __device__ inline float store(void* base, Index i, float value) {
    if constexpr (Dtype == OFFLOAD_F32) {
        static_cast<float*>(base)[i] = value;
        return value;
    } else {
        const Half half = Dtype == OFFLOAD_BF16 ? bf16_from_float(value) : f16_from_float(value);
        static_cast<Half*>(base)[i] = half;
        return Dtype == OFFLOAD_BF16 ? bf16_to_float(half) : f16_to_float(half);
    }
}

// Four elements at index 4 * group, by one access: `base` lies on a multiple of 16 bytes.
template <int Dtype> __device__ inline void load4(const void* base, Index group, float out[4]) {
    if constexpr (Dtype == OFFLOAD_F32) {
        const float4 four = static_cast<const float4*>(base)[group];
        out[0] = four.x, out[1] = four.y, out[2] = four.z, out[3] = four.w;
    } else {
        const ushort4 four = static_cast<const ushort4*>(base)[group];
        const Half halves[4] = {four.x, four.y, four.z, four.w};
        for (int j = 0; j < 4; ++j) out[j] = Dtype == OFFLOAD_BF16 ? bf16_to_float(halves[j]) : f16_to_float(halves[j]);
    }
}

template <int Dtype> __device__ inline void store4(void* base, Index group, const float values[4]) {
    if constexpr (Dtype == OFFLOAD_F32) {
        float4 four;
        four.x = values[0], four.y = values[1], four.z = values[2], four.w = values[3];
        static_cast<float4*>(base)[group] = four;
    } else {
        Half halves[4];
        for (int j = 0; j < 4; ++j) halves[j] = Dtype == OFFLOAD_BF16 ? bf16_from_float(values[j]) : f16_from_float(values[j]);
        ushort4 four;
        four.x = halves[0], four.y = halves[1], four.z = halves[2], four.w = halves[3];
        static_cast<ushort4*>(base)[group] = four;
    }
}

// ---- Adam

// What native/src/update.cpp calls UpdateScalars.
struct AdamScalars {
    float grad_factor, weight_decay, lerp_coefficient, beta2, one_minus_beta2, sqrt_bias_correction2, eps, negative_step_size;
    int l2, lerp_from_grad;
};

struct AdamPiece {
    const void* grad;
    float *master, *exp_avg, *exp_avg_sq;
    void* emit;
    Index numel;
    int first_tile, aligned; // whether all of them lie on multiples of 16 bytes
    AdamScalars scalars;
};

// A tile is 1024 elements, which a block of threads takes.
struct AdamPieces {
    int count, tile_count;
    AdamPiece pieces[42];
};
static_assert(sizeof(AdamPieces) <= kParameterNbytes, "a launch takes no more");

__device__ inline void adam_element(const AdamScalars& c, float gradient, float& p, float& m, float& v) {
    float g = __fmul_rn(gradient, c.grad_factor);
    if (c.l2) {
        g = __fmaf_rn(p, c.weight_decay, g);
    } else {
        p = __fmul_rn(p, c.weight_decay);
    }
    m = __fmaf_rn(c.lerp_coefficient, __fsub_rn(g, m), c.lerp_from_grad ? g : m);
    v = __fmul_rn(v, c.beta2);
    v = __fmaf_rn(__fmul_rn(c.one_minus_beta2, g), g, v);
    const float denominator = __fadd_rn(__fdiv_rn(__fsqrt_rn(v), c.sqrt_bias_correction2), c.eps);
    p = __fadd_rn(p, __fdiv_rn(__fmul_rn(c.negative_step_size, m), denominator));
}

template <int GradDtype, int EmitDtype> __device__ inline void adam_tile(const AdamPiece& a, Index tile) {
    const Index begin = tile * kTileNumel;
    const Index end = begin + kTileNumel < a.numel ? begin + kTileNumel : a.numel;
    const Index groups = a.aligned != 0 ? end / 4 : 0;
    for (Index group = begin / 4 + threadIdx.x; group < groups; group += blockDim.x) {
        float g[4], p[4], m[4], v[4];
        load4<GradDtype>(a.grad, group, g);
        load4<OFFLOAD_F32>(a.master, group, p);
        load4<OFFLOAD_F32>(a.exp_avg, group, m);
        load4<OFFLOAD_F32>(a.exp_avg_sq, group, v);
        for (int j = 0; j < 4; ++j) adam_element(a.scalars, g[j], p[j], m[j], v[j]);
        store4<OFFLOAD_F32>(a.master, group, p);
        store4<OFFLOAD_F32>(a.exp_avg, group, m);
        store4<OFFLOAD_F32>(a.exp_avg_sq, group, v);
        if constexpr (EmitDtype != OFFLOAD_NONE) store4<EmitDtype>(a.emit, group, p);
    }
    for (Index i = (a.aligned != 0 ? 4 * groups : begin) + threadIdx.x; i < end; i += blockDim.x) {
        float p = a.master[i], m = a.exp_avg[i], v = a.exp_avg_sq[i];
        adam_element(a.scalars, load<GradDtype>(a.grad, i), p, m, v);
        a.master[i] = p, a.exp_avg[i] = m, a.exp_avg_sq[i] = v;
        if constexpr (EmitDtype != OFFLOAD_NONE) store<EmitDtype>(a.emit, i, p);
    }
}

template <int GradDtype, int EmitDtype> __device__ void adam(const AdamPieces& all) {
    for (Index tile = blockIdx.x; tile < all.tile_count; tile += gridDim.x) {
        const AdamPiece& piece = all.pieces[piece_of(all, tile)];
        adam_tile<GradDtype, EmitDtype>(piece, tile - piece.first_tile);
    }
}

// ---- gradient ingest

constexpr int kBatch = 8; // elements that a thread loads before it uses the first, to have enough of them on their way

// Adds the squares of what `Count` elements from i on, every 32nd, become when they are stored.
template <int SrcDtype, int DstDtype, int Count>
__device__ inline double ingest_batch(void* dst, const void* src, Index i, bool accumulate, double total) {
    float values[Count];
    for (int j = 0; j < Count; ++j) values[j] = load<SrcDtype>(src, i + j * kLanes);
    if constexpr (DstDtype != OFFLOAD_NONE) {
        if (accumulate)
            for (int j = 0; j < Count; ++j) values[j] = __fadd_rn(values[j], load<DstDtype>(dst, i + j * kLanes));
        for (int j = 0; j < Count; ++j) values[j] = store<DstDtype>(dst, i + j * kLanes, values[j]);
    }
    for (int j = 0; j < Count; ++j) {
        const double value = values[j];
        total = __dadd_rn(total, __dmul_rn(value, value)); // the product is exact
    }
    return total;
}

// `offset` is the first element's index within the first block of 4096 flat indices, a multiple of 64, so that the lane of
// element i is i % 32.
struct IngestPiece {
    void* dst;
    const void* src;
    double* sums;
    Index numel;
    int offset, first_tile;
};

// A tile is a block of 4096 flat indices, which a warp takes.
struct IngestPieces {
    int count, tile_count, accumulate, unused;
    IngestPiece pieces[102];
};
static_assert(sizeof(IngestPieces) <= kParameterNbytes, "a launch takes no more");

template <int SrcDtype, int DstDtype> __device__ void ingest(const IngestPieces& all) {
    const int lane = static_cast<int>(threadIdx.x) % kLanes;
    const Index warps_per_block = blockDim.x / kLanes;
    const bool accumulate = all.accumulate != 0;
    for (Index tile = blockIdx.x * warps_per_block + threadIdx.x / kLanes; tile < all.tile_count; tile += gridDim.x * warps_per_block) {
        const IngestPiece& a = all.pieces[piece_of(all, tile)];
        const Index block = tile - a.first_tile;
        const Index low = block * kBlockNumel - a.offset, high = low + kBlockNumel;
        const Index end = high < a.numel ? high : a.numel;
        Index i = (low < 0 ? 0 : low) + lane;
        double total = 0.0;
        for (; i + (kBatch - 1) * kLanes < end; i += kBatch * kLanes)
            total = ingest_batch<SrcDtype, DstDtype, kBatch>(a.dst, a.src, i, accumulate, total);
        for (; i < end; i += kLanes) total = ingest_batch<SrcDtype, DstDtype, 1>(a.dst, a.src, i, accumulate, total);
        // Lane i < width gets lane i + width; what the others get is not used.
        for (int width = kLanes / 2; width >= 1; width /= 2)
            total = __dadd_rn(total, __shfl_down_sync(0xffffffffu, total, static_cast<unsigned int>(width)));
        if (lane == 0) a.sums[block] = total;
    }
}

// ---- casts

struct Convert {
    void* dst;
    const void* src;
    Index numel;
};

template <int SrcDtype, int DstDtype> __device__ void convert(const Convert& a) {
    const Index stride = static_cast<Index>(gridDim.x) * blockDim.x;
    for (Index i = static_cast<Index>(blockIdx.x) * blockDim.x + threadIdx.x; i < a.numel; i += stride)
        store<DstDtype>(a.dst, i, load<SrcDtype>(a.src, i));
}

} // namespace

// ---- entry points: offload_<what>_<dtype codes>. Each has one parameter, whose bytes a launch puts together. Who changes it
// changes the name: files of kernels that were compiled before are not to be launched with it.

#define OFFLOAD_ADAM(GRAD, EMIT)                                                                                                           \
    extern "C" __global__ void offload_adam_pieces_##GRAD##_##EMIT(const __grid_constant__ AdamPieces all) { adam<GRAD, EMIT>(all); }

#define OFFLOAD_INGEST(SRC, DST)                                                                                                           \
    extern "C" __global__ void offload_ingest_pieces_##SRC##_##DST(const __grid_constant__ IngestPieces all) { ingest<SRC, DST>(all); }

#define OFFLOAD_CONVERT(SRC, DST)                                                                                                          \
    extern "C" __global__ void offload_convert_##SRC##_##DST(const __grid_constant__ Convert all) { convert<SRC, DST>(all); }

// clang-format off
#define OFFLOAD_EACH(DTYPE)                                                                                                                \
    OFFLOAD_ADAM(DTYPE, 0) OFFLOAD_ADAM(DTYPE, 1) OFFLOAD_ADAM(DTYPE, 2) OFFLOAD_ADAM(DTYPE, 3)                                            \
    OFFLOAD_INGEST(DTYPE, 0) OFFLOAD_INGEST(DTYPE, 1) OFFLOAD_INGEST(DTYPE, 2) OFFLOAD_INGEST(DTYPE, 3)
// clang-format on

OFFLOAD_EACH(0)
OFFLOAD_EACH(1)
OFFLOAD_EACH(2)
OFFLOAD_CONVERT(0, 1)
OFFLOAD_CONVERT(0, 2)
OFFLOAD_CONVERT(1, 0)
OFFLOAD_CONVERT(1, 2)
OFFLOAD_CONVERT(2, 0)
OFFLOAD_CONVERT(2, 1)
