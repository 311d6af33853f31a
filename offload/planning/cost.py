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
from offload.planning.use_trace import Expected


def step_seconds(problem: Problem, placement: Placement, found: Cost) -> float:
    """With what the model computes in each part, as far as that is known. What moves after the first forward is hidden by the
    units that it is of, and by others as far as there is room for gradients that leave late: nothing more of it begins while
    they compute. So are gradients that spill, by the backward of the units that they are of: an embedding's, which computes
    nothing, come all at once."""
    tokens, rates, micro_batches, expected = problem.config.tokens, problem.rates, problem.micro_batches, problem.expected
    others, forward, leaving, spilling = micro_batches - 1, 0.0, 0, 0
    between, backward, beside_spills = _Computing(), _Computing(), _Computing()
    for unit, route, fetches in zip(
        problem.footprint.units, placement.routes, fetch_counts(problem, placement, micro_batches), strict=True
    ):
        once, back = computing_seconds(tokens, rates, expected, unit.index, unit.numel, unit.trained_share)
        gives = bool(unit.trained) and route.gradients_in is not Memory.DEVICE
        spills = bool(unit.trained) and route.gradients_in is None
        forward += once
        between.add(others * once, moves=fetches[1] > 0)
        between.add(others * back, moves=gives or fetches[1] > 0)
        backward.add(back, moves=gives or fetches[2] > 0)
        beside_spills.add(back, moves=spills)
        leaving += len(unit.trained) if gives and route.model_in is Memory.DEVICE else 0
        spilling += len(unit.trained) if spills else 0
    late = min(placement.transit_buffer_count / leaving, 1.0) if leaving else 0.0
    retained = min(placement.retained_gradient_buffers / spilling, 1.0) if spilling else 0.0
    beside_others = _Computing(others * beside_spills.moving, others * (beside_spills.still + forward))
    return (
        max(forward, *found.forward.values())
        + max(between.beside(max(found.between.values()), late), beside_others.beside(found.spilled_between, retained))
        + max(backward.beside(max(found.backward.values()), late), beside_spills.beside(found.spilled_last, retained))
    )


def computing_seconds(
    tokens: int, rates: Rates, expected: Expected, unit_index: int, numel: int, trained_share: float
) -> tuple[float, float]:
    """Of a unit's forward and of its backward. On so many tokens: for each of them two operations of a parameter in forward, as
    many in backward, as many again for its gradient, and two more where backward has the forward again; none of a lookup. 0
    tokens, which nobody knows: what launching its operations takes."""
    recomputed = unit_index in expected.recomputed
    if not tokens:
        return (rates.launch_seconds, (2 + recomputed) * rates.launch_seconds) if numel else (0.0, 0.0)
    if unit_index in expected.looked_up:
        return 0.0, 0.0
    forward = 2 * tokens / rates.flops * numel
    return forward, forward * (1 + trained_share + recomputed)


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
    micro_batches = problem.micro_batches
    forward, between, backward = parts = _spilled(problem, placement)
    spilled = [part.seconds_by(problem.rates)["NVMe"] for part in (between, backward)]
    counts = fetch_counts(problem, placement, micro_batches)
    for unit, route, fetches in zip(problem.footprint.units, placement.routes, counts, strict=True):
        for part, count in zip(parts, fetches, strict=True):
            part.add(fetched(unit, route), count)
        if micro_batches > 1:
            between.add(gradients_leave(unit, route, micro_batches - 1))
            backward.add(gradients_leave(unit, route, micro_batches - 1), -1)
        backward.add(gradients_leave(unit, route, micro_batches))
        early = route.undoable and problem.config.update != "step"
        update = backward if early else forward
        update.add(updated(unit, route, micro_batches))
        update.chunk_count += len(unit.trained) if route.update_in is Memory.HOST else 0
    first, others, last = (part.seconds_by(problem.rates) for part in parts)
    return Cost(first, others, last, *spilled)


def _spilled(problem: Problem, placement: Placement) -> tuple[Load, Load, Load]:
    """What gradients that spill move in each part."""
    forward, between, backward = parts = Load(), Load(), Load()
    added_to, updated_from = spilled_by(problem, placement, problem.micro_batches)
    read_last = added_to // max(problem.micro_batches - 1, 1)
    between.add(iter([(Link.WRITTEN, added_to), (Link.READ, added_to - read_last)]))
    backward.add(iter([(Link.WRITTEN, updated_from), (Link.READ, read_last)]))
    forward.add(iter([(Link.READ, updated_from)]))
    return parts
