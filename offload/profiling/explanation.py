# SPDX-License-Identifier: Apache-2.0
"""What a trace says, in few numbers: `python -m offload explain`."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Any

from offload.device.recording import COMPUTE
from offload.profiling.advice import Advice, Adviser
from offload.profiling.attribution import DRIVE, attributed
from offload.profiling.trace_events import Trace

_BOUNDS = 0.1
"""Of a step: where compute stands still for less, it is compute that bounds the step."""


@dataclass(frozen=True, slots=True)
class Work:
    """Of one link or lane, a step. Seconds; `hidden`: 0 to 1; bytes and bytes a second where it moves any."""

    busy_seconds: float
    exposed_seconds: float
    hidden: float | None
    nbytes: float
    bytes_per_second: float | None


@dataclass(frozen=True, slots=True)
class Wait:
    """Compute stood still a step for so long: `what` of `unit` was waited for, a matter of `on`."""

    what: str
    unit: str
    on: str
    seconds: float


@dataclass(frozen=True, slots=True)
class Explanation:
    """Everything by step. `floor_seconds`: what the busiest of compute, links and lanes needs, which is `floor_of`."""

    steps: int
    step_seconds: float
    compute_seconds: float
    phases: dict[str, float]
    work: dict[str, Work]
    waits: list[Wait]
    bottleneck: str
    floor_of: str
    floor_seconds: float
    advice: list[Advice]

    def as_json(self) -> dict[str, Any]:
        """The object that `explain --json` prints."""
        return dataclasses.asdict(self)


def explain(trace: Trace) -> Explanation:
    """What the trace says."""
    found, steps = attributed(trace), trace.step_count

    def seconds(nanoseconds: int) -> float:
        return nanoseconds / 1e9 / steps

    work = {
        name: Work(seconds(share.busy_ns), seconds(share.exposed_ns), share.hidden, share.nbytes / steps, share.rate)
        for name, share in found.shares.items()
        if share.busy_ns or share.nbytes
    }
    step, compute = seconds(trace.duration_ns), seconds(found.compute_ns)
    busy = {COMPUTE: compute, **{name: one.busy_seconds for name, one in work.items()}}
    floor_of = max(busy, key=busy.__getitem__)
    ways = [name for name in work if name != DRIVE]
    worst = max(ways, key=lambda name: work[name].exposed_seconds, default=COMPUTE)
    is_exposed = worst != COMPUTE and work[worst].exposed_seconds > _BOUNDS * step
    return Explanation(
        steps=steps,
        step_seconds=step,
        compute_seconds=compute,
        phases={name: seconds(ns) for name, ns in found.phases.items()},
        work=dict(sorted(work.items(), key=lambda item: -item[1].exposed_seconds)),
        waits=[
            Wait(wait.what, wait.unit, wait.on, seconds(ns))
            for wait, ns in sorted(found.waits.items(), key=lambda item: -item[1])
        ],
        bottleneck=worst if is_exposed else COMPUTE,
        floor_of=floor_of,
        floor_seconds=busy[floor_of],
        advice=Adviser(trace, found).advice(),
    )
