# SPDX-License-Identifier: Apache-2.0
"""From a choice of tiers to what it takes: a route for each unit, and how many bytes of each kind lie where."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import lru_cache
from typing import Any

from offload.config import Config
from offload.device.accelerator import Accelerator
from offload.device.arithmetic.records import RecordFormat
from offload.device.arithmetic.segment import StateFormat
from offload.device.rates import Rates
from offload.layout import ParameterSpec
from offload.planning import purposes
from offload.planning.budget import MASTER_ITEMSIZE, MemoryLine, MemoryPlan, Tier
from offload.planning.free_memory import FreeMemory
from offload.planning.link_seconds import Cost
from offload.planning.purposes import StateNames
from offload.planning.room_to_undo import Undoable
from offload.planning.route import Memory, Route, alike, routes_of, with_undo
from offload.planning.route_bytes import held, passed_through
from offload.planning.schedule import apart_nbytes, expected_nbytes, worthwhile_nbytes
from offload.planning.sizes import Footprint, UnitSizes, buffers_for_a_sum, least_gradient_buffers
from offload.planning.tier_choice import NOTHING_NEAR, Choice, Kept
from offload.planning.use_trace import Expected


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
class Verdict:
    """Why a placement was decided. `weighed`: (tier of parameters, of optimizer states, seconds) of each pairing of tiers that
    was possible, the quickest first. What is compared before the seconds is whether a second micro-batch finds room for its
    sums, `has_room`. `free`: what was free then, by which budgets that nobody gave are guessed."""

    cost: Cost
    rates: Rates
    weighed: tuple[tuple[Tier, Tier, float], ...]
    has_room: bool
    free: FreeMemory

    def as_json(self) -> dict[str, Any]:
        """For `Engine.stats`. Seconds are those that a step takes at least, besides what the model computes."""
        return {
            "seconds": self.cost.seconds,
            "bound_by": self.cost.bound_by if self.cost.seconds else None,
            "forward": self.cost.forward,
            "between": self.cost.between,
            "backward": self.cost.backward,
            "rates": asdict(self.rates),
            "weighed": [
                {"parameters": parameters, "optimizer_states": states, "seconds": seconds}
                for parameters, states, seconds in self.weighed
            ],
            "room_for_micro_batches": self.has_room,
        }


@dataclass(frozen=True, slots=True)
class Placement:
    """The decision. `staging`: purpose -> (count, nbytes) of host buffers. `unit_capacity_nbytes`: None if all stay."""

    choice: Choice
    routes: tuple[Route, ...]
    """Of each unit."""
    staging: dict[str, tuple[int, int]]
    unit_capacity_nbytes: int | None
    plan: MemoryPlan
    bounds_units: bool = False
    """Whether that capacity is a budget's, which is kept; else it may grow with what the device has left."""
    sums: tuple[MemoryLine, ...] = ()
    """What fp32 sums of several micro-batches take besides, where the gradients lie; taken when a second one comes. Nothing
    where that is expected: there is room for sums alone then."""
    sums_missing_nbytes: int = 0
    """Of those what the budget does not leave."""
    sums_missing_in: str = ""
    """The field of `Config` that is this budget."""
    transit_buffer_count: int = 0
    """Chunks of gradients that may be on the device on their way to the host."""
    verdict: Verdict | None = None
    """Why it was decided so."""

    @property
    def parameters(self) -> Tier:
        """The furthest tier of any unit's, as `optimizer_states` and `gradients`."""
        return self.choice.parameters

    @property
    def optimizer_states(self) -> Tier:
        return self.choice.states

    @property
    def gradients(self) -> Tier:
        return self.choice.gradients

    @property
    def prefetch(self) -> int:
        return self.choice.prefetch

    @property
    def retained_gradient_buffers(self) -> int:
        """For gradients on their way to NVMe, each as one backward leaves it, or where several are expected in fp32."""
        return self.staging[purposes.GRADIENT_BUFFERS][0] if purposes.GRADIENT_BUFFERS in self.staging else 0

    @property
    def kept(self) -> Kept:
        return self.choice.kept

    @property
    def sums_nbytes(self) -> int:
        return sum(line.nbytes for line in self.sums)

    def with_sums(self) -> Placement:
        """The same with room for the sums of micro-batches."""
        return replace(
            self, plan=MemoryPlan((*self.plan.lines, *self.sums)), sums=(), sums_missing_nbytes=0, sums_missing_in=""
        )

    @property
    def nvme_nbytes(self) -> int:
        return self.plan.total_nbytes("nvme")

    @property
    def uses_nvme(self) -> bool:
        return self.nvme_nbytes > 0

    def left_on_device(self, budget_nbytes: int) -> int:
        """What it leaves of a budget for the device, with the sums of micro-batches."""
        return max(budget_nbytes - self.with_sums().plan.total_nbytes("device"), 0)


