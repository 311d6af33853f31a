"""From a configuration to a decision: which tier each state lives in, and how many bytes that takes.

"auto" takes the fastest tiers that the budgets allow: device, then cpu, then (where a path is given) nvme, the
optimizer states leaving before the parameters do.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import psutil

from offload.config import Config
from offload.device.accelerator import Accelerator
from offload.errors import BudgetError, ConfigError
from offload.runtime import fetching, gradients, sinks, update
from offload.schedule.budget import FETCH_BUFFERS, IN_WRITING, READ_AHEAD, Footprint, MemoryLine, MemoryPlan, Tier

AUTO_ORDER: tuple[tuple[Tier, Tier], ...] = (
    ("device", "device"),
    ("device", "cpu"),
    ("cpu", "cpu"),
    ("cpu", "nvme"),
    ("nvme", "nvme"),
)
_FREE_SHARE = 0.8
"""Of the free memory, where "auto" has no budget to go by: the rest is for activations and everybody else."""


@dataclass(frozen=True, slots=True)
class Placement:
    """The decision. `staging`: purpose -> (count, nbytes) of host buffers. `unit_capacity_nbytes`: None if all stay."""

    parameters: Tier
    optimizer_states: Tier
    gradients: Tier
    retained_gradient_buffers: int
    staging: dict[str, tuple[int, int]]
    unit_capacity_nbytes: int | None
    prefetch: int
    plan: MemoryPlan

    @property
    def uses_nvme(self) -> bool:
        return any(line.tier == "nvme" for line in self.plan.lines)


@dataclass(frozen=True, slots=True)
class _Problem:
    """What a placement is decided for. `capacity_of(prefetch)`: device bytes of the units in use and coming at once."""

    config: Config
    accelerator: Accelerator
    footprint_of: Callable[[Tier, Tier], Footprint]
    capacity_of: Callable[[int], int]


def own_master(accelerator: Accelerator, parameters: Tier, optimizer_states: Tier, dtype: str) -> bool:
    """Whether records hold a master: not where fp32 parameters lie within reach of the kernel that updates them."""
    if dtype != "float32":
        return True
    if accelerator.unified:
        return False
    return (optimizer_states == "device") != (parameters == "device")


def _staging(
    problem: _Problem, parameters: Tier, states: Tier, footprint: Footprint, retained: int
) -> dict[str, tuple[int, int]]:
    accelerator = problem.accelerator
    buffers: dict[str, tuple[int, int]] = {}
    on_host = accelerator.unified or states != "device"
    if footprint.records and states == "nvme":
        # read ahead, in Adam's hands, in writing
        buffers[update.RECORDS] = (READ_AHEAD + 1 + IN_WRITING, footprint.record_buffer)
        # one for a unit whose turn comes before that of those read ahead
        buffers[update.RECORDS_ON_DEMAND] = (1, footprint.record_buffer)
    if retained:
        buffers[gradients.RETAINED] = (retained, footprint.gradient_buffer)
        # a gradient comes back with each record that is read ahead, in hand, or out of order
        buffers[gradients.RELOADED] = (READ_AHEAD + 1 + IN_WRITING + 1, footprint.gradient_buffer)
    if footprint.records and on_host and not accelerator.unified:
        buffers[gradients.LANDING] = (1, footprint.parameter_buffer)  # a gradient that is about to be added
    if footprint.records and not accelerator.unified and _emits(parameters, states):
        buffers[sinks.EMITTED] = (1 + IN_WRITING, footprint.parameter_buffer)  # updated parameters on their way home
    if parameters == "nvme" and not accelerator.unified:
        buffers[fetching.FETCHED] = (FETCH_BUFFERS, footprint.parameter_buffer)
    return buffers


def _emits(parameters: Tier, states: Tier) -> bool:
    return parameters == "nvme" or (parameters == "device" and states != "device")


def _gradient_tier(problem: _Problem, states: Tier) -> Tier:
    if states == "device" and not problem.accelerator.unified:
        return "device"
    return "nvme" if states == "nvme" else "cpu"


def _place(problem: _Problem, parameters: Tier, states: Tier, prefetch: int, gradients_in: Tier, retained: int) -> Placement:
    accelerator, footprint = problem.accelerator, problem.footprint_of(parameters, states)
    device: Tier = "cpu" if accelerator.unified else "device"
    stays = parameters == "device" or (parameters == "cpu" and accelerator.unified)
    capacity = None if stays else problem.capacity_of(prefetch)
    staging = _staging(problem, parameters, states, footprint, retained if gradients_in == "nvme" else 0)
    lines = [
        MemoryLine(device if parameters == "device" else parameters, "parameters", footprint.parameters),
        MemoryLine(device if states == "device" else states, "optimizer states", footprint.records),
    ]
    if capacity is not None:
        lines.append(MemoryLine(device, "parameters in use", capacity))
    gradient_nbytes = footprint.gradients + (footprint.gradients_wide if footprint.gradients_wide != footprint.gradients else 0)
    if gradients_in == "nvme":
        lines.append(MemoryLine("nvme", "gradients", gradient_nbytes))
    else:
        lines.append(MemoryLine(gradients_in, "gradients", gradient_nbytes))
    lines.extend(MemoryLine("cpu", purpose, count * nbytes) for purpose, (count, nbytes) in staging.items())
    kept = tuple(line for line in lines if line.nbytes)
    return Placement(parameters, states, gradients_in, retained, staging, capacity, prefetch, MemoryPlan(kept))


def _budget(problem: _Problem, tier: Tier) -> int | None:
    config = problem.config
    if tier == "cpu":
        limits = [config.cpu_memory, config.device_memory if problem.accelerator.unified else None]
    else:
        limits = [config.device_memory]
    given = [int(limit) for limit in limits if limit is not None]
    return min(given) if given else None


def _excess(problem: _Problem, placement: Placement) -> tuple[Tier, int] | None:
    """The first tier whose budget the placement exceeds, and the bytes it would need."""
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
    return _place(problem, parameters, states, 0, "nvme", footprint.least_gradient_buffers if footprint.records else 0)


def _grow(problem: _Problem, smallest: Placement) -> Placement:
    """Spend what the budget leaves: first on prefetch, then on gradients that need not be spilled."""
    best = smallest
    parameters, states, gradients_in = smallest.parameters, smallest.optimizer_states, smallest.gradients
    for prefetch in range(problem.config.prefetch, 0, -1):
        grown = _place(problem, parameters, states, prefetch, gradients_in, smallest.retained_gradient_buffers)
        if _excess(problem, grown) is None:
            best = grown
            break
    budget = _budget(problem, "cpu")
    if best.gradients == "nvme" and budget is not None:
        footprint = problem.footprint_of(parameters, states)
        spare = (budget - best.plan.total_nbytes("cpu")) // max(footprint.gradient_buffer, 1)
        retained = min(best.retained_gradient_buffers + max(spare, 0), footprint.chunk_count)
        best = _place(problem, parameters, states, best.prefetch, gradients_in, retained)
    return best


def _require_fit(problem: _Problem, placement: Placement) -> None:
    excess = _excess(problem, placement)
    if excess is None:
        return
    tier, needed = excess
    field = "device_memory" if tier == "device" else "cpu_memory"
    if problem.accelerator.unified and problem.config.cpu_memory is None:
        field = "device_memory"
    lines = "; ".join(f"{line.purpose} {line.nbytes}" for line in placement.plan.lines if line.tier == tier)
    error = BudgetError(
        f"{field}={_budget(problem, tier)} cannot hold what parameters={placement.parameters!r} and "
        f"optimizer_states={placement.optimizer_states!r} need at least: {needed} bytes ({lines}). The smallest "
        f"{field} that can is "
        f"{needed}. Raise it to that, or move more to nvme."
    )
    error.smallest_nbytes = needed
    raise error


def _auto(problem: _Problem) -> Placement:
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
    usable = [pair for pair in candidates if "nvme" not in pair or config.nvme_paths]
    if not usable:
        raise ConfigError("optimizer_states or parameters on nvme need a folder: set nvme='/path/on/the/drive'.")
    guessed = _with_guessed_budgets(problem)
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
    cpu_memory = config.cpu_memory if config.cpu_memory is not None else int(psutil.virtual_memory().available * _FREE_SHARE)
    free = problem.accelerator.free_nbytes()
    device_memory = config.device_memory
    if device_memory is None and free is not None:
        device_memory = int(free * _FREE_SHARE / 2)  # activations need room beside the states
    return replace(problem, config=replace(config, cpu_memory=cpu_memory, device_memory=device_memory))


def decide(
    config: Config,
    accelerator: Accelerator,
    footprint_of: Callable[[Tier, Tier], Footprint],
    capacity_of: Callable[[int], int],
) -> Placement:
    """The placement for this model, these budgets, this device. Raises `BudgetError` with the smallest that would do."""
    problem = _Problem(config, accelerator, footprint_of, capacity_of)
    if config.parameters != "auto" and config.optimizer_states != "auto":
        smallest = _smallest(problem, config.parameters, config.optimizer_states)
    else:
        smallest = _auto(problem)
    _require_fit(problem, smallest)
    return _grow(problem, smallest)
