# SPDX-License-Identifier: Apache-2.0
"""The compiled kernels for CUDA tensors: where their code lies, and their launches. Source: `cuda_kernels/kernels.cu`.

They are compiled when the package is built: by nvcc into one file for every major architecture, or where there is no
nvcc by NVRTC into one file for each. They lie beside the native library, and the driver loads and launches them
(`offload.device.arithmetic.driver`); nothing is compiled at run time. Where they are missing or do not load, which is said
once, `offload.device.arithmetic.kernels` uses torch operations that give the same bits and move some ten times the bytes.

A launch goes to the calling thread's current stream of the tensor's device and returns at once. Any thread may launch.
"""

from __future__ import annotations

import math
import warnings
from functools import lru_cache
from pathlib import Path
from struct import Struct
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from offload import _native_library
from offload.device.arithmetic.driver import Kernels
from offload.device.arithmetic.rules import Hyper, Rule
from offload.device.arithmetic.segment import Segment

SOURCE = Path(__file__).parent / "cuda_kernels" / "kernels.cu"
COMPILED_NAME = "offload_cuda_kernels"

_CODES = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2}
_NO_TENSOR = 3
_THREADS = 256
_BLOCKS_MOST = 1 << 20
_BLOCK_NUMEL = 4096
_WARP = 32

# The parameters of kernels.cu, field by field.
_ADAM, _SCALARS = Struct("=5Qq"), Struct("=8f2i")
_INGEST = Struct("=3Q2qi4x")
_FLAG = Struct("=i4x")
_CONVERT = Struct("=2Qq")
_NUMBERS = Struct("=5d?qd")


class AdamScalars(NamedTuple):
    """The numbers of one Adam step, each rounded to fp32 once, as `scalars_of` in native/src/update.cpp makes them."""

    grad_factor: np.float32
    weight_decay: np.float32
    lerp_coefficient: np.float32
    beta2: np.float32
    one_minus_beta2: np.float32
    sqrt_bias_correction2: np.float32
    eps: np.float32
    negative_step_size: np.float32
    l2: np.int32
    lerp_from_grad: np.int32

    @staticmethod
    def of(hyper: Hyper, step: int, grad_factor: float) -> AdamScalars:
        bias_correction1, bias_correction2 = 1.0 - hyper.beta1**step, 1.0 - hyper.beta2**step
        weight = np.float32(1.0 - hyper.beta1)
        l2 = not hyper.decoupled and hyper.weight_decay != 0.0
        # Without decay the weight is multiplied by exactly 1, which is no operation.
        decay = hyper.weight_decay if l2 else (1.0 - hyper.lr * hyper.weight_decay if hyper.decoupled else 1.0)
        lerp_from_grad = not abs(weight) < np.float32(0.5)
        return AdamScalars(
            grad_factor=np.float32(grad_factor),
            weight_decay=np.float32(decay),
            lerp_coefficient=weight - np.float32(1.0) if lerp_from_grad else weight,
            beta2=np.float32(hyper.beta2),
            one_minus_beta2=np.float32(1.0 - hyper.beta2),
            sqrt_bias_correction2=np.float32(math.sqrt(bias_correction2)),
            eps=np.float32(hyper.eps),
            negative_step_size=np.float32(-(hyper.lr / bias_correction1)),
            l2=np.int32(l2),
            lerp_from_grad=np.int32(lerp_from_grad),
        )

    def packed(self) -> bytes:
        """As the kernel has them."""
        return _SCALARS.pack(*(one.item() for one in self))


def scalars_of(segment: Segment) -> bytes:
    """Packed; most segments of a step have the same."""
    hyper = segment.hyper
    numbers = hyper.lr, hyper.beta1, hyper.beta2, hyper.eps, hyper.weight_decay
    return _packed_scalars(_NUMBERS.pack(*numbers, hyper.decoupled, segment.step, segment.signed_factor))


@lru_cache
def _packed_scalars(numbers: bytes) -> bytes:
    """By the bits of the numbers: of two zeros that are equal each has its own."""
    lr, beta1, beta2, eps, weight_decay, decoupled, step, grad_factor = _NUMBERS.unpack(numbers)
    hyper = Hyper(Rule.ADAM, lr, beta1, beta2, eps, weight_decay, decoupled=decoupled)
    return AdamScalars.of(hyper, step, grad_factor).packed()


class Launcher:
    """Calls an entry point by name on torch's current stream of a device."""

    def __init__(self, path: Path, device_index: int) -> None:
        self._kernels, self._device_index = Kernels(path, entry_points(), device_index), device_index

    def __call__(self, name: str, block_count: int, parameter: bytes) -> None:
        stream = torch._C._cuda_getCurrentRawStream(self._device_index)  # the address alone: no object is made for it
        self._kernels.launch(name, min(block_count, _BLOCKS_MOST), _THREADS, stream, parameter)


