# SPDX-License-Identifier: Apache-2.0
"""Where a step's time went: what the model waited for, what the lanes did meanwhile, and which of it nobody waited for."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from functools import partial

from offload.device.recording import (
    COLLECTIVES,
    D2H,
    H2D,
    MAIN,
    NOBODY,
    NVME_READ,
    NVME_WRITE,
    WAIT,
    WORK,
    OpRecorder,
    Recording,
    lane_row,
)
from offload.tiers.io import IoBackend, IoStats

_FETCH, _UPDATE, _ADAM = "fetch", "update", "adam"
RECORD_WRITES, ROOM_FOR_GRADIENTS = "write records", "room for gradients"
_UPDATES, _FETCHES, _GRADIENTS = lane_row("update"), lane_row("fetch"), lane_row("gradients")
_AWAITS: dict[str, tuple[str, ...]] = {
    _UPDATE: (_UPDATES, lane_row("device update"), H2D, D2H),
    _FETCH: (H2D, _FETCHES, NVME_READ, COLLECTIVES),
    "gather": (COLLECTIVES, _UPDATES),
    "reduction": (COLLECTIVES,),
    "gradients": (D2H, _GRADIENTS, COLLECTIVES),
    ROOM_FOR_GRADIENTS: (NVME_WRITE, D2H, _GRADIENTS),
    "read records": (NVME_READ, D2H, _GRADIENTS),
    "read parameters": (NVME_READ, NVME_WRITE, H2D),
    RECORD_WRITES: (NVME_WRITE,),
    "copy for checkpoint": (lane_row("checkpoint"),),
}
"""By what is waited for: the rows on which that happens."""


@dataclass(slots=True)
class _Sums:
    seconds: dict[str, float] = field(default_factory=dict)
    exposed: dict[str, float] = field(default_factory=dict)
    """By what the update lane was at while the model waited for an update."""


class Timeline:
    """Sums of wall-clock seconds by phase, since the last `take`. Thread-safe; a phase may run on one thread at a time."""

    def __init__(self, clock_ns: Callable[[], int] = time.monotonic_ns, recorder: OpRecorder = NOBODY) -> None:
        """`recorder`: is told of every phase, too."""
        self.clock_ns, self.recorder = clock_ns, recorder
        self._lock = threading.Lock()
        self._sums = _Sums()
        self._update_waits = 0
        self._lane_phases: list[str] = []
        self._since_ns = 0

    def waiting(self, what: str, about: object = None) -> AbstractContextManager[None]:
        """The model's own thread waits for `what`, of the unit `about`."""
        return _Phase(self, what, about, is_wait=True)

    def working(self, what: str, about: object = None) -> AbstractContextManager[None]:
        """The model's own thread does the engine's work `what`, with the unit `about`."""
        return _Phase(self, what, about)

    def joining(self, what: str, about: object = None) -> AbstractContextManager[None]:
        """Compute is given to wait for `what`, and the thread goes on: nothing is summed, a recording is told. To be asked for
        where `recorder.to` is not None, since joins are many."""
        recording = self.recorder.to
        return nullcontext() if recording is None else recording.join(what, about, _AWAITS.get(what, ()))

    def lane_waiting(self, what: str) -> AbstractContextManager[None]:
        """The update lane waits for `what`."""
        return _Phase(self, what, is_wait=True, on_lane=True)

    def lane_working(self, what: str) -> AbstractContextManager[None]:
        """The update lane does `what`."""
        return _Phase(self, what, on_lane=True)

    def _enter(self, phase: _Phase) -> None:
        """Account for the time since the last change, then change who waits or what the lane is at."""
        with self._lock:
            phase.start_ns = now_ns = self.clock_ns()
            self._account(now_ns)
            if phase.on_lane:
                self._lane_phases.append(phase.what)
            else:
                self._update_waits += 1

    def _leave(self, phase: _Phase) -> None:
        """The same, and add what passed."""
        with self._lock:
            now_ns, seconds = self.clock_ns(), self._sums.seconds
            if phase.counts:
                self._account(now_ns)
                if phase.on_lane:
                    self._lane_phases.remove(phase.what)
                else:
                    self._update_waits -= 1
            name, passed_ns = phase.name, now_ns - phase.start_ns
            seconds[name] = seconds[name] + passed_ns / 1e9 if name in seconds else passed_ns / 1e9

    def _account(self, now_ns: int) -> None:
        if self._update_waits and self._lane_phases:
            phase = self._lane_phases[-1]
            self._sums.exposed[phase] = self._sums.exposed.get(phase, 0.0) + (now_ns - self._since_ns) / 1e9
        self._since_ns = now_ns

    def take(self) -> _Sums:
        """The sums so far; starts anew."""
        with self._lock:
            self._account(self.clock_ns())
            sums, self._sums = self._sums, _Sums()
        return sums