@dataclass(frozen=True, slots=True)
class Problem:
    """What a placement is decided for."""

    config: Config
    accelerator: Accelerator
    sharing: RankGroup
    footprint: Footprint
    expected: Expected
    free: FreeMemory
    placed: dict[Choice, Placement] = field(default_factory=dict, init=False, repr=False, compare=False)
    """What `place` has answered: searches come back to the same choices, two in five of them."""

    @property
    def chooses(self) -> bool:
        """Whether tiers are left to the planner."""
        return "auto" in (self.config.parameters, self.config.optimizer_states)

    @property
    def rates(self) -> Rates:
        """Of the machine, as far as they are known."""
        return self.accelerator.rates()

    @property
    def micro_batches(self) -> int:
        """Of a step that is planned for."""
        return self.config.micro_batches

    @property
    def accumulates(self) -> bool:
        """Whether a step has several."""
        return self.micro_batches > 1

    def speculates(self, states: Tier) -> bool:
        """Whether updates may begin before `step()`. Several ranks would have to agree on what they undo."""
        return states != "device" and self.sharing.world_size == 1 and self.config.update != "step"

    def can_hold(self, parameters: Tier) -> bool:
        """Whether the stage allows parameters in that tier: without partitioned parameters they stay on the device."""
        in_device_memory = parameters == "device" or (parameters == "cpu" and self.accelerator.unified)
        return self.sharing.world_size == 1 or self.sharing.shards_parameters or in_device_memory

    @property
    def packs_gradients(self) -> bool:
        """Whether gradients come from a device of its own, and not as averages over ranks."""
        return self.footprint.is_trained and not self.accelerator.unified and self.sharing.world_size == 1

    def budget(self, tier: Tier) -> int | None:
        """Bytes of the tier that this rank may take; None: no limit was given."""
        config = self.config
        limits: list[int | None] = [int(config.device_memory) if config.device_memory is not None else None]
        if tier == "cpu":
            shared = int(config.cpu_memory) // self.sharing.local_world_size if config.cpu_memory is not None else None
            limits = [shared, *(limits if self.accelerator.unified else [])]
        given = [limit for limit in limits if limit is not None]
        return min(given) if given else None

    def bounding_field(self, tier: Tier) -> str:
        """The field of `Config` that is the tier's budget: where two bound one memory, the lower."""
        both = self.accelerator.unified and self.config.device_memory == self.budget("cpu")
        return "device_memory" if tier == "device" or both else "cpu_memory"

    @property
    def bounds_units(self) -> bool:
        """Whether a budget bounds the memory that units have while they are in use."""
        return self.budget("cpu" if self.accelerator.unified else "device") is not None

    def excess(self, placement: Placement, *, with_sums: bool = False) -> tuple[Tier, int] | None:
        """The first tier whose budget the placement exceeds, and the bytes it would need. `with_sums`: of micro-batches too."""
        if with_sums:
            placement = placement.with_sums()
        tiers: tuple[Tier, ...] = ("device", "cpu")
        for tier in tiers:
            budget, needed = self.budget(tier), placement.plan.total_nbytes(tier)
            if budget is not None and needed > budget:
                return tier, needed
        return None

    def fetched(self, routes: Sequence[Route]) -> list[int]:
        """Of each unit, the device memory that it takes only while it is in use, or on its way."""
        return [unit.whole if route.has_store else 0 for unit, route in zip(self.footprint.units, routes, strict=True)]


