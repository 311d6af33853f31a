/* The C ABI of liboffload_native: the optimizer's arithmetic, memory and file I/O of the Python package `offload`.
 *
 * Conventions
 *   - A function that can fail returns 0 or a negated errno value. Every pointer and size is checked first;
 *     what cannot be right is -EINVAL and has no effect.
 *   - Addresses need no alignment beyond what a function says. Buffers belong to the caller and must stay mapped
 *     until the call returns (for I/O: until the ticket is settled).
 *   - Nothing here calls back, throws, or touches a signal handler. Threads made here block all signals.
 *   - "element" is one number; dtype codes are OFFLOAD_F32, OFFLOAD_BF16, OFFLOAD_F16. Rounding to 16 bits is to
 *     nearest even; a NaN becomes the canonical NaN of the 16-bit type (0x7fc0, 0x7e00).
 *   - The results of arithmetic do not depend on the number of threads, the SIMD level, the caller's
 *     floating-point mode or how a tensor was cut. (The payload of a float NaN is not part of the result.)
 */
#ifndef OFFLOAD_H
#define OFFLOAD_H

#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

#define OFFLOAD_API __attribute__((visibility("default")))

/* Changes whenever a signature, a structure or the meaning of an argument below changes. */
#define OFFLOAD_ABI_VERSION 1

enum { OFFLOAD_F32 = 0, OFFLOAD_BF16 = 1, OFFLOAD_F16 = 2 };
enum { OFFLOAD_SIMD_BEST = -1, OFFLOAD_SIMD_SCALAR = 0, OFFLOAD_SIMD_AVX2 = 1, OFFLOAD_SIMD_AVX512 = 2, OFFLOAD_SIMD_NEON = 3 };

/* ---- what this library is ------------------------------------------------------------------------------------- */

/* Thread-safe. */
OFFLOAD_API int32_t offload_abi_version(void);

/* One line: compiler, io_uring or not, SIMD paths compiled in. Thread-safe; a static string, owned by the library. */
OFFLOAD_API const char* offload_build_info(void);

/* The SIMD path in use, one of OFFLOAD_SIMD_*. Thread-safe. */
OFFLOAD_API int32_t offload_simd_level(void);

/* Choose a path (tests). -ENOTSUP when this build or this processor lacks it. Thread-safe: takes effect in calls
 * that begin later. */
OFFLOAD_API int offload_set_simd_level(int32_t level);

/* ---- threads -------------------------------------------------------------------------------------------------- */

typedef struct offload_threads offload_threads;

/* Make a pool of `count` threads, the caller of each operation being one of them; 0: one for each physical core in
 * the affinity mask of the calling thread (hyperthreads not counted; OMP_NUM_THREADS not looked at). At most 1024.
 * Thread-safe. `*out` belongs to the caller, who destroys it. */
OFFLOAD_API int offload_threads_create(int32_t count, offload_threads** out);

/* End and free the pool. No operation may be running on it. In a forked child the threads do not exist and only
 * the memory is left alone. Thread-safe for different pools. */
OFFLOAD_API int offload_threads_destroy(offload_threads* threads);

/* Number of threads, the caller included. Thread-safe. */
OFFLOAD_API int32_t offload_threads_count(const offload_threads* threads);

/* ---- optimizer ------------------------------------------------------------------------------------------------ */

/* One run of elements that share their hyperparameters. master, exp_avg and exp_avg_sq are float32, read and written;
 * grad is read; emit, if not NULL, receives the new master in emit_dtype. None of them may overlap another one, in
 * this or in another segment of the call, save that grad may be shared. */
typedef struct offload_adam_segment {
    const void* grad;
    float* master;
    float* exp_avg;
    float* exp_avg_sq;
    void* emit;
    int64_t numel;
    int64_t step; /* of this update, counted from 1 */
    double lr;
    double beta1;
    double beta2;
    double eps;
    double weight_decay;
    float grad_factor; /* multiplies every gradient element while it is read */
    int32_t grad_dtype;
    int32_t emit_dtype;
    int32_t decoupled; /* 1: AdamW, 0: Adam with L2 */
} offload_adam_segment;

