// SPDX-License-Identifier: Apache-2.0
// The part of libcuda.so.1 that offload/device/arithmetic/driver.py calls, played on the host: kernels run there, at their launch, and
// calls that a real driver would refuse, or that were asked to fail, return its codes. Compiled by tests/device/test_driver.py.
#include "host_cuda.cpp"

#include <cstdio>
#include <cstdlib>
#include <string>

namespace {

int context_of_device, other_context, module_handle;
thread_local std::vector<void*> contexts;
std::string failing, log_text;
int failing_code = 0;
int init_count = 0, retained_count = 0;
const char* entry_names[4096];
int entry_count = 0;

int result(const char* name) { return failing == name ? failing_code : 0; }

void run_kernel(const char* name, int blocks, int threads, void** parameters) {
    int source = 0, target = 0;
    if (std::sscanf(name, "offload_adam_pieces_%d_%d", &source, &target) == 2)
        run_adam(source, target, blocks, threads, parameters[0]);
    else if (std::sscanf(name, "offload_ingest_pieces_%d_%d", &source, &target) == 2)
        run_ingest(source, target, blocks, threads, parameters[0]);
    else if (std::sscanf(name, "offload_convert_%d_%d", &source, &target) == 2)
        run_convert(source, target, blocks, threads, parameters[0]);
}

} // namespace

extern "C" {

// ---- for the test

void fake_fail(const char* name, int code) {
    failing = name;
    failing_code = code;
}
const char* fake_log() { return log_text.c_str(); }
void fake_reset() { failing.clear(), log_text.clear(), contexts.clear(); }
int fake_context_depth() { return static_cast<int>(contexts.size()); }
void fake_enter_other_context() { contexts.push_back(&other_context); }

// ---- the driver

int cuInit(unsigned) {
    ++init_count;
    return result("cuInit");
}
int cuDeviceGet(int* device, int ordinal) {
    if (init_count == 0) return 3; // CUDA_ERROR_NOT_INITIALIZED
    *device = 100 + ordinal;
    return result("cuDeviceGet");
}
int cuDevicePrimaryCtxRetain(void** context, int device) {
    if (device < 100) return 101; // CUDA_ERROR_INVALID_DEVICE: an ordinal is no device
    *context = &context_of_device;
    ++retained_count;
    return result("cuDevicePrimaryCtxRetain");
}
int cuCtxPushCurrent_v2(void* context) {
    const int code = result("cuCtxPushCurrent_v2");
    if (code == 0) contexts.push_back(context);
    return code;
}
int cuCtxPopCurrent_v2(void** context) {
    if (contexts.empty()) return 201; // CUDA_ERROR_INVALID_CONTEXT
    *context = contexts.back();
    contexts.pop_back();
    return result("cuCtxPopCurrent_v2");
}
int cuModuleLoad(void** module, const char* path) {
    if (contexts.empty() || contexts.back() != &context_of_device) return 201;
    log_text += std::string("load ") + path + "\n";
    *module = &module_handle;
    return result("cuModuleLoad");
}
int cuModuleGetFunction(void** function, void* module, const char* name) {
    if (module != &module_handle || entry_count == 4096) return 400; // CUDA_ERROR_INVALID_HANDLE
    entry_names[entry_count] = strdup(name);
    *function = &entry_names[entry_count++];
    return result("cuModuleGetFunction");
}
int cuLaunchKernel(void* function, unsigned gx, unsigned gy, unsigned gz, unsigned bx, unsigned by, unsigned bz, unsigned shared,
                   void* stream, void** parameters, void** extra) {
    if (contexts.empty() || contexts.back() != &context_of_device) return 201;
    if (gy != 1 || gz != 1 || by != 1 || bz != 1 || shared != 0 || extra != nullptr || gx == 0) return 1; // CUDA_ERROR_INVALID_VALUE
    const char* name = *static_cast<const char**>(function);
    char line[160];
    std::snprintf(line, sizeof line, "launch %s %u %u stream %llu\n", name, gx, bx,
                  static_cast<unsigned long long>(reinterpret_cast<uintptr_t>(stream)));
    log_text += line;
    const int code = result("cuLaunchKernel");
    // Three blocks of two warps do it all in turns, with a thread of the host for each.
    if (code == 0) run_kernel(name, gx < 3 ? static_cast<int>(gx) : 3, 64, parameters);
    return code;
}
int cuGetErrorName(int code, const char** text) {
    if (code != 700) return 1;
    *text = "CUDA_ERROR_ILLEGAL_ADDRESS";
    return 0;
}
int cuGetErrorString(int code, const char** text) {
    if (code != 700) return 1;
    *text = "an illegal memory access was encountered";
    return 0;
}

} // extern "C"
