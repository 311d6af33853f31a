# SPDX-License-Identifier: Apache-2.0
"""Which units are in device memory, and when they come and go.

Uses of units start (the parameters must be there) and end (`offload.step.uses`). The schedule made from the last step's
trace says what to evict and what to fetch before each start; as long as the step goes as it did before, the fetch
that a use needs was issued earlier. Where it does not, the unit is fetched on demand, and the schedule is taken up
again where the trace next shows the same event.

What is remembered of a unit lies in its `UnitResidency`, how many bytes there are for all of them in the `Room`.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Collection, Sequence
from typing import Any

import torch

from offload.errors import BudgetError
from offload.model.unit import Unit
from offload.model.unit_state import UnitState
from offload.planning.schedule import Schedule, plan, required_nbytes
from offload.planning.use_trace import UseRecorder, UseTrace
from offload.step.calls import in_backward
from offload.step.residency.fetching import Fetcher
from offload.step.residency.room import Room
from offload.step.residency.schedule_cursor import Due, ScheduleCursor
from offload.step.timeline import Timeline
from offload.step.updates.update import Updates


class Residency:
    """See the module. Owned by the thread that drives the model (backward's thread during backward, never both)."""

    def __init__(
        self,
        units: Sequence[Unit],
        fetcher: Fetcher,
        updates: Updates | None,
        *,
        trace: UseTrace,
        room: Room,
        prefetch: int,
        persistent_numel: tuple[int, int],
        timeline: Timeline,
    ) -> None:
        """`persistent_numel`: see `Config.persistent_numel`; a budget leaves no room for those."""
        self._units, self._fetcher, self._updates = units, fetcher, updates
        self._prefetch, self._timeline = prefetch, timeline
        for unit in units:
            unit.residency.nbytes = sum(flat.memory.nbytes for flat in unit.flats if not flat.memory.stays)
            unit.residency.state = UnitState.ABSENT if unit.residency.nbytes else UnitState.RESIDENT
        self._nbytes = [unit.residency.nbytes for unit in units]
        self.room = room
        self._persistent = self._chosen_to_persist(*persistent_numel)
        room.widen(sum(unit.residency.nbytes for unit in self._persistent), required_nbytes(trace, self._nbytes, 0))
        self._deferred: tuple[Due, ...] = ()
        self._staying: frozenset[Unit] = frozenset()
        self._recorder = UseRecorder()
        self._cursor = ScheduleCursor(units, self._plan(trace, room.capacity_nbytes))

    def _chosen_to_persist(self, of_parameter: int, of_all: int) -> list[Unit]:
        chosen, left = [], 0 if self.room.is_fixed else of_all
        for unit in self._units:
            numel = sum(info.numel for info in unit.parameters)
            if unit.residency.nbytes and 0 < numel <= left and all(info.numel <= of_parameter for info in unit.parameters):
                unit.residency.persistent = True
                chosen.append(unit)
                left -= numel
        return chosen

    # ---- uses ----------------------------------------------------------------------------------------------------

    def forward_begins(self, unit: Unit, inputs: Any, *, recorded: bool) -> None:
        """An outermost one, on these inputs."""
        self.room.forward_begins(unit.index, inputs, recorded=recorded)

    def micro_batch_begins(self, left_out: int) -> None:
        """Before it so many like the one before went by, which did not run."""
        self._cursor.skip(self._recorder.repeat(left_out))

    def use_starts(self, unit: Unit, *, recorded: bool) -> None:
        """Make the unit resident with the values of the last step. `recorded`: part of a training step, so of its trace."""
        self._reach(unit.index)
        self.bring(unit)
        if recorded:  # where it found no room, no use started
            self._recorder.start(unit.index)
            if self.room.follows_activations:
                self.bring_records(unit)

    def bring_records(self, unit: Unit) -> None:
        """Of a unit that a forward uses, with the values of the last step, if the model leaves room for them; not while a save
        follows the updates."""
        if self.room.follows_activations and self._updates is not None and self._updates.watcher is None and not in_backward():
            self.room.bring_records(unit, sum(self._nbytes))

    def use_ended(self, unit: Unit, *, recorded: bool, then: Callable[[], None] | None = None) -> None:
        """`then`: what the end of the use leads to, before other units take the room."""
        if recorded:
            self._recorder.end(unit.index)
        if then is not None:
            then()
        self._reach(~unit.index)

    def begin_staying(self, spare_nbytes: int) -> tuple[int, frozenset[Unit]]:
        """From now on units that were used stay, as many as there is room for beside two of the others, which come and go.
        Where there is no budget, `spare_nbytes` may be taken beyond what a step takes. Returns what `end_staying` needs."""
        before = self.room.capacity_nbytes, self._staying
        if not self._staying:
            self.room.spread(spare_nbytes)
            self._staying = self._chosen_to_stay()
        return before

    def end_staying(self, before: tuple[int, frozenset[Unit]]) -> None:
        self.room.capacity_nbytes, self._staying = before
        self._make_room(0)

    def _chosen_to_stay(self) -> frozenset[Unit]:
        sizes = sorted((unit.residency.nbytes for unit in self._units), reverse=True)
        if sum(sizes) <= self.room.capacity_nbytes:
            return frozenset(self._units)
        left, chosen = self.room.capacity_nbytes - sum(sizes[:2]), []
        for unit in self.next_order():
            if unit.residency.nbytes <= left:
                left -= unit.residency.nbytes
                chosen.append(unit)
        return frozenset(chosen)

    def uses_were_abandoned(self) -> None:
        """What the schedule says for the last event is not to be done any more."""
        self._deferred = ()

    # ---- steps ---------------------------------------------------------------------------------------------------

    @property
    def schedule(self) -> Schedule:
        """What is followed."""
        return self._cursor.schedule

    def next_order(self) -> list[Unit]:
        """All units, in the order in which the next forward is expected to use them. Not to be changed."""
        return self._cursor.order

    def update_order(self) -> list[Unit]:
        """All units: that of the next forward, after those that are persistent."""
        order = self._cursor.order
        return [*self._persistent, *(unit for unit in order if not unit.residency.persistent)] if self._persistent else order

    def bring_persistent(self) -> None:
        """Bring in the persistent units, with the values of the last step. Where there are several ranks all of them do."""
        for unit in self._persistent:
            self.bring(unit)
            if not unit.uses.count:
                unit.close_off()

    def end_step(self) -> None:
        """The step's trace is complete. If it was not as expected, the next step is planned from it."""
        trace = self._recorder.take() if not self._cursor.went_as_planned else None
        self._recorder.begin_anew()
        if trace is not None and len(trace) and self.room.reach(required_nbytes(trace, self._nbytes, 0)):
            self._cursor.follow(self._plan(trace, self.room.capacity_nbytes))
        if self.room.follows_activations:
            self.room.step_ends()
            self._follow_activations()
            self._plan_for_room()
        self._cursor.begin_anew()
        self._deferred = ()

    def bring_first(self) -> None:
        """Start the fetch of the first unit that the next forward will find missing, if its update is enqueued and needs it.
        What is in memory of units that come later, not yet updated, goes where it is in the way."""
        if self._updates is None:
            return
        begun = self._updates.launched_units
        pending = (unit for unit in self._updates.pending_units if unit.needs_residency)
        first = next((unit for unit in pending if unit.residency.state is UnitState.ABSENT), None)
        if first is None:
            return
        while not self.room.has(first.residency.nbytes):
            candidates = [unit for unit in self._may_leave() if unit not in begun]
            last = max(candidates, key=self._cursor.next_use, default=first)
            if self._cursor.next_use(last) <= self._cursor.next_use(first):
                return
            self._drop(last)
        self._start_fetch(first, optional=True)

    def launch_resident(self) -> None:
        """Launch the enqueued updates of units that are in memory, or that need not be.

        Where an update does not reach the copy in device memory, that copy is of the old version: it goes.
        """
        if self._updates is None:
            return
        for unit in self._updates.pending_units:
            if not unit.needs_residency:
                reaches_copy = unit.update is not None and unit.update.memory is not unit.route.update_in  # its records visit
                if not reaches_copy and self._may_evict(unit):
                    self._drop(unit)
                self._updates.launch(unit)
            elif unit.residency.state is UnitState.RESIDENT:
                self._updates.launch(unit)

    def fetch_first(self) -> None:
        """Start to fetch what the next forward begins with, as far as there is room: the loop may take a while until then."""
        for unit in self._cursor.first_fetched:
            self._start_fetch(unit, optional=True)

    @property
    def updates_run_beside(self) -> bool:
        """Whether updates compute beside the model, on a thread of their own."""
        return self._updates is not None and self._updates.runs_beside

    def finish_updates(self, besides: Collection[Unit] = ()) -> None:
        """Run every update that is still enqueued, bringing in what it needs; but those of the units `besides`."""
        if self._updates is not None:
            units = [unit for unit in self._updates.pending_units if unit not in besides]
            self._updates.await_launched(units)
            for unit in units:
                self.finish_update(unit)

    def finish_update(self, unit: Unit) -> None:
        """Run the unit's update, if it is still enqueued, bringing in what it needs."""
        if self._updates is None or unit.update is None:
            return
        if unit.needs_residency or unit.residency.state is not UnitState.ABSENT:
            self.bring(unit)
        else:
            self._updates.finish(unit)
        if not unit.uses.count:
            unit.close_off()

    def forget(self, unit: Unit) -> None:
        """Empty the memory of a unit that holds what an undone update left there, or was to leave. It is not in use."""
        if unit.residency.state is not UnitState.ABSENT and unit.residency.nbytes:
            assert not unit.uses.count, "an update was undone under a unit's use"
            self._drop(unit)

    def evict_all(self) -> None:
        """Take every unit that is not in use out of device memory."""
        for unit in self._units:
            if self._may_evict(unit):
                self._evict(unit)

    # ---- following the schedule ----------------------------------------------------------------------------------

    def _plan(self, trace: UseTrace, capacity_nbytes: int) -> Schedule:
        return plan(trace, self._nbytes, capacity_nbytes, self._prefetch)

    def _plan_for_room(self) -> None:
        """For the next step, where another number of units stays in it."""
        largest = max(self._nbytes, default=0)
        wanted = min(self.room.capacity_nbytes, sum(self._nbytes))
        if largest and abs(wanted - self.schedule.capacity_nbytes) >= largest:
            self._cursor.follow(self._plan(self.schedule.trace, wanted))

    def _follow_activations(self) -> None:
        """Have as much room as the model leaves now; for which units leave, what is used last first."""
        self.room.follow_activations(sum(self._nbytes))
        while not self.room.has(0) and (unit := self._first_to_leave()) is not None:
            self._evict(unit)

    def _reach(self, code: int) -> None:
        """Do what the schedule says comes with the event of this code (`code_of`)."""
        self._deferred = ()
        if self.room.follows_activations:
            self._follow_activations()
        urgent, rest = self._cursor.reach(code)
        for unit, is_fetch in urgent:
            if is_fetch:
                self._start_fetch(unit, optional=False)
            elif self._is_let_go(unit):
                self._evict(unit)
        if code >= 0 and self._units[code].residency.state is UnitState.ABSENT:
            self._start_fetch(self._units[code], optional=False)  # where it found no room ahead of its use
        if rest:
            self._deferred = rest
            self.go_on()

    def go_on(self) -> None:
        """Do what is left of what the schedule says for now: what is fetched ahead of its use does not wait for a unit whose
        update runs to make room. To be called now and then while a unit is in use."""
        while self._deferred:
            unit, is_fetch = self._deferred[0]
            if is_fetch:
                self._start_fetch(unit, optional=True)
            elif self._is_let_go(unit):
                if unit.needs_residency and unit.update is not None and unit.update.is_running:
                    return
                self._evict(unit)
            self._deferred = self._deferred[1:]

    def _may_evict(self, unit: Unit) -> bool:
        residency = unit.residency
        return residency.nbytes > 0 and residency.state is not UnitState.ABSENT and not unit.uses.count

    def _may_leave(self) -> list[Unit]:
        """For others to have the room."""
        return [unit for unit in self._units if self._may_evict(unit) and not unit.residency.persistent]

    def _first_to_leave(self) -> Unit | None:
        """Of those: what is used last; what is to stay only where there is nothing else. None: there are none."""
        return max(self._may_leave(), key=lambda unit: (unit not in self._staying, self._cursor.next_use(unit)), default=None)

    def _is_let_go(self, unit: Unit) -> bool:
        return self._may_evict(unit) and unit not in self._staying and not unit.residency.persistent

    # ---- transitions ---------------------------------------------------------------------------------------------

    def _start_fetch(self, unit: Unit, *, optional: bool) -> None:
        residency = unit.residency
        if residency.state is not UnitState.ABSENT or not residency.nbytes:
            return
        if not optional:
            self._make_room(residency.nbytes)
        elif not self.room.has(residency.nbytes):
            return  # what is fetched ahead never pushes out what the schedule left in
        try:
            unit.fill()
        except (torch.OutOfMemoryError, BudgetError):  # of a device, of the host's memory: there is less than was thought
            if optional:
                return
            self._fill_in_place_of_others(unit)
        residency.become(UnitState.FETCHING)
        self.room.take(residency.nbytes)
        self._fetcher.start(unit)
        if self._updates is not None and unit.needs_residency and unit.update is not None:
            self._updates.launch(unit)

    def bring(self, unit: Unit) -> None:
        """Make the unit resident with the values of the last step, now."""
        if unit.residency.state is UnitState.ABSENT:
            self._start_fetch(unit, optional=False)
        if self._updates is not None and unit.update is not None:
            self._updates.finish(unit)
        if unit.residency.state is UnitState.FETCHING:
            is_over = self._fetcher.is_over(unit)
            if is_over and self._timeline.recorder.to is None:
                self._fetcher.finish(unit)
            else:
                with self._timeline.joining("fetch", unit) if is_over else self._timeline.waiting("fetch", unit):
                    self._fetcher.finish(unit)
            unit.residency.become(UnitState.RESIDENT)

    def _make_room(self, nbytes: int) -> None:
        while not self.room.has(nbytes):
            unit = self._first_to_leave()
            if unit is None:
                return self.room.outgrow(nbytes, [unit for unit in self._units if unit.uses.count])
            self._evict(unit)

    def _fill_in_place_of_others(self, unit: Unit) -> None:
        while self._gives_memory_up():
            with contextlib.suppress(torch.OutOfMemoryError, BudgetError):
                unit.fill()
                return
        unit.fill()

    def _gives_memory_up(self) -> bool:
        """Have records or the sums of micro-batches leave, or else the unit that is used last; whether there was anything."""
        if self.room.have_states_leave():
            return True
        unit = self._first_to_leave()
        if unit is not None:
            self._evict(unit)
        return unit is not None

    def lacking_nbytes(self, units: Collection[Unit]) -> int:
        """By how much a budget is too small for the units to be there at once, beside those in use; 0: it is not."""
        together = {*units, *(unit for unit in self._units if unit.uses.count)}
        return self.room.lacking_nbytes(sum(unit.residency.nbytes for unit in together))

    def _evict(self, unit: Unit) -> None:
        if self._updates is not None and unit.update is not None:
            self._updates.finish(unit)
        self._drop(unit)

    def _drop(self, unit: Unit) -> None:
        """Empty the unit's memory, whatever version it holds."""
        if unit.residency.state is UnitState.FETCHING:
            self._fetcher.finish(unit)
            unit.residency.become(UnitState.RESIDENT)
        unit.close_off()
        if self._updates is not None and self._updates.visiting is not None and unit.records_visit:
            self._updates.visiting.settle_values(unit)
        self._fetcher.evict(unit)
        unit.residency.become(UnitState.ABSENT)
        if unit.residency.persistent:
            unit.close_off()  # it may not be read now
        self.room.give_back(unit.residency.nbytes)
