"""The arithmetic of training on flat tensors: Adam, gradient ingest, casts.

CPU tensors go through the native library. Tensors of other devices, and all tensors where the library is missing, go
through torch operations that are arranged to give the same bits: a fused multiply-add is emulated in float64, and sums
of squares are added in a defined order. So neither the device nor the library changes a result.

Every tensor here is 1-D and contiguous, of dtype float32, bfloat16 or float16, and those of one call on one device.
On CPU tensors the work is over when a call returns; on a device it is queued on the current stream. Any thread may
call.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy
import torch
from torch import Tensor

from offload import _native

BLOCK_NUMEL = 4096
"""Elements of a block of the sum of squares."""
START_MULTIPLE = 64
"""What the flat index of the first element of an ingest is a multiple of."""
_LANES = 32
_DTYPE_CODES = {torch.float32: _native.F32, torch.bfloat16: _native.BF16, torch.float16: _native.F16}
# Elements that the torch forms work on at a time: about ten float64 temporaries of that size.
_CHUNK_NUMEL_CPU = 1 << 18
_CHUNK_NUMEL_DEVICE = 1 << 20


@dataclass(frozen=True, slots=True)
class AdamHyper:
    """Hyperparameters of `torch.optim.AdamW` (decoupled) or `torch.optim.Adam` (weight decay as L2)."""

    lr: float
    beta1: float
    beta2: float
    eps: float
    weight_decay: float
    decoupled: bool


@dataclass(frozen=True, slots=True, eq=False)
class AdamSegment:
    """One run of elements with one set of hyperparameters; all tensors have the same numel.

    grad: any of the three dtypes, read. master, exp_avg, exp_avg_sq: float32, updated in place. emit: None, or the
    tensor that receives the new weights in its own dtype. step: of this update, counted from 1. grad_factor
    multiplies the gradient as it is read (un-scaling and clipping), rounded to float32 first.
    """

    grad: Tensor
    master: Tensor
    exp_avg: Tensor
    exp_avg_sq: Tensor
    emit: Tensor | None
    hyper: AdamHyper
    step: int
    grad_factor: float = 1.0


def adam(segments: Sequence[AdamSegment]) -> None:
    """One Adam or AdamW step on every segment, in place.

    The formulas are those of `torch.optim.Adam(foreach=False)` with its order of operations (see `offload_adam` in
    `native/include/offload.h`), so weights differ from it by what torch's own square root differs from the exact one.
    """
    native: list[_native.AdamArguments] = []
    for segment in segments:
        _check_segment(segment)
        if _uses_native(segment.master):
            native.append(_adam_arguments(segment))
        else:
            _adam_torch(segment)
    if native:
        _native.adam(native)


def ingest(dst: Tensor | None, src: Tensor, start_index: int, accumulate: bool) -> list[float]:
    """As `ingest_async`, with the sums as a list; waits for the device."""
    sums: list[float] = ingest_async(dst, src, start_index, accumulate).tolist()
    return sums


def ingest_async(dst: Tensor | None, src: Tensor, start_index: int, accumulate: bool) -> Tensor:
    """Store a gradient, or add it, and sum the squares of what was stored.

    dst (None: only the sums of src) becomes src, or dst + src if `accumulate`, added in float32 and rounded once to
    dst's dtype. The first element has flat index `start_index`, a multiple of 64.

    Returns float64 [number of blocks touched] on src's device, without waiting for it. Block b is the flat indices
    [4096 b, 4096 (b + 1)); its sum has 32 accumulators, of flat index mod 32, which add double(x)^2 in increasing
    order, then `for w in 16, 8, 4, 2, 1: lane[i] += lane[i + w]`. A sum is finite exactly if every element is.
    """
    _check_ingest(dst, src, start_index, accumulate)
    first_block = start_index // BLOCK_NUMEL
    block_count = -(-(start_index + src.numel()) // BLOCK_NUMEL) - first_block if src.numel() > 0 else 0
    sums = torch.empty(block_count, dtype=torch.float64, device=src.device)
    if src.numel() == 0:
        return sums
    if not _uses_native(src):
        _ingest_torch(dst, src, start_index - first_block * BLOCK_NUMEL, accumulate, sums)
        return sums
    dst_address, dst_code = (0, _native.F32) if dst is None else (dst.data_ptr(), _DTYPE_CODES[dst.dtype])
    src_code = _DTYPE_CODES[src.dtype]
    _native.gradient_ingest(
        dst_address, dst_code, src.data_ptr(), src_code, src.numel(), start_index, accumulate, sums.data_ptr()
    )
    return sums


def convert(dst: Tensor, src: Tensor) -> None:
    """dst = src in dst's dtype, rounded to nearest even; a NaN that is narrowed becomes the one canonical NaN."""
    _check_flat("dst", dst, src.numel(), src.device)
    _check_flat("src", src, src.numel(), src.device)
    if _uses_native(src):
        codes = _DTYPE_CODES[dst.dtype], _DTYPE_CODES[src.dtype]
        _native.convert(dst.data_ptr(), codes[0], src.data_ptr(), codes[1], src.numel())
        return
    if dst.dtype == src.dtype:
        dst.copy_(src)
        return
    for chunk in _chunks(src):
        _store(dst[chunk], src[chunk].float())


