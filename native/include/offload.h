// SPDX-License-Identifier: Apache-2.0
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
#define OFFLOAD_ABI_VERSION 6

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

/* From its next operation on a pool of eight threads and more waits for the next one about 200 us awake, not 20: for where the
 * cores have nothing else to do, as beside a device that computes the model. Thread-safe. */
OFFLOAD_API int offload_threads_stay_awake(offload_threads* threads);

/* Number of threads, the caller included. Thread-safe. */
OFFLOAD_API int32_t offload_threads_count(const offload_threads* threads);

/* ---- optimizer ------------------------------------------------------------------------------------------------ */

enum { OFFLOAD_RULE_ADAM = 0, OFFLOAD_RULE_LION = 1, OFFLOAD_RULE_ADAGRAD = 2, OFFLOAD_RULE_SGD = 3 };
enum { OFFLOAD_STATE_FP32 = 0, OFFLOAD_STATE_SPLIT = 1, OFFLOAD_STATE_BF16 = 2, OFFLOAD_STATE_8BIT = 3 };

/* Elements that share a scale of 8-bit moments. */
enum { OFFLOAD_SCALE_GROUP = 64 };

/* One run of elements of one parameter that share their hyperparameters. Which of the arrays there are follows from
 * the rule and the state format; the others are NULL. None may overlap another one, in this or in another segment of
 * the call, save that grad may be shared.
 *
 *             master             moments (exp_avg, exp_avg_sq)            values
 *   FP32      float32            float32                                  NULL, or receives the weight in values_dtype
 *   SPLIT     int16 remainder    float32                                  bf16 weight, read and written
 *   BF16      int16 remainder    bf16                                     bf16 weight, read and written
 *   8BIT      int16 remainder    int8 and uint8, and a scale byte for     bf16 weight, read and written
 *                                each OFFLOAD_SCALE_GROUP elements
 */
typedef struct offload_update_segment {
    const void* grad; /* read */
    void* master;
    void* exp_avg;    /* Adam, Lion: the average, SGD with momentum: the momentum buffer */
    void* exp_avg_sq; /* Adam: the average of squares, Adagrad: their sum */
    uint8_t* exp_avg_scale;
    uint8_t* exp_avg_sq_scale;
    void* values;
    int64_t numel;
    int64_t first_index;     /* of the parameter's element that comes first, 8BIT: a multiple of OFFLOAD_SCALE_GROUP */
    int64_t source_distance; /* bytes from where states are written to where they are read, 0: in place. Of the moments, and of
                                master where `values` is given: else it is the parameter itself, which is updated in place */
    int64_t step;            /* of this update, counted from 1 */
    uint64_t rounding_seed;
    double lr;
    double beta1; /* SGD: momentum */
    double beta2; /* SGD: dampening */
    double eps;
    double weight_decay;
    float grad_factor; /* multiplies every gradient element while it is read, negative: maximize */
    int32_t grad_dtype;
    int32_t values_dtype;
    int32_t state_format;
    int32_t rule;
    int32_t decoupled; /* Adam: 1: AdamW, 0: weight decay as L2 */
    int32_t nesterov;  /* SGD */
} offload_update_segment;

