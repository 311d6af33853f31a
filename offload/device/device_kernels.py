"""The compiled kernels for CUDA tensors: where their code comes from, and their launches. Source: `cuda_kernels/kernels.cu`.

Where nvcc was there when the package was built, the kernels were compiled then, for every major architecture, into one file
beside the native library, and nothing is compiled at run time. Where it was not, CuPy compiles the same source with NVRTC, at
`initialize` and never within a step, and keeps the result on disk: who installs CuPy beside a build without nvcc asks
for exactly that. Without CuPy, which launches them, or where it cannot load them, `offload.device.kernels` uses torch
operations that give the same bits and move some ten times the bytes.

A launch goes to the calling thread's current stream of the tensor's device and returns at once. Any thread may launch.
"""

from __future__ import annotations

import importlib
import math
import warnings
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from offload import _native_library

if TYPE_CHECKING:
    from offload.device.rules import Hyper
    from offload.device.updating import Segment

SOURCE = Path(__file__).parent / "cuda_kernels" / "kernels.cu"
COMPILED_NAME = "offload_cuda_kernels.fatbin"
COMPILE_OPTIONS = ("--std=c++17", "--fmad=false", "--ftz=false", "--prec-div=true", "--prec-sqrt=true")
"""For NVRTC; nvcc is given the same. Every operation says its rounding anyway."""

_CODES = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2}
_NO_TENSOR = 3
_THREADS = 256
_BLOCKS_MOST = 1 << 20
_BLOCK_NUMEL = 4096
_WARP = 32


@dataclass(frozen=True, slots=True)
class AdamScalars:
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

    def arguments(self) -> tuple[Any, ...]:
        return tuple(getattr(self, name) for name in self.__slots__)


class Launcher:
    """Calls an entry point by name on a CUDA stream. `cupy` is the module; `module` its RawModule."""

    def __init__(self, cupy: Any, module: Any, device_index: int) -> None:
        self._cupy, self._module, self._device_index = cupy, module, device_index
        self._functions: dict[str, Any] = {}

    def __call__(self, name: str, block_count: int, arguments: tuple[Any, ...]) -> None:
        function = self._functions.get(name)
        if function is None:
            function = self._functions[name] = self._module.get_function(name)
        stream = _ForeignStream(torch.cuda.current_stream(self._device_index).cuda_stream)
        with self._cupy.cuda.Device(self._device_index), _cupy_stream(self._cupy, stream):
            function((min(block_count, _BLOCKS_MOST),), (_THREADS,), arguments)


@dataclass(frozen=True, slots=True)
class _ForeignStream:
    """A stream of torch's, as the CUDA stream protocol wants it."""

    address: int

    def __cuda_stream__(self) -> tuple[int, int]:
        return 0, self.address


def _cupy_stream(cupy: Any, stream: _ForeignStream) -> Any:
    from_external = getattr(cupy.cuda.Stream, "from_external", None)  # CuPy 14
    return from_external(stream) if from_external is not None else cupy.cuda.ExternalStream(stream.address)


class DeviceKernels:
    """The launches, with the contracts of `offload.device.kernels`. Tensors are 1-D and contiguous, on one device."""

    def __init__(self, launch: Any) -> None:
        """`launch(name, block_count, arguments)`: a `Launcher`, or what stands in for one in tests."""
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
        scalars = AdamScalars.of(segment.hyper, segment.step, segment.signed_factor)
        arguments = (*map(np.uint64, addresses), np.int64(numel), *scalars.arguments(), np.int32(aligned))
        self._launch(name, -(-numel // (4 * _THREADS)), arguments)

    def ingest(self, dst: Tensor | None, src: Tensor, offset: int, accumulate: bool, sums: Tensor) -> None:
        """Store or add `src`, sum the squares; `offset`: of the first element in the first block."""
        name = f"offload_ingest_{_CODES[src.dtype]}_{_NO_TENSOR if dst is None else _CODES[dst.dtype]}"
        addresses = (0 if dst is None else dst.data_ptr(), src.data_ptr(), sums.data_ptr())
        arguments = (*map(np.uint64, addresses), np.int64(src.numel()), np.int64(offset), np.int32(accumulate))
        warps = -(-(offset + src.numel()) // _BLOCK_NUMEL)
        self._launch(name, -(-warps * _WARP // _THREADS), arguments)

    def convert(self, dst: Tensor, src: Tensor) -> None:
        """dst = src in dst's dtype."""
        if src.numel() == 0:
            return
        arguments = (np.uint64(dst.data_ptr()), np.uint64(src.data_ptr()), np.int64(src.numel()))
        self._launch(f"offload_convert_{_CODES[src.dtype]}_{_CODES[dst.dtype]}", -(-src.numel() // _THREADS), arguments)


_prepared: dict[int, DeviceKernels | None] = {}


def prepare(device: torch.device) -> None:
    """Load the kernels for a CUDA device, once; compile them if the package was built without nvcc. Seconds at most."""
    assert device.index is not None
    if device.index not in _prepared:
        _prepared[device.index] = _load(device.index)


def of(device: torch.device) -> DeviceKernels | None:
    """The kernels for tensors of `device`, where `prepare` found them."""
    return _prepared.get(device.index) if device.type == "cuda" else None


def compiled_path() -> Path | None:
    """The kernels as the build compiled them; None where it had no nvcc."""
    return next((path for path in _native_library.installed_paths(COMPILED_NAME) if path.is_file()), None)


def _load(device_index: int) -> DeviceKernels | None:
    try:
        cupy = importlib.import_module("cupy")
    except ImportError:
        return None
    path = compiled_path()
    try:
        if path is not None:
            module = cupy.RawModule(path=str(path))
        else:
            module = cupy.RawModule(code=SOURCE.read_text(), options=COMPILE_OPTIONS, backend="nvrtc")
        kernels = DeviceKernels(Launcher(cupy, module, device_index))
        _try_out(kernels, torch.device("cuda", device_index))
    except Exception as error:  # whatever CuPy, the driver or NVRTC have to say: training goes on without them
        warnings.warn(
            f"the CUDA kernels cannot be used ({type(error).__name__}: {error}): torch operations give the same bits, slower. "
            "Look at the installation of CuPy, or build the package with nvcc.",
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
