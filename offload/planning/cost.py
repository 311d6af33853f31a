# SPDX-License-Identifier: Apache-2.0
"""How long a step takes at least, by what it moves: what placements are compared by.

A step has three parts, and what moves in one of them is not moved in another. Under the first forward units come, updates of
the last step run and their records are read and written. Under the last backward units come again and the last gradients leave,
and with them go the updates that can be undone, whose records move then. Between the two are all other backwards and forwards
of several micro-batches: units come, gradients leave and spill, and nothing is updated. In each part links work side by side,
so it lasts as long as the slowest of them; reads and writes share a drive, and everything that host memory has to bear shares
that.
How long the model computes is known where the tokens of a micro-batch are (`Config.expecting`): what moves under it is hidden.
Else what is compared is what there is to hide, beside what launching the model's operations takes at the least: small models
are bound by that wherever their states lie, and for them the bytes decide.
"""

from __future__ import annotations

from dataclasses import dataclass

from offload.device.rates import Rates
from offload.planning.link_seconds import Cost, Load
from offload.planning.placement import Placement, Problem
from offload.planning.route import Memory
from offload.planning.route_bytes import Link, fetched, gradients_leave, updated
from offload.planning.traffic import fetch_counts, spilled_by


def step_seconds(problem: Problem, placement: Placement, found: Cost) -> float:
    """With what the model computes in each part, as far as that is known. What moves after the first forward is hidden by the
    units that it is of, and by others as far as there is room for gradients that leave late: nothing more of it begins while
    they compute."""
    tokens, rates, micro_batches = problem.config.tokens, problem.rates, problem.micro_batches
    forward, between, backward, leaving = 0.0, _Computing(), _Computing(), 0
    for unit, route, fetches in zip(
        problem.footprint.units, placement.routes, fetch_counts(problem, placement, micro_batches), strict=True
    ):
        once, back = computing_seconds(tokens, rates, unit.numel, unit.trained_share)
        gives = bool(unit.trained) and route.gradients_in is not Memory.DEVICE
        forward += once
        between.add((micro_batches - 1) * (once + back), moves=gives or fetches[1] > 0)
        backward.add(back, moves=gives or fetches[2] > 0)
        leaving += len(unit.trained) if gives and route.model_in is Memory.DEVICE else 0
    late = min(placement.transit_buffer_count / leaving, 1.0) if leaving else 0.0
    return (
        max(forward, *found.forward.values())
        + between.beside(max(found.between.values()), late)
        + backward.beside(max(found.backward.values()), late)
    )


def computing_seconds(tokens: int, rates: Rates, numel: int, trained_share: float) -> tuple[float, float]:
    """Of a unit's forward and of its backward. On so many tokens: for each of them two operations of a parameter in forward, as
    many in backward, and as many again for its gradient. 0 tokens, which nobody knows: what launching its operations takes."""
    if not tokens:
        return (rates.launch_seconds, 2 * rates.launch_seconds) if numel else (0.0, 0.0)
    forward = 2 * tokens / rates.flops * numel
    return forward, forward * (1 + trained_share)


@dataclass(slots=True)
class _Computing:
    """Seconds of one part: of units of which something moves in it, and of the others."""

    moving: float = 0.0
    still: float = 0.0

    def add(self, seconds: float, *, moves: bool) -> None:
        if moves:
            self.moving += seconds
        else:
            self.still += seconds

    def beside(self, moves: float, late: float) -> float:
        """What the part takes, where links need `moves`, of which the share `late` may follow under other units."""
        return max(self.moving + self.still, moves + max(self.still - late * moves, 0.0))


def cost(problem: Problem, placement: Placement) -> Cost:
    """Of a step with as many micro-batches as are planned for."""
    forward, between, backward = Load(), Load(), Load()
    micro_batches = problem.micro_batches
    counts = fetch_counts(problem, placement, micro_batches)
    added_to, updated_from = spilled_by(problem, placement, micro_batches)
    read_last = added_to // max(micro_batches - 1, 1)
    between.add(iter([(Link.WRITTEN, added_to), (Link.READ, added_to - read_last)]))
    backward.add(iter([(Link.WRITTEN, updated_from), (Link.READ, read_last)]))
    forward.add(iter([(Link.READ, updated_from)]))
    for unit, route, fetches in zip(problem.footprint.units, placement.routes, counts, strict=True):
        for part, count in zip((forward, between, backward), fetches, strict=True):
            part.add(fetched(unit, route), count)
        if micro_batches > 1:
            between.add(gradients_leave(unit, route, micro_batches - 1))
            backward.add(gradients_leave(unit, route, micro_batches - 1), -1)
        backward.add(gradients_leave(unit, route, micro_batches))
        early = route.undoable and problem.config.update != "step"
        update = backward if early else forward
        update.add(updated(unit, route, micro_batches))
        update.chunk_count += len(unit.trained) if route.update_in is Memory.HOST else 0
    return Cost(*(part.seconds_by(problem.rates) for part in (forward, between, backward)))