/* One optimizer step on every segment, in one pass over memory. Scalars are formed in double and rounded once to float;
 * then, with one rounding per operation or fma, in the order in which torch.optim's foreach=False form has them:
 *
 *     g = grad * grad_factor;  L2 (Adam not decoupled, Adagrad, SGD; weight_decay != 0): g = fma(p, weight_decay, g)
 *
 *     Adam      AdamW first: p = p * (1 - lr * weight_decay)
 *               w = 1 - beta1;  d = g - m;  m = w < 0.5 ? fma(w, d, m) : fma(w - 1, d, g)
 *               v = v * beta2;  v = fma((1 - beta2) * g, g, v);  r = sqrt(v)
 *               p = p + (-(lr / bc1) * m) / (r / sqrt(bc2) + eps)
 *               with bc1 = 1 - beta1^step, bc2 = 1 - beta2^step
 *     BF16, 8BIT: Adam with a division and three other operations less. `grad` without grad_factor, but with L2 the g above
 *               and grad_factor 1 in what follows:
 *               m = fma(m, beta1, grad * ((1 - beta1) * grad_factor));  h = grad * (sqrt(1 - beta2) * grad_factor)
 *               v = fma(h, h, v * beta2);  8BIT: v * beta2 is formed as (code * (2^k * sqrt(beta2)))^2;  r = sqrt(v)
 *               u = (-(lr / bc1 * sqrt(bc2)) * m) / (r + eps * sqrt(bc2));  p = fma(p, 1 - lr * weight_decay, u), L2: p + u
 *     Lion      u = fma(g, 1 - beta1, m * beta1);  p = fma(sign(u), -lr, p * (1 - lr * weight_decay))
 *               m = fma(g, 1 - beta2, m * beta2)                                           sign of a NaN is 0
 *     Adagrad   v = fma(g, g, v);  p = p + (-lr * g) / (sqrt(v) + eps)                    lr: with its decay
 *     SGD       momentum != 0: m = step == 1 ? g : fma(g, 1 - dampening, m * momentum)
 *                              g = nesterov ? fma(m, momentum, g) : m
 *               p = fma(g, -lr, p)
 *
 * Split weights. With `bits` those of the float32 weight (a NaN: 0x7fc00000), the bf16 weight is (bits + 0x8000) >> 16 and
 * the remainder the low 16 bits, as a signed number: bits = (bf16 << 16) + remainder, for every bit pattern. So the
 * bf16 weight is the nearest, ties away from zero (nearest even would need 17 bits to invert), and above
 * 0x1.ffp127 it is infinite, as with any rounding to nearest, while the pair still holds the finite number.
 *
 * Random bits. n elements (BF16: 2, 8BIT: 4) share 32 at each step: element i of the parameter
 *     z = rounding_seed + step * 0x9e3779b97f4a7c15 (mod 2^64), then SplitMix64's finaliser (Steele, Lea, Flood 2014):
 *     z = (z ^ z >> 30) * 0xbf58476d1ce4e5b9;  z = (z ^ z >> 27) * 0x94d049bb133111eb;  z = z ^ z >> 31
 *     w = low32(z) + floor(i / n) * 0x9e3779b9 (mod 2^32);  bits = (w ^ w >> 16) * 0x85ebca6b (mod 2^32)
 * Of their n parts, the lowest first, exp_avg takes number i % n and exp_avg_sq number (i % n) ^ 1, the other one of a pair.
 * Over the steps an element's bits are as random as SplitMix64, since for each i the rest is a bijection. Nothing else
 * enters, so no cut of the parameter shows.
 *
 * bf16 moments. bits of the float32 (a NaN: 0x7fc00000) + 16 random bits, then >> 16: unbiased.
 *
 * 8-bit moments. A group of 64 elements has a power of two as scale, so that scaling is exact: exp_avg = code * 2^k,
 * codes -127..127, and sqrt(exp_avg_sq) = code * 2^k, codes 0..255. k is the least with max |x| < 127 * 2^k, -110 to 100
 * (roots: 255 * 2^k, -63 to 56), and kept as k + 110 (k + 63). code = floor(x / 2^k + u), where x / 2^k is first rounded to a
 * multiple of 2^-8 (ties to even) and u is 8 random bits / 2^8: unbiased but for those 2^-9 of a code. A root's code is at
 * least 1: an element that is small beside its group gets too small a step, never too large a one; 0 stands only where there
 * was no update yet. Without random bits, where an fp32 moment is taken over, max |x| <= 127 * 2^k is enough: a group whose
 * largest code is 127 is encoded to itself.
 * Magnitudes above 127 * 2^100 (roots: 255 * 2^56) count as that, a NaN as 0 (roots: as that).
 *
 * Several callers may use one pool; they take turns.
 *
 * How the loops reach the speed of memory. Each pass works on one cache line of every array at a time, because the arrays of
 * a record lie a multiple of 4 KiB apart and share the sets of the first-level cache. Software prefetch runs 1024 bytes
 * ahead of every array that is read: the hardware's follows that many streams late. Stores are ordinary ones, of lines that
 * were just read; non-temporal ones for `values` of FP32, the only array that is written without having been read, were no
 * faster. The formats with narrow arrays only (BF16, 8BIT) compute more than they move: AVX-512 works on them in an order
 * in which pairs of elements share a dword and nothing crosses a 128-bit lane, and encodes an 8-bit group while the square
 * roots of the next are computed, which hides that the encoding waits for the group's maximum. */