def _uses_native(tensor: Tensor) -> bool:
    return tensor.device.type == "cpu" and _native.available()


# Assertions: these are the contract between our own layers, and native code behind a wrong size would corrupt memory.


def _check_flat(name: str, tensor: Tensor, numel: int, device: torch.device) -> None:
    if tensor.dtype not in _DTYPE_CODES or not tensor.is_contiguous():
        raise AssertionError(f"{name} must be contiguous float32, bfloat16 or float16, not {tensor.dtype}")
    if tensor.numel() != numel or tensor.device != device or tensor.dim() != 1:
        expected = f"{numel} elements in one dimension on {device}"
        raise AssertionError(f"{name} must have {expected}, not {tuple(tensor.shape)} on {tensor.device}")


def _check_segment(segment: AdamSegment) -> None:
    numel, device = segment.master.numel(), segment.master.device
    for name in ("master", "exp_avg", "exp_avg_sq"):
        tensor: Tensor = getattr(segment, name)
        _check_flat(name, tensor, numel, device)
        if tensor.dtype != torch.float32:
            raise AssertionError(f"{name} must be float32, not {tensor.dtype}")
    _check_flat("grad", segment.grad, numel, device)
    if segment.emit is not None:
        _check_flat("emit", segment.emit, numel, device)
    if segment.step < 1:
        raise AssertionError(f"steps count from 1, not {segment.step}")


def _check_ingest(dst: Tensor | None, src: Tensor, start_index: int, accumulate: bool) -> None:
    _check_flat("src", src, src.numel(), src.device)
    if dst is not None:
        _check_flat("dst", dst, src.numel(), src.device)
    elif accumulate:
        raise AssertionError("accumulate needs a dst")
    if start_index < 0 or start_index % START_MULTIPLE != 0:
        raise AssertionError(f"start_index must be a multiple of {START_MULTIPLE}, not {start_index}")


def _adam_arguments(segment: AdamSegment) -> _native.AdamArguments:
    emit, hyper = segment.emit, segment.hyper
    return _native.AdamArguments(
        grad=segment.grad.data_ptr(),
        master=segment.master.data_ptr(),
        exp_avg=segment.exp_avg.data_ptr(),
        exp_avg_sq=segment.exp_avg_sq.data_ptr(),
        emit=0 if emit is None else emit.data_ptr(),
        numel=segment.master.numel(),
        step=segment.step,
        lr=hyper.lr,
        beta1=hyper.beta1,
        beta2=hyper.beta2,
        eps=hyper.eps,
        weight_decay=hyper.weight_decay,
        grad_factor=segment.grad_factor,
        grad_dtype=_DTYPE_CODES[segment.grad.dtype],
        emit_dtype=_native.F32 if emit is None else _DTYPE_CODES[emit.dtype],
        decoupled=int(hyper.decoupled),
    )


