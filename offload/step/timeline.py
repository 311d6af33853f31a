"""Where a step's time went: what the model waited for, what the lanes did meanwhile, and which of it nobody waited for."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field

from offload.tiers.io import IoBackend, IoStats

_FETCH, _UPDATE, _ADAM = "fetch", "update", "adam"
RECORD_WRITES = "write records"


@dataclass(slots=True)
class _Sums:
    seconds: dict[str, float] = field(default_factory=dict)
    exposed: dict[str, float] = field(default_factory=dict)
    """By what the update lane was at while the model waited for an update."""


class Timeline:
    """Sums of wall-clock seconds by phase, since the last `take`. Thread-safe; a phase may run on one thread at a time."""

    def __init__(self, clock_ns: Callable[[], int] = time.perf_counter_ns) -> None:
        self._clock_ns = clock_ns
        self._lock = threading.Lock()
        self._sums = _Sums()
        self._update_waits = 0
        self._lane_phases: list[str] = []
        self._since_ns = 0

    @contextmanager
    def _span(self, name: str) -> Iterator[None]:
        start_ns = self._clock_ns()
        try:
            yield
        finally:
            seconds = (self._clock_ns() - start_ns) / 1e9
            with self._lock:
                self._sums.seconds[name] = self._sums.seconds.get(name, 0.0) + seconds

    @contextmanager
    def waiting(self, what: str) -> Iterator[None]:
        """The model's own thread waits for `what`."""
        with self._span(f"wait: {what}"):
            self._change(waits=int(what == _UPDATE))
            try:
                yield
            finally:
                self._change(waits=-int(what == _UPDATE))

    def working(self, what: str) -> AbstractContextManager[None]:
        """The model's own thread does the engine's work `what`."""
        return self._span(f"work: {what}")

    def lane_waiting(self, what: str) -> AbstractContextManager[None]:
        """The update lane waits for `what`."""
        return self._lane_phase(f"lane wait: {what}", what)

    def lane_working(self, what: str) -> AbstractContextManager[None]:
        """The update lane does `what`."""
        return self._lane_phase(f"lane work: {what}", what)

    @contextmanager
    def _lane_phase(self, name: str, what: str) -> Iterator[None]:
        with self._span(name):
            self._change(enters=what)
            try:
                yield
            finally:
                self._change(leaves=what)

    def _change(self, waits: int = 0, enters: str | None = None, leaves: str | None = None) -> None:
        """Account for the time since the last change, then change who waits or what the lane is at."""
        with self._lock:
            now_ns = self._clock_ns()
            self._account(now_ns)
            self._update_waits += waits
            if enters is not None:
                self._lane_phases.append(enters)
            elif leaves is not None:
                self._lane_phases.remove(leaves)

    def _account(self, now_ns: int) -> None:
        if self._update_waits and self._lane_phases:
            phase = self._lane_phases[-1]
            self._sums.exposed[phase] = self._sums.exposed.get(phase, 0.0) + (now_ns - self._since_ns) / 1e9
        self._since_ns = now_ns

    def take(self) -> dict[str, float]:
        """The sums by phase so far; starts anew."""
        return self._take().seconds

    def _take(self) -> _Sums:
        with self._lock:
            self._account(self._clock_ns())
            sums, self._sums = self._sums, _Sums()
        return sums


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
        sums = self._timeline._take()
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
