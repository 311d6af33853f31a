# SPDX-License-Identifier: Apache-2.0
"""From a configuration and budgets to a placement.

What the configuration names is the furthest tier that a state may lie in; what budgets leave beyond the least is spent on
bringing states nearer: to the device (`offload.planning.spare_device_memory`), then from NVMe to host memory
(`offload.planning.spare_host_memory`). "auto" weighs every pairing of tiers that the budgets allow. Of those with room for the
sums of several micro-batches (if any has it) it takes the one whose step takes the fewest seconds by what it moves and by the
machine's rates (`offload.planning.cost`); of those that take about as long the one that moves less, of equals the nearest. Over
NVMe, the slowest link, it moves no more than any that is not much slower, where nobody said how long the model computes.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import replace

from offload.config import Config
from offload.device.accelerator import Accelerator
from offload.errors import BudgetError, ConfigError
from offload.layout import Layout
from offload.planning.budget import LANDING_BUFFERS, LANDING_NBYTES, Tier
from offload.planning.cost import cost, step_seconds
from offload.planning.free_memory import FreeMemory
from offload.planning.placement import ALONE, Placement, Problem, RankGroup, Verdict, format_of, place
from offload.planning.purposes import GRADIENT_BUFFERS, LANDING, ROOM_TO_UNDO, UNITS_IN_USE
from offload.planning.sizes import Footprint, least_gradient_buffers
from offload.planning.spare_device_memory import SpareDeviceMemory
from offload.planning.spare_host_memory import SpareHostMemory
from offload.planning.tier_choice import Choice
from offload.planning.traffic import moved
from offload.planning.use_trace import Expected
from offload.planning.weighing import Weight, lightest, lightest_pairs, weigh

PAIRINGS: tuple[tuple[Tier, Tier], ...] = (
    ("device", "device"),
    ("device", "cpu"),
    ("cpu", "device"),
    ("cpu", "cpu"),
    ("device", "nvme"),
    ("nvme", "device"),
    ("cpu", "nvme"),
    ("nvme", "cpu"),
    ("nvme", "nvme"),
)
"""Tiers of parameters and optimizer states, the nearest first."""
_BUFFERS_SHARE = 0.02
"""Of the budget for host memory: where buffers take more, smaller chunks are weighed too."""
_LANDING_SHARE = 0.01
"""Of host memory, for gradients that wait to be added."""
_BUDGET_RATIO = 1.04
_SMALLER_BUDGETS = 3
"""Of the scale on which it is looked what less of the device's memory would be spent on, and how many."""
_REFINED_PAIRS = 4
"""For which "auto" looks at those."""
_FREE_SHARE = 0.8
"""Of the free memory, where "auto" has no budget to go by: the rest is for activations and everybody else."""


class Decision:
    """For one layout; the same sizes serve every call of `decide`."""

    def __init__(
        self,
        config: Config,
        accelerator: Accelerator,
        layout: Layout,
        expected: Expected,
        moments: tuple[str, ...],
        sharing: RankGroup = ALONE,
        free: FreeMemory | None = None,
    ) -> None:
        """`moments`: what the optimizer keeps. `free`: the memory to go by, where it is not that of now."""
        footprint = Footprint.of(
            layout,
            lambda dtype, crosses: format_of(config, moments, dtype, crosses),
            wide_gradients=config.keeps_wide_gradients,
            narrow_sums=config.sums_are_narrow,
        )
        self.problem = Problem(
            config, accelerator, sharing, footprint, expected, free or FreeMemory.now(accelerator, config.nvme_paths)
        )

    def decide(self, *, within_room: bool = False) -> Placement:
        """The placement for this model, these budgets, this device. Raises `BudgetError` with the smallest that would do.

        `within_room`: also where "auto" finds none that fits into the memory that is free now."""
        problem, config = self.problem, self.problem.config
        if config.parameters != "auto" and not problem.can_hold(config.parameters):
            raise ConfigError(
                f"parameters={config.parameters!r} contradicts stage={config.stage} on {problem.sharing.world_size} ranks: "
                "below stage 3 every rank keeps the whole parameters on its device. Choose stage=3, or parameters='device'."
            )
        guessed = _with_guessed_budgets(problem) if problem.chooses else problem
        smallest, placement, weighed = _best(problem, guessed)
        _require_fit(guessed if within_room else problem, smallest)
        excess = problem.excess(placement, with_sums=True)
        verdict = Verdict(cost(problem, placement), problem.rates, weighed, has_room=excess is None, free=problem.free)
        placement = replace(placement, verdict=verdict)
        if excess is None:
            return placement
        tier, needed = excess
        missing = needed - (problem.budget(tier) or 0)
        return replace(placement, sums_missing_nbytes=missing, sums_missing_in=problem.bounding_field(tier))

    @property
    def always_crowds(self) -> bool:
        """Whether buffers crowd the least of all tiers that "auto" may take, so that nobody need search what budgets make of
        them: where all states find room nearer, so that no buffers remain, nearer tiers are possible, too."""
        problem = self.problem
        if not problem.chooses:
            return False
        guessed = _with_guessed_budgets(problem)
        least = [_least(problem, guessed, *pair) for pair in _pairings(problem)]
        possible = [one for one in least if guessed.excess(one) is None]
        return bool(possible) and all(map(self.buffers_crowd, possible))

    def weight(self, placement: Placement) -> Weight:
        """By which placements are compared, also of different layouts."""
        return weigh(self.problem, placement)

    def buffers_crowd(self, placement: Placement) -> bool:
        """Whether buffers that hold a chunk take so much of the budget that smaller ones leave more for the model's states."""
        budget = self.problem.budget("cpu")
        if budget is None:
            return False
        own = (GRADIENT_BUFFERS, LANDING)  # of the gradients, which take as many bytes whatever the chunks are
        buffers = [size for purpose, size in placement.staging.items() if purpose not in own]
        return sum(count * nbytes for count, nbytes in buffers) > _BUFFERS_SHARE * budget


