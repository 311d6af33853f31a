// SPDX-License-Identifier: Apache-2.0
// What the processor and the scheduler offer.
#ifndef OFFLOAD_CPU_H
#define OFFLOAD_CPU_H

namespace offload {

// Physical cores that own at least one CPU of the calling thread's affinity mask; at least 1. Thread-safe.
int physical_core_count();

} // namespace offload

#endif
