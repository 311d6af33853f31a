"""The engine's state as it lies in the tiers, parameter by parameter in pieces, with one buffer of each kind at most.

Extra host memory: where records (or parameters) cannot be read in place, the largest chunk's record (or values); with
state formats other than fp32 one piece's master and moments in fp32.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass

import torch

from offload.device.records import MASTER, Record, StateFormat
from offload.runtime.checkpointing.manifest import VALUE
from offload.runtime.fetching import chunks_of
from offload.runtime.flats import ChunkOf, ParameterInfo, Unit
from offload.runtime.parts import Parts
from offload.runtime.places import Places
from offload.tiers.memory import HostMemory

PURPOSE = "checkpoint"
"""Of the buffers, on the ledger."""


@dataclass(frozen=True, slots=True)
class PieceState:
    """Elements [start, start + numel) of a parameter, in slot order, in host memory; valid until the next one is asked for.

    `value`: the fp32 master of a trained parameter, else the parameter in its own dtype. The moments are fp32, and None
    where the parameter is not trained or its optimizer keeps none.
    """

    info: ParameterInfo
    start: int
    value: torch.Tensor
    exp_avg: torch.Tensor | None
    exp_avg_sq: torch.Tensor | None


@dataclass(frozen=True, slots=True)
class ChunkState:
    """A chunk's state at hand. `values`: the parameters' [chunk.numel], not looked at where the record has the whole master."""

    chunk_of: ChunkOf
    values: torch.Tensor | None
    record: Record | None

    def pieces(self) -> Iterator[PieceState]:
        """Every piece of the chunk, in the layout's order."""
        values, record, start = self.values, self.record, self.chunk_of.chunk.start
        for info, piece in self.chunk_of.pieces():
            low, high = piece.start - start, piece.stop - start
            part = values[low:high] if values is not None else torch.empty(0)
            moments = {name: record.moment(name, low, high) for name in record.format.moments} if record is not None else {}
            yield PieceState(
                info,
                piece.start - piece.slot.start,
                record.master(low, high, part) if record is not None else part,
                moments.get("exp_avg"),
                moments.get("exp_avg_sq"),
            )

    def array(self, kind: str) -> torch.Tensor | None:
        """`VALUE` or a moment as it lies in its store, padding included; None where what is there has another format."""
        if self.record is None:
            return self.values
        if self.record.format.state_format is not StateFormat.FP32:
            return None
        return self.record.arrays.get(MASTER, self.values) if kind == VALUE else self.record.arrays[kind]


class ChunkBuffer:
    """One host buffer that every chunk of a `Places` (or every chunk's parameters) fits into, made when first needed."""

    def __init__(self, parts: Parts, nbytes: Iterable[int]) -> None:
        self._parts = parts
        self._nbytes = max(nbytes, default=0)
        self._memory: HostMemory | None = None

    def take(self, nbytes: int) -> torch.Tensor:
        """uint8 [nbytes], the same memory every time."""
        if self._memory is None:
            self._memory = HostMemory(self._nbytes, PURPOSE, ledger=self._parts.ledger, direct_io=True)
        return self._memory.tensor[:nbytes]

    def close(self) -> None:
        self._memory = None


def parameter_nbytes(chunk_of: ChunkOf) -> int:
    """Bytes of a chunk's parameters in compute precision."""
    return chunk_of.chunk.numel * chunk_of.flat.layout.itemsize


class ChunkBuffers:
    """The buffers for one pass over the whole state, reading or writing."""

    def __init__(self, parts: Parts) -> None:
        chunks = [chunk_of for unit in parts.units for chunk_of in chunks_of(unit)]
        records, places = parts.records, parts.places
        trained = [chunk_of for chunk_of in chunks if chunk_of.flat.layout.trainable] if records is not None else []
        self.record = ChunkBuffer(parts, (records.nbytes(one) for one in trained) if records is not None else ())
        self.values = ChunkBuffer(
            parts, (places.nbytes(one) if places is not None else parameter_nbytes(one) for one in chunks)
        )

    def close(self) -> None:
        self.record.close()
        self.values.close()


class StateReader:
    """See the module. Used by one thread at a time; no update may write what it reads."""

    def __init__(self, parts: Parts, failures: Callable[[], AbstractContextManager[None]]) -> None:
        """`failures()`: around every read from a tier; a failure there is the engine's, one of writing the files is not."""
        self._parts, self._failures = parts, failures
        self._buffers = ChunkBuffers(parts)

    def pieces(self, unit: Unit) -> Iterator[PieceState]:
        """Every piece of the unit, in the layout's order: each parameter's come in order and are complete at the end."""
        for chunk_of in chunks_of(unit):
            yield from self.chunk(chunk_of).pieces()

    def chunk(self, chunk_of: ChunkOf, *, kept: bool = False) -> ChunkState:
        """The chunk's state, valid until the next one's is asked for. `kept`: what its stores (`stores_of`) keep."""
        with self._failures():
            record = self._record(chunk_of, kept)
            needs_values = record is None or record.format.needs_values
            values = self._values(chunk_of, kept) if needs_values else None
        return ChunkState(chunk_of, values, record)

    def close(self) -> None:
        """Give the buffers back. Idempotent."""
        self._buffers.close()

    def _record(self, chunk_of: ChunkOf, kept: bool) -> Record | None:
        records = self._parts.records
        if records is None or not chunk_of.flat.layout.trainable:
            return None
        return records.over(chunk_of, _read(records, chunk_of, self._buffers.record, kept))

    def _values(self, chunk_of: ChunkOf, kept: bool) -> torch.Tensor:
        """The chunk's parameters [chunk.numel] in their own dtype, in host memory."""
        nbytes, places = parameter_nbytes(chunk_of), self._parts.places
        if places is not None:
            content = _read(places, chunk_of, self._buffers.values, kept)
        elif self._parts.accelerator.unified:
            content = chunk_of.flat.chunk_bytes(chunk_of.chunk)
        else:
            content = self._buffers.values.take(nbytes)
            self._parts.accelerator.copy_out(content, chunk_of.flat.chunk_bytes(chunk_of.chunk)).wait()
        return content[:nbytes].view(chunk_of.flat.dtype)


def stores_of(parts: Parts, chunk_of: ChunkOf) -> tuple[Places, ...]:
    """Those that hold the chunk's state among them; none where a part of it is not in a store."""
    records = parts.records if chunk_of.flat.layout.trainable else None
    needs_values = records is None or records.format(chunk_of).needs_values
    if not needs_values:
        return (records,) if records is not None else ()
    if parts.places is None:
        return ()
    return (records, parts.places) if records is not None else (parts.places,)


def _read(places: Places, chunk_of: ChunkOf, buffer: ChunkBuffer, kept: bool) -> torch.Tensor:
    """The chunk's bytes in host memory: where they lie, or read into the buffer."""
    if kept:
        content = buffer.take(places.nbytes(chunk_of))
        places.read_kept(chunk_of, content).wait()
        return content
    places.settle_write(chunk_of)
    stored = places.view(chunk_of)
    if stored is not None and stored.device.type == "cpu":
        return stored
    content = buffer.take(places.nbytes(chunk_of))
    if stored is not None:
        return content.copy_(stored)
    places.read(chunk_of, content).wait()
    return content
