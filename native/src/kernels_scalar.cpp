// SPDX-License-Identifier: Apache-2.0
#include "element.h"

namespace offload {
namespace {
using Vector = Together<ElementVector, 16>;
using Block = PlainBlock<Vector>;
using Group = PlainGroup<Vector>;
} // namespace
} // namespace offload

#include "kernels.inc"

namespace offload {
const Kernels kKernelsScalar = make_kernels(OFFLOAD_SIMD_SCALAR);
}