# ---- the same in torch operations


def _chunks(tensor: Tensor) -> Iterator[slice]:
    step = _CHUNK_NUMEL_CPU if tensor.device.type == "cpu" else _CHUNK_NUMEL_DEVICE
    for start in range(0, tensor.numel(), step):
        yield slice(start, min(start + step, tensor.numel()))


def _f32(value: float) -> float:
    return float(numpy.float32(value))


def _store(dst: Tensor, value: Tensor) -> None:
    """dst = value (float32), with the canonical NaN where dst is narrower: torch's casts differ in their NaN."""
    dst.copy_(value)
    if dst.dtype != torch.float32:
        dst.masked_fill_(value.isnan(), math.nan)


def _fma(a: Tensor | float, b: Tensor, c: Tensor) -> Tensor:
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


def _adam_torch(segment: AdamSegment) -> None:
    hyper, step = segment.hyper, segment.step
    bias_correction1 = 1.0 - hyper.beta1**step
    bias_correction2 = 1.0 - hyper.beta2**step
    step_size = _f32(-(hyper.lr / bias_correction1))
    # A tensor, because torch multiplies by the reciprocal of a number on some devices.
    sqrt_bias_correction2 = torch.full((1,), _f32(math.sqrt(bias_correction2)), device=segment.master.device)
    weight = _f32(1.0 - hyper.beta1)
    factor, beta2, rest2 = _f32(segment.grad_factor), _f32(hyper.beta2), _f32(1.0 - hyper.beta2)
    for chunk in _chunks(segment.master):
        p, m, v = segment.master[chunk], segment.exp_avg[chunk], segment.exp_avg_sq[chunk]
        g = segment.grad[chunk].float() * factor
        if hyper.weight_decay != 0:
            if hyper.decoupled:
                p.mul_(_f32(1.0 - hyper.lr * hyper.weight_decay))
            else:
                g = _fma(_f32(hyper.weight_decay), p, g)
        m.copy_(_fma(weight, g - m, m) if abs(weight) < 0.5 else _fma(_f32(weight - 1.0), g - m, g))
        v.mul_(beta2)
        v.copy_(_fma(g * rest2, g, v))
        denominator = v.double().sqrt().float() / sqrt_bias_correction2 + _f32(hyper.eps)
        p.add_((m * step_size) / denominator)
        if segment.emit is not None:
            _store(segment.emit[chunk], p)


def _ingest_torch(dst: Tensor | None, src: Tensor, offset: int, accumulate: bool, sums: Tensor) -> None:
    """`offset`: of the first element in the first block."""
    step = _CHUNK_NUMEL_CPU if src.device.type == "cpu" else _CHUNK_NUMEL_DEVICE
    for start in range(0, offset + src.numel(), step):
        piece = slice(max(start - offset, 0), min(start + step - offset, src.numel()))
        value = src[piece].float()
        if dst is not None:
            stored = dst[piece]
            _store(stored, value + stored.float() if accumulate else value)
            value = stored.float()
        first_block = start // BLOCK_NUMEL
        block_count = -(-(offset + piece.stop - start) // BLOCK_NUMEL)
        padded = torch.zeros(block_count * BLOCK_NUMEL, dtype=torch.float64, device=src.device)
        begin = max(offset - start, 0)
        padded[begin : begin + value.numel()] = value
        sums[first_block : first_block + block_count] = _block_sums(padded)


def _block_sums(padded: Tensor) -> Tensor:
    """The sums of squares of whole blocks. Zeros beside a piece change no accumulator."""
    squares = padded.square_().view(-1, BLOCK_NUMEL // _LANES, _LANES)
    # A cumulative sum over a dimension that is not the last adds one element after the other, on CPUs and on GPUs;
    # a plain sum does not.
    lanes = squares.cumsum(1)[:, -1, :]
    while lanes.shape[1] > 1:
        half = lanes.shape[1] // 2
        lanes = lanes[:, :half] + lanes[:, half:]
    return lanes[:, 0]
