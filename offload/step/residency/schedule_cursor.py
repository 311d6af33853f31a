# SPDX-License-Identifier: Apache-2.0
"""Where a step is in its schedule: what is due with each start and end of a use, and which unit is used when."""

from __future__ import annotations

from collections.abc import Sequence

from offload.model.unit import Unit
from offload.planning.schedule import Op, Schedule, Verb
from offload.planning.use_trace import UseEvent, code_of

Due = tuple[Unit, bool]
"""A unit, and whether it is fetched rather than evicted."""
_Stop = tuple[tuple[Due, ...], tuple[Due, ...]]
"""What is due with an event: what cannot wait, and the rest."""
_NOTHING: _Stop = (), ()


class ScheduleCursor:
    """See the module. Owned as `Residency` is.

    schedule         what is followed
    order            all units, in the order in which a forward is expected to use them
    first_fetched    those that are fetched before the first use starts
    went_as_planned  whether every event of the step came when it was expected
    """

    def __init__(self, units: Sequence[Unit], schedule: Schedule) -> None:
        self._units = units
        self.follow(schedule)
        self.went_as_planned = True

    def follow(self, schedule: Schedule) -> None:
        """From its beginning."""
        self.schedule = schedule
        self._cursor = 0
        self._codes = [code_of(event) for event in schedule.trace]
        self._stops = [self._stop(event, ops) for event, ops in zip(schedule.trace, schedule.at, strict=True)]
        self._positions: dict[int, list[int]] = {}
        for position, code in enumerate(self._codes):
            self._positions.setdefault(code, []).append(position)
        first_uses = [code for code in self._positions if code >= 0]
        self.order = [self._units[index] for index in dict.fromkeys([*first_uses, *range(len(self._units))])]
        at_first = schedule.at[0] if len(schedule.trace) else ()
        self.first_fetched = [self._units[op.unit_index] for op in at_first if op.verb is Verb.FETCH]

    def _stop(self, event: UseEvent, ops: Sequence[Op]) -> _Stop:
        asked_for = Op(Verb.FETCH, event.unit_index)
        urgent = ops.index(asked_for) + 1 if asked_for in ops else 0
        known = [(self._units[op.unit_index], op.verb is Verb.FETCH) for op in ops]
        return tuple(known[:urgent]), tuple(known[urgent:])

    def begin_anew(self) -> None:
        """A step begins."""
        self._cursor = 0
        self.went_as_planned = True

    def skip(self, count: int) -> None:
        """So many events were left out."""
        self._cursor += count

    def reach(self, code: int) -> _Stop:
        """The event of this code (`code_of`) has come, expected or not. Where another was expected the schedule is taken up
        again at the next one like it."""
        cursor, codes = self._cursor, self._codes
        if cursor >= len(codes) or codes[cursor] != code:
            self.went_as_planned = False
            positions = self._positions.get(code)
            if not positions:
                return _NOTHING
            ahead = [position for position in positions if position >= cursor]
            cursor = (ahead or positions)[0]
        self._cursor = cursor + 1
        return self._stops[cursor]

    def next_use(self, unit: Unit) -> int:
        """When the unit is used next, to be compared with that of others."""
        positions = self._positions.get(unit.index, [])
        ahead = [position for position in positions if position >= self._cursor]
        return ahead[0] if ahead else len(self._codes) + (positions or [1 << 60])[0]
