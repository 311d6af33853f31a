# SPDX-License-Identifier: Apache-2.0
"""The order in which units are used: recorded in one step, expected in the next.

A trace is a sequence of uses. A use of a unit starts (its parameters must be there) and ends. Uses nest: the root
unit's use spans those of its blocks. A guess made from the order of the model stands in until a step was seen.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from enum import Enum


class Edge(Enum):
    """Which end of a use."""

    START = "start"
    END = "end"


@dataclass(frozen=True, slots=True)
class UseEvent:
    """A use of `unit_index` starts or ends."""

    edge: Edge
    unit_index: int


def code_of(event: UseEvent) -> int:
    """The unit's index, inverted where a use ends: events are compared and looked up in every step, for each use."""
    return event.unit_index if event.edge is Edge.START else ~event.unit_index


@dataclass(frozen=True, slots=True)
class UseTrace:
    """The events of one step, in order. Starts and ends of each unit balance."""

    events: tuple[UseEvent, ...] = field(compare=False)
    _codes: tuple[int, ...] = field(init=False, repr=False)
    """Of the events: what is known of a trace is looked up often (`offload.planning.schedule`)."""
    _hash: int = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "_codes", tuple(map(code_of, self.events)))
        object.__setattr__(self, "_hash", hash(self._codes))
        depth: dict[int, int] = {}
        for event in self.events:
            depth[event.unit_index] = depth.get(event.unit_index, 0) + (1 if event.edge is Edge.START else -1)
            if depth[event.unit_index] < 0:
                raise AssertionError(f"unit {event.unit_index} ends before it starts")
        open_units = [unit_index for unit_index, count in depth.items() if count]
        if open_units:
            raise AssertionError(f"units {open_units} never end")

    def __hash__(self) -> int:
        return self._hash

    def __iter__(self) -> Iterator[UseEvent]:
        return iter(self.events)

    def __len__(self) -> int:
        return len(self.events)


@dataclass(frozen=True, slots=True)
class Use:
    """One use of a unit besides the root in a forward, as the model's structure has it. `read_in_backward`: backward computes
    with the values; of a lookup it does not. `of_a_part`: no other use of the unit in a forward has the same parameters.
    `recomputed`: backward computes its forward again."""

    unit_index: int
    read_in_backward: bool = True
    of_a_part: bool = False
    recomputed: bool = False


def guess(root_index: int, uses: Sequence[Use], *, overlapping: bool = False) -> UseTrace:
    """What a step probably does: the root's use around a forward in the model's order, then around its reverse.

    `overlapping`: as if every use in backward began before the last one ended.
    """
    start, end = UseEvent(Edge.START, root_index), UseEvent(Edge.END, root_index)
    forward = [UseEvent(edge, use.unit_index) for use in uses for edge in (Edge.START, Edge.END)]
    reverse = [use.unit_index for use in reversed(uses) if use.read_in_backward]
    if overlapping:
        starts, ends = ([UseEvent(edge, unit_index) for unit_index in reverse] for edge in Edge)
        backward = [*starts[:1], *(event for pair in zip(starts[1:], ends, strict=False) for event in pair), *ends[-1:]]
    else:
        backward = [UseEvent(edge, unit_index) for unit_index in reverse for edge in (Edge.START, Edge.END)]
    return UseTrace((start, *forward, end, start, *backward, end))


@dataclass(frozen=True, slots=True)
class Expected:
    """What is known of a step before one was seen."""

    trace: UseTrace
    overlapping: UseTrace
    """The same if every use in backward began before the last one ended: nothing that follows the model's order needs more
    units at once."""
    late_units: frozenset[int]
    """Units whose gradients are complete only when backward is over: the root, and what several modules share."""
    recomputed: frozenset[int] = frozenset()
    """Units of which backward computes the forward again."""
    looked_up: frozenset[int] = frozenset()
    """Units of which rows are taken and nothing else."""

    @staticmethod
    def of(root_index: int, uses: Sequence[Use]) -> Expected:
        counts = Counter(use.unit_index for use in uses if not use.of_a_part)
        shared = (unit_index for unit_index, count in counts.items() if count > 1)
        used = {use.unit_index for use in uses}
        recomputed = used - {use.unit_index for use in uses if not use.recomputed}
        looked_up = used - {use.unit_index for use in uses if use.read_in_backward}
        traces = guess(root_index, uses), guess(root_index, uses, overlapping=True)
        return Expected(*traces, frozenset((root_index, *shared)), frozenset(recomputed), frozenset(looked_up))


class UseRecorder:
    """Collects the events of the step that is running."""

    def __init__(self) -> None:
        self._codes: list[int] = []
        """Of its events (`code_of`)."""
        self._since = 0
        """How many there were at the last `repeat`."""
        self._depth: dict[int, int] = {}

    def start(self, unit_index: int) -> None:
        depth = self._depth
        depth[unit_index] = depth[unit_index] + 1 if unit_index in depth else 1
        self._codes.append(unit_index)

    def end(self, unit_index: int) -> None:
        """A use ended. One whose start was not part of the step (a unit joined a use that was going on) is left out."""
        if not self._depth.get(unit_index):
            return
        self._depth[unit_index] -= 1
        self._codes.append(~unit_index)

    def repeat(self, count: int) -> int:
        """What came since the last call, or the step's begin, came so many times more. Returns how many events those are."""
        more = self._codes[self._since :] * count
        self._codes += more
        self._since = len(self._codes)
        return len(more)

    def take(self) -> UseTrace:
        """The trace so far, with uses that are still open ended; the recorder starts anew."""
        closing = [~unit for unit, count in self._depth.items() for _ in range(count)]
        events = [UseEvent(Edge.START, code) if code >= 0 else UseEvent(Edge.END, ~code) for code in (*self._codes, *closing)]
        self.begin_anew()
        return UseTrace(tuple(events))

    def begin_anew(self) -> None:
        """Nobody wants to know what was recorded."""
        self._codes, self._since, self._depth = [], 0, {}