OFFLOAD_API int offload_update(offload_threads* threads, const offload_update_segment* segments, int64_t segment_count);

/* Bytes of the blocks that checksums are made of: a page, so that what begins on a page is of whole blocks. */
enum { OFFLOAD_CHECKSUM_BLOCK_NBYTES = 4096 };

/* Memory that an update reads or writes, and where the sums of its blocks go: as the update finds it, and as it leaves it.
 * Either may be NULL. Blocks count from `address`. */
typedef struct {
    const void* address;
    int64_t nbytes;
    uint64_t* before;
    uint64_t* after;
} offload_summed_memory;

/* offload_update, and the checksums of all these memories in the same pass: a block that an array fills is summed while it is in
 * a core's own cache. No two of them overlap. Sums of memory that the update does not touch are taken too. */
OFFLOAD_API int offload_update_summed(offload_threads* threads, const offload_update_segment* segments, int64_t segment_count,
                                      const offload_summed_memory* memories, int64_t memory_count);

/* ---- gradients and casts -------------------------------------------------------------------------------------- */

/* In one pass: value = src (+ dst if accumulate, in float32); dst = value in dst_dtype; and the sums of squares of
 * what was stored. Elements have flat indices start_index, start_index + 1, ...; start_index % 64 == 0.
 * Block b is [4096 b, 4096 (b + 1)). block_sums (may be NULL) receives one double for each block that the elements
 * touch, in order: 32 lanes (flat index % 32) add double(x)^2 in increasing index order, then
 * `for w in 16, 8, 4, 2, 1: lane[i] += lane[i + w]`, and lane[0] is the sum. dst == NULL: only the sums of src
 * (accumulate must be 0). dst may be src itself with the same dtype; otherwise they must not overlap.
 * checksums (may be NULL): one for each block of OFFLOAD_CHECKSUM_BLOCK_NBYTES from dst on receives its checksum where the block is
 * stored in one go: whole, and within one block of 4096 indices. The others stay as they are.
 * Several callers may use one pool; they take turns. */
OFFLOAD_API int offload_gradient_ingest(offload_threads* threads, void* dst, int32_t dst_dtype, const void* src, int32_t src_dtype,
                                        int64_t numel, int64_t start_index, int32_t accumulate, double* block_sums, uint64_t* checksums);

/* One gradient of those that lie side by side in a buffer; as of offload_gradient_ingest. */
typedef struct {
    int64_t numel;
    int64_t start_index; /* % 64 == 0 */
    double* block_sums;  /* may be NULL */
} offload_ingest_part;

/* offload_gradient_ingest of each, one after the other, nothing of which is added to: all in one dtype, from sources[i] into dst,
 * whose first element has flat index first_index. -EINVAL where one cannot be: then none is stored. */
OFFLOAD_API int offload_gradients_ingest(offload_threads* threads, void* dst, int32_t dtype, int64_t first_index,
                                         const offload_ingest_part* parts, const void* const* sources, int64_t part_count);

/* dst = src, cast. They must not overlap. Several callers may use one pool; they take turns. */
OFFLOAD_API int offload_convert(offload_threads* threads, void* dst, int32_t dst_dtype, const void* src, int32_t src_dtype, int64_t numel);

