# SPDX-License-Identifier: Apache-2.0
"""Which of several placements is the best: by what their steps take, and by what they move."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from offload.planning.cost import cost, step_seconds
from offload.planning.placement import Placement, Problem
from offload.planning.traffic import moved

ABOUT_AS_LONG = 1.005
"""Times the quickest: the cost in seconds is not known better than that, bytes are."""
ABOUT_AS_LONG_OVER_NVME = 1.02
"""The same, of those that move more over NVMe, which a step waits for longest."""
ABOUT_AS_LONG_BESIDE_THE_UNKNOWN = 1.25
"""The same, of those that move more over NVMe, where a GPU computes the model and nobody said on how many tokens: that hides a
part of what other links move, or all of it."""
_FEW_LESS = 0.9
"""Times the bytes over NVMe of larger chunks."""


@dataclass(frozen=True, slots=True)
class Weight:
    """What placements are compared by. `has_no_room`: for the sums of a second micro-batch. `seconds`: that a step takes at
    least, with what is known of the model's computing. `moved`: bytes, over the slowest link first."""

    has_no_room: bool
    seconds: float
    moved: tuple[int, ...]


def weigh(problem: Problem, placement: Placement) -> Weight:
    """One placement."""
    has_no_room = problem.excess(placement, with_sums=True) is not None
    return Weight(has_no_room, step_seconds(problem, placement, cost(problem, placement)), moved(problem, placement))


def quickest(weights: Sequence[Weight], about: float = ABOUT_AS_LONG) -> list[int]:
    """The indices of those with room (if any has it) that take no longer than `about` times the quickest."""
    has_no_room, least = min((one.has_no_room, one.seconds) for one in weights)
    longest = least * about
    return [index for index, one in enumerate(weights) if one.has_no_room == has_no_room and one.seconds <= longest]


def lightest(problem: Problem, weights: Sequence[Weight]) -> int:
    """The index of the best: of those that move the fewest bytes over NVMe, among the `quickest`, the one that moves least of
    the `quickest`; of equals the first. Where tiers are named bytes alone decide, so that more memory never moves more."""
    if not problem.chooses:
        return min(range(len(weights)), key=lambda index: weights[index].moved)
    is_known = problem.config.tokens or problem.accelerator.unified
    near = quickest(weights, ABOUT_AS_LONG_OVER_NVME if is_known else ABOUT_AS_LONG_BESIDE_THE_UNKNOWN)
    over_nvme = min(weights[index].moved[0] for index in near)
    fewest = [index for index in near if weights[index].moved[0] == over_nvme]
    return min((fewest[one] for one in quickest([weights[index] for index in fewest])), key=lambda index: weights[index].moved)


def largest_that_pays(weights: Sequence[Weight]) -> int:
    """The index of the best of several sizes of chunks, the largest first: the largest of the `quickest`, since a chunk costs
    more than the few bytes that smaller ones save; a smaller one where it saves more than a few."""
    best, *smaller = quickest(weights, ABOUT_AS_LONG_OVER_NVME)
    for index in smaller:
        if weights[index].moved[0] < _FEW_LESS * weights[best].moved[0]:
            best = index
    return best


def lightest_pairs(problem: Problem, placements: Sequence[Placement], weights: Sequence[Weight], count: int) -> list[int]:
    """The indices of the best of each of the `count` best pairings of tiers."""
    left, found = list(range(len(weights))), list[int]()
    while left and len(found) < count:
        found.append(left[lightest(problem, [weights[index] for index in left])])
        pair = placements[found[-1]].parameters, placements[found[-1]].optimizer_states
        left = [one for one in left if (placements[one].parameters, placements[one].optimizer_states) != pair]
    return found
