# SPDX-License-Identifier: Apache-2.0
"""Uses of units: from when one starts until it ends its parameters are in device memory, and plain tensors.

A forward or backward of a unit uses it, and so does who holds it (`engine.gathered`). Parameters that are read inside a
forward without a use of their own come and go with its unit: they are its companions.

Where nothing ever leaves the memory that the model computes on, one use covers all units: a forward of the whole model, or a
backward. Inside it the calls of units are none.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from typing import Protocol

from offload.errors import BudgetError, ParameterAccessError
from offload.model.flat import ParameterInfo
from offload.model.leading_call import led_by
from offload.model.unit import Unit
from offload.model.unit_state import UnitState
from offload.step.calls import Call, RunningCalls
from offload.step.residency.residency import Residency
from offload.step.speculation import Speculation

_log = logging.getLogger(__name__)


class Backwards(Protocol):
    """Those that go through the model."""

    def end_cut_short(self) -> bool:
        """End the uses of those that an exception cut short. Whether another goes on."""


class Uses:
    """See the module. Owned by the thread that drives the model (backward's thread during backward, never both)."""

    def __init__(
        self, units: Sequence[Unit], residency: Residency, speculation: Speculation, calls: RunningCalls, *, alone: bool
    ) -> None:
        """`alone`: there is one rank, which fetches when it likes."""
        self._units, self._residency, self._speculation, self._calls = units, residency, speculation, calls
        self._alone = alone
        self.epoch = 0
        """How often all uses were abandoned: one that began in an earlier epoch has ended."""
        self._cover_count = 0
        """Uses that have started and not ended, and cover all units."""
        self._backwards: Callable[[], Backwards | None] = lambda: None

    def ended_by(self, backwards: Callable[[], Backwards | None]) -> None:
        """`backwards` refers to who ends the uses of those that an exception cut short; until the next one takes its place."""
        self._backwards = backwards

    def end_cut_short(self, inside: Call | None = None) -> None:
        """End the uses of forwards and backwards that an exception cut short: PyTorch calls no hook there. Who makes room for
        something that is not part of what goes on has the room of those. `inside`: see `RunningCalls.drop_cut_short`."""
        backwards = self._backwards()
        goes_on = backwards is not None and backwards.end_cut_short()
        dropped = self._calls.drop_cut_short(inside)
        if dropped and not self._calls and not goes_on:
            self._calls.none_goes_on()
            self.abandon()
            return
        for call in dropped:  # whoever called them caught what ended them, and goes on
            if call.started and call.unit is not None:
                self.end(call.unit, recorded=call.recorded)

    def start(self, unit: Unit, *, recorded: bool, module_id: int | None = None) -> None:
        """The unit's parameters must be there from now on. `recorded`: part of a training step, so of its trace. `module_id`:
        which of its modules uses it; None: all of it is used."""
        self._open(unit, recorded=recorded, module_id=module_id)
        companions = _companions_of(unit) if unit.uses.companions else []  # most have none
        for count, companion in enumerate(companions):
            try:
                self._open(companion, recorded=recorded)
            except BudgetError:  # there is no room for them together: none of them is in use
                for started in (*companions[:count], unit):
                    self._end(started, recorded=recorded)
                raise
        unit.uses.called_count += 1

    def _open(self, unit: Unit, *, recorded: bool, module_id: int | None = None) -> None:
        self._begin(unit, recorded=recorded)
        if unit.uses.count - unit.uses.held_count == 1 or unit.has_parts:
            unit.open_up(module_id)

    def _begin(self, unit: Unit, *, recorded: bool) -> None:
        self._speculation.before_use(unit)
        self._residency.use_starts(unit, recorded=recorded)
        unit.uses.count += 1

    def end(self, unit: Unit, *, recorded: bool, then: Callable[[], None] | None = None) -> None:
        """`then`: what the end of the use leads to, before other units take the room."""
        unit.uses.called_count -= 1
        for companion in _companions_of(unit) if unit.uses.companions else ():
            self._end(companion, recorded=recorded)
        self._end(unit, recorded=recorded, then=then)

    def _end(self, unit: Unit, *, recorded: bool, then: Callable[[], None] | None = None) -> None:
        unit.uses.count -= 1
        if unit.uses.count == unit.uses.held_count and not self._cover_count:
            unit.close_off()
        self._residency.use_ended(unit, recorded=recorded, then=then)

    @property
    def covers_all(self) -> bool:
        """Whether every unit is open."""
        return self._cover_count > 0

    def cover(self) -> None:
        """Open all units, none of which ever leaves, until `uncover`. Updates that compute beside the model go on: whoever uses
        a unit that has one waits for it (`Uses.settle`)."""
        self._cover_count += 1
        if self._cover_count > 1:
            return
        for unit in self._units:
            if unit.update is not None:
                if self._residency.updates_run_beside:
                    continue  # stays guarded: who reads its values without a call of the unit waits too
                self._residency.bring(unit)
            unit.open_up()
            self._residency.bring_records(unit)

    def uncover(self) -> None:
        """Close them again, if nothing else uses them."""
        if self._cover_count == 1:
            self._cover_count = 0
            for unit in self._units:
                if unit.uses.count == unit.uses.held_count:
                    unit.close_off()
        elif self._cover_count:
            self._cover_count -= 1

    def settle(self, unit: Unit) -> None:
        """A covered unit is about to compute: with the values of the last step."""
        self._residency.bring(unit)
        unit.open_up()
        self._residency.bring_records(unit)

    def hold(self, unit: Unit) -> None:
        """Keep the unit resident, whatever forwards and backwards come and go, until `release`. It opens nothing, and nothing
        comes with it: what is not computed reads no companions."""
        self.end_cut_short()
        unit.uses.held_count += 1
        try:
            self._begin(unit, recorded=False)
        except BudgetError:
            unit.uses.held_count -= 1
            raise

    def release(self, unit: Unit) -> None:
        unit.uses.held_count -= 1
        self._end(unit, recorded=False)

    @property
    def any(self) -> bool:
        """Whether a unit is in use, or a forward is running."""
        self.end_cut_short()
        return self.in_forward or any(unit.uses.count for unit in self._units)

    @property
    def in_forward(self) -> bool:
        """Whether a forward is running. Changes nothing: it may not be the calling thread's turn."""
        return self._calls.any_goes_on

    def bring_in(self, info: ParameterInfo) -> None:
        """A guarded parameter's value is asked for: right inside a forward, and wherever it lies in place; else an error."""
        unit = self._units[info.unit_index]
        enclosing = None
        if unit.residency.nbytes:
            self.end_cut_short()
            enclosing = self._calls.innermost_unit()
        if not unit.residency.nbytes or (enclosing is None and self._is_kept_here(unit)):
            self._speculation.before_use(unit)
            self._residency.bring(unit)
            unit.was_read = True
            if self._cover_count:
                unit.open_up()
            elif not unit.uses.count:
                unit.close_off()
            return
        if enclosing is None:
            raise ParameterAccessError(
                f"the value of parameter {info.fqn!r} is not in memory: it lies in its tier between uses. "
                + led_by(
                    "Read or write it inside `with engine.gathered([parameter]):`; for the whole model use "
                    "engine.state_dict(); updates are engine.optimizer's. A part of the model that is called on its own must "
                    "be called as a module, not through its weights."
                )
            )
        # A parent computes with a child's weight without calling the child.
        if next(unit.modules[0].children(), None) is not None and unit not in enclosing.uses.companions:
            _log.warning(
                "%s computes with %s without a call of %s, which is a unit: from now on that is in memory as long as %s. To "
                "have it come and go by itself call it as a module, or mark the modules in it that are called (offload.unit).",
                enclosing.name, info.fqn, unit.name, enclosing.name,
            )  # fmt: skip
        self.accompany(enclosing, unit)

    def _is_kept_here(self, unit: Unit) -> bool:
        return unit.residency.persistent and (self._alone or unit.residency.state is not UnitState.ABSENT)

    def accompany(self, enclosing: Unit, unit: Unit) -> bool:
        """From now on the unit comes and goes with `enclosing`, beside its own uses; False where it does already."""
        companions = enclosing.uses.companions
        if unit is enclosing or unit in companions:
            return False
        called = [(one, _companions_of(one)) for one in self._units if one.uses.called_count]
        companions.append(unit)
        started: list[Unit] = []
        try:
            for one, before in called:
                for joining in _companions_of(one):
                    for _ in range(one.uses.called_count if joining not in before else 0):
                        self._open(joining, recorded=False)
                        started.append(joining)
        except BudgetError:
            companions.remove(unit)
            for one in started:
                self._end(one, recorded=False)
            raise
        return True

    def abandon(self) -> None:
        """End every use that is not held: an exception cut a forward or backward short."""
        self.epoch += 1
        self._calls.abandon_uses()
        self._residency.uses_were_abandoned()
        if self._cover_count:
            self._cover_count = 1
            self.uncover()
        for unit in self._units:
            unit.uses.called_count = 0
            if unit.uses.count > unit.uses.held_count:
                unit.uses.count = unit.uses.held_count
                unit.close_off()


def _companions_of(unit: Unit) -> list[Unit]:
    """All that come with it: its own companions and theirs, each once, though two units may be each other's."""
    found = [unit]
    for one in found:  # what is added on the way is gone through, too
        found += [companion for companion in one.uses.companions if companion not in found]
    return found[1:]