/* Digits of an exact sum: enough for 2^63 of the largest doubles. */
enum { OFFLOAD_EXACT_SUM_DIGITS = 70 };

/* The sum of all elements of all arrays, without rounding: digits[0..69] are its two's complement in units of 2^-1074, the
 * lowest first. -EDOM: an element is infinite or NaN. Thread-safe; runs on the calling thread. */
OFFLOAD_API int offload_exact_sum(const double* const* arrays, const int64_t* counts, int64_t array_count, uint32_t* digits);

/* A 64-bit checksum of memory, for finding out that it changed. A change is missed with a chance of about 2^-64; of 2^-32 where
 * it leaves the sum of a lane as it was: two flips of one bit, opposite, in words that lie a multiple of 64 bytes apart. Its value
 * is that of one build on one machine: not for files that outlive a process.
 * sums (may be NULL): of the memory's blocks, one for each OFFLOAD_CHECKSUM_BLOCK_NBYTES and one for what is left, as an update or
 * an ingest left them; 0: not known. Thread-safe; runs on the calling thread. */
OFFLOAD_API int offload_checksum(const void* address, int64_t nbytes, const uint64_t* sums, uint64_t* out);

/* The same of memory that holds something else by now: all sums are known. Thread-safe. */
OFFLOAD_API int offload_checksum_of_blocks(const uint64_t* sums, int64_t nbytes, uint64_t* out);

/* What memory alone allows, for benchmarks: read `read_count` (0..8) arrays and write `write_count` (0..8), which may be
 * among those read. Array i has read_nbytes[i] (write_nbytes[i]) bytes (1..4) for each of `numel` elements, a multiple of 64.
 * What is written means nothing. Work is cut as in offload_update. Several callers may use one pool; they take turns. */
OFFLOAD_API int offload_stream(offload_threads* threads, const void* const* reads, const int32_t* read_nbytes, int32_t read_count,
                               void* const* writes, const int32_t* write_nbytes, int32_t write_count, int64_t numel);

/* ---- memory --------------------------------------------------------------------------------------------------- */

enum { OFFLOAD_ARENA_HUGE_PAGES = 1 };

/* Anonymous zeroed memory: the base lies on a 2 MiB boundary, the size is nbytes rounded up to whole pages and no
 * more. HUGE_PAGES asks for 2 MiB pages (not an error where the system refuses). Thread-safe. The caller owns the range and
 * destroys it. */
OFFLOAD_API int offload_arena_create(int64_t nbytes, int32_t flags, void** out, int64_t* mapped_nbytes);

/* Unmap a whole arena. Thread-safe; nothing may use the memory any more. */
OFFLOAD_API int offload_arena_destroy(void* address, int64_t mapped_nbytes);

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
enum { OFFLOAD_IO_HIGH = 0, OFFLOAD_IO_LOW = 1, OFFLOAD_IO_BACKGROUND = 2 };

typedef struct offload_io_result {
    int64_t status;             /* 0 or a negated errno value; -ENODATA: the file ended before nbytes */
    int64_t transferred_nbytes; /* bytes that did move, also when it failed */
    int64_t failed_offset;      /* the lowest file offset at which it failed; -1 if it did not */
} offload_io_result;

/* By the monotonic clock (CLOCK_MONOTONIC). */
typedef struct offload_io_times {
    int64_t began_ns; /* its first block was handed to the kernel */
    int64_t ended_ns; /* its last block was over */
} offload_io_times;

typedef struct offload_io_statistics {
    int64_t read_nbytes;
    int64_t written_nbytes;
    int64_t read_busy_ns;      /* time in which at least one read was in flight */
    int64_t write_busy_ns;     /* the same for writes and fdatasync */
    int64_t in_flight_count;   /* tickets not settled yet */
    int64_t registered_nbytes; /* memory that is registered now */
    int64_t fixed_nbytes;      /* of the bytes read and written, those from and to registered memory */
} offload_io_statistics;

