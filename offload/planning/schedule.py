# SPDX-License-Identifier: Apache-2.0
"""From a trace and a budget to a schedule: which unit is fetched and which is evicted with each event. Pure.

The policy is Belady's: what is evicted is what is used again last (of what this step is done with, in a next one like
it), and nothing is evicted before its room is needed, so a budget above the minimum saves transfers and one that holds
everything makes none. A fetch is issued as early as `prefetch` uses ahead, but never at the cost of a unit that is used
sooner.

What always holds (property tests check it): at every prefix the resident and arriving bytes are
within the capacity; a unit is resident during each of its uses; every fetch has one evict; a unit in use is never
evicted.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum
from functools import lru_cache
from itertools import islice

from offload.planning.use_trace import Edge, Expected, UseEvent, UseTrace


class Verb(Enum):
    """What an op does to its unit."""

    FETCH = "fetch"
    EVICT = "evict"
    COMPUTE = "compute"


@dataclass(frozen=True, slots=True)
class Op:
    verb: Verb
    unit_index: int


@dataclass(frozen=True, slots=True)
class Schedule:
    """For each event of `trace`, the evicts and fetches issued with it: just before a use starts, just after one ends. Then
    the evicts that end the step."""

    trace: UseTrace
    at: tuple[tuple[Op, ...], ...]
    closing: tuple[Op, ...]
    capacity_nbytes: int

    @property
    def ops(self) -> tuple[Op, ...]:
        """The whole step as one list of ops."""
        steps: list[Op] = []
        for event, ops in zip(self.trace, self.at, strict=True):
            steps.extend(ops)
            if event.edge is Edge.START:
                steps.append(Op(Verb.COMPUTE, event.unit_index))
        return (*steps, *self.closing)


def _starts(trace: UseTrace, unit_count: int) -> list[list[int]]:
    """For each unit, the positions of the events that start a use of it, ascending."""
    starts: list[list[int]] = [[] for _ in range(unit_count)]
    for position, event in enumerate(trace):
        if event.edge is Edge.START:
            starts[event.unit_index].append(position)
    return starts


def required_nbytes(trace: UseTrace, unit_nbytes: Sequence[int], prefetch: int) -> int:
    """The smallest capacity with which `prefetch` distinct coming units always fit beside those in use.

    Where a use starts as another ends nothing is computed with both: what comes next finds room when the other has ended.
    """
    return max((sum(unit_nbytes[unit] for unit in held) for held in _held(trace, prefetch)), default=0)


@lru_cache(maxsize=64)
def _held(trace: UseTrace, prefetch: int) -> tuple[tuple[int, ...], ...]:
    """Which units are in use or coming at once, each set of them once: whatever they take."""
    found: dict[frozenset[int], tuple[int, ...]] = {}
    in_use: dict[int, int] = {}
    events = trace.events
    for position, event in enumerate(events):
        in_use[event.unit_index] = in_use.get(event.unit_index, 0) + (1 if event.edge is Edge.START else -1)
        held = {unit for unit, count in in_use.items() if count}
        if event.edge is Edge.END or not _ends_another(events, position + 1, event.unit_index):
            held.update(_coming(events, position + 1, prefetch, held))
        found.setdefault(frozenset(held), tuple(held))
    return tuple(found.values())


def _ends_another(events: Sequence[UseEvent], position: int, unit_index: int) -> bool:
    """Whether the event at `position` ends the use of a unit other than `unit_index`."""
    return position < len(events) and events[position].edge is Edge.END and events[position].unit_index != unit_index


def expected_nbytes(expected: Expected, unit_nbytes: Sequence[int], prefetch: int) -> int:
    """The smallest capacity for a step that goes as expected, and without prefetch for one whose uses overlap more."""
    return max(required_nbytes(expected.trace, unit_nbytes, prefetch), required_nbytes(expected.overlapping, unit_nbytes, 0))


def apart_nbytes(trace: UseTrace, unit_nbytes: Sequence[int]) -> int:
    """The smallest capacity with which any other unit fits beside those in use, as where backward computes a forward again that
    several units share."""
    largest_first = sorted(range(len(unit_nbytes)), key=lambda unit: -unit_nbytes[unit])
    return max(
        sum(unit_nbytes[unit] for unit in held) + next((unit_nbytes[unit] for unit in largest_first if unit not in held), 0)
        for held in _held(trace, 0)
    )


WORTHWHILE = 6
"""Bytes of fetches that a byte of memory must save in a step to be taken without being asked for: twice what keeping
parameters saves (`offload.planning.tier_choice.Kept`)."""


def worthwhile_nbytes(expected: Expected, unit_nbytes: Sequence[int], prefetch: int) -> int:
    """The capacity where no budget says otherwise: what is needed, or what keeps the units between their uses that several
    modules share, if that saves much for what it takes."""
    least = expected_nbytes(expected, unit_nbytes, prefetch)
    shared = [unit for unit in expected.late_units if unit_nbytes[unit]]
    first, last = (tuple(UseEvent(edge, unit) for unit in shared) for edge in Edge)
    more = required_nbytes(UseTrace((*first, *expected.trace.events, *last)), unit_nbytes, prefetch)
    if more <= least:
        return least
    fetched = [_fetched_nbytes(expected.trace, unit_nbytes, capacity, prefetch) for capacity in (least, more)]
    return more if fetched[0] - fetched[1] >= WORTHWHILE * (more - least) else least


def _fetched_nbytes(trace: UseTrace, unit_nbytes: Sequence[int], capacity_nbytes: int, prefetch: int) -> int:
    """Of one step of many: it begins with what the one before left."""
    twice = plan(UseTrace(trace.events * 2), unit_nbytes, capacity_nbytes, prefetch)
    second = (op for ops in twice.at[len(trace) :] for op in ops)
    return sum(unit_nbytes[op.unit_index] for op in second if op.verb is Verb.FETCH)


def _coming(events: Sequence[UseEvent], position: int, count: int, besides: set[int]) -> list[int]:
    """The next `count` distinct units that start a use at or after `position`, not counting those in `besides`."""
    found: list[int] = []
    for event in islice(events, position, None):
        if len(found) >= count:
            break
        if event.edge is Edge.START and event.unit_index not in besides and event.unit_index not in found:
            found.append(event.unit_index)
    return found


class _Planner:
    def __init__(self, trace: UseTrace, unit_nbytes: Sequence[int], capacity_nbytes: int, prefetch: int) -> None:
        self.trace, self.unit_nbytes = trace, unit_nbytes
        self.capacity_nbytes, self.prefetch = capacity_nbytes, prefetch
        self.starts = _starts(trace, len(unit_nbytes))
        self.resident: dict[int, None] = {}
        self.in_use: dict[int, int] = {}
        """How often at once, of those that are."""
        self.used_nbytes = 0

    def next_use(self, unit_index: int, position: int) -> int:
        """Position of the next start at or after `position`, in the next step when there is none in this one."""
        starts = self.starts[unit_index]
        coming = (start for start in starts if start >= position)
        return next(coming, len(self.trace) + starts[0])

    def make_room(self, nbytes: int, position: int, sooner_than: int) -> list[Op] | None:
        """Evicts that free `nbytes`, taking only units used later than `sooner_than`; None if there are not enough."""
        missing = self.used_nbytes + nbytes - self.capacity_nbytes
        if missing <= 0:
            return []
        victims: list[Op] = []
        candidates = sorted(
            (unit for unit in self.resident if unit not in self.in_use),
            key=lambda unit: self.next_use(unit, position),
            reverse=True,
        )
        for unit in candidates:
            if missing <= 0:
                break
            if self.next_use(unit, position) <= sooner_than:
                return None
            victims.append(Op(Verb.EVICT, unit))
            missing -= self.unit_nbytes[unit]
        return victims if missing <= 0 else None

    def fetch(self, unit_index: int, position: int, sooner_than: int) -> list[Op] | None:
        """Ops that bring the unit in, or None when there is no room that it may take."""
        victims = self.make_room(self.unit_nbytes[unit_index], position, sooner_than)
        if victims is None:
            return None
        for victim in victims:
            del self.resident[victim.unit_index]
            self.used_nbytes -= self.unit_nbytes[victim.unit_index]
        self.resident[unit_index] = None
        self.used_nbytes += self.unit_nbytes[unit_index]
        return [*victims, Op(Verb.FETCH, unit_index)]

    def before_start(self, unit_index: int, position: int) -> list[Op]:
        ops: list[Op] = []
        if unit_index not in self.resident:
            # A unit about to be used outranks every unit that is not in use, whenever that one comes.
            brought = self.fetch(unit_index, position, sooner_than=-1)
            if brought is None:
                raise AssertionError(f"a capacity of {self.capacity_nbytes} bytes cannot hold unit {unit_index} here")
            ops.extend(brought)
        self.in_use[unit_index] = self.in_use.get(unit_index, 0) + 1
        return ops + self.ahead(position)

    def ahead(self, position: int) -> list[Op]:
        """Ops that bring in the units that come next, as far as there is room."""
        ops: list[Op] = []
        busy = set(self.in_use)
        for coming in _coming(self.trace.events, position + 1, self.prefetch, busy):
            if coming in self.resident:
                continue
            brought = self.fetch(coming, position, sooner_than=self.next_use(coming, position))
            if brought is None:
                break
            ops.extend(brought)
        return ops

    def run(self) -> Schedule:
        at: list[tuple[Op, ...]] = []
        for position, event in enumerate(self.trace):
            if event.edge is Edge.START:
                at.append(tuple(self.before_start(event.unit_index, position)))
            else:
                self.in_use[event.unit_index] -= 1
                if not self.in_use[event.unit_index]:
                    del self.in_use[event.unit_index]
                at.append(tuple(self.ahead(position)))
        closing = tuple(Op(Verb.EVICT, unit) for unit in self.resident)
        return Schedule(self.trace, tuple(at), closing, self.capacity_nbytes)


def plan(trace: UseTrace, unit_nbytes: Sequence[int], capacity_nbytes: int, prefetch: int) -> Schedule:
    """The schedule of one step that starts and ends with nothing resident.

    `unit_nbytes[u]` is what unit u takes while resident (0 for a unit that is always there). The capacity must be at
    least `required_nbytes(trace, unit_nbytes, 0)`.
    """
    return _Planner(trace, unit_nbytes, capacity_nbytes, prefetch).run()
