"""What a step would take on a machine that need not exist: the engine itself, run there in virtual time."""

from __future__ import annotations

import math
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

import offload
from offload.device.virtual.description import Machine
from offload.device.virtual.machine import VirtualMachine
from offload.device.virtual.operations import CountedOperations, fused_attention
from offload.errors import BudgetError

LINKS = ("h2d", "d2h", "nvme_read", "nvme_write")
_FIRST_STEPS = 2
"""Before the one that is looked at: the first has no updates under its forward."""


@dataclass(frozen=True, slots=True)
class Work:
    """What one step trains on."""

    batch: int
    sequence: int
    micro_batches: int
    checkpointing: bool

    @property
    def tokens(self) -> int:
        return self.batch * self.sequence * self.micro_batches


@dataclass(frozen=True, slots=True)
class Forecast:
    """Of one step, after the first ones. `floors`: seconds that each resource needs for it, were it the only one.

    Where nothing could be run, seconds are NaN and the rest is empty."""

    fits: bool
    reason: str
    step_seconds: float
    floors: dict[str, float]
    tokens_per_second: float
    peak_nbytes: dict[str, int]
    moved_nbytes: dict[str, int]
    hidden: dict[str, float | None]
    placement: dict[str, str]
    values_read: int

    @property
    def floor_seconds(self) -> float:
        return max(self.floors.values(), default=math.nan)

    @property
    def bottleneck(self) -> str:
        return max(self.floors, key=self.floors.__getitem__, default="")

    def as_json(self) -> dict[str, Any]:
        """The object that `plan --json` prints; null for NaN, which JSON does not have."""
        names = ("fits", "reason", "step_seconds", "floor_seconds", "bottleneck", "tokens_per_second", "floors")
        more = ("peak_nbytes", "moved_nbytes", "hidden", "placement", "values_read")
        values = {name: getattr(self, name) for name in names + more}
        return {name: None if value != value else value for name, value in values.items()}


def forecast(
    model: nn.Module, optimizer: torch.optim.Optimizer, config: offload.Config, machine: Machine, work: Work
) -> Forecast:
    """Train `model`, which lies on the meta device, a few steps on `machine`. Raises `BudgetError` where nothing fits."""
    if work.checkpointing:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", FutureWarning)  # of its name, which older versions know alone
            model.gradient_checkpointing_enable()  # type: ignore[operator]
    virtual = VirtualMachine(machine)
    with _inside(virtual), offload.initialize(model, optimizer, config) as engine:
        for _ in range(_FIRST_STEPS):
            _step(model, engine, work)
        before = _Reading(virtual)
        _step(model, engine, work)
        return _forecast(engine, virtual, before, work)


@contextmanager
def _inside(virtual: VirtualMachine) -> Iterator[None]:
    with virtual.running(), CountedOperations(virtual), fused_attention():
        yield


def _step(model: nn.Module, engine: offload.Engine, work: Work) -> None:
    for _ in range(work.micro_batches):
        tokens = torch.zeros(work.batch, work.sequence, dtype=torch.long, device="meta")
        engine.backward(model(input_ids=tokens, labels=tokens).loss)
    engine.step()
    engine.zero_grad()


class _Reading:
    """The counters of a machine at one moment."""

    def __init__(self, virtual: VirtualMachine) -> None:
        self.now, self.compute_seconds = virtual.simulation.now, virtual.compute_seconds
        self.moved = {name: resource.moved for name, resource in virtual.resources.items()}
        self.busy = {name: (one.busy_seconds, one.hidden_seconds) for name, one in virtual.resources.items()}


def _forecast(engine: offload.Engine, virtual: VirtualMachine, before: _Reading, work: Work) -> Forecast:
    after, machine, stats = _Reading(virtual), virtual.machine, engine.stats()
    moved = {name: after.moved[name] - before.moved[name] for name in after.moved}
    floors = {"compute": after.compute_seconds - before.compute_seconds}
    for name, what in (("h2d", "host to device"), ("d2h", "device to host"), ("memory_bandwidth", "host memory")):
        floors[what] = moved[name] / virtual.resources[name].rate
    nvme = [moved[name] / virtual.resources[name].rate for name in ("nvme_read", "nvme_write", "nvme_both")]
    floors["NVMe"] = max(nvme)
    hidden: dict[str, float | None] = {}
    for link in LINKS:
        busy, under = (after.busy[link][index] - before.busy[link][index] for index in (0, 1))
        hidden[link] = under / busy if busy > 0 else None
    on_nvme = sum(line["nbytes"] for line in stats["planned"] if line["tier"] == "nvme")
    peak = {"device": virtual.peak_device_nbytes, "cpu": stats["host_peak_nbytes"], "nvme": on_nvme}
    room = {"device": machine.device_nbytes, "cpu": machine.cpu_nbytes, "nvme": machine.nvme_nbytes}
    short = [f"{tier}: {peak[tier]} bytes of {room[tier]:.0f}" for tier in room if peak[tier] > room[tier]]
    seconds = after.now - before.now
    return Forecast(
        fits=not short,
        reason="; ".join(short),
        step_seconds=seconds,
        floors=floors,
        tokens_per_second=work.tokens / seconds,
        peak_nbytes=peak,
        moved_nbytes={link: round(moved[link]) for link in LINKS},
        hidden=hidden,
        placement=stats["placement"],
        values_read=virtual.values_read,
    )


def refused(error: BudgetError) -> Forecast:
    """Where no placement fits."""
    return Forecast(False, str(error), math.nan, {}, 0.0, {}, {}, {}, {}, 0)