/* Start an engine that keeps at most queue_depth (1..4096) blocks of block_nbytes (512..1 GiB, a multiple of 512) in
 * flight: by one thread with an io_uring of its own, or by min(queue_depth, 128) threads that call pread and pwrite.
 * -ENOSYS: the kernel has no io_uring; -EPERM or another code: the system forbids it.
 * Thread-safe. `*out` belongs to the caller, who destroys it. */
OFFLOAD_API int offload_io_create(int32_t kind, int32_t queue_depth, int64_t block_nbytes, offload_io** out);

/* Wait for everything submitted, then end the threads and free the engine and the tickets nobody waited for.
 * No other call on this engine may be running. In a forked child it does nothing. */
OFFLOAD_API int offload_io_destroy(offload_io* io);

/* Make memory known to the kernel, so that it need not look up and hold the pages for each block (io_uring's fixed
 * buffers). Seen on a virtual disk with blocks of 1 MiB: the same rate with 10 to 30 % less processor time from huge
 * pages, half of it from 4 KiB pages. (Registered files made no difference that could be measured with blocks of such
 * a size, so there are none.) Optional: transfers of memory that is not registered work as well. The pages stay in
 * memory until offload_io_unregister or the end of the engine, and must stay mapped where they are. -EOPNOTSUPP: the
 * kind of engine or the kernel (before 5.19) has no such thing; -ENOMEM: the limit of locked memory; -ENOSPC: too many
 * ranges; -EEXIST: overlaps a registered range. Thread-safe. */
OFFLOAD_API int offload_io_register(offload_io* io, void* address, int64_t nbytes);

/* Take back one whole registered range. Nothing may be in flight in it. -ENOENT: none begins there. Thread-safe. */
OFFLOAD_API int offload_io_unregister(offload_io* io, void* address);

/* Queue a transfer of nbytes between buffer and file offset, or an fdatasync of what was written and waited for before
 * (buffer, nbytes and offset are then unused). Returns at once; `*ticket` names it. Blocks of high-priority requests
 * start before blocks of low-priority ones, those before background ones, and in order of submission within a priority.
 * Of background blocks one at a time is in flight beside others, else an eighth of the queue depth, so that what comes
 * next does not wait behind many of them in the drive. Short transfers are
 * continued, EINTR and EAGAIN retried. Where fd is O_DIRECT, alignment is the caller's duty. Thread-safe.
 * -ECHILD in a forked child. */
OFFLOAD_API int offload_io_submit(offload_io* io, int32_t op, int32_t fd, void* buffer, int64_t nbytes, int64_t offset, int32_t priority,
                                  uint64_t* ticket);

/* Wait until the ticket is settled, at most timeout_ns (below 0: without limit). 0: `*result` is filled, no block of it is
 * in flight any more, and the ticket is gone; -ETIMEDOUT: not settled, the ticket stays; -ENOENT: no such ticket.
 * Thread-safe; if several threads wait for one ticket, one gets the result and the others -ENOENT. */
OFFLOAD_API int offload_io_wait(offload_io* io, uint64_t ticket, int64_t timeout_ns, offload_io_result* result);

/* As offload_io_wait; `times`, unless it is null, is filled where `*result` is. */
OFFLOAD_API int offload_io_wait_timed(offload_io* io, uint64_t ticket, int64_t timeout_ns, offload_io_result* result,
                                      offload_io_times* times);

/* As offload_io_wait without waiting; -EAGAIN: not settled. Thread-safe. */
OFFLOAD_API int offload_io_poll(offload_io* io, uint64_t ticket, offload_io_result* result);

/* Totals since the engine was made. Thread-safe. */
OFFLOAD_API int offload_io_stats(offload_io* io, offload_io_statistics* statistics);

#ifdef __cplusplus
}
#endif

#endif
