"""From a configuration to a decision: which tier each state lives in, and how many bytes that takes.

"auto" takes the fastest tiers that the budgets allow: device, then cpu, then (where a path is given) nvme, the
optimizer states leaving before the parameters do.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from offload.config import Config
from offload.device.accelerator import Accelerator
from offload.device.host_room import host_room
from offload.device.records import RecordFormat
from offload.device.segment import StateFormat
from offload.errors import BudgetError, ConfigError
from offload.planning import purposes
from offload.planning.budget import (
    FETCH_BUFFERS,
    IN_WRITING,
    LANDING_BUFFERS,
    NOTHING_KEPT,
    READ_AHEAD,
    Footprint,
    Kept,
    MemoryLine,
    MemoryPlan,
    Placement as Placement,
    Tier,
    UndoRoom,
)
from offload.planning.working_set import WorkingSet
from offload.tiers import scratch

AUTO_ORDER: tuple[tuple[Tier, Tier], ...] = (
    ("device", "device"),
    ("device", "cpu"),
    ("cpu", "cpu"),
    ("cpu", "nvme"),
    ("nvme", "nvme"),
)
KEPT_PARAMETERS = "parameters kept in memory"
KEPT_RECORDS = "optimizer states kept in memory"
_FREE_SHARE = 0.8
"""Of the free memory, where "auto" has no budget to go by: the rest is for activations and everybody else."""
_DRIVE_RESERVE = 0.02
"""Of what is free on the drives, what is left to others by what may be there and need not."""


@dataclass(frozen=True, slots=True)
class RankGroup:
    """With whom this rank trains: `world_size` ranks share the shards, `local_world_size` the memory of this node."""

    stage: int = 3
    world_size: int = 1
    local_world_size: int = 1

    @property
    def shards_parameters(self) -> bool:
        """Whether a rank keeps only its shard of the parameters between uses."""
        return self.world_size > 1 and self.stage == 3


ALONE = RankGroup()


@dataclass(frozen=True, slots=True)
class _Problem:
    """What a placement is decided for.

    `capacity_of(prefetch, n, budget)`: device bytes of the units in use and coming at once, the first n units not counted.
    `late_units`: those whose gradients are complete only when backward is over.
    `drive_nbytes`: what is free on the drives.
    `accumulates`: whether the sums of several micro-batches are planned for."""

    config: Config
    accelerator: Accelerator
    sharing: RankGroup
    footprint_of: Callable[[Tier, Tier], Footprint]
    capacity_of: Callable[[int, int, int | None], int]
    late_units: frozenset[int]
    drive_nbytes: int
    accumulates: bool

    def keeps_whole(self, parameters: Tier) -> bool:
        """Whether parameters in that tier are for good where the device computes on them."""
        in_device_memory = parameters == "device" or (parameters == "cpu" and self.accelerator.unified)
        return in_device_memory and not self.sharing.shards_parameters

    def speculates(self, parameters: Tier, states: Tier) -> bool:
        """Whether updates may begin before `step()`. Where their results lie in memory that is no gain, and to undo
        them would take a copy; several ranks would have to agree on what they undo."""
        on_nvme = (parameters, states) == ("nvme", "nvme") and self.sharing.world_size == 1
        return on_nvme and self.config.update == "backward"

    def can_hold(self, parameters: Tier) -> bool:
        """Whether the stage allows parameters in that tier: without partitioned parameters they stay on the device."""
        return self.sharing.world_size == 1 or self.sharing.shards_parameters or self.keeps_whole(parameters)


def record_format(
    accelerator: Accelerator, config: Config, moments: tuple[str, ...], parameters: Tier, optimizer_states: Tier, dtype: str
) -> RecordFormat:
    """What the records of trained parameters of `dtype` consist of. fp32 ones hold no master where fp32 parameters lie within
    reach of the kernel that updates them."""
    within_reach = accelerator.unified or (optimizer_states == "device") == (parameters == "device")
    own_master = dtype != "float32" or not within_reach
    return RecordFormat(StateFormat(config.state_format), moments, own_master)


def _staging(
    problem: _Problem, parameters: Tier, states: Tier, footprint: Footprint, retained: int, kept: Kept
) -> dict[str, tuple[int, int]]:
    accelerator = problem.accelerator
    buffers: dict[str, tuple[int, int]] = {}
    on_host = accelerator.unified or states != "device"
    passes_through = parameters == "nvme" and kept.parameter_nbytes < footprint.parameters
    if states == "nvme" and kept.record_nbytes < footprint.records:
        # read ahead, in the update's hands, in writing
        buffers[purposes.RECORDS] = (READ_AHEAD + 1 + IN_WRITING, footprint.record_buffer)
        # one for a unit whose turn comes before that of those read ahead
        buffers[purposes.RECORDS_ON_DEMAND] = (1, footprint.record_buffer)
    if retained:
        buffers[purposes.RETAINED] = (retained, footprint.gradient_buffer)
        # a gradient comes back with each record that is read ahead, in hand, or out of order
        buffers[purposes.RELOADED] = (READ_AHEAD + 1 + IN_WRITING + 1, footprint.gradient_buffer)
    if footprint.gradients and on_host and not accelerator.unified and problem.sharing.world_size == 1:
        buffers[purposes.LANDING] = (LANDING_BUFFERS, footprint.parameter_buffer)
    if footprint.gradients and not accelerator.unified and problem.sharing.world_size == 1:
        buffers[purposes.SUMS] = (1, footprint.sums)
    emits = passes_through or (parameters == "device" and states != "device")
    in_reach = accelerator.unified and not (passes_through and problem.sharing.shards_parameters)
    if footprint.gradients and emits and not in_reach:
        # updated parameters on their way home, and where the update reads them too, those read ahead
        ahead = READ_AHEAD if footprint.reads_parameters and passes_through else 0
        buffers[purposes.EMITTED] = (ahead + 1 + IN_WRITING, footprint.parameter_buffer)
    if passes_through and not accelerator.unified:
        buffers[purposes.FETCHED] = (FETCH_BUFFERS, footprint.parameter_buffer)
    return buffers


def _gradient_tier(problem: _Problem, states: Tier) -> Tier:
    if states == "device" and not problem.accelerator.unified:
        return "device"
    return "nvme" if states == "nvme" else "cpu"


def _place(
    problem: _Problem,
    parameters: Tier,
    states: Tier,
    prefetch: int,
    gradients_in: Tier,
    retained: int,
    kept: Kept = NOTHING_KEPT,
) -> Placement:
    accelerator, footprint = problem.accelerator, problem.footprint_of(parameters, states)
    device: Tier = "cpu" if accelerator.unified else "device"
    capacity = (
        None if problem.keeps_whole(parameters) else problem.capacity_of(prefetch, kept.unit_count, _budget(problem, device))
    )
    staging = _staging(problem, parameters, states, footprint, retained if gradients_in == "nvme" else 0, kept)
    lines = [
        MemoryLine(
            device if parameters == "device" else parameters, "parameters", footprint.parameters - kept.parameter_nbytes
        ),
        MemoryLine(device if states == "device" else states, "optimizer states", footprint.records - kept.record_nbytes),
        MemoryLine("cpu", KEPT_PARAMETERS, kept.parameter_nbytes),
        MemoryLine("cpu", KEPT_RECORDS, kept.record_nbytes),
    ]
    if capacity is not None:
        lines.append(MemoryLine(device, "parameters in use", capacity))
    lines.append(MemoryLine(device, "gradients before their reduction", footprint.unreduced_gradients))
    lines.append(MemoryLine("cpu", "gradients from other ranks", footprint.exchange))
    lines.append(MemoryLine(gradients_in, "gradients", footprint.gradients))
    sums = footprint.gradients_wide if footprint.gradients_wide != footprint.gradients else 0
    if problem.accumulates:
        lines.append(MemoryLine(gradients_in, purposes.ACCUMULATED, sums))
    undo_rooms: tuple[UndoRoom, ...] = ()
    if problem.speculates(parameters, states):
        others = MemoryPlan(tuple(lines)).total_nbytes("nvme") + (0 if problem.accumulates else sums)
        undo_rooms = _undo_rooms(problem, footprint, kept, others)
    lines.append(MemoryLine("nvme", "room to undo updates", sum(room.nbytes for room in undo_rooms)))
    lines.extend(MemoryLine("cpu", purpose, count * nbytes) for purpose, (count, nbytes) in staging.items())
    transit = 0
    if footprint.gradients and not accelerator.unified and problem.sharing.world_size == 1:
        lines.append(MemoryLine("device", "gradient sums", footprint.sums))
        if gradients_in != "device":
            transit = _transit_buffer_count(problem, footprint, MemoryPlan(tuple(lines)).total_nbytes("device"))
            lines.append(MemoryLine("device", "gradients on their way", transit * footprint.parameter_buffer))
    plan = MemoryPlan(tuple(line for line in lines if line.nbytes))
    undoable = frozenset(room.unit_index for room in undo_rooms)
    return Placement(
        parameters, states, gradients_in, retained, staging, capacity, prefetch, plan,
        0 if problem.accumulates else sums, transit_buffer_count=transit, kept=kept, undoable_units=undoable,
    )  # fmt: skip


def _undo_rooms(problem: _Problem, footprint: Footprint, kept: Kept, other_nbytes: int) -> tuple[UndoRoom, ...]:
    """As many as the drives have room for besides what must be there; of the last units first, which backward reaches first."""
    left = int(problem.drive_nbytes * (1 - _DRIVE_RESERVE)) - other_nbytes
    found: list[UndoRoom] = []
    for room in reversed(footprint.undo_rooms):
        if room.is_beside(kept) and room.unit_index not in problem.late_units and room.nbytes <= left:
            found.append(room)
            left -= room.nbytes
    return tuple(reversed(found))


def _transit_buffer_count(problem: _Problem, footprint: Footprint, other_nbytes: int) -> int:
    """For two units, one arriving and one leaving, so that backward need not wait for the link; as few as it must be where
    the budget for the device leaves no more."""
    least = footprint.least_gradient_buffers
    budget = _budget(problem, "device")
    if budget is None:
        return max(least, 2 * footprint.unit_chunk_count)
    affordable = (budget - other_nbytes) // max(footprint.parameter_buffer, 1)
    return max(least, min(2 * footprint.unit_chunk_count, affordable))


def _budget(problem: _Problem, tier: Tier) -> int | None:
    config = problem.config
    if tier == "cpu":
        shared = int(config.cpu_memory) // problem.sharing.local_world_size if config.cpu_memory is not None else None
        limits = [shared, config.device_memory if problem.accelerator.unified else None]
    else:
        limits = [config.device_memory]
    given = [int(limit) for limit in limits if limit is not None]
    return min(given) if given else None


def _excess(problem: _Problem, placement: Placement, *, with_sums: bool = False) -> tuple[Tier, int] | None:
    """The first tier whose budget the placement exceeds, and the bytes it would need. `with_sums`: of micro-batches too."""
    if with_sums:
        placement = placement.with_sums()
    tiers: tuple[Tier, ...] = ("device", "cpu")
    for tier in tiers:
        budget = _budget(problem, tier)
        needed = placement.plan.total_nbytes(tier)
        if budget is not None and needed > budget:
            return tier, needed
    return None


def _smallest(problem: _Problem, parameters: Tier, states: Tier) -> Placement:
    """The placement without prefetch; gradients on nvme where they must be, or where that helps host memory."""
    gradients_in = _gradient_tier(problem, states)
    if gradients_in == "nvme":
        return _place_spilling(problem, parameters, states)
    kept = _place(problem, parameters, states, 0, gradients_in, 0)
    if gradients_in == "device" or not problem.config.nvme_paths or _excess(problem, kept) is None:
        return kept
    spilling = _place_spilling(problem, parameters, states)
    return min(kept, spilling, key=lambda placement: placement.plan.total_nbytes("cpu"))


def _place_spilling(problem: _Problem, parameters: Tier, states: Tier) -> Placement:
    footprint = problem.footprint_of(parameters, states)
    return _place(problem, parameters, states, 0, "nvme", footprint.least_gradient_buffers if footprint.gradients else 0)


def _grow(problem: _Problem, smallest: Placement, guessed: _Problem) -> Placement:
    """Spend what the budget leaves: on prefetch, then on what need not go to NVMe (`offload.planning.working_set`).

    `guessed`: budgets of which prefetch takes no more than is there either."""

    def again(placement: Placement, **changes: Any) -> Placement:
        """The placement with some arguments of `_place` changed."""
        arguments: dict[str, Any] = {
            "prefetch": placement.prefetch,
            "gradients_in": placement.gradients,
            "retained": placement.retained_gradient_buffers,
            "kept": placement.kept,
        }
        return _place(problem, placement.parameters, placement.optimizer_states, **(arguments | changes))

    # What several micro-batches will want is left to them, where it is there at all.
    leaves_sums = _excess(problem, smallest, with_sums=True) is None

    def fits(placement: Placement) -> bool:
        return _excess(problem, placement, with_sums=leaves_sums) is None

    tried = (again(smallest, prefetch=prefetch) for prefetch in range(problem.config.prefetch, 0, -1))
    best = next((placement for placement in tried if fits(placement) and _excess(guessed, placement) is None), smallest)
    if _budget(problem, "cpu") is None:
        return best
    footprint = problem.footprint_of(smallest.parameters, smallest.optimizer_states)
    return WorkingSet(footprint, again, fits, problem.accelerator.unified and footprint.has_whole_units).best(best)


def _require_fit(problem: _Problem, placement: Placement) -> None:
    excess = _excess(problem, placement)
    if excess is None:
        return
    tier, needed = excess
    field = "device_memory" if tier == "device" else "cpu_memory"
    if problem.accelerator.unified and problem.config.cpu_memory is None:
        field = "device_memory"
    lines = "; ".join(f"{line.purpose} {line.nbytes}" for line in placement.plan.lines if line.tier == tier)
    rank_count = problem.sharing.local_world_size if field == "cpu_memory" else 1
    per_rank = f" for each of the node's {rank_count} ranks" if rank_count > 1 else ""
    smallest = needed * rank_count
    error = BudgetError(
        f"{field}={(_budget(problem, tier) or 0) * rank_count} cannot hold what parameters={placement.parameters!r} and "
        f"optimizer_states={placement.optimizer_states!r} need at least: {needed} bytes{per_rank} ({lines}). The smallest "
        f"{field} that can is "
        f"{smallest}. Raise it to that, or move more to nvme."
    )
    error.smallest_nbytes = smallest
    raise error


def _auto(problem: _Problem, guessed: _Problem) -> Placement:
    """The first in the order of "auto" that fits the `guessed` budgets, else the last."""
    config = problem.config
    candidates = [
        (parameters, states)
        for parameters, states in AUTO_ORDER
        if config.parameters in ("auto", parameters) and config.optimizer_states in ("auto", states)
    ]
    if not candidates:  # one of the two is fixed to a place that the order does not pair with anything
        tiers: Sequence[Tier] = ("device", "cpu", "nvme")
        candidates = [
            (parameters, states)
            for parameters in tiers
            for states in tiers
            if config.parameters in ("auto", parameters) and config.optimizer_states in ("auto", states)
        ]
    candidates = [pair for pair in candidates if problem.can_hold(pair[0])]
    usable = [pair for pair in candidates if "nvme" not in pair or config.nvme_paths]
    if not usable:
        raise ConfigError("optimizer_states or parameters on nvme need a folder: set nvme='/path/on/the/drive'.")
    last: Placement | None = None
    for parameters, states in usable:
        last = _smallest(guessed, parameters, states)
        if _excess(guessed, last) is None:
            return last
    assert last is not None
    return last


def _with_guessed_budgets(problem: _Problem) -> _Problem:
    """For choosing only: where no budget is given, a share of the memory that is free now."""
    config = problem.config
    cpu_memory = config.cpu_memory if config.cpu_memory is not None else int(host_room().free_nbytes * _FREE_SHARE)
    free = problem.accelerator.free_nbytes()
    device_memory = config.device_memory
    if device_memory is None and free is not None:
        device_memory = int(free * _FREE_SHARE / 2)  # activations need room beside the states
    return replace(problem, config=replace(config, cpu_memory=cpu_memory, device_memory=device_memory))


def decide(
    config: Config,
    accelerator: Accelerator,
    footprint_of: Callable[[Tier, Tier], Footprint],
    capacity_of: Callable[[int, int, int | None], int],
    sharing: RankGroup = ALONE,
    late_units: frozenset[int] = frozenset({0}),
    *,
    within_room: bool = False,
    accumulates: bool = False,
) -> Placement:
    """The placement for this model, these budgets, this device. Raises `BudgetError` with the smallest that would do.

    `within_room`: also where "auto" finds none that fits into the memory that is free now. `accumulates`: there will be
    several micro-batches in a step, whose sums must find room."""
    drive_nbytes = scratch.free_nbytes(config.nvme_paths)
    problem = _Problem(config, accelerator, sharing, footprint_of, capacity_of, late_units, drive_nbytes, accumulates)
    if config.parameters != "auto" and not problem.can_hold(config.parameters):
        raise ConfigError(
            f"parameters={config.parameters!r} contradicts stage={config.stage} on {sharing.world_size} ranks: below stage 3 "
            "every rank keeps the whole parameters on its device. Choose stage=3, or parameters='device'."
        )
    if config.parameters != "auto" and config.optimizer_states != "auto":
        guessed, smallest = problem, _smallest(problem, config.parameters, config.optimizer_states)
    else:
        guessed = _with_guessed_budgets(problem)
        smallest = _auto(problem, guessed)
        if within_room:
            _require_fit(guessed, smallest)
    _require_fit(problem, smallest)
    placement = _grow(problem, smallest, guessed)
    excess = _excess(problem, placement, with_sums=True)
    missing = excess[1] - (_budget(problem, excess[0]) or 0) if excess is not None else 0
    return replace(placement, sums_missing_nbytes=missing)
