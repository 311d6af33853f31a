# SPDX-License-Identifier: Apache-2.0
"""What the arithmetic on flat tensors has in common: checks, and float32 operations with one rounding in torch.

CPU tensors go through the native library, CUDA tensors through the kernels of
`offload.device.arithmetic.compiled_kernels`. Tensors of other devices, and all tensors where those are missing, go through
torch operations that are arranged to give the same bits.
"""

from __future__ import annotations

import math
from collections.abc import Iterator

import numpy
import torch
from torch import Tensor

from offload import _native
from offload.device.virtual.current import virtual_machine

DTYPE_CODES = {torch.float32: _native.F32, torch.bfloat16: _native.BF16, torch.float16: _native.F16}
# Elements that the torch forms work on at a time: about ten float64 temporaries of that size.
_CHUNK_NUMEL_CPU = 1 << 18
_CHUNK_NUMEL_DEVICE = 1 << 20


def uses_native(tensor: Tensor) -> bool:
    return tensor.device.type == "cpu" and _native.available() and virtual_machine() is None


# Assertions: these are the contract between our own layers, and native code behind a wrong size would corrupt memory.


def check_flat(name: str, tensor: Tensor, numel: int, device: torch.device) -> None:
    if tensor.dtype not in DTYPE_CODES or not tensor.is_contiguous():
        raise AssertionError(f"{name} must be contiguous float32, bfloat16 or float16, not {tensor.dtype}")
    if tensor.shape != (numel,) or tensor.device != device:
        expected = f"{numel} elements in one dimension on {device}"
        raise AssertionError(f"{name} must have {expected}, not {tuple(tensor.shape)} on {tensor.device}")


def chunk_numel(device: torch.device) -> int:
    """Elements that a torch form works on at a time; a multiple of every block and group."""
    return _CHUNK_NUMEL_CPU if device.type == "cpu" else _CHUNK_NUMEL_DEVICE


def chunks(tensor: Tensor) -> Iterator[slice]:
    step = chunk_numel(tensor.device)
    for start in range(0, tensor.numel(), step):
        yield slice(start, min(start + step, tensor.numel()))


def f32(value: float) -> float:
    return float(numpy.float32(value))


def store(dst: Tensor, value: Tensor) -> None:
    """dst = value (float32), with the canonical NaN where dst is narrower: torch's casts differ in their NaN."""
    dst.copy_(value)
    if dst.dtype != torch.float32:
        dst.masked_fill_(value.isnan(), math.nan)


def fma(a: Tensor | float, b: Tensor, c: Tensor) -> Tensor:
    """a * b + c of float32 values with one rounding.

    The product of two floats is exact in double. Their sum s with c is not; its error e is found by Knuth's TwoSum, and
    s is moved to the neighbour with an odd last bit (round to odd), from where rounding to float is right
    (Boldo and Melquiond, "Emulation of FMA and correctly rounded sums: proved algorithms using rounding to odd", 2008).
    """
    product = b.double() * a
    addend = c.double()
    total = product + addend
    virtual = total - product
    error = (product - (total - virtual)) + (addend - virtual)
    bits = total.view(torch.int64)
    to_odd = (error != 0) & total.isfinite() & ((bits & 1) == 0)
    # One up in the bits is away from zero, whatever the sign.
    away = torch.where((error > 0) == (total > 0), 1, -1)
    return torch.where(to_odd, bits + away, bits).view(torch.float64).float()
