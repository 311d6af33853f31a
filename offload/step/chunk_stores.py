# SPDX-License-Identifier: Apache-2.0
"""Where each chunk's parameters and optimizer record lie: the link between the layout's chunks and the tiers' extents."""

from __future__ import annotations

import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable
from functools import partial

import torch

from offload.device.arithmetic import kernels
from offload.device.arithmetic.records import Record, RecordFormat
from offload.device.pending import AllOf, Pending, Settled
from offload.errors import StorageError
from offload.layout import Extent, ExtentAllocator
from offload.model.chunk import Chunk, Place
from offload.model.flat import Flat, some_of
from offload.planning.budget import Tier
from offload.planning.purposes import OPTIMIZER_STATES
from offload.planning.route import RecordPath
from offload.tiers.io import OpenFile, Priority
from offload.tiers.store import ExtentSnapshot, Store

_NAMED = 3
"""How many parameters an error lists."""
_NOTHING = torch.empty(0, dtype=torch.uint8, device="cpu")

StoreFactory = Callable[[Tier, Iterable[Extent]], Store]
"""Makes one state's store in a tier."""


class _OfChunk(Pending):
    """A transfer whose failure says which parameters it strikes."""

    def __init__(self, transfer: Pending, purpose: str, chunk: Chunk) -> None:
        self._transfer, self._purpose, self._chunk = transfer, purpose, chunk
        self._failure: StorageError | None = None

    def wait(self) -> None:
        self._see(self._transfer.wait)

    def arrive(self) -> bool:
        return bool(self._see(self._transfer.arrive))

    def compare(self, sums: torch.Tensor) -> None:
        self._see(partial(self._transfer.compare, sums))

    def _see(self, look: Callable[[], bool | None]) -> bool | None:
        try:
            return look()
        except StorageError as error:
            self._failure = self._failure or _named(error, self._purpose, self._chunk)
            raise self._failure from error

    def done(self) -> bool:
        return self._transfer.done()


def _named(error: StorageError, purpose: str, chunk: Chunk) -> StorageError:
    """The same failure, saying whose it is."""
    names = some_of([info.fqn for info, _ in chunk.pieces], _NAMED)
    return type(error)(error.errno, f"{purpose} of {names}: {error.strerror}")


