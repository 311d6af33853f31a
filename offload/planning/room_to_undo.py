# SPDX-License-Identifier: Apache-2.0
"""Room for second places, by which updates that begin before `step()` can be undone: whose, and how much."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING

from offload.layout import EXTENT_ALIGN, round_up
from offload.planning.budget import MemoryPlan, Tier
from offload.planning.route import Memory, Route
from offload.planning.sizes import UnitSizes

if TYPE_CHECKING:
    from offload.planning.placement import Problem

_HOST_RESERVE = 0.1
"""Of free host memory, what is left where no budget says how much may be taken."""
_DRIVE_RESERVE = 0.02
"""Of what is free on the drives, what is left to others by what may be there and need not."""
_CHECKPOINTS = 2
"""Room for which update="auto" leaves on the drives: the last one stays until the next is whole."""


@dataclass(frozen=True, slots=True)
class Undoable:
    """Of which units updates can be undone, and what their second places take."""

    keeps_values: Mapping[int, bool]
    """By the index of each such unit, as `Route` has it."""
    nbytes: Counter[Tier]

    @staticmethod
    def of(problem: Problem, routes: Sequence[Route], others: MemoryPlan, *, in_memory: bool = True) -> Undoable:
        """Units of which an update overwrites nothing that could not be had again, as many as there is room for besides what
        must be there; of the last first, which backward reaches first."""
        left, taken, keeps_values = _room(problem, others), Counter[Tier](), dict[int, bool]()
        sizes: dict[tuple[int, int], tuple[tuple[Tier, int], ...] | None] = {}
        """By kind and route; None of those that cannot be undone."""
        footprint, late_units = problem.footprint, problem.expected.late_units
        for unit, kind, route in zip(reversed(footprint.units), reversed(footprint.kinds), reversed(routes), strict=True):
            told = kind, id(route)
            if told not in sizes:
                nbytes = tuple(_undo_nbytes(unit, route).items()) if _can_undo(unit, route) else None
                sizes[told] = nbytes if in_memory or nbytes is None or all(tier != "cpu" for tier, _ in nbytes) else None
            nbytes = sizes[told]
            if nbytes is None or unit.index in late_units:
                continue
            for tier, count in nbytes:
                if taken[tier] + count > left[tier]:
                    break
            else:
                keeps_values[unit.index] = any(unit.records(route.crosses).read)
                for tier, count in nbytes:
                    taken[tier] += count
        return Undoable(keeps_values, taken)


def _room(problem: Problem, others: MemoryPlan) -> Counter[Tier]:
    """On the drives, of which "auto" leaves some for checkpoints. In host memory what a budget leaves; without one "auto" takes
    nothing for it, and "backward" what is free, less a tenth."""
    is_auto, budget = problem.config.update == "auto", problem.budget("cpu")
    drive = int(problem.free.drive_nbytes * (1 - _DRIVE_RESERVE)) - others.total_nbytes("nvme")
    if is_auto:
        drive -= _CHECKPOINTS * sum(unit.home + unit.beside.nbytes for unit in problem.footprint.units)
    if budget is None:
        free = min((limit.free_nbytes for limit in problem.free.host), default=0)
        budget = 0 if is_auto else int(free * (1 - _HOST_RESERVE))
    return Counter[Tier]({"nvme": drive, "cpu": budget - others.total_nbytes("cpu")})


def _can_undo(unit: UnitSizes, route: Route) -> bool:
    """Whether all that an update of the unit writes can have a second place, or is parameters that the record's masters tell.
    Where the device is the CPU, which has nothing to spare under backward, what lies in memory is updated at the step."""
    reads = any(unit.records(route.crosses).read)
    if route.update_in is Memory.HOST and route.model_in is Memory.DEVICE:
        return bool(unit.trained) and not (reads and route.parameters == "device")
    records = route.records == "nvme" and not route.kept_records
    parameters = route.parameters == "nvme" and not route.kept_parameters
    return bool(unit.trained) and records and (parameters or not reads)


def _undo_nbytes(unit: UnitSizes, route: Route) -> Counter[Tier]:
    """What a second place for all that an update of the unit writes to stores takes."""
    records = unit.records(route.crosses)
    kept = sum(records.chunks[: route.kept_records])
    found = Counter[Tier]({"cpu": kept})
    found[route.records] += records.nbytes - kept
    whole = _aligned_nbytes(unit.trained, unit.trained_positions, 0)
    on_drive = 0
    if route.parameters == "nvme":
        on_drive = _aligned_nbytes(unit.trained, unit.trained_positions, route.kept_parameters)
        found["nvme"] += on_drive
    if any(records.read):
        found["cpu"] += whole - on_drive
    return +found


@lru_cache
def _aligned_nbytes(chunks: tuple[int, ...], positions: tuple[int, ...], first: int) -> int:
    """Of those chunks whose position is not below `first`, each in an extent of its own."""
    return sum(round_up(nbytes, EXTENT_ALIGN) for nbytes, position in zip(chunks, positions, strict=True) if position >= first)
