# SPDX-License-Identifier: Apache-2.0
"""What a run measures while it goes: seconds by phase, the engine's counters, losses, and the peaks of memory."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import offload
from offload.cli.process import rss_nbytes

PHASES = ("data", "forward", "backward", "step")


@dataclass(frozen=True, slots=True)
class IoTotals:
    """Bytes moved and seconds in which something was moving, since the engine was made."""

    read_nbytes: int = 0
    written_nbytes: int = 0
    read_seconds: float = 0.0
    write_seconds: float = 0.0

    def __sub__(self, before: IoTotals) -> IoTotals:
        return IoTotals(
            self.read_nbytes - before.read_nbytes,
            self.written_nbytes - before.written_nbytes,
            self.read_seconds - before.read_seconds,
            self.write_seconds - before.write_seconds,
        )


@dataclass(slots=True)
class Measurements:
    """Filled by the training loop. Seconds are wall-clock time of the model's thread."""

    seconds: dict[str, float] = field(default_factory=dict)
    waits: dict[str, float] = field(default_factory=dict)
    losses: list[float] = field(default_factory=list)
    token_count: int = 0
    rss_before_nbytes: int = field(default_factory=rss_nbytes)
    held_out_loss: float | None = None
    held_out_tokens: int = 0
    interrupted: bool = False
    resumed_step_count: int = 0
    """Steps of earlier runs that this one goes on from."""

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Add the time inside to `seconds[name]`."""
        start = time.perf_counter()
        try:
            yield
        finally:
            self.seconds[name] = self.seconds.get(name, 0.0) + time.perf_counter() - start

    @property
    def step_count(self) -> int:
        return len(self.losses)

    @property
    def total_step_count(self) -> int:
        return self.resumed_step_count + self.step_count


class EngineMeter:
    """Reads `engine.stats()`. Its seconds start anew with each reading, so all readings go through here, and into
    `measurements`."""

    def __init__(self, engine: offload.Engine, measurements: Measurements) -> None:
        self._engine, self.measurements = engine, measurements
        self._initial_peak_nbytes = 0
        self._held_nbytes = 0
        self.latest: dict[str, Any] = {}
        self.io = IoTotals()
        self.read()
        self._initial_peak_nbytes = int(self.latest["host_peak_nbytes"])
        self.initial_io = self.io

    def read(self) -> None:
        """Take the engine's counters now."""
        self.latest = stats = self._engine.stats()
        waits = self.measurements.waits
        for name, seconds in stats["seconds"].items():
            waits[name] = waits.get(name, 0.0) + seconds
        self._held_nbytes = max(self._held_nbytes, sum(stats["host_nbytes"].values()))
        if stats["io"] is not None:
            raw = stats["io"]
            self.io = IoTotals(raw.read_nbytes, raw.written_nbytes, raw.read_busy_ns / 1e9, raw.write_busy_ns / 1e9)

    def planned_nbytes(self, tier: str) -> int:
        return sum(line["nbytes"] for line in self.latest["planned"] if line["tier"] == tier)

    @property
    def host_nbytes(self) -> int:
        """Host memory of the engine: what it has allocated, and units in use where the device computes on host memory."""
        return self._held_nbytes + self._units_nbytes

    @property
    def host_peak_nbytes(self) -> int:
        """The most so far. Filling the tiers allocates more for a while, before any unit is in use."""
        later_peak = int(self.latest["host_peak_nbytes"])
        held = later_peak if later_peak > self._initial_peak_nbytes else self._held_nbytes
        return max(self._initial_peak_nbytes, held + self._units_nbytes)

    @property
    def device_peak_nbytes(self) -> int | None:
        """As the device's allocator counted it, activations included; None on the CPU."""
        peak = self.latest["device_peak_nbytes"]
        return None if peak is None else int(peak)

    @property
    def _units_nbytes(self) -> int:
        on_host = any(line["tier"] == "cpu" and line["purpose"] == "parameters in use" for line in self.latest["planned"])
        return int(self.latest["resident_peak_nbytes"]) if on_host else 0
