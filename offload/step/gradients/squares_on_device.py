# SPDX-License-Identifier: Apache-2.0
"""Sums of squares that device kernels leave, for the norm: on the device until it is asked for, then over in one copy."""

from __future__ import annotations

from collections.abc import Iterable

import torch

from offload.device.accelerator import Accelerator
from offload.device.arithmetic import kernels
from offload.device.arithmetic.ingest_table import IngestTable
from offload.model.chunk import Chunk
from offload.planning.purposes import SQUARES
from offload.tiers.staging import StagingPool


class SquaresOnDevice:
    """The sums of squares of all gradients of a step, on the device: float64, block after block, piece after piece."""

    def __init__(self, accelerator: Accelerator, chunks: Iterable[Chunk], pool: StagingPool) -> None:
        self._accelerator = accelerator
        self._ranges: dict[tuple[int, int], slice] = {}
        self._whole_ranges: dict[Chunk, slice] = {}
        count = 0
        for chunk in chunks:
            begin = count
            for info, piece in chunk.pieces:
                blocks = kernels.touched_block_count(piece.start, piece.numel)
                self._ranges[info.index, chunk.index] = slice(count, count + blocks)
                count += blocks
            self._whole_ranges[chunk] = slice(begin, count)
        self._device = accelerator.memory(8 * count).view(torch.float64)
        self._lease = pool.lease(SQUARES)
        self._host = self._lease.tensor[: count * 8].view(torch.float64)
        self._parts: dict[tuple[int, int], torch.Tensor] = {}
        """What `part` gave."""
        self._tables: dict[Chunk, IngestTable] = {}
        """What `table_of` gave."""
        self._unread: slice | None = None

    def part(self, parameter_index: int, chunk_index: int) -> torch.Tensor:
        """Where the sums of one piece are to be written, on the device."""
        key = parameter_index, chunk_index
        where, part = self._ranges[key], self._parts.get(key)
        self._written(where.start, where.stop)
        if part is None:
            part = self._parts[key] = self._device[where]
        return part

    def table_of(self, chunk: Chunk) -> IngestTable:
        """What takes in gradients of the chunk's pieces, as they come from backward."""
        table, whole = self._tables.get(chunk), self._whole_ranges[chunk]
        self._written(whole.start, whole.stop)
        if table is None:
            first = whole.start
            pieces = [(self._ranges[info.index, chunk.index].start, piece) for info, piece in chunk.pieces]
            parts = [(piece.start, piece.numel, start - first) for start, piece in pieces]
            table = self._tables[chunk] = IngestTable(chunk.start, chunk.flat.dtype, parts, self._device[whole])
        return table

    def parts(self, parameter_index: int, first_chunk_index: int, last_chunk_index: int) -> torch.Tensor:
        """The same for the pieces of one parameter in chunks that it fills alone, which lie one after the other."""
        low = self._ranges[parameter_index, first_chunk_index].start
        high = self._ranges[parameter_index, last_chunk_index].stop
        self._written(low, high)
        return self._device[low:high]

    def _written(self, low: int, high: int) -> None:
        unread = self._unread
        if unread is None or low < unread.start or high > unread.stop:
            self._unread = slice(low, high) if unread is None else slice(min(unread.start, low), max(unread.stop, high))

    def read(self) -> None:
        """Bring over what was written since the last call, and wait for it."""
        part, self._unread = self._unread, None
        if part is not None:
            self._accelerator.copy_out(self._host[part], self._device[part]).wait()

    def values(self, parameter_index: int, chunk_index: int) -> torch.Tensor:
        """The sums of one piece, as last read."""
        return self._host[self._ranges[parameter_index, chunk_index]]

    def values_of(self, chunk: Chunk) -> torch.Tensor:
        """The sums of all pieces of a chunk, as last read."""
        return self._host[self._whole_ranges[chunk]]

    def close(self) -> None:
        """Give the memory back, on the device and on the host."""
        self._parts, self._tables = {}, {}
        self._device = self._host = torch.empty(0, dtype=torch.float64, device="cpu")
        self._lease.release()
