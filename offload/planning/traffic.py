# SPDX-License-Identifier: Apache-2.0
"""The bytes that a step moves over each link, from the routes of its units and how often each is fetched."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import chain

from offload.planning.budget import spilled_nbytes
from offload.planning.placement import Placement, Problem
from offload.planning.route_bytes import Link, fetched, gradients_leave, updated
from offload.planning.schedule import Verb, plan
from offload.planning.use_trace import UseTrace


@dataclass(frozen=True, slots=True)
class Traffic:
    """Bytes of one step over each link. NVMe is the slowest, and between host and device both ways run at once."""

    to_device_nbytes: int = 0
    from_device_nbytes: int = 0
    read_nbytes: int = 0
    written_nbytes: int = 0
    spilled_nbytes: int = 0
    """Part of both of NVMe: gradients that found no room in host memory."""

    @property
    def slowest_first(self) -> tuple[int, int, int]:
        """What placements are compared by: bytes over NVMe, over the busier way between host and device, over both."""
        ways = (self.to_device_nbytes, self.from_device_nbytes)
        return self.read_nbytes + self.written_nbytes, max(ways), sum(ways)

    @staticmethod
    def of(problem: Problem, placement: Placement, fetch_counts: Sequence[int], micro_batches: int) -> Traffic:
        """`fetch_counts`: how often each unit is fetched in the step, those that stay aside."""
        moved = Counter[Link]()
        for unit, route, count in zip(problem.footprint.units, placement.routes, fetch_counts, strict=True):
            for link, nbytes in fetched(unit, route):
                moved[link] += count * nbytes
            for link, nbytes in chain(gradients_leave(unit, route, micro_batches), updated(unit, route, micro_batches)):
                moved[link] += nbytes
        spilled = sum(spilled_by(problem, placement, micro_batches))
        read, written = moved[Link.READ] + spilled, moved[Link.WRITTEN] + spilled
        return Traffic(moved[Link.TO_DEVICE], moved[Link.FROM_DEVICE], read, written, spilled)

    @staticmethod
    def scheduled(problem: Problem, placement: Placement, micro_batches: int) -> Traffic:
        """Of a step that goes as expected and begins with none of its units fetched."""
        counts = fetch_counts(problem, placement, micro_batches)
        return Traffic.of(problem, placement, list(map(sum, counts)), micro_batches)


def moved(problem: Problem, placement: Placement) -> tuple[int, ...]:
    """`Traffic.slowest_first` of a step as it is planned for."""
    return Traffic.scheduled(problem, placement, problem.micro_batches).slowest_first


Fetches = tuple[int, int, int]
"""How often the schedule fetches a unit: under a step's first forward, between that and the last backward, under that."""


def fetch_counts(problem: Problem, placement: Placement, micro_batches: int) -> Sequence[Fetches]:
    """Of each unit. All micro-batches between the first and the last fetch as the second does."""
    takes_memory, capacity = tuple(problem.fetched(placement.routes)), placement.unit_capacity_nbytes or 0
    return _fetch_counts(problem.expected.trace, takes_memory, capacity, placement.prefetch, micro_batches)


@lru_cache
def _fetch_counts(
    trace: UseTrace, takes_memory: tuple[int, ...], capacity: int, prefetch: int, micro_batches: int
) -> tuple[Fetches, ...]:
    events, counts, looked_at = trace.events, [[0, 0, 0] for _ in takes_memory], min(micro_batches, 3)
    schedule = plan(UseTrace(events * looked_at), takes_memory, capacity, prefetch)
    for position, ops in enumerate(schedule.at):
        is_backward, is_between = 2 * (position % len(events)) >= len(events), position // len(events) == 1 and looked_at == 3
        is_first, is_last = position < len(events), position // len(events) == looked_at - 1
        part = 0 if is_first and not is_backward else 2 if is_last and is_backward else 1
        times = micro_batches - 2 if is_between else 1
        for op in ops:
            counts[op.unit_index][part] += times * (op.verb is Verb.FETCH and takes_memory[op.unit_index] > 0)
    return tuple((first, between, last) for first, between, last in counts)


def spilled_by(problem: Problem, placement: Placement, micro_batches: int) -> tuple[int, int]:
    """Bytes of gradients that a step writes to NVMe and reads again, since they find no buffer in host memory: for the next
    micro-batch to add to, and for the update.

    Every backward goes over them in the same order and the oldest leave first, so that where some must leave,
    each micro-batch but the last makes all of them leave; the first as it computed them, the others as sums."""
    routed = zip(problem.footprint.units, placement.routes, strict=True)
    spilling = [unit for unit, route in routed if unit.trained and route.gradients_in is None]
    if micro_batches == 1 or problem.config.sums_are_narrow:
        chunks = [nbytes for unit in spilling for nbytes in unit.gradients]
        last = spilled_nbytes(chunks, placement.retained_gradient_buffers)
    else:
        chunks = [nbytes for unit in spilling for nbytes in unit.gradients_wide]
        last = spilled_nbytes(chunks, placement.choice.retained)
    if micro_batches == 1 or not last:
        return 0, last
    return sum(unit.gradients_nbytes for unit in spilling) + (micro_batches - 2) * sum(chunks), last