/* One Adam or AdamW step on every segment, in one pass over memory. bc1 = 1 - beta1^step, bc2 = 1 - beta2^step and
 * lr / bc1 are formed in double and rounded once to float; then, with one rounding per operation or fma:
 *     g = grad * grad_factor
 *     AdamW: p = p * (1 - lr * weight_decay)            Adam: g = fma(p, weight_decay, g)
 *     w = 1 - beta1;  d = g - m;  m = w < 0.5 ? fma(w, d, m) : fma(w - 1, d, g)
 *     v = v * beta2;  v = fma((1 - beta2) * g, g, v)
 *     p = p + (-(lr / bc1) * m) / (sqrt(v) / sqrt(bc2) + eps)
 * Several callers may use one pool; they take turns. */
OFFLOAD_API int offload_adam(offload_threads* threads, const offload_adam_segment* segments, int64_t segment_count);

/* ---- gradients and casts -------------------------------------------------------------------------------------- */

/* In one pass: value = src (+ dst if accumulate, in float32); dst = value in dst_dtype; and the sums of squares of
 * what was stored. Elements have flat indices start_index, start_index + 1, ...; start_index % 64 == 0.
 * Block b is [4096 b, 4096 (b + 1)). block_sums (may be NULL) receives one double for each block that the elements
 * touch, in order: 32 lanes (flat index % 32) add double(x)^2 in increasing index order, then
 * `for w in 16, 8, 4, 2, 1: lane[i] += lane[i + w]`, and lane[0] is the sum. dst == NULL: only the sums of src
 * (accumulate must be 0). dst may be src itself with the same dtype; otherwise they must not overlap.
 * Several callers may use one pool; they take turns. */
OFFLOAD_API int offload_gradient_ingest(offload_threads* threads, void* dst, int32_t dst_dtype, const void* src, int32_t src_dtype,
                                        int64_t numel, int64_t start_index, int32_t accumulate, double* block_sums);

/* dst = src, cast. They must not overlap. Several callers may use one pool; they take turns. */
OFFLOAD_API int offload_convert(offload_threads* threads, void* dst, int32_t dst_dtype, const void* src, int32_t src_dtype, int64_t numel);

/* What memory alone allows, for benchmarks: add the `read_count` (1..4) float32 arrays and store the sum in each of the
 * `write_count` (0..4) arrays, which may be among those read. Work is cut as in offload_adam.
 * Several callers may use one pool; they take turns. */
OFFLOAD_API int offload_stream(offload_threads* threads, const float* const* reads, int32_t read_count, float* const* writes,
                               int32_t write_count, int64_t numel);

/* ---- memory --------------------------------------------------------------------------------------------------- */

enum { OFFLOAD_ARENA_HUGE_PAGES = 1, OFFLOAD_ARENA_PREFAULT = 2 };

/* Anonymous zeroed memory: the base lies on a 2 MiB boundary, the size is nbytes rounded up to whole pages and no
 * more. HUGE_PAGES asks for 2 MiB pages (not an error where the system refuses), PREFAULT makes the pages now, by
 * several threads; -ENOMEM if they cannot be had. Thread-safe. The caller owns the range and destroys it. */
OFFLOAD_API int offload_arena_create(int64_t nbytes, int32_t flags, void** out, int64_t* mapped_nbytes);

/* Unmap a whole arena. Thread-safe; nothing may use the memory any more. */
OFFLOAD_API int offload_arena_destroy(void* address, int64_t mapped_nbytes);

/* Give whole pages back to the system; they read as zeros later. address and nbytes are multiples of the page size.
 * Thread-safe. */
OFFLOAD_API int offload_arena_decommit(void* address, int64_t nbytes);

/* Whether offload_pages_move works here (probed once): 1 or 0. Thread-safe. */
OFFLOAD_API int32_t offload_pages_supported(void);

/* Reserve addresses, without memory, on a 2 MiB boundary; nbytes is a multiple of 2 MiB. Reading or writing them
 * faults until pages are moved there. Thread-safe. The caller owns the range and releases it. */
OFFLOAD_API int offload_pages_reserve(int64_t nbytes, void** out);