def format_of(config: Config, moments: tuple[str, ...], dtype: str, crosses: bool) -> RecordFormat:
    """What the records of trained parameters of `dtype` consist of. fp32 ones hold no master where the kernel that updates them
    computes where they lie (`Route.crosses`)."""
    return RecordFormat(StateFormat(config.state_format), moments, own_master=dtype != "float32" or crosses)


def states_nbytes(config: Config, moments: tuple[str, ...], parameter: ParameterSpec) -> int:
    """Of one parameter that is updated where it lies: its values, and if it is trained its gradient and its record."""
    values = parameter.numel * parameter.itemsize
    if not parameter.trainable:
        return values
    gradient = parameter.numel * MASTER_ITEMSIZE if config.keeps_wide_gradients else values
    return values + gradient + format_of(config, moments, parameter.dtype, crosses=False).nbytes(parameter.numel)


def place(problem: Problem, choice: Choice) -> Placement:
    """What the choice takes."""
    known = problem.placed.get(choice)
    if known is None:
        known = problem.placed[choice] = _place(problem, choice)
    return known


def _place(problem: Problem, choice: Choice) -> Placement:
    accelerator, footprint = problem.accelerator, problem.footprint
    device: Tier = "cpu" if accelerator.unified else "device"
    routes = routes_of(footprint.units, choice, unified=accelerator.unified, sharded=problem.sharing.shards_parameters)
    capacity = _capacity(problem, choice, routes)
    nbytes = Counter[tuple[StateNames, Tier]]()
    kinds = alike(footprint, routes)
    buffers = _buffers(problem, choice, [(unit, route) for unit, route, _ in kinds])
    for unit, route, times in kinds:
        for names, tier, count in held(unit, route):
            nbytes[names, tier] += times * count
    lines = _state_lines(purposes.PARAMETERS, choice.parameters, nbytes, device)
    lines += _state_lines(purposes.OPTIMIZER_STATES, choice.states, nbytes, device)
    if capacity is not None:
        lines.append(MemoryLine(device, purposes.UNITS_IN_USE, capacity))
    lines.append(MemoryLine(device, "gradients before their reduction", footprint.unreduced_gradients))
    lines.append(MemoryLine("cpu", "gradients from other ranks", footprint.exchange))
    lines += _state_lines(purposes.GRADIENTS, choice.gradients, nbytes, device)
    sums = _sum_lines(kinds, choice)
    if problem.speculates(choice.states):
        through = [MemoryLine(tier, purpose, count * nbytes) for (tier, purpose), (count, nbytes) in buffers.items()]
        undoable = Undoable.of(problem, routes, MemoryPlan((*lines, *sums, *through)), in_memory=choice.undoes_in_memory)
        routes = with_undo(routes, undoable.keeps_values)
        lines.extend(MemoryLine(tier, purposes.ROOM_TO_UNDO, count) for tier, count in undoable.nbytes.items())
    lines.extend(MemoryLine(tier, purpose, count * nbytes) for (tier, purpose), (count, nbytes) in buffers.items())
    transit = 0
    if problem.packs_gradients:
        leaving = [unit for unit, _ in _summed_outside(footprint.units, routes)]
        if leaving:
            transit = _transit_buffer_count(problem, leaving, MemoryPlan(tuple(lines)).total_nbytes("device"))
            lines.append(MemoryLine("device", "gradients on their way", transit * footprint.parameter_buffer))
    staging = {purpose: size for (tier, purpose), size in buffers.items() if tier == "cpu"}
    return Placement(
        choice, routes, staging, capacity, MemoryPlan(tuple(line for line in lines if line.nbytes)), problem.bounds_units,
        tuple(sums), transit_buffer_count=transit,
    )  # fmt: skip


def _capacity(problem: Problem, choice: Choice, routes: Sequence[Route]) -> int | None:
    """Device memory for units in use or on their way; None: none ever is."""
    if not any(route.has_store for route in routes):
        return None
    fetched = tuple(problem.fetched(routes))
    needed = _needed(problem.expected, fetched, choice.prefetch, problem.bounds_units, choice.near != NOTHING_NEAR)
    return min(needed + choice.spare_nbytes, max(needed, sum(fetched)))


