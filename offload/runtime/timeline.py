"""Where a step's time went: what the model waited for, and what the lanes did meanwhile. Seconds by name."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager


class Timeline:
    """Sums of wall-clock seconds by phase, since the last `take`. Thread-safe; a phase may run on one thread at a time."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._seconds: dict[str, float] = {}

    @contextmanager
    def _span(self, name: str) -> Iterator[None]:
        start_ns = time.perf_counter_ns()
        try:
            yield
        finally:
            seconds = (time.perf_counter_ns() - start_ns) / 1e9
            with self._lock:
                self._seconds[name] = self._seconds.get(name, 0.0) + seconds

    def waiting(self, what: str) -> AbstractContextManager[None]:
        """The model's own thread waits for `what`."""
        return self._span(f"wait: {what}")

    def working(self, what: str) -> AbstractContextManager[None]:
        """The model's own thread does the engine's work `what`."""
        return self._span(f"work: {what}")

    def lane_waiting(self, what: str) -> AbstractContextManager[None]:
        """The update lane waits for `what`."""
        return self._span(f"lane wait: {what}")

    def lane_working(self, what: str) -> AbstractContextManager[None]:
        """The update lane does `what`."""
        return self._span(f"lane work: {what}")

    def take(self) -> dict[str, float]:
        """The sums so far; starts anew."""
        with self._lock:
            seconds, self._seconds = self._seconds, {}
        return seconds
