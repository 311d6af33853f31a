// SPDX-License-Identifier: Apache-2.0
// Anonymous memory: arenas of exact size, and ranges of addresses whose pages can be exchanged.
#include <sys/mman.h>
#include <unistd.h>

#include <cerrno>
#include <cstdint>

#include "offload.h"

// Missing in older headers; the kernel decides whether it knows them.
#if !defined(MREMAP_DONTUNMAP)
#define MREMAP_DONTUNMAP 4
#endif

namespace offload {
namespace {

constexpr int64_t kHugePageNbytes = int64_t{2} << 20;
constexpr int64_t kMappingMax = int64_t{1} << 46;

int64_t page_nbytes() {
    static const int64_t value = sysconf(_SC_PAGESIZE);
    return value;
}

bool is_multiple(const void* address, int64_t of) { return reinterpret_cast<uintptr_t>(address) % static_cast<uintptr_t>(of) == 0; }

// Maps more than is needed and gives back what lies before the boundary and behind the end.
int map_aligned(int64_t nbytes, int protection, int extra_flags, char** out) {
    const int64_t reserved_nbytes = nbytes + kHugePageNbytes;
    void* reserved = mmap(nullptr, static_cast<size_t>(reserved_nbytes), protection, MAP_PRIVATE | MAP_ANONYMOUS | extra_flags, -1, 0);
    if (reserved == MAP_FAILED) return -errno;
    char* const begin = static_cast<char*>(reserved);
    const int64_t misalignment = static_cast<int64_t>(reinterpret_cast<uintptr_t>(begin) % static_cast<uintptr_t>(kHugePageNbytes));
    const int64_t head_nbytes = misalignment == 0 ? 0 : kHugePageNbytes - misalignment;
    const int64_t tail_nbytes = reserved_nbytes - head_nbytes - nbytes;
    char* const aligned = begin + head_nbytes;
    if (head_nbytes > 0) munmap(begin, static_cast<size_t>(head_nbytes));
    if (tail_nbytes > 0) munmap(aligned + nbytes, static_cast<size_t>(tail_nbytes));
    *out = aligned;
    return 0;
}

int pages_move(void* from, void* to, int64_t nbytes) {
    const size_t size = static_cast<size_t>(nbytes);
    // DONTUNMAP keeps `from` mapped, so that no other thread's mmap can land there before it is reserved again.
    if (mremap(from, size, size, MREMAP_MAYMOVE | MREMAP_FIXED | MREMAP_DONTUNMAP, to) == MAP_FAILED) return -errno;
    if (mmap(from, size, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE | MAP_FIXED, -1, 0) == MAP_FAILED) return -errno;
    return 0;
}

bool probe_pages_move() {
    char* from = nullptr;
    char* to = nullptr;
    if (map_aligned(kHugePageNbytes, PROT_READ | PROT_WRITE, 0, &from) != 0) return false;
    bool works = false;
    if (map_aligned(kHugePageNbytes, PROT_NONE, MAP_NORESERVE, &to) == 0) {
        from[0] = 1;
        works = pages_move(from, to, kHugePageNbytes) == 0 && to[0] == 1;
        munmap(to, static_cast<size_t>(kHugePageNbytes));
    }
    munmap(from, static_cast<size_t>(kHugePageNbytes));
    return works;
}

bool is_huge_page_range(const void* address, int64_t nbytes) {
    return address != nullptr && nbytes > 0 && nbytes <= kMappingMax && nbytes % kHugePageNbytes == 0 &&
           is_multiple(address, kHugePageNbytes);
}

} // namespace
} // namespace offload

extern "C" {

int offload_arena_create(int64_t nbytes, int32_t flags, void** out, int64_t* mapped_nbytes) {
    using namespace offload;
    if (out == nullptr || mapped_nbytes == nullptr || nbytes < 1 || nbytes > kMappingMax) return -EINVAL;
    if ((flags & ~OFFLOAD_ARENA_HUGE_PAGES) != 0) return -EINVAL;
    const int64_t size = (nbytes + page_nbytes() - 1) / page_nbytes() * page_nbytes();
    char* address = nullptr;
    const int status = map_aligned(size, PROT_READ | PROT_WRITE, 0, &address);
    if (status != 0) return status;
    if ((flags & OFFLOAD_ARENA_HUGE_PAGES) != 0)
        (void)madvise(address, static_cast<size_t>(size), MADV_HUGEPAGE); // advice: a refusal is fine
    *out = address;
    *mapped_nbytes = size;
    return 0;
}

int offload_arena_destroy(void* address, int64_t mapped_nbytes) {
    if (address == nullptr || mapped_nbytes < 1 || !offload::is_multiple(address, offload::page_nbytes())) return -EINVAL;
    return munmap(address, static_cast<size_t>(mapped_nbytes)) == 0 ? 0 : -errno;
}

int32_t offload_pages_supported(void) {
    static const bool supported = offload::probe_pages_move();
    return supported ? 1 : 0;
}

int offload_pages_reserve(int64_t nbytes, void** out) {
    using namespace offload;
    if (out == nullptr || nbytes < 1 || nbytes > kMappingMax || nbytes % kHugePageNbytes != 0) return -EINVAL;
    char* address = nullptr;
    const int status = map_aligned(nbytes, PROT_NONE, MAP_NORESERVE, &address);
    if (status == 0) *out = address;
    return status;
}

int offload_pages_release(void* address, int64_t nbytes) {
    if (!offload::is_huge_page_range(address, nbytes)) return -EINVAL;
    return munmap(address, static_cast<size_t>(nbytes)) == 0 ? 0 : -errno;
}

int offload_pages_move(void* from, void* to, int64_t nbytes) {
    using namespace offload;
    if (!is_huge_page_range(from, nbytes) || !is_huge_page_range(to, nbytes)) return -EINVAL;
    const uintptr_t a = reinterpret_cast<uintptr_t>(from);
    const uintptr_t b = reinterpret_cast<uintptr_t>(to);
    if (a < b + static_cast<uintptr_t>(nbytes) && b < a + static_cast<uintptr_t>(nbytes)) return -EINVAL;
    return pages_move(from, to, nbytes);
}

} // extern "C"
