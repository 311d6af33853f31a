# SPDX-License-Identifier: Apache-2.0
"""How a unit's parameters come into device memory and leave it: one fetcher per way. What is there for good is asked of none.

DirectFetcher  device memory is host memory: the store reads straight into it
StagedFetcher  store -> (staging buffer ->) H2D, on a lane of its own, after the update of the unit if one runs
GatheredFetcher  this rank's shard by one of the above, those of the other ranks by an all-gather into the same memory
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import suppress

from torch import Tensor

from offload.device.accelerator import Accelerator
from offload.device.pending import Pending, Settled
from offload.model.chunk import Chunk
from offload.model.unit import Unit
from offload.model.unit_state import Fetch
from offload.model.update import UnitUpdate
from offload.planning.purposes import FETCHED
from offload.planning.route import Memory
from offload.ranks.rendezvous import Rendezvous
from offload.step.chunk_stores import ParameterStore
from offload.step.updates.update import Updates
from offload.tiers.staging import Lease, StagingPool

_Run = tuple[list[Chunk], Tensor, Tensor | None]
"""Chunks, where they go, and where in host memory they are copied from; None: one that is read."""


class Fetcher(ABC):
    """See the module. Called by the thread that drives the model."""

    @abstractmethod
    def start(self, unit: Unit) -> None:
        """Begin to bring the unit's values into its memory, which is filled."""

    @abstractmethod
    def finish(self, unit: Unit) -> None:
        """Make compute wait until the values are there; raise the failure if they cannot be had."""

    def is_over(self, unit: Unit) -> bool:
        """Whether `finish` has nothing to wait for, as far as is known at once."""
        return False

    @abstractmethod
    def evict(self, unit: Unit) -> None:
        """Empty the unit's memory. Nothing is written back: parameters change only by updates, which write."""

    def close(self) -> None:  # noqa: B027 - most hold nothing
        """Stop what runs. Idempotent."""


class DirectFetcher(Fetcher):
    """Device memory where updates happen: the store can address it, or (units kept in memory) it is the store's own."""

    def __init__(self, parameter_store: ParameterStore) -> None:
        self._parameter_store = parameter_store

    def start(self, unit: Unit) -> None:
        for chunk in unit.chunks:
            self._parameter_store.fetch(chunk)

    def finish(self, unit: Unit) -> None:
        for chunk in unit.chunks:
            self._parameter_store.settle_fetch(chunk)

    def evict(self, unit: Unit) -> None:
        for chunk in unit.chunks:
            self._parameter_store.settle_write(chunk)  # an update's write still reads this memory
        for flat in unit.flats:
            flat.memory.empty()


