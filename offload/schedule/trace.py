"""The order in which units are used: recorded in one step, expected in the next.

A trace is a sequence of uses. A use of a unit starts (its parameters must be there) and ends. Uses nest: the root
unit's use spans those of its blocks. A guess made from the order of the model stands in until a step was seen.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from enum import Enum
from itertools import pairwise


class Edge(Enum):
    """Which end of a use."""

    START = "start"
    END = "end"


@dataclass(frozen=True, slots=True)
class Event:
    """A use of `unit_index` starts or ends."""

    edge: Edge
    unit_index: int


@dataclass(frozen=True, slots=True)
class Trace:
    """The events of one step, in order. Starts and ends of each unit balance."""

    events: tuple[Event, ...]

    def __post_init__(self) -> None:
        depth: dict[int, int] = {}
        for event in self.events:
            depth[event.unit_index] = depth.get(event.unit_index, 0) + (1 if event.edge is Edge.START else -1)
            if depth[event.unit_index] < 0:
                raise AssertionError(f"unit {event.unit_index} ends before it starts")
        open_units = [unit_index for unit_index, count in depth.items() if count]
        if open_units:
            raise AssertionError(f"units {open_units} never end")

    def __iter__(self) -> Iterator[Event]:
        return iter(self.events)

    def __len__(self) -> int:
        return len(self.events)


def guess(root_index: int, order: Sequence[int]) -> Trace:
    """What a step probably does: the root's use around a forward in the model's order, then around its reverse."""

    start, end = Event(Edge.START, root_index), Event(Edge.END, root_index)
    forward = [Event(edge, unit) for unit in order for edge in (Edge.START, Edge.END)]
    # In backward the gradient that ends one unit's use is the one that starts the next's: they overlap for a moment.
    reverse = order[::-1]
    backward = [Event(Edge.START, unit) for unit in reverse[:1]]
    for left, reached in pairwise(reverse):
        backward += [Event(Edge.START, reached), Event(Edge.END, left)]
    backward += [Event(Edge.END, unit) for unit in reverse[-1:]]
    return Trace((start, *forward, end, start, *backward, end))


class Recorder:
    """Collects the events of the step that is running."""

    def __init__(self) -> None:
        self._events: list[Event] = []
        self._depth: dict[int, int] = {}

    def start(self, unit_index: int) -> None:
        self._depth[unit_index] = self._depth.get(unit_index, 0) + 1
        self._events.append(Event(Edge.START, unit_index))

    def end(self, unit_index: int) -> None:
        """A use ended. One whose start was not part of the step (a unit joined a use that was going on) is left out."""
        if not self._depth.get(unit_index):
            return
        self._depth[unit_index] -= 1
        self._events.append(Event(Edge.END, unit_index))

    def take(self) -> Trace:
        """The trace so far, with uses that are still open ended; the recorder starts anew."""
        closing = [Event(Edge.END, unit) for unit, count in self._depth.items() for _ in range(count)]
        trace = Trace((*self._events, *closing))
        self._events, self._depth = [], {}
        return trace
