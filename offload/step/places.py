"""Where each chunk's parameters and optimizer record lie: the link between the layout's chunks and the tiers' extents."""

from __future__ import annotations

import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable

import torch

from offload.device.pending import AllOf, Pending, Settled
from offload.device.records import Record, RecordFormat
from offload.errors import StorageError
from offload.layout import Extent, ExtentAllocator, FlatLayout
from offload.model.chunk import ChunkOf, Place
from offload.model.flats import Flat, some_of
from offload.tiers.io import OpenFile, Priority
from offload.tiers.store import ShareBlocks, Store

_NAMED = 3
"""How many parameters an error lists."""

OPTIMIZER_STATES = "optimizer states"
"""The name of their store."""

StoreFactory = Callable[[str, Iterable[Extent]], Store]
"""Makes the store of one kind of state in the tier chosen for it: (purpose, extents) -> store."""

Undoable = Callable[[ChunkOf], bool]
"""Whether the last write of a chunk must be undoable."""


def _never(_: ChunkOf) -> bool:
    return False


class _OfChunk(Pending):
    """A transfer whose failure says which parameters it strikes."""

    def __init__(self, transfer: Pending, purpose: str, chunk_of: ChunkOf) -> None:
        self._transfer, self._purpose, self._chunk_of = transfer, purpose, chunk_of
        self._failure: StorageError | None = None

    def wait(self) -> None:
        try:
            self._transfer.wait()
        except StorageError as error:
            self._failure = self._failure or _named(error, self._purpose, self._chunk_of)
            raise self._failure from error

    def done(self) -> bool:
        return self._transfer.done()


def _named(error: StorageError, purpose: str, chunk_of: ChunkOf) -> StorageError:
    """The same failure, saying whose it is."""
    names = some_of([info.fqn for info, _ in chunk_of.pieces], _NAMED)
    return type(error)(error.errno, f"{purpose} of {names}: {error.strerror}")


