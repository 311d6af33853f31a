// SPDX-License-Identifier: Apache-2.0
#include "cpu.h"

#include <sched.h>
#if defined(OFFLOAD_HAVE_X86)
#include <cpuid.h>
#endif

#include <atomic>
#include <cerrno>
#include <cstdio>
#include <cstdlib>
#include <set>
#include <string>

#include "kernels.h"
#include "offload.h"

namespace offload {
namespace {

// The first CPU of a core's list of hyperthreads ("3,35" or "3-4") names the core; -1 where sysfs does not say.
int core_of_cpu(int cpu) {
    const std::string path = "/sys/devices/system/cpu/cpu" + std::to_string(cpu) + "/topology/thread_siblings_list";
    std::FILE* file = std::fopen(path.c_str(), "re");
    if (file == nullptr) return -1;
    int first = -1;
    if (std::fscanf(file, "%d", &first) != 1) first = -1;
    std::fclose(file);
    return first;
}

#if defined(OFFLOAD_HAVE_X86)
// By cpuid, and not by __builtin_cpu_supports: that asks the compiler's run-time library, and zig's answers no to everything.
struct X86 {
    unsigned leaf1_ecx = 0, leaf7_ebx = 0;
    uint64_t saved = 0; // XCR0: the registers that the system keeps when it changes threads

    X86() {
        unsigned eax = 0, ebx = 0, ecx = 0, edx = 0;
        if (__get_cpuid(1, &eax, &ebx, &leaf1_ecx, &edx) == 0) return;
        if ((leaf1_ecx & bit_OSXSAVE) != 0) {
            __asm__ volatile("xgetbv" : "=a"(eax), "=d"(edx) : "c"(0));
            saved = static_cast<uint64_t>(edx) << 32 | eax;
        }
        (void)__get_cpuid_count(7, 0, &eax, &leaf7_ebx, &ecx, &edx);
    }

    bool has(uint64_t registers, unsigned leaf1, unsigned leaf7) const {
        return (saved & registers) == registers && (leaf1_ecx & leaf1) == leaf1 && (leaf7_ebx & leaf7) == leaf7;
    }
};

constexpr uint64_t kYmm = 0x06, kZmm = 0xe6;
#endif

bool cpu_runs(const Kernels& table) {
#if defined(OFFLOAD_HAVE_X86)
    static const X86 cpu;
#endif
    switch (table.level) {
#if defined(OFFLOAD_HAVE_X86)
    case OFFLOAD_SIMD_AVX2: return cpu.has(kYmm, bit_FMA | bit_F16C, bit_AVX2);
    case OFFLOAD_SIMD_AVX512: return cpu.has(kZmm, bit_FMA | bit_F16C, bit_AVX2 | bit_AVX512F | bit_AVX512DQ | bit_AVX512BW | bit_AVX512VL);
#endif
    default: return true;
    }
}

const Kernels* const kTablesBestFirst[] = {
#if defined(OFFLOAD_HAVE_X86)
    &kKernelsAvx512,
    &kKernelsAvx2,
#endif
#if defined(OFFLOAD_HAVE_NEON)
    &kKernelsNeon,
#endif
    &kKernelsScalar,
};

const Kernels* table_for(int32_t level) {
    for (const Kernels* table : kTablesBestFirst)
        if ((level == OFFLOAD_SIMD_BEST || level == table->level) && cpu_runs(*table)) return table;
    return nullptr;
}

std::atomic<const Kernels*> chosen_table{nullptr};

} // namespace

int physical_core_count() {
    // A mask larger than the fixed cpu_set_t exists on machines with more than 1024 CPUs.
    for (int cpu_limit = CPU_SETSIZE; cpu_limit <= (1 << 20); cpu_limit *= 4) {
        cpu_set_t* mask = CPU_ALLOC(static_cast<size_t>(cpu_limit));
        if (mask == nullptr) return 1;
        const size_t mask_nbytes = CPU_ALLOC_SIZE(static_cast<size_t>(cpu_limit));
        if (sched_getaffinity(0, mask_nbytes, mask) != 0) {
            const bool too_small = errno == EINVAL;
            CPU_FREE(mask);
            if (too_small) continue;
            return 1;
        }
        std::set<int> cores;
        int unnamed_count = 0;
        for (int cpu = 0; cpu < cpu_limit; ++cpu) {
            if (!CPU_ISSET_S(static_cast<size_t>(cpu), mask_nbytes, mask)) continue;
            const int core = core_of_cpu(cpu);
            if (core >= 0) {
                cores.insert(core);
            } else {
                ++unnamed_count;
            }
        }
        CPU_FREE(mask);
        const int count = static_cast<int>(cores.size()) + unnamed_count;
        return count > 0 ? count : 1;
    }
    return 1;
}

const Kernels& kernels() {
    const Kernels* table = chosen_table.load(std::memory_order_acquire);
    if (table == nullptr) {
        table = table_for(OFFLOAD_SIMD_BEST);
        const Kernels* expected = nullptr;
        if (!chosen_table.compare_exchange_strong(expected, table, std::memory_order_acq_rel)) table = expected;
    }
    return *table;
}

} // namespace offload

#define OFFLOAD_TEXT_OF(value) #value
#define OFFLOAD_TEXT(value) OFFLOAD_TEXT_OF(value)

#if defined(__clang__)
#define OFFLOAD_COMPILER "clang " __clang_version__
#else
#define OFFLOAD_COMPILER "gcc " __VERSION__
#endif

#if defined(OFFLOAD_HAVE_X86)
#define OFFLOAD_SIMD_TEXT "scalar, avx2, avx512"
#elif defined(OFFLOAD_HAVE_NEON)
#define OFFLOAD_SIMD_TEXT "scalar, neon"
#else
#define OFFLOAD_SIMD_TEXT "scalar"
#endif

extern "C" {

int32_t offload_abi_version(void) { return OFFLOAD_ABI_VERSION; }

const char* offload_build_info(void) {
    return "abi " OFFLOAD_TEXT(OFFLOAD_ABI_VERSION) "; compiler " OFFLOAD_COMPILER
                                                    "; io_uring yes (by system calls); simd " OFFLOAD_SIMD_TEXT;
}

int32_t offload_simd_level(void) { return offload::kernels().level; }

int offload_set_simd_level(int32_t level) {
    if (level < OFFLOAD_SIMD_BEST || level > OFFLOAD_SIMD_NEON) return -EINVAL;
    const offload::Kernels* table = offload::table_for(level);
    if (table == nullptr) return -ENOTSUP;
    offload::chosen_table.store(table, std::memory_order_release);
    return 0;
}

} // extern "C"
