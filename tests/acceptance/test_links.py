# SPDX-License-Identifier: Apache-2.0
"""What `engine.stats()` says of each link: how long it worked, and how much of that the model waited for."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from offload.step.timeline import RECORD_WRITES, LinkMeter, Timeline
from offload.tiers.io import IoStats

from .models import ON_NVME, Setup, adamw, stack
from .runs import Run, simple_loop


class Clock:
    """Seconds that pass only when told."""

    def __init__(self) -> None:
        self.now_ns = 0

    def __call__(self) -> int:
        return self.now_ns

    def passes(self, seconds: float) -> None:
        self.now_ns += round(seconds * 1e9)


class Backend:
    """Counters, and nothing else."""

    def __init__(self) -> None:
        self.counters = IoStats()

    def stats(self) -> IoStats:
        return self.counters


def test_what_the_lane_does_while_the_model_waits_is_exposed() -> None:
    clock, backend = Clock(), Backend()
    timeline = Timeline(clock)
    meter = LinkMeter(timeline, backend)  # type: ignore[arg-type]
    with timeline.lane_waiting("read records"):
        clock.passes(3)  # hidden: the model computes
    adam = timeline.lane_working("adam")
    adam.__enter__()
    clock.passes(1)
    with timeline.waiting("update"):
        clock.passes(2)
        adam.__exit__(None, None, None)
        clock.passes(0.5)  # the lane is between two phases
        with timeline.lane_waiting("read records"):
            clock.passes(4)
        with timeline.lane_waiting(RECORD_WRITES):
            clock.passes(0.25)
    with timeline.waiting("fetch"):
        clock.passes(1)
    backend.counters = IoStats(700, 300, 10_000_000_000, 1_000_000_000)
    reading = meter.take()
    seconds, links = reading.seconds, reading.links
    assert reading.io == IoStats(700, 300, 10_000_000_000, 1_000_000_000)
    assert seconds["lane wait: read records"] == pytest.approx(7.0) and seconds["wait: update"] == pytest.approx(6.75)
    assert links["adam"].busy_seconds == pytest.approx(3.0) and links["adam"].exposed_seconds == pytest.approx(2.0)
    read, write = links["nvme read"], links["nvme write"]
    assert (read.nbytes, write.nbytes) == (700, 300)
    assert read.exposed_seconds == pytest.approx(4.0 + 1.0) and read.hidden == pytest.approx(0.5)
    assert write.exposed_seconds == pytest.approx(0.25) and write.hidden == pytest.approx(0.75)
    again = meter.take()
    assert again.seconds == {} and all(link.busy_seconds == 0 and link.hidden is None for link in again.links.values())


def test_a_phase_that_is_going_on_is_split_at_the_reading() -> None:
    clock = Clock()
    timeline = Timeline(clock)
    meter = LinkMeter(timeline, None)
    with timeline.waiting("update"), timeline.lane_working("adam"):
        clock.passes(1)
        assert meter.take().links["adam"].exposed_seconds == pytest.approx(1.0)
        clock.passes(2)
    assert meter.take().links["adam"].exposed_seconds == pytest.approx(2.0)
    assert set(meter.take().links) == {"adam"}


@pytest.mark.parametrize("setup", [ON_NVME, Setup("nvme", "nvme", "cpu"), Setup("cpu", "cpu", "cpu")], ids=lambda s: s.name)
def test_an_engine_reports_its_links(opened: Callable[..., Any], setup: Setup) -> None:
    model = stack()
    engine = opened(model, adamw(model), setup)
    run = Run(model, engine.optimizer, engine)
    before = engine.stats()
    simple_loop(steps=4)(run)
    stats = engine.stats()
    assert set(stats["links"]) == ({"adam"} if setup.parameters == "cpu" else {"adam", "nvme read", "nvme write"})
    for link in stats["links"].values():
        assert link["busy_seconds"] > 0 and 0.0 <= link["hidden"] <= 1.0
    if stats["io"] is not None:
        assert stats["links"]["nvme read"]["nbytes"] == stats["io"].read_nbytes - before["io"].read_nbytes > 0
        assert stats["links"]["nvme write"]["nbytes"] == stats["io"].written_nbytes - before["io"].written_nbytes > 0
