// SPDX-License-Identifier: Apache-2.0
// Cuts gradient ingest and casts in tasks for the pool.
#include <algorithm>
#include <cerrno>

#include "kernels.h"
#include "offload.h"
#include "threads.h"

namespace offload {
namespace {

constexpr int64_t kBlockNumel = 4096; // of the definition of the sum of squares
constexpr int64_t kBlocksPerTask = 16;
constexpr int64_t kTaskNumel = kBlockNumel * kBlocksPerTask;
constexpr int64_t kStartMultiple = 64;

// `whole` describes all elements; they begin at `start_index` in flat index space.
// checksums: of the blocks of its target, or null.
void ingest(offload_threads& threads, const IngestPiece& whole, int64_t start_index, uint64_t* checksums) {
    const Kernels& table = kernels();
    const int64_t end_index = start_index + whole.numel;
    const int64_t first_block = start_index / kBlockNumel;
    const int64_t block_count = (end_index + kBlockNumel - 1) / kBlockNumel - first_block;
    threads.run((block_count + kBlocksPerTask - 1) / kBlocksPerTask, [&](int64_t task) {
        const int64_t last = std::min(block_count, (task + 1) * kBlocksPerTask);
        for (int64_t block = task * kBlocksPerTask; block < last; ++block) {
            const int64_t begin = std::max(start_index, (first_block + block) * kBlockNumel);
            const int64_t end = std::min(end_index, (first_block + block + 1) * kBlockNumel);
            const int64_t done = begin - start_index;
            IngestPiece piece = whole;
            if (whole.dst != nullptr) piece.dst = static_cast<char*>(whole.dst) + done * element_nbytes(whole.dst_dtype);
            piece.src = static_cast<const char*>(whole.src) + done * element_nbytes(whole.src_dtype);
            if (whole.block_sum != nullptr) piece.block_sum = whole.block_sum + block;
            piece.numel = end - begin;
            table.ingest(piece);
            if (checksums == nullptr) continue;
            const int64_t width = element_nbytes(whole.dst_dtype);
            for (int64_t at = checksum_block_count(done * width); (at + 1) * kChecksumBlock <= (end - start_index) * width; ++at)
                checksums[at] = block_checksum(static_cast<const uint8_t*>(whole.dst) + at * kChecksumBlock, kChecksumBlock);
        }
    });
}

void convert(offload_threads& threads, void* dst, int32_t dst_dtype, const void* src, int32_t src_dtype, int64_t numel) {
    const Kernels& table = kernels();
    threads.run((numel + kTaskNumel - 1) / kTaskNumel, [&](int64_t task) {
        const int64_t begin = task * kTaskNumel;
        table.convert(static_cast<char*>(dst) + begin * element_nbytes(dst_dtype), dst_dtype,
                      static_cast<const char*>(src) + begin * element_nbytes(src_dtype), src_dtype, std::min(kTaskNumel, numel - begin));
    });
}

bool is_range(int64_t numel, int64_t start_index) {
    return numel >= 0 && start_index >= 0 && start_index % kStartMultiple == 0 && start_index <= INT64_MAX - numel - kBlockNumel;
}

} // namespace
} // namespace offload

extern "C" {

int offload_gradient_ingest(offload_threads* threads, void* dst, int32_t dst_dtype, const void* src, int32_t src_dtype, int64_t numel,
                            int64_t start_index, int32_t accumulate, double* block_sums, uint64_t* checksums) {
    using namespace offload;
    if (threads == nullptr || !is_range(numel, start_index)) return -EINVAL;
    if (!is_dtype(src_dtype) || (dst != nullptr && !is_dtype(dst_dtype)) || (accumulate != 0 && accumulate != 1)) return -EINVAL;
    if (dst == nullptr && (accumulate != 0 || checksums != nullptr)) return -EINVAL;
    if (numel == 0) return 0;
    if (src == nullptr) return -EINVAL;
    ingest(*threads, {dst, src, block_sums, dst_dtype, src_dtype, numel, accumulate != 0}, start_index, checksums);
    return 0;
}

int offload_gradients_ingest(offload_threads* threads, void* dst, int32_t dtype, int64_t first_index, const offload_ingest_part* parts,
                             const void* const* sources, int64_t part_count) {
    using namespace offload;
    if (threads == nullptr || dst == nullptr || !is_dtype(dtype) || first_index < 0) return -EINVAL;
    if (part_count < 0 || (part_count > 0 && (parts == nullptr || sources == nullptr))) return -EINVAL;
    for (int64_t i = 0; i < part_count; ++i) {
        const offload_ingest_part& part = parts[i];
        if (!is_range(part.numel, part.start_index) || part.start_index < first_index) return -EINVAL;
        if (part.numel > 0 && sources[i] == nullptr) return -EINVAL;
    }
    for (int64_t i = 0; i < part_count; ++i) {
        const offload_ingest_part& part = parts[i];
        if (part.numel == 0) continue;
        char* const place = static_cast<char*>(dst) + (part.start_index - first_index) * element_nbytes(dtype);
        ingest(*threads, {place, sources[i], part.block_sums, dtype, dtype, part.numel, false}, part.start_index, nullptr);
    }
    return 0;
}

int offload_convert(offload_threads* threads, void* dst, int32_t dst_dtype, const void* src, int32_t src_dtype, int64_t numel) {
    using namespace offload;
    if (threads == nullptr || numel < 0 || !is_dtype(dst_dtype) || !is_dtype(src_dtype)) return -EINVAL;
    if (numel == 0) return 0;
    if (dst == nullptr || src == nullptr) return -EINVAL;
    convert(*threads, dst, dst_dtype, src, src_dtype, numel);
    return 0;
}

} // extern "C"
