"""Where each chunk's parameters and optimizer record lie: the link between the layout's chunks and the tiers' extents."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable
from dataclasses import dataclass

import torch

from offload.device.pending import AllOf, Pending
from offload.layout import Extent, ExtentAllocator
from offload.runtime.flats import ChunkOf
from offload.tiers.io import Priority
from offload.tiers.store import Store

RECORD_ITEMSIZE = 4
"""Bytes. Master weights and moments are fp32."""

StoreFactory = Callable[[str, Iterable[Extent]], Store]
"""Makes the store of one kind of state in the tier chosen for it: (purpose, extents) -> store."""


@dataclass(frozen=True, slots=True)
class Record:
    """The optimizer state of one chunk, as views of one buffer: fp32 [chunk.numel] each.

    `master` is None where the parameters themselves are the fp32 master.
    """

    master: torch.Tensor | None
    exp_avg: torch.Tensor
    exp_avg_sq: torch.Tensor

    @staticmethod
    def nbytes(numel: int, has_master: bool) -> int:
        return (3 if has_master else 2) * numel * RECORD_ITEMSIZE

    @staticmethod
    def over(buffer: torch.Tensor, numel: int, has_master: bool) -> Record:
        """Cut a uint8 buffer of at least `nbytes(numel, has_master)` into the arrays of a record."""
        values = buffer[: Record.nbytes(numel, has_master)].view(torch.float32)
        arrays = [values[index * numel : (index + 1) * numel] for index in range(3 if has_master else 2)]
        return Record(arrays[0] if has_master else None, arrays[-2], arrays[-1])


class Places:
    """Chunks' extents in one store. A read or write of a chunk is ordered after its last write, on any thread."""

    read_priority = Priority.STATE

    def __init__(self, sizes_nbytes: Iterable[tuple[ChunkOf, int]], purpose: str, make_store: StoreFactory) -> None:
        allocator = ExtentAllocator()
        self._extents = {chunk_of.key: allocator.take(nbytes) for chunk_of, nbytes in sizes_nbytes}
        self.store = make_store(purpose, allocator.extents)
        self._lock = threading.Lock()
        self._writes: dict[tuple[int, int], Pending] = {}

    def nbytes(self, chunk_of: ChunkOf) -> int:
        return self._extents[chunk_of.key].nbytes

    def view(self, chunk_of: ChunkOf) -> torch.Tensor | None:
        """The chunk's bytes where they lie, if they can be used in place."""
        return self.store.view(self._extents[chunk_of.key])

    def read(self, chunk_of: ChunkOf, into: torch.Tensor) -> Pending:
        self.settle_write(chunk_of)
        return self.store.read(self._extents[chunk_of.key], into, priority=self.read_priority)

    def write(self, chunk_of: ChunkOf, source: torch.Tensor) -> Pending:
        self.settle_write(chunk_of)
        pending = self.store.write(self._extents[chunk_of.key], source)
        with self._lock:
            self._writes[chunk_of.key] = pending
        return pending

    def settle_write(self, chunk_of: ChunkOf) -> None:
        """Wait for the chunk's last write, if one is in flight; raise its failure."""
        with self._lock:
            pending = self._writes.pop(chunk_of.key, None)
        if pending is not None:
            pending.wait()

    def settle_writes(self) -> None:
        """Wait for every write in flight; raise the first failure."""
        with self._lock:
            pendings = list(self._writes.values())
            self._writes.clear()
        AllOf(pendings).wait()

    def raise_failed_writes(self) -> None:
        """Raise the failure of a write that is over and that nobody waited for."""
        with self._lock:
            over = [key for key, pending in self._writes.items() if pending.done()]
            settled = [self._writes.pop(key) for key in over]
        for pending in settled:
            pending.wait()


class ParameterPlaces(Places):
    """The parameters' home in a store. Absent where parameters live in memory that the device computes on."""

    read_priority = Priority.PARAMETER

    def __init__(self, chunks: Iterable[ChunkOf], make_store: StoreFactory) -> None:
        sizes = ((chunk_of, chunk_of.chunk.numel * chunk_of.flat.layout.itemsize) for chunk_of in chunks)
        super().__init__(sizes, "parameters", make_store)
        self._fetches: dict[tuple[int, int], Pending] = {}

    def fetch(self, chunk_of: ChunkOf) -> None:
        """Read the chunk straight into its flat, which must be memory that the store can address."""
        pending = self.read(chunk_of, chunk_of.flat.chunk_bytes(chunk_of.chunk))
        with self._lock:
            self._fetches[chunk_of.key] = pending

    def settle_fetch(self, chunk_of: ChunkOf) -> None:
        """Wait for the chunk's `fetch`, if one is in flight; raise its failure."""
        with self._lock:
            pending = self._fetches.get(chunk_of.key)
        if pending is not None:
            pending.wait()
            with self._lock:
                self._fetches.pop(chunk_of.key, None)


class RecordPlaces(Places):
    """The optimizer records' home in a store."""

    def __init__(self, chunks: Iterable[ChunkOf], make_store: StoreFactory, has_master: Callable[[ChunkOf], bool]) -> None:
        own = {chunk_of: has_master(chunk_of) for chunk_of in chunks}
        sizes = ((chunk_of, Record.nbytes(chunk_of.chunk.numel, own[chunk_of])) for chunk_of in own)
        super().__init__(sizes, "optimizer states", make_store)
        self._has_master = {chunk_of.key: has for chunk_of, has in own.items()}
        self.in_memory = all(self.view(chunk_of) is not None for chunk_of in list(own)[:1])
        """Whether records are updated where they lie, with no transfer."""
        views = [self.view(chunk_of) for chunk_of in list(own)[:1]]
        self.on_device = any(view is not None and view.device.type != "cpu" for view in views)
        """Whether that is the memory of a GPU."""

    def has_master(self, chunk_of: ChunkOf) -> bool:
        return self._has_master[chunk_of.key]

    def over(self, chunk_of: ChunkOf, buffer: torch.Tensor) -> Record:
        return Record.over(buffer, chunk_of.chunk.numel, self._has_master[chunk_of.key])