def _least(problem: Problem, guessed: Problem, parameters: Tier, states: Tier) -> Placement:
    """The least that these tiers take; where host memory cannot hold that and what is granted of the device's can, with as few
    units there as make it fit."""
    smallest = _smallest(guessed, parameters, states)
    share = problem.config.states_on_device
    if share and not problem.accelerator.unified:
        smallest = SpareDeviceMemory(guessed, lambda _: True).holding(smallest, share)
    excess = guessed.excess(smallest)
    is_granted = problem.budget("device") is not None and problem.budget("cpu") is not None
    if excess is None or excess[0] == "device" or problem.accelerator.unified or not is_granted:
        return smallest
    return SpareDeviceMemory(guessed, lambda _: True).relieved(smallest)


def _smallest(problem: Problem, parameters: Tier, states: Tier) -> Placement:
    """The placement without prefetch; gradients on nvme where they must be, or where that helps host memory, also where that
    alone leaves room for the sums of several micro-batches."""
    spilling = Choice(parameters, states, "nvme", retained=least_gradient_buffers(problem.footprint.units))
    if states == "device" and not problem.accelerator.unified:
        return place(problem, Choice(parameters, states, "device"))
    if states == "nvme":
        return place(problem, spilling)
    kept = place(problem, Choice(parameters, states, "cpu"))
    if not problem.config.nvme_paths:
        return kept
    ways = (kept, place(problem, spilling))
    for with_sums in (True, False):
        for way in ways:
            if problem.excess(way, with_sums=with_sums) is None:
                return way
    return min(ways, key=lambda placement: placement.plan.total_nbytes("cpu"))


def _grown(problem: Problem, smallest: Placement, guessed: Problem) -> list[Placement]:
    """Ways to spend what the budgets leave: on prefetch, then on what may stay on the device, then on what need not go to NVMe.

    `guessed`: budgets of which prefetch takes no more than is there either."""
    # What several micro-batches will want is left to them, where it is there at all.
    leaves_sums = problem.excess(smallest, with_sums=True) is None

    def fits(placement: Placement) -> bool:
        return problem.excess(placement, with_sums=leaves_sums) is None

    tried = (place(problem, replace(smallest.choice, prefetch=count)) for count in range(problem.config.prefetch, 0, -1))
    best = next((one for one in tried if fits(one) and guessed.excess(one) is None), smallest)
    best = _with_more_landing(problem, guessed, best, fits)
    found = [best]
    if problem.budget("device") is not None and not problem.accelerator.unified:
        found = SpareDeviceMemory(problem, fits).candidates(best)
    if problem.budget("cpu") is not None:
        found = [SpareHostMemory(problem, fits).best(one) for one in found]
    return [_without_vain_room(problem, one) for one in found]


