# SPDX-License-Identifier: Apache-2.0
"""The optimizer step, chunk by chunk: read record k+1, update k, write k-1, at once.

    enqueue   at step(): what every chunk will get (gradient pieces, hyper-parameters, step counts), in the order in
              which the next forward needs the units; nothing of it can change any more
    launch    hands one unit's chunks to the update lane; the lane reads ahead beyond them while buffers last
    finish    waits until a unit's new parameters are in place

A unit between `enqueue` and `finish` is in the shard state UPDATING (`offload.model.unit_state`).
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Iterable, Sequence
from contextlib import nullcontext, suppress
from itertools import takewhile
from typing import Protocol

from offload.device.arithmetic.checksums import SummedMemory
from offload.device.arithmetic.step_table import JoinedTable, Place
from offload.device.lane import HostLane, InlineLane, LaneRow
from offload.device.pending import Pending
from offload.model.chunk import Chunk
from offload.model.unit import Unit
from offload.model.update import ChunkUpdate, UnitUpdate
from offload.planning.route import Memory, Route, ValuePath
from offload.step.gradients.chunk_gradients import ChunkGradients
from offload.step.updates.chunk_arithmetic import ChunkArithmetic, numbers_of
from offload.step.updates.record_paths import RecordAccess, record_accesses
from offload.step.updates.tools import UpdateTools
from offload.step.updates.value_paths import ValueAccess, ValuesNeeded, value_accesses


class Watcher(Protocol):
    """Sees every chunk's update, on the lane."""

    def before_update(self, chunk: Chunk) -> None:
        """The chunk's record and values are about to be overwritten. Returns when they may be."""

    def after_update(self) -> None:
        """A chunk was updated: who waits for its last write finds the new version in its places."""