def entry_points() -> list[str]:
    """The name of every kernel: offload_<what>_<dtype codes>."""
    sources = _CODES.values()
    names = [f"offload_{what}_{s}_{t}" for what in ("adam", "ingest") for s in sources for t in (*sources, _NO_TENSOR)]
    return names + [f"offload_convert_{s}_{t}" for s in sources for t in sources if s != t]


class DeviceKernels:
    """The launches, with the contracts of `arithmetic/kernels.py`. Tensors are 1-D and contiguous, on one device."""

    def __init__(self, launch: Any) -> None:
        """`launch(name, block_count, parameter)`: a `Launcher`, or what stands in for one in tests."""
        self._launch = launch

    def adam(self, segment: Segment) -> None:
        """One Adam step on one segment with fp32 states."""
        numel, emit = segment.grad.numel(), segment.values
        if numel == 0:
            return
        tensors = (segment.grad, *(segment.arrays[name] for name in ("master", "exp_avg", "exp_avg_sq")), emit)
        addresses = [0 if tensor is None else tensor.data_ptr() for tensor in tensors]
        aligned = all(address % 16 == 0 for address in addresses)
        name = f"offload_adam_{_CODES[segment.grad.dtype]}_{_NO_TENSOR if emit is None else _CODES[emit.dtype]}"
        parameter = _ADAM.pack(*addresses, numel) + scalars_of(segment) + _FLAG.pack(aligned)
        self._launch(name, -(-numel // (4 * _THREADS)), parameter)

    def ingest(self, dst: Tensor | None, src: Tensor, offset: int, accumulate: bool, sums: Tensor) -> None:
        """Store or add `src`, sum the squares; `offset`: of the first element in the first block."""
        name = f"offload_ingest_{_CODES[src.dtype]}_{_NO_TENSOR if dst is None else _CODES[dst.dtype]}"
        addresses = (0 if dst is None else dst.data_ptr(), src.data_ptr(), sums.data_ptr())
        warps = -(-(offset + src.numel()) // _BLOCK_NUMEL)
        self._launch(name, -(-warps * _WARP // _THREADS), _INGEST.pack(*addresses, src.numel(), offset, accumulate))

    def convert(self, dst: Tensor, src: Tensor) -> None:
        """dst = src in dst's dtype."""
        if src.numel() == 0:
            return
        parameter = _CONVERT.pack(dst.data_ptr(), src.data_ptr(), src.numel())
        self._launch(f"offload_convert_{_CODES[src.dtype]}_{_CODES[dst.dtype]}", -(-src.numel() // _THREADS), parameter)


_prepared: dict[int, DeviceKernels | None] = {}


def prepare(device: torch.device) -> None:
    """Load the kernels for a CUDA device, once. Where that cannot be done a `RuntimeWarning` says why, once."""
    assert device.index is not None
    if device.index not in _prepared:
        _prepared[device.index] = _load(device)


def of(device: torch.device) -> DeviceKernels | None:
    """The kernels for tensors of `device`, where `prepare` found them."""
    return _prepared.get(device.index) if device.type == "cuda" else None


def compiled_path(capability: tuple[int, int]) -> Path | None:
    """The kernels as the build compiled them, for devices of a compute capability; None where it compiled none.

    nvcc's file holds all architectures; NVRTC makes one for each. Code for a capability runs on later ones of the same major.
    """
    major, minor = capability
    names = ["fatbin", *(f"sm_{major}{at_most}.cubin" for at_most in range(minor, -1, -1))]
    paths = [path for name in names for path in _native_library.installed_paths(f"{COMPILED_NAME}.{name}")]
    return next((path for path in paths if path.is_file()), None)


def _load(device: torch.device) -> DeviceKernels | None:
    capability = torch.cuda.get_device_capability(device)
    try:
        path = compiled_path(capability)
        if path is None:
            raise FileNotFoundError("the package was built without them for compute capability {}.{}".format(*capability))
        kernels = DeviceKernels(Launcher(path, device.index))
        _try_out(kernels, device)
    except (OSError, AttributeError, RuntimeError) as error:  # no file, no driver, a driver without a function; what it refuses
        warnings.warn(
            f"the CUDA kernels cannot be used ({error}): torch operations give the same bits with about ten times the traffic "
            "in device memory, and take up to 0.1 GiB of it more than planned. Install offload-cuda, or build the package with "
            "-C cmake.define.OFFLOAD_CUDA_KERNELS=ON: see docs/gpu.md.",
            RuntimeWarning,
            stacklevel=2,
        )
        return None
    return kernels


def _try_out(kernels: DeviceKernels, device: torch.device) -> None:
    """Launch once, so that what cannot run is known before the first step."""
    values = torch.full((_BLOCK_NUMEL,), 2.0, device=device)
    sums = torch.empty(1, dtype=torch.float64, device=device)
    kernels.ingest(None, values, 0, False, sums)
    if sums.item() != 4.0 * _BLOCK_NUMEL:
        raise RuntimeError("a kernel gave a wrong sum")
