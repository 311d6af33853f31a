# SPDX-License-Identifier: Apache-2.0
"""How long a step takes at least, by what it moves: what placements are compared by.

A step has two halves, and what moves in one of them is not moved in the other: under the forward units come, updates of the
last step run and their records are read and written; under the backward units come again, gradients leave and spill. Of several
micro-batches the first forward is the one half, and all that follows the other. In each half links work side by side, so it
lasts as long as the slowest of them; reads and writes share a drive, and everything that host memory has to bear shares that.
How long the model computes is known where the tokens of a micro-batch are (`Config.expecting`): what moves under it is hidden.
Else what is compared is what there is to hide.
"""

from __future__ import annotations

from offload.planning.link_seconds import Cost, Load
from offload.planning.placement import Placement, Problem
from offload.planning.route import Memory
from offload.planning.route_bytes import Link, fetched, gradients_leave, updated
from offload.planning.traffic import fetch_counts, spilled_by


def step_seconds(problem: Problem, placement: Placement, found: Cost) -> float:
    """With what the model computes in each half, where that is known: for each token two operations of a parameter in forward,
    as many in backward, and as many again for its gradient. What moves under the backwards is hidden by the units that it is
    of: while others compute there is nothing of it to do."""
    units, micro_batches = problem.footprint.units, problem.micro_batches
    seconds = 2 * problem.config.tokens / problem.rates.flops
    forward = seconds * sum(unit.numel for unit in units)
    computing, moving = 0.0, 0.0
    for unit, route, held_while_used in zip(units, placement.routes, problem.fetched(placement.routes), strict=True):
        takes = seconds * unit.numel * (micro_batches * (2 + unit.trained_share) - 1)
        if held_while_used or (unit.trained and route.gradients_in is not Memory.DEVICE):
            moving += takes
        else:
            computing += takes
    return max(forward, *found.forward.values()) + computing + max(moving, *found.backward.values())


def cost(problem: Problem, placement: Placement) -> Cost:
    """Of a step with as many micro-batches as are planned for."""
    forward, backward = Load(), Load()
    micro_batches = problem.micro_batches
    counts = fetch_counts(problem, placement, micro_batches)
    added_to, updated_from = spilled_by(problem, placement, micro_batches)
    backward.add(iter([(Link.WRITTEN, added_to + updated_from), (Link.READ, added_to)]))
    forward.add(iter([(Link.READ, updated_from)]))
    for unit, route, (first, second) in zip(problem.footprint.units, placement.routes, counts, strict=True):
        forward.add(fetched(unit, route), first)
        backward.add(fetched(unit, route), second)
        backward.add(gradients_leave(unit, route, micro_batches))
        early = route.undoable and problem.config.update != "step"
        update = backward if early else forward
        update.add(updated(unit, route, micro_batches))
        update.chunk_count += len(unit.trained) if route.update_in is Memory.HOST else 0
    return Cost(forward.seconds_by(problem.rates), backward.seconds_by(problem.rates))
