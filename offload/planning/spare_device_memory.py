# SPDX-License-Identifier: Apache-2.0
"""What the device memory beyond the minimum is spent on: units that stay there instead of being moved.

What a unit's state saves in each step for the bytes that it takes, with n micro-batches, 16-bit parameters, fp32 states:

    parameters  2n fetches become one: the values that the host's update leaves                   (2n - 1) x 2 of 2 bytes
    gradients   n transfers become one                                                            (n - 1) x 2 of 2 to 6
    records     the last transfer of the gradients and that of the values too: nothing moves      4 of 12

So parameters come first, then gradients where there are several micro-batches, then records (with their gradients), until the
budget is full. Of the units those that the schedule fetches most come first, and whatever still fits is taken.

Where an update reads the old values, parameters that stay would come back for it: what is fetched for each step and then kept
until its update moves less (`_resident`). Both are candidates.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, replace
from functools import partial

from offload.planning.placement import Placement, Problem, place
from offload.planning.route import Memory
from offload.planning.sizes import UnitSizes
from offload.planning.spare_host_memory import largest
from offload.planning.tier_choice import Choice, Near
from offload.planning.traffic import fetch_counts, moved

_STEPS = 4
"""From how many of the units on it is tried what fits."""
WithUnits = Callable[[Choice, frozenset[int]], Choice]
"""The choice with a state of these units on the device."""


@dataclass(frozen=True, slots=True)
class SpareDeviceMemory:
    """See the module."""

    problem: Problem
    fits: Callable[[Placement], bool]

    def candidates(self, smallest: Placement) -> list[Placement]:
        """Placements that fit, from the one given up: which of them moves least depends on what host memory then keeps."""
        order = self._order(smallest, self.problem.micro_batches)
        found = [smallest]
        for grow in (self._staying, self._resident):
            most, *fewer = (self._with_spare(one) for one in grow(smallest, order))
            found += [most, *([min(fewer, key=partial(moved, self.problem))] if fewer else [])]
        return [*found, *map(self._with_spare, self._records_first(smallest, order))]

    def _records_first(self, smallest: Placement, order: Sequence[int]) -> list[Placement]:
        """Where gradients come before records: the other way round. What is updated on the device leaves the forward, under
        which the host's updates run, and what sums of micro-batches move the backwards hide where they compute for long."""
        if not (self.problem.accumulates and self.problem.config.tokens):
            return []
        return [self._taken(smallest, self._trained(smallest, order), _with_records)]

    def holding(self, smallest: Placement, share: float) -> Placement:
        """With at least this share of the records on the device, of the units that come first."""
        sizes = {unit.index: unit.beside.nbytes for unit in self.problem.footprint.units}
        wanted, units = share * sum(sizes.values()), list[int]()
        for index in self._trained(smallest, self._order(smallest, 1)):
            if sum(sizes[one] for one in units) < wanted:
                units.append(index)
        return place(self.problem, _with_records(smallest.choice, frozenset(units)))

    def relieved(self, smallest: Placement) -> Placement:
        """With the fewest units on the device, all that they have, with which it fits, the sums of several micro-batches too if
        that can be; where none do, with as many as the device holds."""
        order, budget = self._order(smallest, 1), self.problem.budget("cpu") or 0
        trained = set(self._trained(smallest, order))
        in_memory = set(self._movable(smallest, order)) if smallest.parameters == "cpu" else set[int]()
        units = [index for index in order if index in trained | in_memory]

        def without(count: int) -> Placement:
            moved = frozenset(units[: len(units) - count])
            return place(self.problem, _with_records(_with_parameters(smallest.choice, moved), moved & trained))

        def host_holds(with_sums: bool, count: int) -> bool:
            placement = without(count)
            return (placement.with_sums() if with_sums else placement).plan.total_nbytes("cpu") <= budget

        for with_sums in (True, False):
            relieved = without(largest(len(units), partial(host_holds, with_sums)))
            if self.problem.excess(relieved, with_sums=with_sums) is None:
                return relieved
        most = largest(len(units), lambda count: not self._exceeds_device(without(len(units) - count)))
        return without(len(units) - most)

    def _exceeds_device(self, placement: Placement) -> bool:
        excess = self.problem.excess(placement)
        return excess is not None and excess[0] == "device"

    def _order(self, smallest: Placement, micro_batches: int) -> list[int]:
        counts = fetch_counts(self.problem, smallest, micro_batches)
        return sorted(range(len(counts)), key=lambda index: -sum(counts[index]))

    # ---- two ways --------------------------------------------------------------------------------------------------

    def _staying(self, smallest: Placement, order: Sequence[int]) -> list[Placement]:
        """Parameters of units stay for good: of as many as fit first, then of fewer, which leaves more to states, and to what
        units in use keep between their uses."""
        movable = self._movable(smallest, order)
        found, wants = [], [movable, [index for index in movable if not self._needs_master(index)]]
        for units in wants if wants[0] != wants[1] else wants[:1]:
            for placement in self._ways(smallest, units, _with_parameters):
                found += self._with_states(placement, order)
        return found

    def _resident(self, smallest: Placement, order: Sequence[int]) -> list[Placement]:
        """Parameters are fetched once for each step; only what is updated on the device stays for good."""
        if not any(self.problem.fetched(smallest.routes)):
            return [smallest]
        total = sum(self.problem.fetched(smallest.routes))
        placement = place(self.problem, replace(smallest.choice, spare_nbytes=total))
        return self._with_states(placement, order) if self.fits(placement) else [smallest]

    def _with_states(self, placement: Placement, order: Sequence[int]) -> list[Placement]:
        if self.problem.accumulates:
            placement = self._taken(placement, self._trained(placement, order), _with_gradients)
        return [self._taken(placement, self._trained(placement, order), _with_records), placement]

    def _with_spare(self, placement: Placement) -> Placement:
        """What is left keeps units between their uses."""
        budget, fetched = self.problem.budget("device"), sum(self.problem.fetched(placement.routes))
        if budget is None or placement.unit_capacity_nbytes is None:
            return placement
        leaves_sums = self.problem.excess(placement, with_sums=True) is None
        taken = (placement.with_sums() if leaves_sums else placement).plan.total_nbytes("device")
        spare = min(budget - taken, fetched - placement.unit_capacity_nbytes)
        if spare <= 0:
            return placement
        roomier = place(self.problem, replace(placement.choice, spare_nbytes=placement.choice.spare_nbytes + spare))
        return roomier if self.fits(roomier) else placement

    # ---- units -----------------------------------------------------------------------------------------------------

    def _movable(self, placement: Placement, order: Sequence[int]) -> list[int]:
        """Units whose parameters lie further away than the device."""
        units = self.problem.footprint.units
        return [index for index in order if units[index].home and placement.routes[index].parameters != "device"]

    def _needs_master(self, index: int) -> bool:
        """Whether the unit's records grow when its parameters lie in another memory than its updates compute in: by the master
        that the parameters were."""
        unit = self.problem.footprint.units[index]
        return unit.records(True).nbytes > unit.records(False).nbytes

    def _trained(self, placement: Placement, order: Sequence[int]) -> list[int]:
        """Units whose updates compute on the host."""
        units, routes = self.problem.footprint.units, placement.routes
        return [index for index in order if units[index].trained and routes[index].update_in is Memory.HOST]

    def _ways(self, placement: Placement, units: Sequence[int], with_units: WithUnits) -> list[Placement]:
        """As many of the units as fit, then none, then as many as fit from other ones on: what fits beside the first of them
        may be less than what fits without."""
        found = [self._taken(placement, units, with_units), placement]
        starts = sorted({math.ceil(len(units) * step / _STEPS) for step in range(1, _STEPS)} - {0, len(units)})
        found += [self._taken(placement, [*units[start:], *units[:start]], with_units) for start in starts]
        return found

    def _taken(self, placement: Placement, units: Sequence[int], with_units: WithUnits) -> Placement:
        """As many of the units as fit: the first of them, and of the others each that still does. Of those that are alike none
        is tried again after one that did not."""

        def placed(indices: Collection[int]) -> Placement:
            return place(self.problem, with_units(placement.choice, frozenset(indices)))

        count = largest(len(units), lambda count: self.fits(placed(units[:count])))
        taken, tried = list(units[:count]), set[UnitSizes]()
        for index in units[count:]:
            alike = replace(self.problem.footprint.units[index], index=0)
            if alike in tried:
                continue
            if self.fits(placed([*taken, index])):
                taken.append(index)
            else:
                tried.add(alike)
        return placed(taken) if taken else placement


def _with_parameters(choice: Choice, units: frozenset[int]) -> Choice:
    return replace(choice, near=replace(choice.near, parameters=choice.near.parameters | units))


def _with_gradients(choice: Choice, units: frozenset[int]) -> Choice:
    return replace(choice, near=replace(choice.near, gradients=choice.near.gradients | units))


def _with_records(choice: Choice, units: frozenset[int]) -> Choice:
    """All of the unit stays: what is updated on the device has its gradients and its parameters there."""
    near = choice.near
    return replace(choice, near=Near(near.parameters | units, near.gradients | units, near.records | units))
