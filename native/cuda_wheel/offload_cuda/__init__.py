# SPDX-License-Identifier: Apache-2.0
"""The CUDA kernels of offload, compiled when this package was built. offload finds them; there is nothing to import."""
