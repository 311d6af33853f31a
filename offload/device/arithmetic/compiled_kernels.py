# SPDX-License-Identifier: Apache-2.0
"""The compiled kernels for CUDA tensors: where their code lies, and their launches. Source: `cuda_kernels/kernels.cu`.

They are compiled when the package is built: by nvcc into one file for every major architecture, or where there is no
nvcc by NVRTC into one file for each. They lie beside the native library, and the driver loads and launches them
(`offload.device.arithmetic.driver`); nothing is compiled at run time. Where they are missing or do not load, which is said
once, `offload.device.arithmetic.kernels` uses torch operations that give the same bits and move some ten times the bytes.

A launch goes to the calling thread's current stream of the tensors' device and returns at once. Any thread may launch. Adam and
ingest take many pieces in one launch, as many as its parameter holds; their bits are those of one launch for each.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Iterable, Sequence
from functools import lru_cache
from pathlib import Path
from struct import Struct
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from offload import _native, _native_library
from offload.device.arithmetic.driver import PARAMETER_NBYTES, Kernels
from offload.device.arithmetic.flat import DTYPE_CODES
from offload.device.arithmetic.rules import Hyper, Rule

SOURCE = Path(__file__).parent / "cuda_kernels" / "kernels.cu"
COMPILED_NAME = "offload_cuda_kernels"

NO_TENSOR = 3
"""In the place of a dtype's code."""
_ADAM, _FP32 = _native.RULES[Rule.ADAM.value], _native.STATE_FORMATS["fp32"]
_THREADS = 256
_BLOCKS_MOST = 1 << 20
_BLOCK_NUMEL = 4096
_TILE_NUMEL = 1024
_WARP = 32

# The parameters of kernels.cu, field by field.
_ADAM_HEAD, _ADAM_PIECE, _SCALARS = Struct("=2i"), Struct("=5Qq2i"), Struct("=8f2i")
_INGEST_HEAD, _INGEST_PIECE = Struct("=3i4x"), Struct("=3Qq2i")
_CONVERT = Struct("=2Qq")
ADAM_PIECES_MOST = (PARAMETER_NBYTES - _ADAM_HEAD.size) // (_ADAM_PIECE.size + _SCALARS.size)
INGEST_PIECES_MOST = (PARAMETER_NBYTES - _INGEST_HEAD.size) // _INGEST_PIECE.size
"""Of one launch."""

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


class AdamPiece(NamedTuple):
    """One run of elements to update: where its arrays begin (`values` 0: nowhere), and the bytes of its `AdamScalars`."""

    grad: int
    master: int
    exp_avg: int
    exp_avg_sq: int
    values: int
    numel: int
    scalars: bytes


class IngestPiece(NamedTuple):
    """One gradient that is taken in: where it begins, its place (`dst` 0: none) and that of its sums. `offset`: of the first
    element in the first block."""

    dst: int
    src: int
    sums: int
    numel: int
    offset: int


def scalars_of(
    lr: float, beta1: float, beta2: float, eps: float, weight_decay: float, decoupled: bool, step: int, grad_factor: float
) -> bytes:
    """The bytes of the `AdamScalars` of these numbers, which many pieces of a step have in common."""
    return _packed_scalars(_NUMBERS.pack(lr, beta1, beta2, eps, weight_decay, decoupled, step, grad_factor))


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
    """The name of every kernel: offload_<what>_<dtype codes>. A file of kernels with other parameters has other names, and is
    refused as it is loaded."""
    sources, kinds = DTYPE_CODES.values(), ("adam_pieces", "ingest_pieces")
    names = [f"offload_{what}_{s}_{t}" for what in kinds for s in sources for t in (*sources, NO_TENSOR)]
    return names + [f"offload_convert_{s}_{t}" for s in sources for t in sources if s != t]


class DeviceKernels:
    """The launches, with the contracts of `arithmetic/kernels.py`. All tensors are contiguous, on one device. No piece is
    empty, and none overlaps what another of the same call writes."""

    def __init__(self, launch: Any) -> None:
        """`launch(name, block_count, parameter)`: a `Launcher`, or what stands in for one in tests."""
        self._launch = launch

    def update(self, arguments: Iterable[_native.UpdateArguments]) -> None:
        """What `_native.update` does, of what lies on the device: Adam with fp32 states, in place. Empty ones are left out."""
        pieces: dict[tuple[int, int], list[AdamPiece]] = {}
        for one in arguments:
            if one.rule != _ADAM or one.state_format != _FP32 or one.source_distance:
                raise AssertionError("the compiled kernel is that of Adam with fp32 states, in place")
            if one.numel:
                scalars = scalars_of(
                    one.lr, one.beta1, one.beta2, one.eps, one.weight_decay, bool(one.decoupled), one.step, one.grad_factor
                )
                addresses = one.grad, one.master, one.exp_avg, one.exp_avg_sq, one.values
                codes = one.grad_dtype, one.values_dtype if one.values else NO_TENSOR
                pieces.setdefault(codes, []).append(AdamPiece(*addresses, one.numel, scalars))
        for codes, alike in pieces.items():
            self.adam(*codes, alike)

    def adam(self, grad: int, values: int, pieces: Sequence[AdamPiece]) -> None:
        """One Adam step on each piece with fp32 states. The codes of dtypes are those of all pieces; `values` NO_TENSOR: none
        has any."""
        for low in range(0, len(pieces), ADAM_PIECES_MOST):
            some, rows, tiles = pieces[low : low + ADAM_PIECES_MOST], [], 0
            for one in some:
                aligned = (one.grad | one.master | one.exp_avg | one.exp_avg_sq | one.values) % 16 == 0
                rows.append(_ADAM_PIECE.pack(*one[:-1], tiles, aligned) + one.scalars)
                tiles += -(-one.numel // _TILE_NUMEL)
            head = _ADAM_HEAD.pack(len(some), tiles)
            self._launch(f"offload_adam_pieces_{grad}_{values}", tiles, b"".join((head, *rows)))

    def ingest(self, src: int, dst: int, pieces: Sequence[IngestPiece], *, accumulate: bool) -> None:
        """Store or add each piece, sum the squares. The codes of dtypes are those of all pieces; `dst` NO_TENSOR: only the
        sums."""
        for low in range(0, len(pieces), INGEST_PIECES_MOST):
            some, rows, blocks = pieces[low : low + INGEST_PIECES_MOST], [], 0
            for one in some:
                rows.append(_INGEST_PIECE.pack(*one, blocks))
                blocks += -(-(one.offset + one.numel) // _BLOCK_NUMEL)
            head = _INGEST_HEAD.pack(len(some), blocks, accumulate)
            self._launch(f"offload_ingest_pieces_{src}_{dst}", -(-blocks * _WARP // _THREADS), b"".join((head, *rows)))

    def convert(self, dst: Tensor, src: Tensor) -> None:
        """dst = src in dst's dtype."""
        if src.numel() == 0:
            return
        parameter = _CONVERT.pack(dst.data_ptr(), src.data_ptr(), src.numel())
        self._launch(
            f"offload_convert_{DTYPE_CODES[src.dtype]}_{DTYPE_CODES[dst.dtype]}", -(-src.numel() // _THREADS), parameter
        )


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
    piece = IngestPiece(0, values.data_ptr(), sums.data_ptr(), _BLOCK_NUMEL, 0)
    kernels.ingest(DTYPE_CODES[values.dtype], NO_TENSOR, [piece], accumulate=False)
    if sums.item() != 4.0 * _BLOCK_NUMEL:
        raise RuntimeError("a kernel gave a wrong sum")