/* Unmap a reserved range, with whatever pages are there. Thread-safe. */
OFFLOAD_API int offload_pages_release(void* address, int64_t nbytes);

/* Move the pages at `from` to `to`: no copy, huge pages stay whole, what lay at `to` is lost, `from` is reserved
 * without memory afterwards and at no moment free for another mapping. Both are on 2 MiB boundaries, nbytes is a
 * multiple of 2 MiB, and the ranges do not overlap. `from` must be one whole arena or one whole earlier `to`. Not for memory that a device
 * has registered. Thread-safe for different ranges. */
OFFLOAD_API int offload_pages_move(void* from, void* to, int64_t nbytes);

/* ---- file I/O ------------------------------------------------------------------------------------------------- */

typedef struct offload_io offload_io;

enum { OFFLOAD_IO_URING = 0, OFFLOAD_IO_THREADS = 1 };
enum { OFFLOAD_IO_READ = 0, OFFLOAD_IO_WRITE = 1, OFFLOAD_IO_FDATASYNC = 2 };
enum { OFFLOAD_IO_HIGH = 0, OFFLOAD_IO_LOW = 1 };

typedef struct offload_io_result {
    int64_t status;             /* 0 or a negated errno value; -ENODATA: the file ended before nbytes */
    int64_t transferred_nbytes; /* bytes that did move, also when it failed */
    int64_t failed_offset;      /* the lowest file offset at which it failed; -1 if it did not */
} offload_io_result;

typedef struct offload_io_statistics {
    int64_t read_nbytes;
    int64_t written_nbytes;
    int64_t read_busy_ns;    /* time in which at least one read was in flight */
    int64_t write_busy_ns;   /* the same for writes and fdatasync */
    int64_t in_flight_count; /* tickets not settled yet */
} offload_io_statistics;

/* Start an engine that keeps at most queue_depth (1..4096) blocks of block_nbytes (512..1 GiB, a multiple of 512) in
 * flight: by one thread with an io_uring of its own, or by min(queue_depth, 128) threads that call pread and pwrite.
 * -ENOSYS: built without io_uring, or the kernel has none; -EPERM or another code: the system forbids it.
 * Thread-safe. `*out` belongs to the caller, who destroys it. */
OFFLOAD_API int offload_io_create(int32_t kind, int32_t queue_depth, int64_t block_nbytes, offload_io** out);

/* Wait for everything submitted, then end the threads and free the engine and the tickets nobody waited for.
 * No other call on this engine may be running. In a forked child it does nothing. */
OFFLOAD_API int offload_io_destroy(offload_io* io);

/* Queue a transfer of nbytes between buffer and file offset, or an fdatasync of what was written and waited for before
 * (buffer, nbytes and offset are then unused). Returns at once; `*ticket` names it. Blocks of high-priority requests
 * start before blocks of low-priority ones, and in order of submission within a priority. Short transfers are
 * continued, EINTR and EAGAIN retried. Where fd is O_DIRECT, alignment is the caller's duty. Thread-safe.
 * -ECHILD in a forked child. */
OFFLOAD_API int offload_io_submit(offload_io* io, int32_t op, int32_t fd, void* buffer, int64_t nbytes, int64_t offset, int32_t priority,
                                  uint64_t* ticket);

/* Wait until the ticket is settled, at most timeout_ns (below 0: without limit). 0: `*result` is filled, no block of it is
 * in flight any more, and the ticket is gone; -ETIMEDOUT: not settled, the ticket stays; -ENOENT: no such ticket.
 * Thread-safe; if several threads wait for one ticket, one gets the result and the others -ENOENT. */
OFFLOAD_API int offload_io_wait(offload_io* io, uint64_t ticket, int64_t timeout_ns, offload_io_result* result);

/* As offload_io_wait without waiting; -EAGAIN: not settled. Thread-safe. */
OFFLOAD_API int offload_io_poll(offload_io* io, uint64_t ticket, offload_io_result* result);

/* Totals since the engine was made. Thread-safe. */
OFFLOAD_API int offload_io_stats(offload_io* io, offload_io_statistics* statistics);

#ifdef __cplusplus
}
#endif

#endif
