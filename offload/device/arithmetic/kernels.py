# SPDX-License-Identifier: Apache-2.0
"""Gradient ingest and casts on flat tensors. (The optimizer step: `offload.device.arithmetic.optimizer_step`.)

CPU tensors go through the native library, CUDA tensors through the kernels of
`offload.device.arithmetic.compiled_kernels`. Tensors of other devices, and all tensors where those are missing, go through
torch operations that are arranged to give the same bits: a fused multiply-add is emulated in float64, and sums of squares
are added in a defined order. So neither the device nor a library changes a result.

Every tensor here is 1-D and contiguous, of dtype float32, bfloat16 or float16, and those of one call on one device.
On CPU tensors the work is over when a call returns; on a device it is queued on the current stream. Any thread may
call.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from offload import _native
from offload.device.arithmetic import compiled_kernels
from offload.device.arithmetic.flat import DTYPE_CODES, check_flat, chunk_numel, chunks, store, uses_native
from offload.device.virtual.current import virtual_machine

BLOCK_NUMEL = 4096
"""Elements of a block of the sum of squares."""
START_MULTIPLE = 64
"""What the flat index of the first element of an ingest is a multiple of."""
_LANES = 32


def ingest_async(
    dst: Tensor | None,
    src: Tensor,
    start_index: int,
    accumulate: bool,
    sums: Tensor | None = None,
    *,
    checksums: Tensor | None = None,
    all_cores: bool = False,
) -> Tensor:
    """Store a gradient, or add it, and sum the squares of what was stored.

    dst (None: only the sums of src) becomes src, or dst + src if `accumulate`, added in float32 and rounded once to
    dst's dtype. The first element has flat index `start_index`, a multiple of 64.

    Returns float64 [number of blocks touched] on src's device (`sums`, where given), without waiting for it. Block b is
    the flat indices [4096 b, 4096 (b + 1)); its sum has 32 accumulators, of flat index mod 32, which add double(x)^2 in
    increasing order, then `for w in 16, 8, 4, 2, 1: lane[i] += lane[i + w]`. A sum is finite exactly if every element is.

    `checksums`: of the blocks of dst, which begin with it; those that this stores whole become known, where the native library
    does it (`offload.device.arithmetic.checksums`). `all_cores`: of the host, none of which computes the model.
    """
    numel, device = src.numel(), src.device
    _check_ingest(dst, src, start_index, accumulate)
    block_count = touched_block_count(start_index, numel)
    if sums is None:
        sums = torch.empty(block_count, dtype=torch.float64, device=device)
    elif sums.numel() != block_count or sums.dtype != torch.float64 or not sums.is_contiguous() or sums.device != device:
        raise AssertionError(f"sums must be contiguous float64 [{block_count}] on {device}")
    if numel == 0:
        return sums
    if (machine := virtual_machine()) is not None:
        machine.pass_over(src, src.nbytes + (dst.nbytes * (1 + accumulate) if dst is not None else 0))
        if dst is not None:
            machine.wrote(dst)
        return sums if src.is_meta else sums.zero_()
    if not uses_native(src):
        if (compiled := compiled_kernels.of(device)) is not None:
            compiled.ingest(*_codes(dst, src), [_piece(dst, src, start_index, sums.data_ptr())], accumulate=accumulate)
        else:
            _ingest_torch(dst, src, start_index % BLOCK_NUMEL, accumulate, sums)
        return sums
    target, taken = sums.data_ptr(), checksums.data_ptr() if checksums is not None else 0
    _native.gradient_ingest(_values(dst), _values(src), numel, start_index, accumulate, target, taken, all_cores=all_cores)
    return sums


def ingest_all(parts: Sequence[tuple[Tensor | None, Tensor, int]]) -> list[Tensor]:
    """`ingest_async` of each (dst, src, start_index), nothing of which is added to, and none of which overlaps another."""
    if not parts:
        return []
    if not uses_native(first := parts[0][1]):
        if (compiled := compiled_kernels.of(first.device)) is not None:
            return _ingest_all_compiled(compiled, parts)
        return [ingest_async(dst, src, start_index, False) for dst, src, start_index in parts]
    counts = [touched_block_count(start_index, src.numel()) for _, src, start_index in parts]
    sums = torch.empty(sum(counts), dtype=torch.float64, device="cpu")
    address = sums.data_ptr()
    for (dst, src, start_index), count in zip(parts, counts, strict=True):
        numel = src.numel()
        if start_index % START_MULTIPLE or not src.is_contiguous() or not src.is_cpu:
            raise AssertionError(f"what begins at {start_index} is no contiguous gradient on the host")
        if dst is not None and (dst.numel() != numel or not dst.is_contiguous() or not dst.is_cpu):
            raise AssertionError(f"its place must be contiguous, [{numel}] on the host")
        _native.gradient_ingest(_values(dst), _values(src), numel, start_index, False, address)
        address += 8 * count
    return list(sums.split(counts))


def _ingest_all_compiled(
    compiled: compiled_kernels.DeviceKernels, parts: Sequence[tuple[Tensor | None, Tensor, int]]
) -> list[Tensor]:
    counts = [touched_block_count(start_index, src.numel()) for _, src, start_index in parts]
    sums = torch.empty(sum(counts), dtype=torch.float64, device=parts[0][1].device)
    address, pieces = sums.data_ptr(), dict[tuple[int, int], list[compiled_kernels.IngestPiece]]()
    for (dst, src, start_index), count in zip(parts, counts, strict=True):
        _check_ingest(dst, src, start_index, accumulate=False)
        if count:
            pieces.setdefault(_codes(dst, src), []).append(_piece(dst, src, start_index, address))
        address += 8 * count
    for codes, alike in pieces.items():
        compiled.ingest(*codes, alike, accumulate=False)
    return list(sums.split(counts))


def _codes(dst: Tensor | None, src: Tensor) -> tuple[int, int]:
    return DTYPE_CODES[src.dtype], compiled_kernels.NO_TENSOR if dst is None else DTYPE_CODES[dst.dtype]


def _piece(dst: Tensor | None, src: Tensor, start_index: int, sums: int) -> compiled_kernels.IngestPiece:
    address = 0 if dst is None else dst.data_ptr()
    return compiled_kernels.IngestPiece(address, src.data_ptr(), sums, src.numel(), start_index % BLOCK_NUMEL)


def _values(tensor: Tensor | None) -> _native.Values:
    return _native.Values(0, _native.F32) if tensor is None else _native.Values(tensor.data_ptr(), DTYPE_CODES[tensor.dtype])


def touched_block_count(start_index: int, numel: int) -> int:
    """How many blocks the flat indices [start_index, start_index + numel) touch."""
    return -(-(start_index + numel) // BLOCK_NUMEL) - start_index // BLOCK_NUMEL if numel > 0 else 0


def convert(dst: Tensor, src: Tensor, *, all_cores: bool = False) -> None:
    """dst = src in dst's dtype, rounded to nearest even; a NaN that is narrowed becomes the one canonical NaN. `all_cores`: as
    of `ingest_async`."""
    check_flat("dst", dst, src.numel(), src.device)
    check_flat("src", src, src.numel(), src.device)
    if (machine := virtual_machine()) is not None:
        machine.pass_over(src, src.nbytes + dst.nbytes)
        machine.wrote(dst)
        return
    if uses_native(src):
        _native.convert(_values(dst), _values(src), src.numel(), all_cores=all_cores)
        return
    if dst.dtype == src.dtype:
        dst.copy_(src)
        return
    if (compiled := compiled_kernels.of(src.device)) is not None:
        compiled.convert(dst, src)
        return
    for chunk in chunks(src):
        store(dst[chunk], src[chunk].float())


def scale(values: Tensor, factor: np.float32) -> None:
    """values *= factor: float32 in host memory, in the calling thread alone."""
    if (machine := virtual_machine()) is not None:
        machine.pass_over(values, 2 * values.nbytes)
        return
    np.multiply(values.numpy(), factor, out=values.numpy())


def exact_sum(arrays: Sequence[Tensor]) -> int | None:
    """The exact sum of all elements, in units of the smallest double, 2**-1074; None if one is infinite or NaN.

    arrays: float64; those on a device come over in one copy. No order of summation shows in the sum, nor how what is summed
    was cut: the sums of parts may be added."""
    if any(array.dtype != torch.float64 or not array.is_contiguous() for array in arrays):
        raise AssertionError("exact sums are of contiguous float64 tensors")
    if virtual_machine() is not None:
        return 0
    if elsewhere := [array for array in arrays if array.device.type != "cpu"]:
        arrays = [array for array in arrays if array.device.type == "cpu"] + [torch.cat(elsewhere).cpu()]
    if _native.available():
        return _native.exact_sum([(array.data_ptr(), array.numel()) for array in arrays])
    return _exact_sum_numpy(np.concatenate([array.numpy().ravel() for array in arrays] or [np.empty(0)]))


def _check_ingest(dst: Tensor | None, src: Tensor, start_index: int, accumulate: bool) -> None:
    check_flat("src", src, src.numel(), src.device)
    if dst is not None:
        check_flat("dst", dst, src.numel(), src.device)
    elif accumulate:
        raise AssertionError("accumulate needs a dst")
    if start_index < 0 or start_index % START_MULTIPLE != 0:
        raise AssertionError(f"start_index must be a multiple of {START_MULTIPLE}, not {start_index}")


# ---- the same in torch operations


def _ingest_torch(dst: Tensor | None, src: Tensor, offset: int, accumulate: bool, sums: Tensor) -> None:
    """`offset`: of the first element in the first block."""
    step = chunk_numel(src.device)
    for start in range(0, offset + src.numel(), step):
        piece = slice(max(start - offset, 0), min(start + step - offset, src.numel()))
        value = src[piece].float()
        if dst is not None:
            stored = dst[piece]
            store(stored, value + stored.float() if accumulate else value)
            value = stored.float()
        first_block = start // BLOCK_NUMEL
        block_count = -(-(offset + piece.stop - start) // BLOCK_NUMEL)
        padded = torch.zeros(block_count * BLOCK_NUMEL, dtype=torch.float64, device=src.device)
        begin = max(offset - start, 0)
        padded[begin : begin + value.numel()] = value
        sums[first_block : first_block + block_count] = _block_sums(padded)


def _exact_sum_numpy(values: np.ndarray[Any, np.dtype[np.float64]]) -> int | None:
    if not np.isfinite(values).all():
        return None
    fractions, exponents = np.frexp(values)
    mantissas = (fractions * 2.0**53).astype(np.int64)
    total = 0
    for exponent in np.unique(exponents).tolist():
        same = mantissas[exponents == exponent]
        whole = (int((same >> 32).sum()) << 32) + int((same & 0xFFFFFFFF).sum())  # neither half overflows
        shift = exponent - 53 + 1074
        total += whole << shift if shift >= 0 else whole >> -shift  # a subnormal's mantissa ends in zeros
    return total


def _added_in_order(squares: Tensor, *, by_rows: bool) -> Tensor:
    """The sum over dimension 1, one element after the other.

    A cumulative sum over a dimension that is not the last adds so, on CPUs and on GPUs; a plain sum does not. Where torch
    allows no cumulative sum (on a GPU under `use_deterministic_algorithms`): `by_rows`, an operation for each.
    """
    if not by_rows:
        return squares.cumsum(1)[:, -1, :]
    total = squares[:, 0, :].clone()
    for row in range(1, squares.shape[1]):
        total += squares[:, row, :]
    return total


def _block_sums(padded: Tensor) -> Tensor:
    """The sums of squares of whole blocks. Zeros beside a piece change no accumulator."""
    squares = padded.square_().view(-1, BLOCK_NUMEL // _LANES, _LANES)
    lanes = _added_in_order(squares, by_rows=squares.is_cuda and torch.are_deterministic_algorithms_enabled())
    while lanes.shape[1] > 1:
        half = lanes.shape[1] // 2
        lanes = lanes[:, :half] + lanes[:, half:]
    return lanes[:, 0]
