"""How a unit's parameters come into device memory and leave it: one fetcher per way.

HomeFetcher    they are there for good
DirectFetcher  device memory is host memory: the store reads straight into it
StagedFetcher  store -> (staging buffer ->) H2D, on a lane of its own, after the update of the unit if one runs
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import deque

from offload.device.accelerator import Accelerator
from offload.device.pending import Pending
from offload.runtime.flats import ChunkOf, Unit
from offload.runtime.places import ParameterPlaces
from offload.runtime.update import Updates
from offload.tiers.staging import Lease, StagingPool

FETCHED = "fetched parameters"


def chunks_of(unit: Unit) -> list[ChunkOf]:
    return [ChunkOf(flat, chunk) for flat in unit.flats for chunk in flat.layout.chunks]


class Fetcher(ABC):
    """See the module. Called by the thread that drives the model."""

    @abstractmethod
    def fetched_nbytes(self, unit: Unit) -> int:
        """Device memory that the unit takes while it is resident; 0 if it is there for good."""

    @abstractmethod
    def start(self, unit: Unit) -> None:
        """Fill the unit's memory and begin to bring its values in."""

    @abstractmethod
    def finish(self, unit: Unit) -> None:
        """Make compute wait until the values are there; raise the failure if they cannot be had."""

    @abstractmethod
    def evict(self, unit: Unit) -> None:
        """Empty the unit's memory. Nothing is written back: parameters change only by updates, which write."""

    def close(self) -> None:  # noqa: B027 - most hold nothing
        """Stop what runs. Idempotent."""


class HomeFetcher(Fetcher):
    """Parameters that never leave."""

    def fetched_nbytes(self, unit: Unit) -> int:
        return 0

    def start(self, unit: Unit) -> None:
        raise AssertionError(f"unit {unit.name} is always resident")

    def finish(self, unit: Unit) -> None:
        raise AssertionError(f"unit {unit.name} is always resident")

    def evict(self, unit: Unit) -> None:
        raise AssertionError(f"unit {unit.name} is always resident")


class DirectFetcher(Fetcher):
    """Device memory that the store can address."""

    def __init__(self, places: ParameterPlaces) -> None:
        self._places = places

    def fetched_nbytes(self, unit: Unit) -> int:
        return sum(flat.memory.nbytes for flat in unit.flats)

    def start(self, unit: Unit) -> None:
        for flat in unit.flats:
            flat.memory.fill()
        for chunk_of in chunks_of(unit):
            self._places.fetch(chunk_of)

    def finish(self, unit: Unit) -> None:
        for chunk_of in chunks_of(unit):
            self._places.settle_fetch(chunk_of)

    def evict(self, unit: Unit) -> None:
        for chunk_of in chunks_of(unit):
            self._places.settle_write(chunk_of)  # an update's write still reads this memory
        for flat in unit.flats:
            flat.memory.empty()


class StagedFetcher(Fetcher):
    """Device memory of its own, reached by H2D copies."""

    def __init__(self, accelerator: Accelerator, places: ParameterPlaces, pool: StagingPool, updates: Updates | None) -> None:
        self._accelerator, self._places, self._pool, self._updates = accelerator, places, pool, updates
        self._lane = accelerator.host_lane("fetch", waits_for_io=True)
        self._jobs: dict[int, Pending] = {}
        self._copies: dict[int, list[Pending]] = {}

    def fetched_nbytes(self, unit: Unit) -> int:
        return sum(flat.memory.nbytes for flat in unit.flats)

    def start(self, unit: Unit) -> None:
        for flat in unit.flats:
            flat.memory.fill()
        updates = self._updates
        update = updates.launch(unit.index) if updates is not None and updates.is_pending(unit.index) else None
        self._copies[unit.index] = []
        self._jobs[unit.index] = self._lane.submit(lambda: self._bring(unit, update))

    def finish(self, unit: Unit) -> None:
        self._jobs.pop(unit.index).wait()
        for copy in self._copies.pop(unit.index):
            self._accelerator.join(copy)

    def evict(self, unit: Unit) -> None:
        for flat in unit.flats:
            flat.memory.empty()

    def close(self) -> None:
        self._lane.close()

    def _bring(self, unit: Unit, update: Pending | None) -> None:
        if update is not None:
            update.wait()
        copies = self._copies[unit.index]
        reading: deque[tuple[ChunkOf, Lease, Pending]] = deque()
        for chunk_of in chunks_of(unit):
            stored = self._places.view(chunk_of)
            if stored is not None:
                nbytes = chunk_of.chunk.numel * chunk_of.flat.layout.itemsize
                copies.append(self._accelerator.copy_in(chunk_of.flat.chunk_bytes(chunk_of.chunk), stored[:nbytes]))
                continue
            lease = self._pool.try_lease(FETCHED)
            while lease is None:
                if reading:
                    copies.append(self._copy(*reading.popleft()))
                    lease = self._pool.try_lease(FETCHED)
                else:
                    lease = self._pool.lease(FETCHED)
            nbytes = chunk_of.chunk.numel * chunk_of.flat.layout.itemsize
            reading.append((chunk_of, lease, self._places.read(chunk_of, lease.tensor[:nbytes])))
        while reading:
            copies.append(self._copy(*reading.popleft()))

    def _copy(self, chunk_of: ChunkOf, lease: Lease, read: Pending) -> Pending:
        read.wait()
        nbytes = chunk_of.chunk.numel * chunk_of.flat.layout.itemsize
        copied = self._accelerator.copy_in(chunk_of.flat.chunk_bytes(chunk_of.chunk), lease.tensor[:nbytes])
        lease.release(after=copied)
        return copied
