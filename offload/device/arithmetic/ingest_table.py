# SPDX-License-Identifier: Apache-2.0
"""Gradients side by side in a chunk, taken in at once: what the kernel is told of each is put together once.

Where a gradient goes in its chunk, and where the sums of its squares go, is the same in every step; only the buffer changes,
among few, and the tensors that autograd made. The bits are those of `kernels.ingest_async` for each.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from offload import _native
from offload.device.arithmetic import compiled_kernels, kernels
from offload.device.arithmetic.flat import DTYPE_CODES, uses_native


class IngestTable:
    """Of one chunk. One thread at a time."""

    def __init__(self, first_index: int, dtype: torch.dtype, parts: Sequence[tuple[int, int, int]], sums: Tensor) -> None:
        """By part (start_index, numel, position): its sums go to `sums`, float64, from `position` on. `first_index`: flat index
        of the chunk's first element. `dtype`: of the buffer, and of gradients as a rule."""
        self._dtype, self._sums = dtype, sums
        self._first_index, self._stop_index = first_index, max(start + numel for start, numel, _ in parts)
        self._starts, self._numels = [start for start, _, _ in parts], [numel for _, numel, _ in parts]
        if any(start % kernels.START_MULTIPLE or start < first_index for start in self._starts):
            raise AssertionError(f"parts of a chunk begin at multiples of {kernels.START_MULTIPLE}, in the chunk")
        counts = [kernels.touched_block_count(start, numel) for start, numel, _ in parts]
        places = [position + count for (_, _, position), count in zip(parts, counts, strict=True)]
        if sums.dtype != torch.float64 or not sums.is_contiguous() or max(places) > sums.numel():
            raise AssertionError(f"sums must be contiguous float64, at least [{max(places)}]")
        self._sums_of = [sums[position : position + count] for (_, _, position), count in zip(parts, counts, strict=True)]
        told = zip(self._numels, self._starts, map(Tensor.data_ptr, self._sums_of), strict=True)
        self._parts = _native.IngestParts(first_index, list(told))
        self._addresses = [one.data_ptr() for one in self._sums_of]
        self._is_native = True
        """As far as is known of the buffers."""
        self._known: set[int] = set()
        """Addresses of buffers that have room for all."""

    def ingest(self, dst: Tensor, sources: Sequence[Tensor]) -> None:
        """Into `dst`, the chunk's buffer: by part a tensor in the table's dtype, dense in memory, in the order of its slot."""
        if list(map(Tensor.numel, sources)) != self._numels:
            raise AssertionError(f"gradients of {self._numels} elements are needed")
        address = dst.data_ptr() if self._is_native else 0
        if address not in self._known:
            self._is_native = uses_native(dst)
            if not self._is_native:
                self.ingest_some(dst, sources, range(len(sources)))
                return
            if dst.dtype != self._dtype or dst.numel() < self._stop_index - self._first_index or not dst.is_contiguous():
                raise AssertionError(f"a buffer of {self._stop_index - self._first_index} contiguous {self._dtype} is needed")
            self._known.add(address := dst.data_ptr())
        self._parts.ingest(_native.Values(address, DTYPE_CODES[self._dtype]), map(Tensor.data_ptr, sources))

    def ingest_some(self, dst: Tensor, sources: Sequence[Tensor], which: Sequence[int]) -> None:
        """The same of the parts at these positions, of any dtype that gradients have: on the host one by one."""
        if (compiled := compiled_kernels.of(dst.device)) is not None:
            self._ingest_compiled(compiled, dst, sources, which)
            return
        for source, position in zip(sources, which, strict=True):
            start, numel = self._starts[position], self._numels[position]
            flat, low = source.as_strided((numel,), (1,), source.storage_offset()), start - self._first_index
            kernels.ingest_async(dst[low : low + numel], flat, start, False, self._sums_of[position])

    def _ingest_compiled(
        self, compiled: compiled_kernels.DeviceKernels, dst: Tensor, sources: Sequence[Tensor], which: Sequence[int]
    ) -> None:
        if dst.numel() < self._stop_index - self._first_index or not dst.is_contiguous():
            raise AssertionError(f"a contiguous buffer of {self._stop_index - self._first_index} elements is needed")
        address, itemsize = dst.data_ptr(), dst.itemsize
        pieces: dict[int, list[compiled_kernels.IngestPiece]] = {}
        for source, position in zip(sources, which, strict=True):
            start, numel = self._starts[position], self._numels[position]
            if source.numel() != numel or source.device != dst.device:
                raise AssertionError(f"a gradient of {numel} elements on {dst.device} is needed")
            if numel:
                place, offset = address + (start - self._first_index) * itemsize, start % kernels.BLOCK_NUMEL
                piece = compiled_kernels.IngestPiece(place, source.data_ptr(), self._addresses[position], numel, offset)
                pieces.setdefault(DTYPE_CODES[source.dtype], []).append(piece)
        for code, alike in pieces.items():
            compiled.ingest(code, DTYPE_CODES[dst.dtype], alike, accumulate=False)