def _without_vain_room(problem: Problem, placement: Placement) -> Placement:
    """Without second places in host memory, if a step of so many tokens takes longer with them: to write there takes as much of
    that memory as another record."""
    taken = any((line.tier, line.purpose) == ("cpu", ROOM_TO_UNDO) for line in placement.plan.lines)
    if not taken or problem.config.update == "backward" or not problem.config.tokens:
        return placement
    without = place(problem, replace(placement.choice, undoes_in_memory=False))
    return min(placement, without, key=lambda one: step_seconds(problem, one, cost(problem, one)))


def _of_less_device_memory(problem: Problem, guessed: Problem, placement: Placement) -> list[Placement]:
    """What a little less of the device's memory would be spent on with the same tiers, if this placement moves anything. Units
    are spent on as wholes, in some order: with more memory another unit may fit first that leaves less to the rest, and what
    was found with less is still possible. A search of all that is possible would find it too, and take many times as long.

    The budgets are those of a fixed scale, so that budgets close to each other look at the same ones."""
    budget = problem.budget("device")
    if budget is None or problem.accelerator.unified or not any(moved(problem, placement)):
        return []
    has_room, found = problem.excess(placement, with_sums=True) is None, []
    first = math.ceil(math.log(budget, _BUDGET_RATIO)) - 1
    for exponent in range(first, first - _SMALLER_BUDGETS, -1):
        less, guessed_less = (
            replace(one, config=replace(one.config, device_memory=int(_BUDGET_RATIO**exponent))) for one in (problem, guessed)
        )
        smallest = _least(less, guessed_less, placement.parameters, placement.optimizer_states)
        if guessed_less.excess(smallest, with_sums=has_room) is not None:
            break
        found += _grown(less, smallest, guessed_less)
    return found


