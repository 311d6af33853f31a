# SPDX-License-Identifier: Apache-2.0
"""What work takes its time from: resources with a rate, shared by all who use them at once.

An *activity* (a copy, a kernel, an optimizer step) needs an amount of each of some resources: bytes of a link, bytes of
memory traffic, floating-point operations, seconds of a core. Alone it takes as long as the scarcest of them makes it. Where
activities want more of a resource than there is, who wants little has it, and the others have as much as each other.

A *queue* starts its activities one after another, in the order given or by priority: a stream, a drive's reads.
"""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from offload.device.virtual.simulation import Event, Simulation

_NOTHING = 1e-12


@dataclass(slots=True, eq=False)
class Resource:
    """`rate`: units a second, of which all that use it at once have their shares. `moved`: units that were used so far."""

    name: str
    rate: float
    moved: float = 0.0
    busy_seconds: float = 0.0
    """Seconds in which somebody used it."""
    hidden_seconds: float = 0.0
    """Those of them in which the sharing's `foreground` was at work, too."""


@dataclass(slots=True, eq=False)
class Activity:
    """Work under way. `left` is the part of it that is still to be done, `share` of its full speed it has now."""

    end: Event
    seconds: float
    """Alone."""
    use: dict[Resource, float]
    """By resource, the part of it that full speed takes."""
    amounts: dict[Resource, float]
    left: float = 1.0
    share: float = 0.0


class Sharing:
    """All resources of a machine, and what goes on there."""

    def __init__(self, simulation: Simulation) -> None:
        self.simulation = simulation
        self.foreground: frozenset[Resource] = frozenset()
        self._active: dict[Activity, None] = {}
        self._since = 0.0
        self._round = 0

    def start(self, amounts: Mapping[Resource, float], least_seconds: float = 0.0) -> Event:
        """Begin now; the event settles when it is done. `least_seconds`: what it takes however fast the resources are."""
        end = Event(self.simulation)
        used = {resource: float(amount) for resource, amount in amounts.items() if amount > 0}
        seconds = max([least_seconds, *(amount / resource.rate for resource, amount in used.items())])
        if seconds <= 0.0:
            self.simulation.at(self.simulation.now, end.settle)
            return end
        use = {resource: part for resource, amount in used.items() if (part := amount / (resource.rate * seconds)) > _NOTHING}
        self._advance()
        self._active[Activity(end, seconds, use, used)] = None
        self._share_out()
        return end

    def _advance(self) -> None:
        """Account for the time since the shares were last given out."""
        passed, self._since = self.simulation.now - self._since, self.simulation.now
        if passed <= 0.0:
            return
        busy: dict[Resource, None] = {}
        for activity in self._active:
            done = min(activity.left, passed * activity.share / activity.seconds)
            activity.left -= done
            for resource, amount in activity.amounts.items():
                resource.moved += amount * done
                busy[resource] = None
        is_hidden = not self.foreground.isdisjoint(busy)
        for resource in busy:
            resource.busy_seconds += passed
            resource.hidden_seconds += passed if is_hidden else 0.0

    def _share_out(self) -> None:
        """Give everyone a share: the most wanted resource first, so that each is looked at once."""
        wanted: dict[Resource, float] = {}
        for activity in self._active:
            activity.share = 1.0
            for resource, part in activity.use.items():
                wanted[resource] = wanted.get(resource, 0.0) + part
        while wanted:
            scarcest = max(wanted, key=wanted.__getitem__)
            if wanted[scarcest] <= 1.0:
                break
            _fill([activity for activity in self._active if scarcest in activity.use], scarcest)
            del wanted[scarcest]
            for resource in wanted:
                wanted[resource] = sum(one.use.get(resource, 0.0) * one.share for one in self._active)
        self._round += 1
        if self._active:
            current = self._round
            soonest = min(one.left * one.seconds / one.share for one in self._active)
            self.simulation.at(self.simulation.now + soonest, lambda: self._arrive(current))

    def _arrive(self, round_number: int) -> None:
        if round_number != self._round:
            return  # the shares have changed meanwhile
        self._advance()
        done = [one for one in self._active if one.left * one.seconds <= 1e-12]
        for one in done:
            for resource, amount in one.amounts.items():
                resource.moved += amount * one.left
            del self._active[one]
        self._share_out()
        for one in done:
            one.end.settle()


def _fill(users: list[Activity], resource: Resource) -> None:
    """Lower the shares of those who want more than an equal part of the resource."""
    room = 1.0
    users.sort(key=lambda one: one.use[resource] * one.share)
    for index, user in enumerate(users):
        part = min(user.use[resource] * user.share, room / (len(users) - index))
        user.share = part / user.use[resource]
        room -= part


class Queue:
    """Activities one after another, in the order given, those of a lower priority number first. What waits for an event holds
    up those behind it."""

    def __init__(self, sharing: Sharing) -> None:
        self._sharing = sharing
        self._waiting: list[tuple[int, int, _Queued]] = []
        self._order = itertools.count()
        self._is_busy = False
        self._last = sharing.simulation.after(0.0)
        self._open: _Queued | None = None
        """The last one, while it waits and nobody knows its end: the next may be a part of it."""

    @property
    def last(self) -> Event:
        """Settles when what was added last is done, and with one priority all before it."""
        self._open = None
        return self._last

    def add(self, amounts: Mapping[Resource, float], *, after: Iterable[Event] = (), priority: int = 0) -> Event:
        """Begin once it is its turn and `after` have settled; the event settles when it is done."""
        self._put(dict(amounts), [event for event in after if not event.done()], 0.0, priority)
        return self.last

    def append(self, amounts: Mapping[Resource, float]) -> None:
        """`add`, of something that nobody waits for alone: what is appended while the queue is behind is one activity."""
        last, alone = self._open, max((amount / resource.rate for resource, amount in amounts.items()), default=0.0)
        if last is None:
            one = self._put(dict(amounts), [], alone, 0)
            self._open = None if one.has_begun else one
            return
        last.least_seconds += alone
        for resource, amount in amounts.items():
            last.amounts[resource] = last.amounts.get(resource, 0.0) + amount

    def _put(self, amounts: dict[Resource, float], after: list[Event], least_seconds: float, priority: int) -> _Queued:
        self._last = end = Event(self._sharing.simulation)
        one = _Queued(amounts, least_seconds, after, end)
        heapq.heappush(self._waiting, (priority, next(self._order), one))
        self._open = None
        self._go_on()
        return one

    def _go_on(self) -> None:
        if self._is_busy or not self._waiting:
            return
        self._is_busy = True
        awaited = [event for event in self._waiting[0][2].after if not event.done()]
        if awaited:
            awaited[0].follow(self._look_again)
            return
        _, _, one = heapq.heappop(self._waiting)
        one.end.began_at = self._sharing.simulation.now
        one.has_begun = True
        if one is self._open:
            self._open = None
        self._sharing.start(one.amounts, one.least_seconds).follow(lambda: self._ended(one))

    def _look_again(self) -> None:
        self._is_busy = False
        self._go_on()

    def _ended(self, one: _Queued) -> None:
        one.end.settle()
        self._look_again()


@dataclass(slots=True, eq=False)
class _Queued:
    amounts: dict[Resource, float]
    least_seconds: float
    after: list[Event]
    end: Event
    has_begun: bool = False
