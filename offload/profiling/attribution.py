# SPDX-License-Identifier: Apache-2.0
"""Where a recorded step's time went: what links and lanes did, for which of it compute stood still, and who waited for whom.

At any moment the model computes, or it stands still. Where it stands still because something is waited for, that is followed
from row to row: the wait names the rows on which it is answered; on a lane, what that lane is at counts, and if that is a wait
too it is followed further; a link that moves bytes of the unit in question, or any at all, ends the search. What nothing can
be found for is the host's own: Python, and the hand-over from thread to thread.

On a GPU compute is known by unit: a device that has run dry inside a unit, because the host is slow, counts as computing.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, field

from offload.device.recording import COMPUTE, H2D, LINKS, MAIN, NVME_READ, NVME_WRITE, USE, WAIT, WORK, lane_row
from offload.profiling.trace_events import Event, Trace

ADAM, SUMS, HOST, OUTSIDE = "CPU Adam", "CPU gradients", "host", "outside of the model"
"""Beside the links: the arithmetic of updates, taking gradients into host memory and adding micro-batches there, the engine's
and PyTorch's own Python, and the loop's own work."""
DRIVE = "NVMe"
"""Reads and writes together."""
_UPDATES, _FETCHES, _GRADIENTS = lane_row("update"), lane_row("fetch"), lane_row("gradients")
_UPDATE_STEP = "adam"


@dataclass(slots=True)
class Share:
    """Of one link or lane, over all recorded steps. `exposed_ns`: in which compute stood still for it."""

    busy_ns: int = 0
    exposed_ns: int = 0
    nbytes: int = 0
    idle_backward_ns: int = 0
    """While the model was in backward."""

    @property
    def hidden(self) -> float | None:
        """Of its work, 0 to 1, what nobody stood still for; None where it did none."""
        return max(0.0, 1.0 - self.exposed_ns / self.busy_ns) if self.busy_ns else None

    @property
    def rate(self) -> float | None:
        """Bytes a second while it was at work."""
        return self.nbytes / self.busy_ns * 1e9 if self.busy_ns and self.nbytes else None


@dataclass(frozen=True, slots=True)
class Waited:
    """`waiter` waited for `what` of `unit`, and that was a matter of `on`."""

    waiter: str
    what: str
    unit: str
    on: str


@dataclass(slots=True)
class Attribution:
    """Nanoseconds, over all recorded steps."""

    shares: dict[str, Share]
    waits: dict[Waited, int]
    compute_ns: int = 0
    phases: dict[str, int] = field(default_factory=dict)
    """By "forward", "backward", "recompute" and "step": of the thread that drives the model, the outermost alone."""


def attributed(trace: Trace) -> Attribution:
    """See the module."""
    shares: dict[str, Share] = defaultdict(Share)
    for event in trace.events:
        if event.link in LINKS:
            shares[event.link].nbytes += event.nbytes
    if drives := [shares[row] for row in (NVME_READ, NVME_WRITE) if row in shares]:
        shares[DRIVE].nbytes = sum(one.nbytes for one in drives)
    found = Attribution(shares, defaultdict(int))
    on_host = bool(trace.facts.get("computes_on_host"))
    for lasts_ns, moment in _moments(trace):
        moment.account(found, lasts_ns, on_host=on_host)
    found.shares, found.waits = dict(shares), dict(found.waits)
    return found


class _Moment:
    """What goes on at one moment: by row, the events, the innermost last."""

    def __init__(self) -> None:
        self.active: dict[str, list[Event]] = defaultdict(list)

    def account(self, found: Attribution, lasts_ns: int, *, on_host: bool) -> None:
        busy = self._busy()
        for name in busy:
            found.shares[name].busy_ns += lasts_ns
        outermost = next((event.name for event in self.active[MAIN] if event.kind in (USE, WORK)), None)
        if outermost is not None:
            found.phases[outermost] = found.phases.get(outermost, 0) + lasts_ns
        if outermost == "backward":
            for name, share in found.shares.items():
                share.idle_backward_ns += 0 if name in busy else lasts_ns
        waiting = self._waiting()
        if waiting is not None:
            on = self._blamed(waiting)
            found.waits[Waited(waiting.row, waiting.name, waiting.unit, on)] += lasts_ns
            self._expose(found, on, lasts_ns)
        elif on_host and (working := self._innermost(MAIN)) is not None and working.kind == WORK:
            self._expose(found, HOST, lasts_ns)
        elif self.active[COMPUTE]:
            found.compute_ns += lasts_ns
        else:
            self._expose(found, HOST if self.active[MAIN] else OUTSIDE, lasts_ns)

    @staticmethod
    def _expose(found: Attribution, on: str, lasts_ns: int) -> None:
        found.shares[on].exposed_ns += lasts_ns
        if on in (NVME_READ, NVME_WRITE):
            found.shares[DRIVE].exposed_ns += lasts_ns
        elif on in (HOST, OUTSIDE):
            found.shares[on].busy_ns += lasts_ns

    def _busy(self) -> set[str]:
        busy = {event.link for events in self.active.values() for event in events if event.link in LINKS}
        if busy & {NVME_READ, NVME_WRITE}:
            busy.add(DRIVE)
        if any(event.name == _UPDATE_STEP for event in self.active[_UPDATES]):
            busy.add(ADAM)
        if any(event.kind == WORK for event in self.active[_GRADIENTS]):
            busy.add(SUMS)
        return busy

    def _innermost(self, row: str) -> Event | None:
        events = self.active[row]
        return events[-1] if events else None

    def _waiting(self) -> Event | None:
        """The wait for which compute stands still, if it does."""
        innermost = self._innermost(COMPUTE)
        return innermost if innermost is not None and innermost.kind == WAIT else None

    def _blamed(self, wait: Event) -> str:
        """The link or lane that the wait is a matter of."""
        awaits, unit, seen = wait.awaits, wait.unit, set[str]()
        while True:
            moving = [event for row in awaits for event in self._on_link(row)]
            of_unit = [event for event in moving if event.unit == unit]
            if of_unit:
                return of_unit[0].link
            lane = next((row for row in awaits if row not in seen and row not in LINKS and self.active[row]), None)
            if lane is None:
                return moving[0].link if moving else HOST
            seen.add(lane)
            at = self.active[lane][-1]
            if at.kind != WAIT and lane != _FETCHES:
                return ADAM if at.name == _UPDATE_STEP else SUMS if lane == _GRADIENTS else HOST
            awaits, unit = (at.awaits, at.unit) if at.kind == WAIT else ((H2D, NVME_READ, NVME_WRITE, _UPDATES), at.unit)

    def _on_link(self, link: str) -> list[Event]:
        if link not in LINKS:
            return []
        return [event for events in self.active.values() for event in events if event.link == link]


def _moments(trace: Trace) -> Iterator[tuple[int, _Moment]]:
    """What went on between every two moments at which something began or ended, and how long that lasted."""
    edges: list[tuple[int, int, Event]] = []
    for event in trace.events:
        if event.end_ns > event.start_ns:
            edges += [(event.start_ns, 1, event), (event.end_ns, 0, event)]
    edges.sort(key=lambda edge: edge[:2])  # stable: what encloses begins first
    moment, since_ns = _Moment(), 0
    for at_ns, begins, event in edges:
        if at_ns > since_ns:
            yield at_ns - since_ns, moment
            since_ns = at_ns
        active = moment.active[event.row]
        if begins:
            active.append(event)
        else:
            active.remove(event)
    if trace.duration_ns > since_ns:
        yield trace.duration_ns - since_ns, moment
