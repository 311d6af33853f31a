# SPDX-License-Identifier: Apache-2.0
"""What the host memory beyond the minimum is spent on: keeping a part of what lies on NVMe. For the order see `Kept`."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from itertools import accumulate

from offload.planning.placement import Placement, Problem, place
from offload.planning.purposes import OPTIMIZER_STATES, PARAMETERS, StateNames
from offload.planning.route import kept_first
from offload.planning.route_bytes import held
from offload.planning.sizes import least_gradient_buffers
from offload.planning.traffic import moved, spilled_by


def largest(count: int, fits: Callable[[int], bool]) -> int:
    """The largest n <= `count` that fits. 0 fits; more takes more, save that the last may take less."""
    if fits(count):
        return count
    low, high = 0, count
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if fits(middle) else (low, middle)
    return low


@dataclass(frozen=True, slots=True)
class SpareHostMemory:
    """See the module."""

    problem: Problem
    fits: Callable[[Placement], bool]

    def best(self, smallest: Placement) -> Placement:
        """Of the placements that fit, from the one given up, the one whose step moves least over NVMe.

        Buffers take memory too, so that of a small budget gradients in memory, which need none, may be the better use; and the
        more micro-batches there are, the more often gradients that spill go there and back."""
        best = self._best_from(smallest)
        if smallest.parameters == "nvme" and smallest.gradients == "cpu":
            spilling = self._with_gradients_on_nvme(smallest)
            if self.fits(spilling):
                best = min(best, self._best_from(spilling), key=partial(moved, self.problem))
        return best

    def _best_from(self, smallest: Placement) -> Placement:
        candidates = [self._keep_gradients(self._keep_records(self._keep_parameters(smallest)))]
        if self.problem.accumulates:
            candidates.append(self._keep_records(self._keep_parameters(self._keep_gradients(smallest))))
        in_place = self._with_gradients_in_memory(smallest) if smallest.gradients == "nvme" else None
        if in_place is not None and self.fits(in_place):
            candidates.append(self._keep_records(self._keep_parameters(in_place)))
        return min(candidates, key=self._moved)

    def _most(self, count: int, placed: Callable[[int], Placement]) -> Placement:
        return placed(largest(count, lambda n: self.fits(placed(n))))

    def _with_gradients_in_memory(self, placement: Placement) -> Placement:
        return place(self.problem, replace(placement.choice, gradients="cpu", retained=0))

    def _with_gradients_on_nvme(self, placement: Placement) -> Placement:
        """What they leave may keep parameters, each byte of which saves more."""
        least = least_gradient_buffers(self.problem.footprint.units)
        return place(self.problem, replace(placement.choice, gradients="nvme", retained=least))

    def _moved(self, placement: Placement) -> tuple[int, ...]:
        """Bytes of a step; of several micro-batches those over NVMe, with a fetch of all parameters for each forward and
        backward."""
        if not self.problem.accumulates:
            return moved(self.problem, placement)
        on_nvme = Counter[StateNames]()
        for unit, route in zip(self.problem.footprint.units, placement.routes, strict=True):
            for state, tier, nbytes in held(unit, route):
                on_nvme[state] += nbytes if tier == "nvme" else 0
        count = self.problem.micro_batches
        added_to, updated_from = spilled_by(self.problem, placement, count)
        return ((2 * count + 1) * on_nvme[PARAMETERS] + 2 * (on_nvme[OPTIMIZER_STATES] + added_to + updated_from),)

    def _keep_parameters(self, placement: Placement) -> Placement:
        """By whole units, where the device computes where they lie."""
        if placement.parameters != "nvme":
            return placement
        by_unit = [
            unit.chunks
            for unit, route in zip(self.problem.footprint.units, placement.routes, strict=True)
            if route.parameters == "nvme"
        ]
        sizes = [nbytes for chunks in by_unit for nbytes in chunks]
        ends = [sum(map(len, by_unit[:count])) for count in range(len(by_unit) + 1)]
        choice = placement.choice

        def keep_units(count: int) -> Placement:
            return keep_chunks(ends[count], unit_count=count)

        def keep_chunks(count: int, unit_count: int = 0) -> Placement:
            kept = replace(choice.kept, unit_count=unit_count, parameter_count=count)
            return place(self.problem, replace(choice, kept=kept))

        keeps_units = self.problem.accelerator.unified and not self.problem.sharing.shards_parameters
        return self._most(len(by_unit), keep_units) if keeps_units else self._most(len(sizes), keep_chunks)

    def _keep_records(self, placement: Placement) -> Placement:
        if placement.optimizer_states != "nvme":
            return placement
        routes, choice = placement.routes, placement.choice
        on_nvme = [unit for unit in self.problem.footprint.units if routes[unit.index].records == "nvme"]
        records = [unit.records(routes[unit.index].crosses).chunks for unit in on_nvme]
        order = kept_first(on_nvme, unified=self.problem.accelerator.unified)
        first = [0, *accumulate(records[position][index] for position, index in order)]

        def keep(count: int) -> Placement:
            kept = replace(choice.kept, record_count=count, record_nbytes=first[count])
            return place(self.problem, replace(choice, kept=kept))

        return self._most(len(order), keep)

    def _keep_gradients(self, placement: Placement) -> Placement:
        if placement.gradients != "nvme":
            return placement
        in_place = self._with_gradients_in_memory(placement)
        if self.fits(in_place):
            return in_place
        spilling = [
            unit
            for unit, route in zip(self.problem.footprint.units, placement.routes, strict=True)
            if route.gradients_in is None
        ]
        choice = placement.choice
        least = choice.retained
        parts = max(placement.retained_gradient_buffers // max(least, 1), 1)
        more = max(-(-sum(len(unit.trained) for unit in spilling) // parts) - least, 0)
        return self._most(more, lambda count: place(self.problem, replace(choice, retained=least + count)))