class ChunkStore(ABC):
    """One state of all chunks, each in the store of its tier. A read or write of a chunk is ordered after its last write, on
    any thread.

    What has no bytes has no extent, and is there in place: [0].
    Where its route gives a trained chunk a second place, it has two extents and is written to them in turn, so that its last
    write can be undone: that costs room and no transfer.
    """

    read_priority = Priority.STATE

    def __init__(self, sizes_nbytes: Iterable[tuple[Chunk, Tier, int]], purpose: str, make_store: StoreFactory) -> None:
        allocators: dict[Tier, ExtentAllocator] = {}
        sized = [(chunk, tier, nbytes) for chunk, tier, nbytes in sizes_nbytes if nbytes]
        for chunk, tier, nbytes in sized:
            self._place(chunk).extent = allocators.setdefault(tier, ExtentAllocator()).take(nbytes)
        for chunk, tier, nbytes in sized:  # after all others: what is read one after the other lies so
            if chunk.flat.layout.trainable and self._has_second_place(chunk, tier):
                self._place(chunk).other = allocators[tier].take(nbytes)
            if chunk.flat.layout.trainable and self._keeps_former(chunk, tier):
                self._place(chunk).former = allocators[tier].take(nbytes)
        self._stores = {tier: make_store(tier, allocator.extents) for tier, allocator in allocators.items()}
        for chunk, tier, _ in sized:
            self._place(chunk).store = self._stores[tier]
        self._purpose = purpose
        self._lock = threading.Lock()
        self._writing: dict[Chunk, Pending] = {}
        """Writes whose end nobody has seen yet, oldest first."""
        self.bring_home: Callable[[Chunk], None] | None = None
        """Of what is newer on the device (`Place.behind`)."""

    @staticmethod
    @abstractmethod
    def _place(chunk: Chunk) -> Place:
        """Where the chunk has the state that these places are of."""

    def _has_second_place(self, chunk: Chunk, tier: Tier) -> bool:
        return chunk.route.undoable and tier == "nvme"

    def _keeps_former(self, chunk: Chunk, tier: Tier) -> bool:
        return False

    def nbytes(self, chunk: Chunk) -> int:
        extent = self._place(chunk).extent
        return extent.nbytes if extent is not None else 0

    def view(self, chunk: Chunk) -> torch.Tensor | None:
        """The chunk's bytes where they lie, if they can be used in place. Waits for its last write then."""
        place = self._place(chunk)
        if place.extent is None or place.store is None:
            return _NOTHING
        found = place.store.view(place.extent)
        if found is not None:
            self.settle_write(chunk)
        return found

    def read(self, chunk: Chunk, into: torch.Tensor) -> Pending:
        self.settle_write(chunk)
        place = self._place(chunk)
        assert place.store is not None and place.extent is not None, "what has no bytes is there in place"
        try:
            transfer = place.store.read(place.extent, into, priority=self.read_priority)
        except StorageError as error:  # what the chunk's last write left behind cannot be read
            raise _named(error, self._purpose, chunk) from error
        return _OfChunk(transfer, self._purpose, chunk)

    def snapshot(self, chunk: Chunk) -> ExtentSnapshot | None:
        """Keep the chunk's bytes of now, whatever is written from now on. Waits for its last write. None where the store cannot
        (`Store.snapshot`)."""
        self.settle_write(chunk)
        place = self._place(chunk)
        return place.store.snapshot(place.extent) if place.store is not None and place.extent is not None else None

    def read_snapshot(self, chunk: Chunk, snapshot: ExtentSnapshot, into: torch.Tensor, priority: Priority) -> Pending:
        return _OfChunk(snapshot.read(into, priority=priority), self._purpose, chunk)

    def room_for_snapshots(self) -> list[tuple[OpenFile, int]]:
        """See `Store.room_for_snapshots`."""
        return [room for store in self._stores.values() for room in store.room_for_snapshots()]

    def verifies(self, chunk: Chunk) -> bool:
        """Whether the chunk's reads are compared with what was written: then `write` takes checksums."""
        store = self._place(chunk).store
        return store is not None and store.verifies

    def write(self, chunk: Chunk, source: torch.Tensor, sums: torch.Tensor | None = None) -> Pending:
        """`sums`: of the blocks of `source`, as of `Store.write`."""
        self.settle_write(chunk)
        place = self._place(chunk)
        if place.store is None:
            return Settled()
        _turn(place)
        assert place.extent is not None
        pending = _OfChunk(place.store.write(place.extent, source, sums=sums), self._purpose, chunk)
        self.writing(chunk, pending)
        return pending

    def writing(self, chunk: Chunk, pending: Pending) -> None:
        """`pending` writes the chunk where it lies in the store: whoever reads it, or writes there, waits for that. The chunk's
        last write must be settled (`view` and `settle_write` do that)."""
        with self._lock:
            self._place(chunk).write = self._writing[chunk] = pending

    def second_view(self, chunk: Chunk) -> torch.Tensor | None:
        """Where the chunk's bytes may be written so that this can be undone, if that can be addressed; see `turn`."""
        place = self._place(chunk)
        if place.other is None or place.store is None:
            return None
        return place.store.view(place.other)

    def turn(self, chunk: Chunk) -> None:
        """What was written to `second_view` is the chunk's from now on."""
        _turn(self._place(chunk))

    def undo_write(self, chunk: Chunk) -> None:
        """The chunk, whose route must be undoable, is again what it was before its last write. Nobody may be reading it."""
        self.settle_write(chunk)
        place = self._place(chunk)
        if place.store is None:
            return  # it has no bytes: plain SGD keeps nothing
        assert place.other is not None, "what is written in place cannot be undone"
        _turn(place)

    def settle_write(self, chunk: Chunk) -> None:
        """Have here what is newer on the device. Wait for the chunk's last write, if one is in flight; raise its failure."""
        place = self._place(chunk)
        if place.behind:
            assert self.bring_home is not None, "who left it behind brings it"
            self.bring_home(chunk)
        pending = place.write
        if pending is not None:
            self._settle({chunk: pending})

    def settle_writes(self) -> None:
        """Wait for every write in flight; raise the first failure."""
        with self._lock:
            pendings = dict(self._writing)
        self._settle(pendings)

    def _settle(self, pendings: dict[Chunk, Pending]) -> None:
        try:
            AllOf(pendings.values()).wait()
        finally:
            with self._lock:  # only now: until it is over, every other thread that comes must find it and wait too
                for chunk, pending in pendings.items():
                    if pending.done():  # else: an interrupt ended the wait
                        self._forget_write(chunk, pending)

    def _forget_write(self, chunk: Chunk, pending: Pending) -> None:
        place = self._place(chunk)
        if place.write is pending:
            place.write = None
            del self._writing[chunk]

    def raise_failed_writes(self) -> None:
        """Raise the failure of a write that is over and that nobody waited for."""
        with self._lock:
            over = {chunk: pending for chunk, pending in self._writing.items() if pending.done()}
            for chunk, pending in over.items():
                self._forget_write(chunk, pending)
        for pending in over.values():
            pending.wait()


def _turn(place: Place) -> None:
    if place.other is not None:
        place.extent, place.other = place.other, place.extent