class _Phase:
    """One phase of a thread: adds to the sums, and is told of where somebody records."""

    __slots__ = ("_about", "_is_wait", "_timeline", "_told", "counts", "name", "on_lane", "start_ns", "what")

    def __init__(
        self, timeline: Timeline, what: str, about: object = None, *, is_wait: bool = False, on_lane: bool = False
    ) -> None:
        """`on_lane`: of updates, else of the thread that drives the model."""
        self._timeline, self.what, self._about, self._is_wait, self.on_lane = timeline, what, about, is_wait, on_lane
        self.name = f"{'lane ' if on_lane else ''}{'wait' if is_wait else 'work'}: {what}"
        self.counts = on_lane or (is_wait and what == _UPDATE)
        """For what the lane is at while the model waits for an update."""
        self.start_ns = 0

    def __enter__(self) -> None:
        timeline = self._timeline
        self._told = self._tell(timeline.recorder.to) if timeline.recorder.to is not None else None
        if self.counts:
            timeline._enter(self)
        else:
            self.start_ns = timeline.clock_ns()

    def __exit__(self, *_: object) -> None:
        self._timeline._leave(self)
        if self._told is not None:
            self._told()

    def _tell(self, recording: Recording) -> Callable[[], None]:
        """Returns what is to be called when the phase is over."""
        what, awaits = self.what, _AWAITS.get(self.what, ())
        if self.on_lane:
            return partial(recording.end, recording.begin(_UPDATES, WAIT if self._is_wait else WORK, what, awaits=awaits))
        if self._is_wait:
            return partial(recording.end_compute, recording.begin_compute(WAIT, what, self._about, awaits))
        return partial(recording.end, recording.begin(MAIN, WORK, what, self._about))


@dataclass(frozen=True, slots=True)
class Link:
    """What one way for bytes did: seconds in which it was at work, and those of them in which the model waited for it."""

    busy_seconds: float
    exposed_seconds: float
    nbytes: int | None = None
    """That it moved; None where that is not counted."""

    @property
    def hidden(self) -> float | None:
        """The share of its work that nobody waited for, 0 to 1; None where it did none."""
        if self.busy_seconds <= 0.0:
            return None
        return max(0.0, 1.0 - self.exposed_seconds / self.busy_seconds)


@dataclass(frozen=True, slots=True)
class LinkReading:
    """One reading of the meter. `io` is what the links were computed from: a later reading of the backend, whose lanes
    work on meanwhile, would not add up with them."""

    seconds: dict[str, float]
    """By phase."""
    links: dict[str, Link]
    io: IoStats | None
    """Since the backend was opened; None without one."""


class LinkMeter:
    """The timeline and the I/O backend's counters as links: NVMe read, NVMe write, and Adam (memory).

    Waits for a fetch are for reading; waits for an update count for what the update lane was at meanwhile."""

    def __init__(self, timeline: Timeline, backend: IoBackend | None) -> None:
        self._timeline, self._backend = timeline, backend
        self._before = IoStats()

    def take(self) -> LinkReading:
        """What happened since the last time."""
        sums = self._timeline.take()
        links = {_ADAM: Link(sums.seconds.get(f"lane work: {_ADAM}", 0.0), sums.exposed.get(_ADAM, 0.0))}
        if self._backend is None:
            return LinkReading(sums.seconds, links, None)
        before, now = self._before, self._backend.stats()
        self._before = now
        written_exposed = sums.exposed.get(RECORD_WRITES, 0.0)
        read_exposed = sums.seconds.get(f"wait: {_FETCH}", 0.0) + sum(
            seconds for phase, seconds in sums.exposed.items() if phase not in (_ADAM, RECORD_WRITES)
        )
        links["nvme read"] = Link(
            (now.read_busy_ns - before.read_busy_ns) / 1e9, read_exposed, now.read_nbytes - before.read_nbytes
        )
        links["nvme write"] = Link(
            (now.write_busy_ns - before.write_busy_ns) / 1e9, written_exposed, now.written_nbytes - before.written_nbytes
        )
        return LinkReading(sums.seconds, links, now)