class Updates:
    """The updates that are enqueued and not finished.

    The public methods belong to whose turn it is (`FailureState.turn`): the thread that drives the model, or the save's in its
    place. `apply`, `launch` and what only tells may come from any thread."""

    def __init__(self, tools: UpdateTools, gradients: ChunkGradients, routes: Iterable[Route]) -> None:
        """`routes`: those that updates take."""
        accelerator, records = tools.accelerator, tools.records
        self._records, self._gradients, self._parameter_store = records, gradients, tools.parameter_store
        self._record_accesses, self._value_accesses = record_accesses(tools), value_accesses(tools, routes)
        self._accelerator, self._timeline = accelerator, tools.timeline
        self._arithmetic = ChunkArithmetic(records, gradients)
        self._values_of: dict[Chunk, ValueAccess] = {}
        """What `_values` gave."""
        self.visiting = tools.visiting
        if self.visiting is not None:
            self.visiting.leaving = self._arithmetic.forget
        brings_values = any(value_path is ValuePath.COPY_IN for value_path, _ in self._value_accesses)
        self._reads = not records.in_memory or gradients.spills or gradients.brings or brings_values
        """Whether there is anything to be read before an update."""
        # On the device an update is a launch in the order of compute, not work for a thread of the host.
        self._lanes: dict[Memory, HostLane] = {
            Memory.DEVICE: InlineLane(accelerator.lock(), LaneRow("device update", accelerator.recorder)),
            Memory.HOST: accelerator.host_lane("update", waits_for_io=self._reads),
        }
        self.watcher: Watcher | None = None
        self._queue: dict[Unit, UnitUpdate] = {}
        """The units that have an update, in the enqueued order. Changed by whose turn it is, read by any thread: as a copy,
        which takes one call of C."""
        self._launching = threading.Lock()
        self._ahead: deque[ChunkUpdate] = deque()
        self._joined_chunks: tuple[Chunk, ...] = ()
        self._joined: JoinedTable | None = None
        """Of these chunks: what a step updates together, as a rule."""

    @property
    def pending_units(self) -> list[Unit]:
        """The units whose parameters are not yet those of the last step, in the enqueued order."""
        return list(self._queue)

    @property
    def launched_units(self) -> set[Unit]:
        """Those of them whose updates the lane has."""
        return {unit for unit, update in self._queue.items() if update.job is not None}

    @property
    def runs_beside(self) -> bool:
        """Whether the lane is a thread of its own."""
        return self._lanes[Memory.HOST].runs_beside

    def coming(self) -> list[ChunkUpdate]:
        """The enqueued updates of chunks that are not over."""
        return [one for update in list(self._queue.values()) for one in update.chunks if not one.applied]

    def enqueue(self, unit: Unit, chunks: list[ChunkUpdate]) -> None:
        """Add a unit's update. Its gradients belong to the update from now on."""
        if unit.update is not None:
            raise AssertionError(f"unit {unit.name} is updated twice at once")
        # On the stream that is compute now: who launches or runs it may be another thread, which has a stream of its own.
        run = self._accelerator.on_compute(lambda: self._run(unit))
        visiting = self.visiting if self.visiting is not None and self.visiting.takes(unit, chunks) else None
        memory = Memory.DEVICE if visiting is not None else unit.route.update_in
        unit.update = self._queue[unit] = UnitUpdate(chunks, run, memory)
        if visiting is not None:
            self._launch(unit, unit.update).wait()  # given to compute now: the records leave as soon as somebody wants the room
            visiting.was_given(unit, unit.update.published[-1])
        elif self._reads and memory is Memory.HOST:
            self._ahead.extend(chunks)

    def read_ahead(self) -> None:
        """Start reading the first records before any unit is launched."""
        if self._ahead:
            self._lanes[Memory.HOST].submit(self._accelerator.on_compute(self._read_ahead), "read ahead")

    def launch(self, unit: Unit) -> Pending:
        """Hand the unit's update to the lane, once; settles when its new parameters are in place."""
        update = unit.update
        assert update is not None, "there is no update to launch"
        return self._launch(unit, update)

    def _launch(self, unit: Unit, update: UnitUpdate) -> Pending:
        if update.job is None:
            with self._launching:  # one may come from another thread: who lends other ranks what it updates
                if update.job is None:
                    self._submit(unit, update)
        assert update.job is not None
        return update.job

    def _submit(self, unit: Unit, update: UnitUpdate) -> None:
        lane = self._lanes[update.memory]
        if self._updates_together(unit, update):
            together = [(one, other) for one, other in list(self._queue.items()) if self._updates_together(one, other)]
            job = lane.submit(lambda: self._run_together(together), "units in memory")
            for _, other in together:
                other.job = job
        else:
            update.job = lane.submit(update.run, unit)

    def _updates_together(self, unit: Unit, update: UnitUpdate) -> bool:
        """Whether the unit's update, which no lane has yet, needs nothing to be brought or taken anywhere."""
        in_place = unit.route.value_path is ValuePath.IN_PLACE and unit.route.update_in is Memory.HOST
        return in_place and not self._reads and update.job is None

    def finish(self, unit: Unit) -> None:
        """Wait until the unit's update ran, if it has one; raise its failure."""
        update = unit.update
        if update is None:
            return
        job = self._launch(unit, update)
        is_over = job.done()
        if is_over and self._timeline.recorder.to is None:
            self._take_over(unit, update, job)
        else:
            with self._timeline.joining("update", unit) if is_over else self._timeline.waiting("update", unit):
                self._take_over(unit, update, job)

    def _take_over(self, unit: Unit, update: UnitUpdate, job: Pending) -> None:
        job.wait()
        self._leave_queue(unit)
        for pending in update.published:
            self._accelerator.join(pending)

    def await_launched(self, units: Sequence[Unit]) -> None:
        """Before `finish` of one after the other: block until those of the first ones are over that the lane has, in one wait.
        To be woken for each takes longer than what is to be done then. What failed is raised by its `finish`."""
        launched = list(takewhile(lambda unit: unit.update is not None and unit.update.job is not None, units))
        last = launched[-1].update if launched else None
        if last is not None and last.job is not None and not last.job.done():
            with self._timeline.waiting("update", launched[-1]), suppress(Exception):
                last.job.wait()

    def apply(self, unit: Unit) -> None:
        """Block until this rank's part of the unit's update, if it has one, is in place. From any thread."""
        update = unit.update
        if update is not None:
            self._launch(unit, update).wait()
            for pending in update.published:
                pending.wait()

    def cancel(self, unit: Unit) -> None:
        """Return when nothing of the unit's update runs any more: of the chunks that are marked `cancelled` only one in hand is
        still updated."""
        if unit.update is not None:
            self.apply(unit)
            self._leave_queue(unit)

    def recall(self, units: Iterable[Unit]) -> dict[Unit, list[ChunkUpdate]]:
        """Take back what the lane has not begun of these units' updates: to be enqueued anew, in another order."""
        # What was read ahead of a unit that waits to be resident is kept: it is updated when it comes.
        enqueued = [
            (unit, unit.update)
            for unit in units
            if unit.update is not None and (unit.update.job is not None or not any(one.started for one in unit.update.chunks))
        ]
        recalled: dict[Unit, list[ChunkUpdate]] = {}
        for _, update in enqueued:
            for one in update.chunks:
                # All of what no lane has: if its reading begins now, it has no values to update yet.
                one.cancelled = update.job is None or not one.started
        for unit, update in enqueued:
            if any(one.cancelled for one in update.chunks):
                self._launch(unit, update).wait()  # what the lane had begun of it meanwhile is over then
                self._leave_queue(unit)
                for pending in update.published:
                    self._accelerator.join(pending)
                left = [one for one in update.chunks if not one.applied]
                if left:
                    recalled[unit] = [one.anew() for one in left]
        return recalled

    def _leave_queue(self, unit: Unit) -> None:
        unit.update = None
        del self._queue[unit]

    def close(self) -> None:
        for lane in self._lanes.values():
            lane.close()
        for values in self._value_accesses.values():
            values.close()
        if self.visiting is not None:
            self.visiting.close()
        self._joined_chunks, self._joined = (), None  # it keeps the memory
        self._arithmetic.close()

    # ---- on the lane ---------------------------------------------------------------------------------------------

    def _run(self, unit: Unit) -> None:
        update = unit.update
        assert update is not None, "it left the queue before its job was over"
        if len(update.chunks) > 1 and self._are_at_hand(update):
            self._apply_at_once(update)
        else:
            self._apply_each(update)
        if update.memory is Memory.DEVICE:
            update.published.append(self._accelerator.mark())

    def _apply_each(self, update: UnitUpdate) -> None:
        for chunk_update in update.chunks:
            if chunk_update.cancelled:
                self._give_up(chunk_update)
                continue
            if not self._reads:
                chunk_update.started = True
            elif not chunk_update.started:
                self._access(chunk_update.chunk).reserve(chunk_update, now=True)
                self._start_reading(chunk_update)
            if update.memory is Memory.HOST:
                self._read_ahead()
            update.published.append(self._apply(chunk_update))

    def _are_at_hand(self, update: UnitUpdate) -> bool:
        """Whether one call can make these: all that they read and write lies where the kernel addresses it, and nobody wants to
        see each of them."""
        if self.watcher is not None or (self._reads and update.memory is Memory.HOST):
            return False
        ready = (one.updates_every_slot and not one.cancelled for one in update.chunks)
        return all(ready) and all(self._values(one.chunk).stays(one.chunk) for one in update.chunks)

    def _apply_at_once(self, update: UnitUpdate) -> None:
        """Between calls for each chunk the pool's threads fall asleep, and to wake many takes as long as the chunk. A launch
        for each takes the host as long as a small one takes the device."""
        updates, chunks = update.chunks, [one.chunk for one in update.chunks]
        for one in updates:
            one.started = True
        with nullcontext() if all(map(self._gradients.is_here, chunks)) else self._timeline.lane_waiting("read records"):
            records = [self._access(one.chunk).begin(one) for one in updates]
            for chunk in chunks:
                self._gradients.open(chunk)
        is_at_hand = all(self._values(chunk).is_at_hand(chunk) for chunk in chunks)
        with nullcontext() if is_at_hand else self._timeline.lane_waiting("read parameters"):
            values = [self._values(one.chunk).begin(one.chunk, self._old(one)) for one in updates]
        for one in updates:
            if one.early:
                self._parameter_store.keep_former(one.chunk)
        with self._timeline.lane_working("adam"):
            self._arithmetic.update_at_once(updates, records, values)
        for one, record, own in zip(updates, records, values, strict=True):
            self._gradients.release(one.chunk)
            update.published.append(self._values(one.chunk).commit(one.chunk, own, one.only_pieces))
            self._access(one.chunk).commit(one, record)
            one.applied = True

    def _run_together(self, runs: Sequence[tuple[Unit, UnitUpdate]]) -> None:
        updates = [one for _, update in runs for one in update.chunks]
        alike = all(one.updates_every_slot and not one.cancelled and one.factor == updates[0].factor for one in updates)
        if self.watcher is not None or not updates or not alike:  # of several ranks one may have no part of any
            for unit, _ in runs:
                self._run(unit)
            return
        chunks = tuple(one.chunk for one in updates)
        if chunks != self._joined_chunks:
            values = [chunk.values for chunk in chunks]
            if not self._arithmetic.by_table(updates[0], values[0]):
                for unit, _ in runs:
                    self._run(unit)
                return
            records = [self._access(one.chunk).begin(one) for one in updates]
            self._joined = self._arithmetic.joined(zip(chunks, map(Place, records, values), strict=True))
            self._joined_chunks = chunks
        assert self._joined is not None
        gradients = self._gradients.open_all(chunks)
        with self._timeline.lane_working("adam"):
            self._joined.update(gradients, numbers_of(updates), updates[0].factor)
        self._gradients.release_all(chunks)
        for one in updates:
            one.started = one.applied = True

    def _values(self, chunk: Chunk) -> ValueAccess:
        """Each lane has its own: one chunk is in its hands at a time."""
        if self.visiting is not None and chunk.visiting is not None:
            return self.visiting.values
        found = self._values_of.get(chunk)
        if found is None:
            found = self._values_of[chunk] = self._value_accesses[chunk.route.value_path, chunk.route.update_in]
        return found

    def _access(self, chunk: Chunk) -> RecordAccess:
        if self.visiting is not None and chunk.visiting is not None:
            return self.visiting
        return self._record_accesses[chunk.record_path]

    def _read_ahead(self) -> None:
        """Read what comes next in the enqueued order, as far as there are buffers."""
        while self._ahead:
            first = self._ahead[0]
            if not (first.cancelled or first.started or self._reads_ahead(first)):
                return
            self._ahead.popleft()

    def _reads_ahead(self, update: ChunkUpdate) -> bool:
        access = self._access(update.chunk)
        if not access.reads_ahead:
            return self._bring_ahead(update)
        if not access.reserve(update, now=False):
            return False
        self._start_reading(update)
        return True

    def _give_up(self, chunk_update: ChunkUpdate) -> None:
        chunk_update.started = True  # so that nothing is read ahead for it
        self._access(chunk_update.chunk).forget(chunk_update)
        self._values(chunk_update.chunk).forget(chunk_update.chunk)

    def _bring_ahead(self, chunk_update: ChunkUpdate) -> bool:
        """What else than the record the update needs; False where a buffer for it is missing now."""
        chunk = chunk_update.chunk
        try:
            if not self._gradients.prefetch(chunk):
                return False
            return self._old(chunk_update) is not ValuesNeeded.ALL or self._values(chunk).read_ahead(chunk)
        except Exception as error:
            chunk_update.failure = error  # as in _start_reading
            return True

    def _start_reading(self, chunk_update: ChunkUpdate) -> None:
        chunk_update.started = True
        chunk = chunk_update.chunk
        try:
            self._access(chunk).read(chunk_update)
            if self._old(chunk_update) is ValuesNeeded.ALL:
                self._values(chunk).read_ahead(chunk)
            self._gradients.prefetch(chunk)  # False: the update in hand reads it
        except Exception as error:
            # Reading ahead is nobody's errand: the failure waits for the update that needs what was not read.
            chunk_update.failure = error

    def _old(self, chunk_update: ChunkUpdate) -> ValuesNeeded:
        if self._records.format(chunk_update.chunk).needs_values:
            return ValuesNeeded.ALL
        return ValuesNeeded.NONE if chunk_update.updates_every_slot else ValuesNeeded.REST

    def _takes_sums(self, update: ChunkUpdate) -> bool:
        """Whether it takes the checksums of what came from a drive and goes there."""
        on_host = update.chunk.visiting is None and update.chunk.route.update_in is Memory.HOST
        return self._reads and on_host and self._arithmetic.takes_sums(update)

    def _apply(self, chunk_update: ChunkUpdate) -> Pending:
        chunk = chunk_update.chunk
        access = self._access(chunk)
        if chunk_update.failure is not None:
            raise chunk_update.failure
        is_here = not self._reads and self._gradients.is_here(chunk)
        sums = self._takes_sums(chunk_update)
        with nullcontext() if is_here else self._timeline.lane_waiting("read records"):
            buffer = access.begin(chunk_update, sums=sums)
            of_gradient = self._gradients.open(chunk, sums=sums)
        path = self._values(chunk)
        with nullcontext() if path.is_at_hand(chunk) else self._timeline.lane_waiting("read parameters"):
            values = path.begin(chunk, self._old(chunk_update))
        if chunk_update.early:
            self._parameter_store.keep_former(chunk)
        watcher = self.watcher  # once: a save that ends takes it away
        if watcher is not None:
            with self._timeline.lane_waiting("copy for checkpoint"):
                watcher.before_update(chunk)
        stored = path.verified(chunk, values) if sums else None
        of_values = SummedMemory(stored, None, stored=True) if stored is not None else None
        summed = [one for one in (chunk_update.summed, of_values, of_gradient) if one is not None]
        with self._timeline.lane_working("adam"):
            self._arithmetic.update(chunk_update, buffer, values, summed)
        for one in summed:  # before anything of it gets to its home
            one.compare()
        self._gradients.release(chunk)
        new_sums = of_values.after if of_values is not None else None
        published = path.commit(chunk, values, chunk_update.only_pieces, new_sums)
        access.commit(chunk_update, buffer)
        chunk_update.applied = True  # before it is told: `coming` may be asked for between the two
        watcher = self.watcher
        if watcher is not None:
            watcher.after_update()
        return published