class ParameterStore(ChunkStore):
    """The parameters' homes: a store, or where they stay the very memory that the model computes on, which is their view."""

    read_priority = Priority.PARAMETER

    def __init__(self, chunks: Iterable[tuple[Chunk, Tier]], make_store: StoreFactory) -> None:
        stored = ((chunk, tier, chunk.nbytes) for chunk, tier in chunks if chunk.route.has_store)
        super().__init__(stored, "parameters", make_store)
        self._copying: dict[Chunk, None] = {}
        """Chunks with a copy whose end nobody has seen yet."""

    @staticmethod
    def _place(chunk: Chunk) -> Place:
        return chunk.parameters

    def _keeps_former(self, chunk: Chunk, tier: Tier) -> bool:
        return chunk.route.keeps_values and tier == "cpu"

    def keep_former(self, chunk: Chunk) -> None:
        """Before an update that may have to be undone: keep the values that it overwrites, where there is a place for them."""
        found = self._with_former(chunk)
        if found is not None:
            kernels.convert(found[1], found[0], all_cores=True)

    def restore_former(self, chunk: Chunk) -> bool:
        """Undo that update. Nobody may be reading the chunk. False where nothing was kept."""
        found = self._with_former(chunk)
        if found is None:
            return False
        self.settle_copies(chunk)
        kernels.convert(*found, all_cores=True)
        return True

    def _with_former(self, chunk: Chunk) -> tuple[torch.Tensor, torch.Tensor] | None:
        """The chunk's values, and where the former ones are kept."""
        place = chunk.parameters
        if place.former is None or place.store is None:
            return None
        former, values = place.store.view(place.former), self.view(chunk)
        assert former is not None and values is not None, "what lies in memory can be addressed"
        return chunk.values_in(values), chunk.values_in(former)

    def nbytes(self, chunk: Chunk) -> int:
        return super().nbytes(chunk) if chunk.route.has_store else chunk.nbytes

    def view(self, chunk: Chunk) -> torch.Tensor | None:
        return super().view(chunk) if chunk.route.has_store else chunk.bytes

    def write(self, chunk: Chunk, source: torch.Tensor, sums: torch.Tensor | None = None) -> Pending:
        if chunk.route.has_store:
            return super().write(chunk, source, sums)
        chunk.bytes.copy_(source[: chunk.nbytes])  # on the stream of compute, after what it does now
        return Settled()

    def copying(self, chunk: Chunk, copy: Pending) -> None:
        """`copy` reads the chunk where it lies in the store: who writes there calls `settle_copies` first."""
        with self._lock:
            chunk.parameters.copy = copy
            self._copying[chunk] = None

    def is_copied(self, chunk: Chunk) -> bool:
        """Whether `settle_copies` has nothing to wait for."""
        copy = chunk.parameters.copy
        return copy is None or copy.done()

    def settle_copies(self, chunk: Chunk) -> None:
        """Wait until no copy reads the chunk where it lies in the store."""
        copy = chunk.parameters.copy
        if copy is None:
            return
        try:
            copy.wait()
        finally:
            with self._lock:  # as in `_settle`: whoever comes meanwhile waits too
                if chunk.parameters.copy is copy and copy.done():
                    chunk.parameters.copy = None
                    self._copying.pop(chunk, None)

    def settle_all_copies(self) -> None:
        """The same for every chunk."""
        with self._lock:
            chunks = list(self._copying)
        for chunk in chunks:
            self.settle_copies(chunk)

    def fetch(self, chunk: Chunk) -> None:
        """Read the chunk straight into its flat, which must be memory that the store can address."""
        chunk.parameters.fetch = self.read(chunk, chunk.bytes)

    def settle_fetch(self, chunk: Chunk) -> None:
        """Wait for the chunk's `fetch`, if one is in flight; raise its failure."""
        pending = chunk.parameters.fetch
        if pending is not None:
            pending.wait()
            chunk.parameters.fetch = None


class RecordStore(ChunkStore):
    """The optimizer records' home in a store."""

    def __init__(
        self,
        chunks: Iterable[tuple[Chunk, Tier, RecordPath]],
        make_store: StoreFactory,
        format_of: Callable[[Flat], RecordFormat],
    ) -> None:
        known = list(chunks)
        self._formats = {id(chunk.flat): format_of(chunk.flat) for chunk, _, _ in known}
        sizes = [(chunk, tier, self.format(chunk).nbytes(chunk.numel)) for chunk, tier, _ in known]
        super().__init__(sizes, OPTIMIZER_STATES.furthest, make_store)
        for chunk, _, path in known:
            chunk.record_path = path if self.nbytes(chunk) else RecordPath.IN_PLACE
        self.in_memory = all(chunk.record_path is RecordPath.IN_PLACE for chunk, _, _ in known)
        """Whether every record is updated where it lies, with no transfer."""

    @staticmethod
    def _place(chunk: Chunk) -> Place:
        return chunk.record

    def _has_second_place(self, chunk: Chunk, tier: Tier) -> bool:
        return chunk.route.undoable

    @property
    def moments(self) -> tuple[str, ...]:
        """What every record keeps."""
        return next((one.moments for one in self._formats.values()), ())

    def format(self, chunk: Chunk) -> RecordFormat:
        return self.flat_format(chunk.flat)

    def flat_format(self, flat: Flat) -> RecordFormat:
        """Of every chunk of the flat, also of other ranks'."""
        return self._formats[id(flat)]

    def over(self, chunk: Chunk, buffer: torch.Tensor) -> Record:
        return self.format(chunk).over(buffer, chunk.numel)