class StagedFetcher(Fetcher):
    """Device memory of its own, reached by H2D copies (or, where it is host memory, by reads straight into it)."""

    def __init__(
        self, accelerator: Accelerator, parameter_store: ParameterStore, pool: StagingPool | None, updates: Updates | None
    ) -> None:
        """`pool`: of staging buffers; None where reads go straight into the unit's memory."""
        self._accelerator, self._parameter_store, self._pool, self._updates = accelerator, parameter_store, pool, updates
        self._lane = accelerator.host_lane("fetch", waits_for_io=True)
        self._stored: dict[Unit, list[_Run]] = {}
        """Of units that lie in host memory as a whole. There each chunk stays in its place until the store is closed."""

    def start(self, unit: Unit) -> None:
        updates = self._updates
        update = unit.update if updates is not None else None
        job = updates.launch(unit) if updates is not None and update is not None else None
        unit.fetch = fetch = Fetch()
        at_once = self._accelerator.copies_beside and (job is None or job.done()) and self._is_stored(unit)
        begin = self._lane.run_now if at_once else self._lane.submit
        fetch.job = begin(lambda: self._bring(unit, fetch.copies, update), unit)

    def _is_stored(self, unit: Unit) -> bool:
        """Whether all of it lies in host memory, so that nothing but its update is waited for before the copies."""
        return unit in self._stored or all(self._parameter_store.view(chunk) is not None for chunk in unit.chunks)

    def is_over(self, unit: Unit) -> bool:
        fetch = unit.fetch
        if fetch is None or fetch.job is None or not fetch.job.done():
            return False
        return all(map(self._accelerator.joins_at_once, fetch.copies))

    def finish(self, unit: Unit) -> None:
        fetch, unit.fetch = unit.fetch, None
        assert fetch is not None and fetch.job is not None
        fetch.job.wait()
        for copy in fetch.copies:
            self._accelerator.join(copy)

    def arrive(self, unit: Unit) -> None:
        """Block until what `start` brings is there; `finish` is still to come. From any thread."""
        fetch = unit.fetch
        assert fetch is not None and fetch.job is not None
        fetch.job.wait()
        for copy in fetch.copies:
            copy.wait()

    def evict(self, unit: Unit) -> None:
        for flat in unit.flats:
            flat.memory.empty()

    def close(self) -> None:
        self._lane.close()
        self._stored = {}  # it keeps the memory
        self._parameter_store.settle_all_copies()

    def _bring(self, unit: Unit, copies: list[Pending], update: UnitUpdate | None) -> None:
        if update is not None:
            assert update.job is not None, "it was launched"
            update.job.wait()
            if update.memory is Memory.DEVICE:
                for pending in update.published:
                    self._accelerator.copy_in_after(pending)
        if unit in self._stored:
            for chunk in unit.chunks:
                self._parameter_store.settle_write(chunk)
            copies.extend([self._copy_together(run) for run in self._stored[unit]])
            return
        reading: deque[tuple[Chunk, Lease, Pending]] = deque()
        try:
            runs = list(self._begun(unit, reading, copies))
            while reading:
                copies.append(self._copy_first(reading))
        except BaseException:
            self._give_back(reading)
            raise
        if all(source is not None for _, _, source in runs):
            self._stored[unit] = runs

    def _begun(self, unit: Unit, reading: deque[tuple[Chunk, Lease, Pending]], copies: list[Pending]) -> Iterator[_Run]:
        """All of the unit, in order, each on its way: in `copies`, or in `reading`."""
        for run in self._runs(unit):
            (chunk, *_), target, source = run
            if source is not None:
                copies.append(self._copy_together(run))
            elif self._pool is None:
                copies.append(self._parameter_store.read(chunk, target))
            else:
                while (lease := self._pool.try_lease(FETCHED)) is None and reading:
                    copies.append(self._copy_first(reading))
                if lease is None:
                    lease = self._pool.lease(FETCHED)
                reading.append((chunk, lease, Settled()))
                reading[-1] = chunk, lease, self._parameter_store.read(chunk, lease.tensor[: chunk.nbytes])
            yield run

    @staticmethod
    def _give_back(reading: deque[tuple[Chunk, Lease, Pending]]) -> None:
        """After a failure, which is told: the units that others fetch meanwhile have need of the buffers."""
        for _, lease, read in reading:
            with suppress(Exception):
                read.wait()
            lease.release()

    def _runs(self, unit: Unit) -> Iterator[_Run]:
        """All of the unit, in order. Waits for the last writes to what lies in host memory."""
        side_by_side: list[tuple[Chunk, Tensor]] = []
        for chunk in unit.chunks:
            stored = self._parameter_store.view(chunk)
            if side_by_side and (stored is None or not _continues(side_by_side, chunk, stored)):
                yield _run_of(side_by_side)
                side_by_side = []
            if stored is None:
                yield [chunk], chunk.bytes, None
            else:
                side_by_side.append((chunk, stored[: chunk.nbytes]))
        if side_by_side:
            yield _run_of(side_by_side)

    def _copy_together(self, run: _Run) -> Pending:
        chunks, target, source = run
        assert source is not None
        copied = self._accelerator.copy_in(target, source)
        for chunk in chunks:
            self._parameter_store.copying(chunk, copied)
        return copied

    def _copy_first(self, reading: deque[tuple[Chunk, Lease, Pending]]) -> Pending:
        chunk, lease, read = reading[0]
        read.wait()
        copied = self._accelerator.copy_in(chunk.bytes, lease.tensor[: chunk.nbytes])
        reading.popleft()
        lease.release(after=copied)
        return copied


def _run_of(side_by_side: Sequence[tuple[Chunk, Tensor]]) -> _Run:
    """Chunks that lie side by side on both sides, for one copy: a call for each takes as long as its bytes."""
    (first, stored), (last, _) = side_by_side[0], side_by_side[-1]
    itemsize = first.flat.layout.itemsize
    target = first.flat.memory.flat[first.start * itemsize : last.stop * itemsize]
    return [chunk for chunk, _ in side_by_side], target, stored.as_strided((target.numel(),), (1,), stored.storage_offset())


def _continues(run: list[tuple[Chunk, Tensor]], chunk: Chunk, stored: Tensor) -> bool:
    """Whether the chunk lies right behind the run, in its flat and in host memory."""
    last, before = run[-1]
    follows = last.flat is chunk.flat and last.stop == chunk.start
    return follows and (
        stored.untyped_storage().data_ptr() == before.untyped_storage().data_ptr()
        and stored.storage_offset() == before.storage_offset() + before.numel()
    )


class GatheredFetcher(Fetcher):
    """Parameters of which each rank keeps its shard (ZeRO stage 3)."""

    def __init__(self, accelerator: Accelerator, own: StagedFetcher, rendezvous: Rendezvous) -> None:
        self._accelerator, self._own, self._rendezvous = accelerator, own, rendezvous

    def start(self, unit: Unit) -> None:
        self._own.start(unit)
        assert unit.fetch is not None
        unit.fetch.gather = self._rendezvous.ask_gather(unit.index)

    def finish(self, unit: Unit) -> None:
        assert unit.fetch is not None
        asked = unit.fetch.gather
        assert asked is not None
        asked.wait()
        self._own.finish(unit)
        if asked.result is not None:
            self._accelerator.join(asked.result)

    def evict(self, unit: Unit) -> None:
        self._own.evict(unit)

    def close(self) -> None:
        self._own.close()
