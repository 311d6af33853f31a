# SPDX-License-Identifier: Apache-2.0
"""What of a plan could be larger, and what more memory or another drive would buy: by the planner's own arithmetic.

Nothing is run for it. What activations take grows with the tokens of a micro-batch, what lies on the drives with the
parameters. A floor is the forecast's own, and what it becomes by the bytes that the placement which would be chosen moves more
or less.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from offload.cli.plans.forecast import GRANTED_SHARE, Work
from offload.cli.plans.outline import Outline
from offload.device.virtual.description import Machine, changed
from offload.device.virtual.machine import VirtualMachine
from offload.errors import BudgetError, ConfigError
from offload.forecast import Forecast, room_of
from offload.planning.placement import Placement
from offload.planning.traffic import Traffic

GIB = 2**30
_ROUND = 128
"""Sequences are told in multiples of it."""


@dataclass(frozen=True, slots=True)
class Bought:
    """`before`, `after`: the floor, in seconds."""

    what: str
    before: float
    after: float

    def as_json(self) -> dict[str, Any]:
        """For `plan --json`."""
        return {"what": self.what, "floor_seconds_before": self.before, "floor_seconds_after": self.after}


@dataclass(frozen=True, slots=True)
class Wishes:
    """`largest`: of parameters, batch and sequence, each with the others as they are. Of parameters as many as the drives hold;
    none where what this model computes with is too much already. Of a step that could not be run nothing is said."""

    largest: dict[str, int] = field(default_factory=dict)
    buys: list[Bought] = field(default_factory=list)


MakeOutline = Callable[[dict[str, int]], Outline]
"""From budgets (fields of `Config`) to an outline on the virtual machine."""


def wishes_of(
    found: Forecast,
    machine: Machine,
    outline_with: MakeOutline,
    work: Work,
    *,
    cpu_memory: int | None,
    device_memory: int | None,
    more: Machine,
) -> Wishes:
    """`work`: the step that the forecast is of. `cpu_memory`: the budget that it was made with. `device_memory`: one that
    stays, whatever the batch. `more`: the machine with one drive more."""
    with VirtualMachine(machine).running(), outline_with({}) as outline:
        placement = outline.placement()
        largest = _largest(found, machine, outline, placement, work, device_memory)
    budgets = {"cpu_memory": cpu_memory if cpu_memory is not None else int(machine.cpu_nbytes * 0.8)}
    if not machine.is_unified:
        budgets["device_memory"] = max(int(machine.device_nbytes - found.own_nbytes), 1)
    before = _traffic(machine, budgets, outline_with, work.micro_batches)
    if before is None:
        return Wishes(largest)
    buys = []
    for name, field_name in (("memory", "cpu_memory"), ("device memory", "device_memory")):
        if field_name in budgets:
            wider = {**budgets, field_name: budgets[field_name] + GIB}
            grown = changed(machine, cpu_nbytes=machine.cpu_nbytes + GIB, device_nbytes=machine.device_nbytes + GIB)
            after = _traffic(grown, wider, outline_with, work.micro_batches)
            if after is not None:
                buys.append(Bought(f"One more GiB of {name}", found.floor_seconds, _floor(grown, found, before, after)))
    if placement.uses_nvme:
        buys.append(Bought("One more drive", found.floor_seconds, _floor(more, found, before, before)))
    return Wishes(largest, buys)


def _largest(
    found: Forecast,
    machine: Machine,
    outline: Outline,
    placement: Placement,
    work: Work,
    device_memory: int | None,
) -> dict[str, int]:
    room = room_of(machine, found.ranks)[machine.model_tier] * (1.0 if machine.is_unified else GRANTED_SHARE)
    smallest = outline.smallest_nbytes(placement, f"{machine.model_tier}_memory") or 0
    least = max(smallest / found.ranks if machine.is_unified else smallest, device_memory or 0)
    times = max((room - least) / max(found.own_nbytes, 1), 0.0)
    largest = {what: _most(found, machine, size, times) for what, size in (("batch", work.batch), ("sequence", work.sequence))}
    if largest["sequence"] != work.sequence:
        largest["sequence"] = largest["sequence"] // _ROUND * _ROUND
    if _computes_with_too_much(found, machine):
        return largest
    try:
        on_drive = outline.placement("nvme", "nvme").nvme_nbytes
    except ConfigError:  # below stage 3 parameters stay on the devices of all ranks
        on_drive = 0
    return (
        {"parameters": int(outline.parameter_numel * machine.nvme_nbytes / on_drive / found.ranks), **largest}
        if on_drive
        else largest
    )


def _computes_with_too_much(found: Forecast, machine: Machine) -> bool:
    """Whether the memory that the model computes on is what is short: of that a larger model takes no less."""
    return found.peak_nbytes[found.model_tier] > room_of(machine, found.ranks)[found.model_tier]


def _most(found: Forecast, machine: Machine, size: int, times: float) -> int:
    """`times` so large, but for what the run itself says: `size` fits, is too large, or something else does not fit."""
    if found.fits:
        return max(size, int(size * times))
    return min(size - 1, int(size * times)) if _computes_with_too_much(found, machine) else 0


def _traffic(machine: Machine, budgets: dict[str, int], outline_with: MakeOutline, micro_batches: int) -> Traffic | None:
    """Of a step as the schedule has it; None where nothing fits."""
    with VirtualMachine(machine).running(), outline_with(budgets) as outline:
        try:
            return outline.traffic(outline.placement(), micro_batches, scheduled=True)
        except BudgetError:
            return None


def _floor(machine: Machine, found: Forecast, before: Traffic, after: Traffic) -> float:
    """Seconds on `machine`: what was found to move, but for the bytes by which the two differ. What computing takes stays, and
    so does what passes over host memory but for those bytes. Not more than before: what is there more need not be used."""
    moved = {
        "h2d": after.to_device_nbytes - before.to_device_nbytes,
        "d2h": after.from_device_nbytes - before.from_device_nbytes,
        "nvme_read": after.read_nbytes - before.read_nbytes,
        "nvme_write": after.written_nbytes - before.written_nbytes,
    }
    nbytes = {link: max(found.moved_nbytes[link] + difference, 0) for link, difference in moved.items()}
    read, written = nbytes["nvme_read"], nbytes["nvme_write"]
    links = [float(nbytes[link] / getattr(machine, link)) for link in moved]
    through_memory = found.floors["host memory"] + sum(moved.values()) / machine.memory_bandwidth
    needed = max(found.floors["compute"], through_memory, (read + written) / machine.nvme_both, *links)
    return min(needed, found.floor_seconds)