class Places(ABC):
    """Chunks' extents in one store. A read or write of a chunk is ordered after its last write, on any thread.

    What has no bytes has no extent, and is there in place: [0] on the device `empty_on`.
    A chunk in `undoable` has two extents and is written to them in turn, so that its last write can be undone: that costs room
    and no transfer.
    """

    read_priority = Priority.STATE

    def __init__(
        self,
        sizes_nbytes: Iterable[tuple[ChunkOf, int]],
        purpose: str,
        make_store: StoreFactory,
        empty_on: torch.device | None = None,
        undoable: Undoable = _never,
    ) -> None:
        allocator = ExtentAllocator()
        sized = [(chunk_of, nbytes) for chunk_of, nbytes in sizes_nbytes if nbytes]
        for chunk_of, nbytes in sized:
            self._place(chunk_of).extent = allocator.take(nbytes)
        # After all others: of a store in two tiers the first extents are those in memory.
        for chunk_of, nbytes in sized:
            if undoable(chunk_of):
                self._place(chunk_of).other = allocator.take(nbytes)
        self._store = make_store(purpose, allocator.extents) if allocator.extents else None
        self._nothing = torch.empty(0, dtype=torch.uint8, device=empty_on)
        self._purpose = purpose
        self._lock = threading.Lock()
        self._writing: dict[ChunkOf, Pending] = {}
        """Writes whose end nobody has seen yet, oldest first."""

    @staticmethod
    @abstractmethod
    def _place(chunk_of: ChunkOf) -> Place:
        """Where the chunk has the state that these places are of."""

    def nbytes(self, chunk_of: ChunkOf) -> int:
        extent = self._place(chunk_of).extent
        return extent.nbytes if extent is not None else 0

    def view(self, chunk_of: ChunkOf) -> torch.Tensor | None:
        """The chunk's bytes where they lie, if they can be used in place."""
        extent = self._place(chunk_of).extent
        return self._nothing if extent is None or self._store is None else self._store.view(extent)

    def read(self, chunk_of: ChunkOf, into: torch.Tensor) -> Pending:
        self.settle_write(chunk_of)
        extent = self._place(chunk_of).extent
        assert self._store is not None and extent is not None, "what has no bytes is there in place"
        try:
            transfer = self._store.read(extent, into, priority=self.read_priority)
        except StorageError as error:  # what the chunk's last write left behind cannot be read
            raise _named(error, self._purpose, chunk_of) from error
        return _OfChunk(transfer, self._purpose, chunk_of)

    def share(self, chunk_of: ChunkOf, share: ShareBlocks) -> None:
        """See `Store.share`. The chunk's last write must be over."""
        extent = self._place(chunk_of).extent
        if extent is None or self._store is None:
            return
        try:
            self._store.share(extent, share)
        except StorageError as error:
            raise _named(error, self._purpose, chunk_of) from error

    def keep(self, chunk_of: ChunkOf) -> bool:
        """Keep the chunk's bytes of now for `read_kept`, whatever is written from now on, until `let_go`; False where the
        store cannot (`Store.keep`). Waits for its last write."""
        self.settle_write(chunk_of)
        place = self._place(chunk_of)
        if place.extent is None or self._store is None or not self._store.keep(place.extent):
            return False
        place.kept = place.extent
        return True

    def read_kept(self, chunk_of: ChunkOf, into: torch.Tensor) -> Pending:
        kept = self._place(chunk_of).kept
        assert self._store is not None and kept is not None, "what has no bytes is not kept"
        return _OfChunk(self._store.read_kept(kept, into), self._purpose, chunk_of)

    def let_go(self, chunk_of: ChunkOf) -> None:
        """What was kept, if anything was, is not needed any more."""
        place = self._place(chunk_of)
        kept, place.kept = place.kept, None
        if kept is not None:
            assert self._store is not None
            self._store.let_go(kept)

    def room_to_keep(self) -> list[tuple[OpenFile, int]]:
        """See `Store.room_to_keep`."""
        return self._store.room_to_keep() if self._store is not None else []

    def write(self, chunk_of: ChunkOf, source: torch.Tensor) -> Pending:
        self.settle_write(chunk_of)
        if self._store is None:
            return Settled()
        place = self._place(chunk_of)
        _turn(place)
        assert place.extent is not None
        pending = _OfChunk(self._store.write(place.extent, source), self._purpose, chunk_of)
        with self._lock:
            place.write = self._writing[chunk_of] = pending
        return pending

    def undo_write(self, chunk_of: ChunkOf) -> None:
        """The chunk, which must be `undoable`, is again what it was before its last write. Nobody may be reading it."""
        self.settle_write(chunk_of)
        place = self._place(chunk_of)
        assert place.other is not None, "what is written in place cannot be undone"
        _turn(place)

    def settle_write(self, chunk_of: ChunkOf) -> None:
        """Wait for the chunk's last write, if one is in flight; raise its failure."""
        pending = self._place(chunk_of).write
        if pending is not None:
            self._settle({chunk_of: pending})

    def settle_writes(self) -> None:
        """Wait for every write in flight; raise the first failure."""
        with self._lock:
            pendings = dict(self._writing)
        self._settle(pendings)

    def _settle(self, pendings: dict[ChunkOf, Pending]) -> None:
        try:
            AllOf(pendings.values()).wait()
        finally:
            with self._lock:  # only now: until it is over, every other thread that comes must find it and wait too
                for chunk_of, pending in pendings.items():
                    if pending.done():  # else: an interrupt ended the wait
                        self._forget_write(chunk_of, pending)

    def _forget_write(self, chunk_of: ChunkOf, pending: Pending) -> None:
        place = self._place(chunk_of)
        if place.write is pending:
            place.write = None
            del self._writing[chunk_of]

    def raise_failed_writes(self) -> None:
        """Raise the failure of a write that is over and that nobody waited for."""
        with self._lock:
            over = {chunk_of: pending for chunk_of, pending in self._writing.items() if pending.done()}
            for chunk_of, pending in over.items():
                self._forget_write(chunk_of, pending)
        for pending in over.values():
            pending.wait()


