# SPDX-License-Identifier: Apache-2.0
"""The engine's state as it lies in the tiers, parameter by parameter in pieces, a chunk at a time or some ahead.

Extra host memory: where records (or parameters) cannot be read in place, the largest chunk's record (or values), as often
as chunks are read at once; with state formats other than fp32 one piece's master and moments in fp32.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass
from types import MappingProxyType

import torch

from offload.checkpoint.format.manifest import VALUE
from offload.device.arithmetic.records import Record
from offload.device.arithmetic.segment import MASTER, StateFormat
from offload.device.pending import AllOf, Pending
from offload.model.chunk import Chunk
from offload.model.flat import ParameterInfo
from offload.model.unit import Unit
from offload.step.chunk_stores import ChunkStore
from offload.step.components import Components
from offload.tiers.io import Priority
from offload.tiers.memory import HostMemory
from offload.tiers.store import ExtentSnapshot

PURPOSE = "checkpoint"
"""Of the buffers, on the ledger."""

Failures = Callable[[], AbstractContextManager[None]]

Snapshots = Mapping[ChunkStore, ExtentSnapshot]
"""What the stores of a chunk keep of it."""

_Read = Callable[[ChunkStore, "ChunkBuffer"], torch.Tensor]

_log = logging.getLogger(__name__)


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

    chunk: Chunk
    values: torch.Tensor | None
    record: Record | None

    def pieces(self) -> Iterator[PieceState]:
        """Every piece of the chunk, in the layout's order."""
        values, record, start = self.values, self.record, self.chunk.start
        for info, piece in self.chunk.pieces:
            low, high = piece.start - start, piece.stop - start
            part = values[low:high] if values is not None else torch.empty(0, device="cpu")
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
    """One host buffer that every chunk of a `ChunkStore` (or every chunk's parameters) fits into, made when first needed."""

    def __init__(self, parts: Components, nbytes: Iterable[int]) -> None:
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


class ChunkBuffers:
    """The buffers for one pass over the whole state, reading or writing."""

    def __init__(self, parts: Components) -> None:
        chunks = [chunk for unit in parts.units for chunk in unit.chunks]
        records, parameter_store = parts.records, parts.parameter_store
        trained = [one for one in chunks if one.flat.layout.trainable]
        self.record = ChunkBuffer(parts, (records.nbytes(one) for one in trained) if records is not None else ())
        self.values = ChunkBuffer(parts, (parameter_store.nbytes(one) for one in chunks))

    def close(self) -> None:
        self.record.close()
        self.values.close()


class ChunkRead:
    """A chunk on its way into memory. Its memory may not be used for anything else before it `settle`d."""

    def __init__(self, state: ChunkState, transfers: Pending, failures: Failures) -> None:
        self._state, self._transfers, self._failures = state, transfers, failures

    def wait(self) -> ChunkState:
        """The chunk's state, when it is there; raises why it is not."""
        with self._failures():
            self._transfers.wait()
        return self._state

    def settle(self) -> None:
        """For whoever does not want it any more: wait until nothing of it is in flight."""
        settle(self._transfers)


class StateReader:
    """See the module. Used by one thread at a time; no update may write what it reads."""

    def __init__(self, parts: Components, failures: Failures, at_once: int = 1) -> None:
        """`failures()`: around every read from a tier; a failure there is the engine's, one of writing the files is not.
        `at_once`: how many chunks' states are valid at the same time."""
        self._parts, self._failures = parts, failures
        self._buffers = deque(ChunkBuffers(parts) for _ in range(at_once))

    def pieces(self, unit: Unit) -> Iterator[PieceState]:
        """Every piece of the unit, in the layout's order: each parameter's come in order and are complete at the end."""
        for chunk in unit.chunks:
            yield from self.begin(chunk).wait().pieces()

    def begin(
        self, chunk: Chunk, snapshots: Snapshots = MappingProxyType({}), priority: Priority = Priority.STATE
    ) -> ChunkRead:
        """Have the chunk's state read; it is valid until `at_once` more have begun. `snapshots`: what its stores keep of it,
        read with that priority."""
        buffers = self._buffers[0]
        self._buffers.rotate(-1)
        transfers: list[Pending] = []

        def read(store: ChunkStore, buffer: ChunkBuffer) -> torch.Tensor:
            snapshot = snapshots.get(store)
            if snapshot is None:
                return _read(store, chunk, buffer, transfers)
            content = buffer.take(store.nbytes(chunk))
            transfers.append(store.read_snapshot(chunk, snapshot, content, priority))
            return content

        try:
            with self._failures():
                record = self._record(chunk, buffers.record, read)
                needs_values = record is None or record.format.needs_values
                values = self._values(chunk, buffers.values, read) if needs_values else None
        except BaseException:
            settle(AllOf(transfers))
            raise
        return ChunkRead(ChunkState(chunk, values, record), AllOf(transfers), self._failures)

    def close(self) -> None:
        """Give the buffers back. Idempotent."""
        for buffers in self._buffers:
            buffers.close()

    def _record(self, chunk: Chunk, buffer: ChunkBuffer, read: _Read) -> Record | None:
        records = self._parts.records
        if records is None or not chunk.flat.layout.trainable:
            return None
        return records.over(chunk, read(records, buffer))

    def _values(self, chunk: Chunk, buffer: ChunkBuffer, read: _Read) -> torch.Tensor:
        """The chunk's parameters [chunk.numel] in their own dtype, in host memory."""
        content = read(self._parts.parameter_store, buffer)
        return content[: chunk.nbytes].view(chunk.flat.dtype)


def settle(transfers: Pending) -> None:
    """Wait for what another failure has made useless. A failure of its own goes to the log."""
    try:
        transfers.wait()
    except Exception as error:
        _log.warning("a further failure: %s", error)


def stores_of(parts: Components, chunk: Chunk) -> list[ChunkStore]:
    """Those that hold the chunk's state among them."""
    records = parts.records if chunk.flat.layout.trainable else None
    stores: list[ChunkStore] = [records] if records is not None else []
    if records is None or records.format(chunk).needs_values:
        stores.append(parts.parameter_store)
    return stores


def raw_arrays(parts: Components, store: ChunkStore, chunk: Chunk) -> dict[str, range]:
    """The chunk's arrays that lie in one of its stores (`stores_of`) just as they will in a file, and where in its extent."""
    records = parts.records
    if not chunk.flat.layout.trainable:
        return {VALUE: range(chunk.nbytes)}
    if records is None or records.format(chunk).state_format is not StateFormat.FP32:
        return {}
    if store is not records:
        return {VALUE: range(chunk.nbytes)}
    found, start = {}, 0
    for name, dtype, numel in records.format(chunk).arrays(chunk.numel):
        found[VALUE if name == MASTER else name] = range(start, start + numel * dtype.itemsize)
        start += numel * dtype.itemsize
    return found


def _read(store: ChunkStore, chunk: Chunk, buffer: ChunkBuffer, transfers: list[Pending]) -> torch.Tensor:
    """The chunk's bytes in host memory: where they lie, or in the buffer when what joins `transfers` is over."""
    stored = store.view(chunk)
    if stored is not None and stored.device.type == "cpu":
        return stored
    content = buffer.take(store.nbytes(chunk))
    if stored is not None:
        return content.copy_(stored)
    transfers.append(store.read(chunk, content))
    return content
