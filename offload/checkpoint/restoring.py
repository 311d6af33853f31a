# SPDX-License-Identifier: Apache-2.0
"""From an opened, checked checkpoint into the engine's tiers, whatever its placement, chunks and strides.

Every chunk is put together from byte ranges of its parameters: nothing of the saving run's layout is needed. Extra host
memory: one chunk's record and values, and where a parameter's order of elements differs, that parameter twice.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager

import torch

from offload.checkpoint.format.consistency import same_order
from offload.checkpoint.format.manifest import VALUE, ParameterEntry, TensorEntry
from offload.checkpoint.format.opened import OpenedCheckpoint
from offload.checkpoint.state_reading import ChunkBuffer, ChunkBuffers
from offload.device.arithmetic.rounding import round_into
from offload.device.arithmetic.segment import MASTER
from offload.layout import Piece
from offload.model.chunk import Chunk
from offload.model.file_dtypes import DTYPES
from offload.model.flat import ParameterInfo
from offload.model.unit import Unit
from offload.progress import Progress
from offload.step.chunk_stores import ChunkStore
from offload.step.components import Components

_log = logging.getLogger(__name__)


class StoredParameter:
    """One parameter in the checkpoint, read in the engine's own order of elements."""

    def __init__(self, opened: OpenedCheckpoint, entry: ParameterEntry, info: ParameterInfo) -> None:
        self._opened, self.entry, self._info = opened, entry, info
        self._pieces = sorted(entry.pieces, key=lambda piece: piece.start)
        self._same_order = same_order(entry.shape, entry.stride, info.stride)
        self._reordered: dict[str, torch.Tensor] = {}

    def read(self, kind: str, start: int, into: torch.Tensor) -> None:
        """Fill `into` (contiguous, host memory) with elements from `start` of `kind`, rounded to its dtype if need be.

        Moments that an imported checkpoint lacks are zeros, as before the first step."""
        if kind != VALUE and self.entry.group is None:
            into.zero_()
            return
        if self._same_order:
            self._read_stored(kind, start, into)
            return
        if kind not in self._reordered:
            whole = torch.empty(self.entry.numel, dtype=into.dtype, device="cpu")
            self._read_stored(kind, 0, whole)
            shaped = whole.as_strided(self.entry.shape, self.entry.stride)
            self._reordered[kind] = self._info.in_memory_order(shaped)
        into.copy_(self._reordered[kind][start : start + into.numel()])

    def _read_stored(self, kind: str, start: int, into: torch.Tensor) -> None:
        stop = start + into.numel()
        for piece in self._pieces:
            low, high = max(start, piece.start), min(stop, piece.stop)
            if low < high:
                self._read_range(getattr(piece, kind), low - piece.start, into[low - start : high - start])

    def _read_range(self, tensor: TensorEntry, start: int, into: torch.Tensor) -> None:
        dtype = DTYPES[tensor.dtype]
        if dtype == into.dtype:
            self._opened.read_elements(tensor, start, into)
            return
        step = 2**20
        for low in range(0, into.numel(), step):
            part = into[low : low + step]
            stored = self._opened.slab(part.numel() * dtype.itemsize).view(dtype)
            self._opened.read_elements(tensor, start + low, stored)
            round_into(part, stored)