def _turn(place: Place) -> None:
    if place.other is not None:
        place.extent, place.other = place.other, place.extent


class ParameterPlaces(Places):
    """The parameters' home in a store. Absent where parameters live in memory that the device computes on."""

    read_priority = Priority.PARAMETER

    def __init__(self, chunks: Iterable[ChunkOf], make_store: StoreFactory, undoable: Undoable = _never) -> None:
        super().__init__(((chunk_of, chunk_of.nbytes) for chunk_of in chunks), "parameters", make_store, undoable=undoable)
        self._copying: dict[ChunkOf, None] = {}
        """Chunks with a copy whose end nobody has seen yet."""

    @staticmethod
    def _place(chunk_of: ChunkOf) -> Place:
        return chunk_of.parameters

    def copying(self, chunk_of: ChunkOf, copy: Pending) -> None:
        """`copy` reads the chunk where it lies in the store: who writes there calls `settle_copies` first."""
        with self._lock:
            chunk_of.parameters.copy = copy
            self._copying[chunk_of] = None

    def settle_copies(self, chunk_of: ChunkOf) -> None:
        """Wait until no copy reads the chunk where it lies in the store."""
        with self._lock:
            copy, chunk_of.parameters.copy = chunk_of.parameters.copy, None
            self._copying.pop(chunk_of, None)
        if copy is not None:
            copy.wait()

    def settle_all_copies(self) -> None:
        """The same for every chunk."""
        with self._lock:
            chunks = list(self._copying)
        for chunk_of in chunks:
            self.settle_copies(chunk_of)

    def fetch(self, chunk_of: ChunkOf) -> None:
        """Read the chunk straight into its flat, which must be memory that the store can address."""
        chunk_of.parameters.fetch = self.read(chunk_of, chunk_of.flat.chunk_bytes(chunk_of.chunk))

    def settle_fetch(self, chunk_of: ChunkOf) -> None:
        """Wait for the chunk's `fetch`, if one is in flight; raise its failure."""
        pending = chunk_of.parameters.fetch
        if pending is not None:
            pending.wait()
            chunk_of.parameters.fetch = None


class RecordPlaces(Places):
    """The optimizer records' home in a store."""

    def __init__(
        self,
        chunks: Iterable[ChunkOf],
        make_store: StoreFactory,
        format_of: Callable[[FlatLayout], RecordFormat],
        device: torch.device | None = None,
        undoable: Undoable = _never,
    ) -> None:
        """`device`: that of the store, if it is memory out of the host's reach."""
        known = list(chunks)
        self._formats = {id(chunk_of.flat): format_of(chunk_of.flat.layout) for chunk_of in known}
        sizes = [(chunk_of, self.format(chunk_of).nbytes(chunk_of.chunk.numel)) for chunk_of in known]
        super().__init__(sizes, OPTIMIZER_STATES, make_store, device, undoable)
        self.in_memory = all(self.view(chunk_of) is not None for chunk_of in known)
        """Whether every record is updated where it lies, with no transfer."""
        self.on_device = device is not None
        """Whether that is device memory out of the host's reach."""

    @staticmethod
    def _place(chunk_of: ChunkOf) -> Place:
        return chunk_of.record

    @property
    def moments(self) -> tuple[str, ...]:
        """What every record keeps."""
        return next((one.moments for one in self._formats.values()), ())

    def format(self, chunk_of: ChunkOf) -> RecordFormat:
        return self.flat_format(chunk_of.flat)

    def flat_format(self, flat: Flat) -> RecordFormat:
        """Of every chunk of the flat, also of other ranks'."""
        return self._formats[id(flat)]

    def over(self, chunk_of: ChunkOf, buffer: torch.Tensor) -> Record:
        return self.format(chunk_of).over(buffer, chunk_of.chunk.numel)
