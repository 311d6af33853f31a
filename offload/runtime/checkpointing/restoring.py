"""From an opened, checked checkpoint into the engine's tiers, whatever its placement, chunks and strides.

Every chunk is put together from byte ranges of its parameters: nothing of the saving run's layout is needed. Extra host
memory: one chunk's record and values, and where a parameter's order of elements differs, that parameter twice.
"""

from __future__ import annotations

import torch

from offload.device import kernels
from offload.runtime.assembly import Parts
from offload.runtime.checkpointing.manifest import ParameterEntry, TensorEntry
from offload.runtime.checkpointing.matching import same_order
from offload.runtime.checkpointing.opened import OpenedCheckpoint
from offload.runtime.checkpointing.state_reading import ChunkBuffers, parameter_nbytes
from offload.runtime.checkpointing.tensor_file import DTYPES
from offload.runtime.fetching import chunks_of
from offload.runtime.flats import ChunkOf, ParameterInfo, Unit
from offload.runtime.places import Record

_CONVERTED = (torch.float32, torch.bfloat16, torch.float16)
VALUE = "value"


class StoredParameter:
    """One parameter in the checkpoint, read in the engine's own order of elements."""

    def __init__(self, opened: OpenedCheckpoint, entry: ParameterEntry, info: ParameterInfo) -> None:
        self._opened, self.entry, self._info = opened, entry, info
        self._pieces = sorted(entry.pieces, key=lambda piece: piece.start)
        self._same_order = same_order(entry.shape, entry.stride, info.stride)
        self._reordered: dict[str, torch.Tensor] = {}

    def read(self, kind: str, start: int, into: torch.Tensor) -> None:
        """Fill `into` (contiguous, host memory) with elements from `start` of `kind`, rounded to its dtype if need be."""
        if self._same_order:
            self._read_stored(kind, start, into)
            return
        if kind not in self._reordered:
            whole = torch.empty(self.entry.numel, dtype=into.dtype)
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


def round_into(target: torch.Tensor, source: torch.Tensor) -> None:
    """target = source in target's dtype, as the update's kernel rounds."""
    if target.dtype in _CONVERTED and source.dtype in _CONVERTED:
        kernels.convert(target, source)
    else:
        target.copy_(source)


class StateWriter:
    """Fills the tiers. Owned by the thread that drives the model; nothing is resident that a store is the home of."""

    def __init__(self, parts: Parts, stored: dict[int, StoredParameter]) -> None:
        self._parts, self._stored = parts, stored
        self._buffers = ChunkBuffers(parts)

    def unit(self, unit: Unit) -> None:
        """Overwrite the unit's parameters and records."""
        for chunk_of in chunks_of(unit):
            record = self._fill_record(chunk_of)
            self._fill_values(chunk_of, record.master if record is not None else None)
        for info in unit.parameters:
            del self._stored[info.index]  # with what it may have reordered

    def close(self) -> None:
        """Give the buffers back. Idempotent."""
        self._buffers.close()

    def _fill_record(self, chunk_of: ChunkOf) -> Record | None:
        records = self._parts.records
        if records is None or not chunk_of.flat.layout.trainable:
            return None
        records.settle_write(chunk_of)
        home = records.view(chunk_of)
        in_place = home is not None and home.device.type == "cpu"
        content = home if home is not None and in_place else self._buffers.record.take(records.nbytes(chunk_of)).zero_()
        record = records.over(chunk_of, content)
        for info, piece in chunk_of.pieces():
            low, high = piece.start - chunk_of.chunk.start, piece.stop - chunk_of.chunk.start
            stored, start = self._stored[info.index], piece.start - piece.slot.start
            if record.master is not None:
                stored.read(VALUE, start, record.master[low:high])
            stored.read("exp_avg", start, record.exp_avg[low:high])
            stored.read("exp_avg_sq", start, record.exp_avg_sq[low:high])
        if not in_place:
            records.write(chunk_of, content).wait()
        return record

    def _fill_values(self, chunk_of: ChunkOf, master: torch.Tensor | None) -> None:
        nbytes, places = parameter_nbytes(chunk_of), self._parts.places
        home: torch.Tensor | None
        if places is not None:
            places.settle_write(chunk_of)
            home = places.view(chunk_of)
        else:
            home = chunk_of.flat.chunk_bytes(chunk_of.chunk) if self._parts.accelerator.unified else None
        content = home
        if content is None:
            content = self._buffers.values.take(places.nbytes(chunk_of) if places is not None else nbytes).zero_()
        values = content[:nbytes].view(chunk_of.flat.dtype)
        for info, piece in chunk_of.pieces():
            low, high = piece.start - chunk_of.chunk.start, piece.stop - chunk_of.chunk.start
            if master is not None:
                round_into(values[low:high], master[low:high])
            else:
                self._stored[info.index].read(VALUE, piece.start - piece.slot.start, values[low:high])
        if home is None and places is not None:
            places.write(chunk_of, content).wait()
        elif home is None:
            chunk_of.flat.chunk_bytes(chunk_of.chunk).copy_(content)  # on the stream of compute, after what it does now