@lru_cache
def _needed(expected: Expected, fetched: tuple[int, ...], prefetch: int, is_bounded: bool, some_stay: bool) -> int:
    """`_capacity` without what is spare. `fetched`: by unit, what it takes while it is there."""
    needed = (expected_nbytes if is_bounded else worthwhile_nbytes)(expected, fetched, prefetch)
    if is_bounded and some_stay:  # what stays takes no room that an unexpected use may need
        needed = max(needed, apart_nbytes(expected.trace, fetched))
    return needed


# ---- lines -----------------------------------------------------------------------------------------------------------


def _state_lines(names: StateNames, furthest: Tier, nbytes: Counter[tuple[StateNames, Tier]], device: Tier) -> list[MemoryLine]:
    """Of one state. What of it lies nearer than `furthest` has lines of its own."""
    found = [MemoryLine(device if furthest == "device" else furthest, names.furthest, nbytes[names, furthest])]
    nearer: tuple[Tier, ...] = ("cpu", "device")
    return found + [MemoryLine(tier, names.of(tier, furthest), nbytes[names, tier]) for tier in nearer if tier != furthest]


def _sum_lines(kinds: Sequence[tuple[UnitSizes, Route, int]], choice: Choice) -> list[MemoryLine]:
    """What fp32 sums of gradients over micro-batches take besides. `kinds`: as of `alike`."""
    sums = Counter[Tier]()
    for unit, route, times in kinds:
        sums[route.gradients] += times * unit.sums
    tiers: tuple[Tier, ...] = (choice.gradients, "device")
    return [MemoryLine(tier, purposes.ACCUMULATED, sums[tier]) for tier in dict.fromkeys(tiers) if sums[tier]]


# ---- buffers ---------------------------------------------------------------------------------------------------------


_Buffers = dict[tuple[Tier, str], tuple[int, int]]
"""(tier, purpose) -> (count, nbytes)."""


def _buffers(problem: Problem, choice: Choice, routed: Sequence[tuple[UnitSizes, Route]]) -> _Buffers:
    """`routed`: units with their routes, alike ones once."""
    footprint = problem.footprint
    spilling = [unit for unit, route in routed if route.gradients_in is None]
    parts = 1 if problem.config.keeps_wide_gradients else buffers_for_a_sum(spilling)
    buffers: _Buffers = {}
    for unit, route in routed:
        shared = passed_through(unit, route, choice.retained, footprint.parameter_buffer, gradient_parts=parts)
        for tier, purpose, count, nbytes in shared:
            most, largest = buffers.get((tier, purpose), (0, 0))
            buffers[tier, purpose] = max(most, count), max(largest, nbytes)
    if problem.packs_gradients:
        if any(unit.trained and route.gradients_leave_device for unit, route in routed):
            buffers["cpu", purposes.LANDING] = choice.landing, footprint.parameter_buffer
        buffers["cpu", purposes.SQUARES] = buffers["device", purposes.SQUARES] = 1, footprint.square_sums
    return buffers


def _summed_outside(units: Sequence[UnitSizes], routes: Sequence[Route]) -> list[tuple[UnitSizes, Route]]:
    """The trained units whose gradients leave the device as they come."""
    routed = zip(units, routes, strict=True)
    return [(unit, route) for unit, route in routed if unit.trained and route.gradients_in is not Memory.DEVICE]


def _transit_buffer_count(problem: Problem, leaving: Sequence[UnitSizes], other_nbytes: int) -> int:
    """For two units, one arriving and one leaving, so that backward need not wait for the link; as few as it must be where
    the budget for the device leaves no more."""
    least, wanted = least_gradient_buffers(leaving), 2 * max(len(unit.trained) for unit in leaving)
    budget = problem.budget("device")
    if budget is None:
        return max(least, wanted)
    affordable = (budget - other_nbytes) // max(problem.footprint.parameter_buffer, 1)
    return max(least, min(wanted, affordable))