def _with_more_landing(
    problem: Problem, guessed: Problem, placement: Placement, fits: Callable[[Placement], bool]
) -> Placement:
    """Where the host adds up gradients of several micro-batches: buffers in which more of them wait for that, so that backward
    does not; a small share of what is granted."""
    if LANDING not in placement.staging or not problem.accumulates:
        return placement
    budget, (least, nbytes) = guessed.budget("cpu"), placement.staging[LANDING]
    chunk_count = sum(len(unit.trained) for unit in problem.footprint.units)
    wanted = min(max(LANDING_BUFFERS, LANDING_NBYTES // nbytes), chunk_count)
    affordable = wanted if budget is None else int(budget * _LANDING_SHARE) // nbytes
    more = place(problem, replace(placement.choice, landing=max(least, min(wanted, affordable))))
    return more if fits(more) and guessed.excess(more) is None else placement


def _moves_nothing(problem: Problem, placement: Placement) -> bool:
    return not any(moved(problem, placement)) and problem.excess(placement, with_sums=True) is None


_Weighed = tuple[tuple[Tier, Tier, float], ...]
"""As `Verdict` has it."""


def _best(problem: Problem, guessed: Problem) -> tuple[Placement, Placement, _Weighed]:
    """The least that the best tiers take, what the budgets make of it, and what was weighed, where there was a choice.

    Tiers that are chosen take what there is for all else: where no budget is given, what is free now, and so `guessed` decides
    whether they are possible. Where none is, the one that needs least of what the last lacks."""
    weighed: list[tuple[Placement, Placement]] = []
    refused: list[tuple[Placement, Tier, int]] = []
    for parameters, states in _pairings(problem):
        smallest = _least(problem, guessed, parameters, states)
        if (excess := guessed.excess(smallest)) is not None:
            refused.append((smallest, *excess))
            continue
        weighed += [(smallest, grown) for grown in _grown(problem, smallest, guessed)]
        if any(_moves_nothing(problem, grown) for _, grown in weighed):
            break
    if not weighed:
        _, lacked, _ = refused[-1]
        smallest, _, _ = min((one for one in reversed(refused) if one[1] == lacked), key=lambda one: one[2])
        return smallest, smallest, ()
    weights = [weigh(problem, grown) for _, grown in weighed]
    moves = any(weights[lightest(problem, weights)].moved)
    for pair in lightest_pairs(problem, [grown for _, grown in weighed], weights, _REFINED_PAIRS) if moves else ():
        others = _of_less_device_memory(problem, guessed, weighed[pair][1])
        weighed += [(weighed[pair][0], one) for one in others]
        weights += [weigh(problem, one) for one in others]
    listed = sorted(zip(weighed, weights, strict=True), key=lambda one: (one[1].has_no_room, one[1].seconds))
    pairs = dict[tuple[Tier, Tier], float]()
    for (_, grown), weight in listed:
        pairs.setdefault((grown.parameters, grown.optimizer_states), weight.seconds)
    seconds = tuple((*pair, least_seconds) for pair, least_seconds in pairs.items()) if problem.chooses else ()
    return *weighed[lightest(problem, weights)], seconds


def _pairings(problem: Problem) -> Sequence[tuple[Tier, Tier]]:
    """Those that the configuration and the stage leave open."""
    config = problem.config
    found = [
        (parameters, states)
        for parameters, states in PAIRINGS
        if config.parameters in ("auto", parameters)
        and config.optimizer_states in ("auto", states)
        and problem.can_hold(parameters)
    ]
    if problem.accelerator.unified:  # host memory by two names: one is enough
        found = [pair for pair in found if pair == PAIRINGS[0] or _on_host(pair) == pair or _on_host(pair) not in found]
    usable = [pair for pair in found if "nvme" not in pair or config.nvme_paths]
    if not usable:
        raise ConfigError("optimizer_states or parameters on nvme need a folder: set nvme='/path/on/the/drive'.")
    return usable


def _on_host(pair: tuple[Tier, Tier]) -> tuple[Tier, Tier]:
    parameters, states = ("cpu" if tier == "device" else tier for tier in pair)
    return parameters, states


def _with_guessed_budgets(problem: Problem) -> Problem:
    """For choosing only: where no budget is given, a share of the memory that is free now."""
    config = problem.config
    cpu_memory = config.cpu_memory if config.cpu_memory is not None else max(1, int(_free_nbytes(problem) * _FREE_SHARE))
    free = problem.free.device_nbytes
    device_memory = config.device_memory
    if device_memory is None and free is not None:
        device_memory = max(1, int(free * _FREE_SHARE / 2))  # activations need room beside the states
    return replace(problem, config=replace(config, cpu_memory=cpu_memory, device_memory=device_memory))


def _free_nbytes(problem: Problem) -> int:
    """Of host memory. Where the device computes on it, each unit has addresses of its own, whether it is there or not."""
    addresses_nbytes = sum(unit.whole for unit in problem.footprint.units) if problem.accelerator.unified else 0
    return min(room.free_nbytes - (addresses_nbytes if room.bounds_addresses else 0) for room in problem.free.host)


def _require_fit(problem: Problem, placement: Placement) -> None:
    excess = problem.excess(placement)
    if excess is None:
        return
    tier, needed = excess
    field = problem.bounding_field(tier)
    lines = "; ".join(f"{line.purpose} {line.nbytes}" for line in placement.plan.lines if line.tier == tier)
    rank_count = problem.sharing.local_world_size if field == "cpu_memory" else 1
    per_rank = f" for each of the node's {rank_count} ranks" if rank_count > 1 else ""
    smallest = needed * rank_count
    error = BudgetError(
        f"{field}={getattr(problem.config, field)} cannot hold what parameters={placement.parameters!r} and "
        f"optimizer_states={placement.optimizer_states!r} need at least: {needed} bytes{per_rank} ({lines}). The smallest "
        f"{field} that can is "
        f"{smallest}. Raise it to that{_besides(problem, placement, tier)}."
    )
    error.smallest_nbytes = smallest
    raise error


def _besides(problem: Problem, placement: Placement, tier: Tier) -> str:
    """What else would make it fit: what may lie further away, unless "auto" found that to take no less; and where nothing may,
    what takes the memory."""
    further: Tier = "cpu" if tier == "device" else "nvme"
    here = (tier, "device") if problem.accelerator.unified else (tier,)
    near = ["optimizer_states"] if placement.optimizer_states in here else []
    if placement.parameters in here and problem.can_hold(further):
        near.insert(0, "parameters")
    is_reached = further == "cpu" or bool(problem.config.nvme_paths)
    untried = [name for name in near if not is_reached or getattr(problem.config, name) != "auto"]
    if untried:
        drive = "" if is_reached else ", nvme='/path/on/the/drive'"
        return f", or let more lie further away: {', '.join(f'{name}={further!r}' for name in untried)}{drive}"
    holds_units = any((line.tier, line.purpose) == (tier, UNITS_IN_USE) for line in placement.plan.lines)
    smaller = ". Smaller units take less: mark parts of the largest with offload.unit"
    none = "'auto' finds nothing that takes less" if near else "nothing of it can lie further away"
    return f": {none}{smaller if holds_units else ''}"