class StateWriter:
    """Fills the tiers. Owned by the thread that drives the model; nothing is resident that a store is the home of."""

    def __init__(self, parts: Components, stored: dict[int, StoredParameter]) -> None:
        """What is not in `stored` keeps its value."""
        self._parts, self._stored = parts, stored
        self._buffers = ChunkBuffers(parts)
        total_nbytes = sum(unit.layout.nbytes for unit in parts.units)
        self._progress = Progress(_log, "load: %.1f of %.1f GiB of parameters are read", total_nbytes)

    def unit(self, unit: Unit) -> None:
        """Overwrite the unit's parameters and records."""
        for chunk in unit.chunks:
            masters = self._fill_record(chunk)
            if unit.route.has_store:
                self._fill_values(chunk, masters)
        if not unit.route.has_store:
            # They stay on the device, whole on every rank, whatever part of them this one updates.
            for chunk in unit.homes:
                self._fill_values(chunk, None)
        for info in unit.parameters:
            self._stored.pop(info.index, None)  # with what it may have reordered
        self._progress.add(unit.layout.nbytes)

    def close(self) -> None:
        """Give the buffers back. Idempotent."""
        self._buffers.close()

    def _fill_record(self, chunk: Chunk) -> torch.Tensor | None:
        """Overwrite the chunk's record. Returns its fp32 masters, unless the parameters are those."""
        records = self._parts.records
        if records is None or not chunk.flat.layout.trainable:
            return None
        with self._overwriting(records, chunk, self._buffers.record) as content:
            record = records.over(chunk, content)
            masters = record.arrays.get(MASTER)
            if masters is None and record.format.own_master:
                masters = torch.zeros(chunk.numel, dtype=torch.float32, device="cpu")
            for info, piece in chunk.pieces:
                low, high = piece.start - chunk.start, piece.stop - chunk.start
                stored, start = self._stored[info.index], piece.start - piece.slot.start
                if masters is not None:
                    stored.read(VALUE, start, masters[low:high])
                    record.put_master(low, high, masters[low:high])
                for name in record.format.moments:
                    direct = record.arrays[name][low:high]
                    is_exact = direct.dtype == torch.float32
                    exact = direct if is_exact else torch.empty(high - low, dtype=torch.float32, device="cpu")
                    stored.read(name, start, exact)
                    if not is_exact:
                        record.put_moment(name, low, high, exact)
        return masters

    def _fill_values(self, chunk: Chunk, masters: torch.Tensor | None) -> None:
        parameter_store = self._parts.parameter_store
        parameter_store.settle_copies(chunk)
        some_stay = any(info.index not in self._stored for info, _ in chunk.pieces)
        with self._overwriting(parameter_store, chunk, self._buffers.values, some_stay=some_stay) as content:
            values = content[: chunk.nbytes].view(chunk.flat.dtype)
            for info, piece in chunk.pieces:
                if info.index not in self._stored:
                    continue
                low, high = piece.start - chunk.start, piece.stop - chunk.start
                if masters is not None:
                    self._round(chunk, values[low:high], masters[low:high])
                else:
                    self._read_values(chunk, info, piece, values[low:high])

    @contextmanager
    def _overwriting(
        self, store: ChunkStore, chunk: Chunk, buffer: ChunkBuffer, *, some_stay: bool = False
    ) -> Iterator[torch.Tensor]:
        """The chunk's bytes, to be overwritten where they lie, or in the buffer, which is then written there. `some_stay`: what
        they are now is asked for."""
        home = store.view(chunk)
        if home is not None and home.device.type == "cpu":
            yield home
            return
        content = buffer.take(store.nbytes(chunk)).zero_()
        if some_stay and home is not None:
            content[: home.numel()].copy_(home)
        elif some_stay:
            store.read(chunk, content).wait()
        yield content
        store.write(chunk, content).wait()

    def _read_values(self, chunk: Chunk, info: ParameterInfo, piece: Piece, into: torch.Tensor) -> None:
        stored, start = self._stored[info.index], piece.start - piece.slot.start
        records = self._parts.records
        if records is None or not info.trainable or not records.format(chunk).state_format.is_split:
            stored.read(VALUE, start, into)
            return
        exact = torch.empty(into.numel(), dtype=torch.float32, device="cpu")
        stored.read(VALUE, start, exact)
        self._round(chunk, into, exact)

    def _round(self, chunk: Chunk, into: torch.Tensor, masters: torch.Tensor) -> None:
        """The parameters of fp32 masters, as an update would leave them."""
        assert self._parts.records is not None
        self._parts.records.format(chunk).round_values(into, masters)
