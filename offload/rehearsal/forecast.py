# SPDX-License-Identifier: Apache-2.0
"""What a step would take on a machine that need not exist: the engine itself, run there in virtual time.

    rehearse(VirtualMachine(read_machine("rtx4090")), begin, step, tokens=8192)

`begin` makes the engine, for a model on the meta device; `step` is one step of its loop. Both are the caller's: what is
trained, with which settings and on what. Nothing here knows how an engine is made.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol, TypeVar

from offload.device.virtual.machine import COLLECTIVES, CORES, VirtualMachine
from offload.device.virtual.operations import CountedOperations, fused_attention
from offload.errors import BudgetError

LINKS = ("h2d", "d2h", "nvme_read", "nvme_write")
_IN_USE = "parameters in use"
FIRST_STEPS = 2
"""Before the one that is looked at: the first has no updates under its forward."""


class Rehearsed(Protocol):
    """What is asked of an engine."""

    def stats(self) -> dict[str, Any]:
        """As `offload.Engine.stats`."""
        ...

    def profile(self, path: Path, steps: int) -> object:
        """As `offload.Engine.profile`."""
        ...

    def close(self) -> None:
        """As `offload.Engine.close`."""
        ...


E = TypeVar("E", bound=Rehearsed)


@dataclass(frozen=True, slots=True)
class Forecast:
    """Of one step, after the first ones. `floors`: seconds that each resource needs for it, were it the only one.

    Of several ranks bytes are those of one, and tokens those of all. Where nothing could be run, seconds are NaN and the rest
    is empty."""

    fits: bool
    reason: str
    step_seconds: float
    floors: dict[str, float]
    tokens_per_second: float
    peak_nbytes: dict[str, int]
    moved_nbytes: dict[str, int]
    hidden: dict[str, float | None]
    exposed_seconds: dict[str, float]
    """By link, and for passes over host memory ("host_memory"): in which it was busy and the model was not."""
    placement: dict[str, str]
    planned: list[dict[str, Any]]
    """What lies where, as `Engine.stats` has it."""
    model_tier: str
    """The memory that the model computes on."""
    own_nbytes: int
    """What the model takes there itself, about: activations, gradients, inputs."""
    values_read: int
    halves: dict[str, dict[str, float]]
    """Of "forward" and "backward": seconds that each link takes at least, as the placement was weighed by them."""
    ranks: int = 1

    @property
    def floor_seconds(self) -> float:
        return max(self.floors.values(), default=math.nan)

    @property
    def bottleneck(self) -> str:
        return max(self.floors, key=self.floors.__getitem__, default="")

    @property
    def peak_nbytes_of_all(self) -> dict[str, int]:
        """By tier, of all ranks together."""
        return {tier: self.ranks * nbytes for tier, nbytes in self.peak_nbytes.items()}

    def as_json(self) -> dict[str, Any]:
        """The object that `plan --json` prints; null for NaN, which JSON does not have."""
        names = ("fits", "reason", "step_seconds", "floor_seconds", "bottleneck", "tokens_per_second", "floors")
        more = ("peak_nbytes", "moved_nbytes", "hidden", "exposed_seconds", "placement", "planned")
        last = ("own_nbytes", "values_read", "halves", "ranks", "peak_nbytes_of_all")
        values = {name: getattr(self, name) for name in names + more + last}
        return {name: None if value != value else value for name, value in values.items()}


def rehearse(
    virtual: VirtualMachine,
    begin: Callable[[], E],
    step: Callable[[E], None],
    *,
    tokens: int,
    trace: Path | None = None,
    first_steps: int = FIRST_STEPS,
) -> Forecast:
    """Train with what `begin` returns a few steps on `virtual`, which is new; the last of them is the one that is told of.

    `tokens`: of one step, of all ranks, for the rate. `trace`: the file for a trace of that step. `first_steps`: before it.

    Raises what `begin` and `step` raise: `BudgetError` where no placement fits."""
    with _inside(virtual):
        engine = begin()
        try:
            for _ in range(first_steps):
                step(engine)
            before = _Reading(virtual)
            if trace is not None:
                engine.profile(trace, steps=1)
            step(engine)
            return _forecast(engine, virtual, before, tokens)
        finally:
            engine.close()


@contextmanager
def _inside(virtual: VirtualMachine) -> Iterator[None]:
    with virtual.running(), CountedOperations(virtual), fused_attention():
        yield


class _Reading:
    """The counters of a machine at one moment."""

    def __init__(self, virtual: VirtualMachine) -> None:
        self.now, self.compute_seconds = virtual.simulation.now, virtual.compute_seconds
        self.taken = {name: resource.moved for name, resource in virtual.resources.items()}
        self.moved = virtual.moved()
        self.busy = {name: (one.busy_seconds, one.hidden_seconds) for name, one in virtual.resources.items()}


def _forecast(engine: Rehearsed, virtual: VirtualMachine, before: _Reading, tokens: int) -> Forecast:
    after, machine, stats = _Reading(virtual), virtual.machine, engine.stats()
    taken = {name: after.taken[name] - before.taken[name] for name in after.taken}
    floors = {"compute": after.compute_seconds - before.compute_seconds}
    for name, what in (("h2d", "host to device"), ("d2h", "device to host"), ("memory_bandwidth", "host memory")):
        floors[what] = taken[name] / virtual.resources[name].rate
    if machine.kind == "cpu":  # they compute the model, and all passes over memory
        floors["compute"] = taken[CORES]
    nvme = [taken[name] / virtual.resources[name].rate for name in ("nvme_read", "nvme_write", "nvme_both")]
    floors["NVMe"] = max(nvme)
    links = LINKS if virtual.rank_count == 1 else (*LINKS, COLLECTIVES)
    if COLLECTIVES in links:
        floors[COLLECTIVES] = taken[COLLECTIVES] / virtual.resources[COLLECTIVES].rate
    hidden: dict[str, float | None] = {}
    exposed: dict[str, float] = {}
    for link, resource in (*zip(links, links, strict=True), ("host_memory", "memory_bandwidth")):
        busy, under = (after.busy[resource][index] - before.busy[resource][index] for index in (0, 1))
        exposed[link] = busy - under
        if link in links:
            hidden[link] = under / busy if busy > 0 else None
    on_nvme = sum(line["nbytes"] for line in stats["planned"] if line["tier"] == "nvme")
    in_use = virtual.memory.peak_nbytes  # with host memory, where the model computes on it
    peak = {"device": 0, "cpu": stats["host_peak_nbytes"], "nvme": on_nvme} | {machine.model_tier: in_use}
    count = virtual.rank_count
    room = {"device": machine.device_nbytes, "cpu": machine.cpu_nbytes / count, "nvme": machine.nvme_nbytes / count}
    short = [f"{tier}: {peak[tier] / 2**30:.2f} GiB of {room[tier] / 2**30:.2f}" for tier in room if peak[tier] > room[tier]]
    seconds = after.now - before.now
    return Forecast(
        fits=not short,
        reason="; ".join(short),
        step_seconds=seconds,
        floors=floors,
        tokens_per_second=tokens / seconds,
        peak_nbytes=peak,
        moved_nbytes={link: round(after.moved[link] - before.moved[link]) for link in links},
        hidden=hidden,
        exposed_seconds=exposed,
        placement=stats["placement"],
        planned=stats["planned"],
        model_tier=machine.model_tier,
        own_nbytes=max(peak[machine.model_tier] + virtual.unwritten_nbytes - _of_the_engine(stats, machine.model_tier), 0),
        values_read=virtual.values_read,
        halves={half: stats["decision"][half] for half in ("forward", "backward")} if stats["decision"] is not None else {},
        ranks=count,
    )


def _of_the_engine(stats: dict[str, Any], tier: str) -> int:
    """What it holds there at most: as planned, and the units that stay in what is left."""
    planned = sum(line["nbytes"] for line in stats["planned"] if line["tier"] == tier)
    in_use = sum(line["nbytes"] for line in stats["planned"] if (line["tier"], line["purpose"]) == (tier, _IN_USE))
    return int(planned + max(stats["resident_peak_nbytes"] - in_use, 0))


def refused(error: BudgetError) -> Forecast:
    """Where no placement fits."""
    return Forecast(False, str(error), math.nan, {}, 0.0, {}, {}, {}, {}, {}, [], "", 0, 0, {})
