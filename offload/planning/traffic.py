"""The bytes that a step moves over each link, from the routes of its units and how often each is fetched."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from offload.planning.budget import spilled_nbytes
from offload.planning.placement import Placement, Problem
from offload.planning.plan import Verb, plan
from offload.planning.route import Emission, Memory, Route
from offload.planning.sizes import UnitSizes
from offload.planning.trace import Trace


@dataclass(frozen=True, slots=True)
class Traffic:
    """Bytes of one step over each link. NVMe is the slowest, and between host and device both ways run at once."""

    to_device_nbytes: int = 0
    from_device_nbytes: int = 0
    read_nbytes: int = 0
    written_nbytes: int = 0
    spilled_nbytes: int = 0
    """Part of both of NVMe: gradients that found no room in host memory."""

    def __add__(self, other: Traffic) -> Traffic:
        return Traffic(
            self.to_device_nbytes + other.to_device_nbytes,
            self.from_device_nbytes + other.from_device_nbytes,
            self.read_nbytes + other.read_nbytes,
            self.written_nbytes + other.written_nbytes,
            self.spilled_nbytes + other.spilled_nbytes,
        )

    @property
    def slowest_first(self) -> tuple[int, int, int]:
        """What placements are compared by: bytes over NVMe, over the busier way between host and device, over both."""
        ways = (self.to_device_nbytes, self.from_device_nbytes)
        return self.read_nbytes + self.written_nbytes, max(ways), sum(ways)

    @staticmethod
    def of(problem: Problem, placement: Placement, fetch_counts: Sequence[int], micro_batches: int) -> Traffic:
        """`fetch_counts`: how often each unit is fetched in the step, those that stay aside."""
        spilled = spilled_by(problem, placement, micro_batches)
        found = Traffic(0, 0, spilled, spilled, spilled)
        for unit, route, count in zip(problem.footprint.units, placement.routes, fetch_counts, strict=True):
            found = found + _over_nvme(unit, route, count)
            if not problem.accelerator.unified:
                found = found + _between(unit, route, count, micro_batches)
        return found

    @staticmethod
    def scheduled(problem: Problem, placement: Placement, micro_batches: int) -> Traffic:
        """Of a step that goes as expected and begins with none of its units fetched."""
        return Traffic.of(problem, placement, fetch_counts(problem, placement, micro_batches), micro_batches)


def fetch_counts(problem: Problem, placement: Placement, micro_batches: int) -> list[int]:
    """How often the schedule fetches each unit."""
    fetched = problem.fetched(placement.routes)
    counts = [0] * len(fetched)
    trace = Trace(problem.expected.trace.events * micro_batches)
    schedule = plan(trace, fetched, placement.unit_capacity_nbytes or 0, placement.prefetch)
    for op in schedule.ops:
        counts[op.unit_index] += op.verb is Verb.FETCH and fetched[op.unit_index] > 0
    return counts


def _between(unit: UnitSizes, route: Route, fetch_count: int, micro_batches: int) -> Traffic:
    """Over the links between host and device."""
    to_device = fetch_count * unit.home if route.has_store and route.parameters != "device" else 0
    from_device = 0
    if route.update_in is Memory.HOST and not route.brings_gradients:
        from_device += micro_batches * unit.gradients_nbytes
    elif route.brings_gradients:
        from_device += sum(unit.gradients_wide) if micro_batches > 1 else unit.gradients_nbytes
    trained, read = sum(unit.trained), sum(unit.records(route.crosses).read)
    if route.emission is Emission.COPY_IN:
        to_device, from_device = to_device + trained, from_device + read
    elif route.emission is Emission.COPY_OUT:
        to_device, from_device = to_device + read, from_device + trained
    return Traffic(to_device, from_device)


def _over_nvme(unit: UnitSizes, route: Route, fetch_count: int) -> Traffic:
    """Each record is read and written once; parameters are read for each fetch, written once by the update, and read by it
    where they are a part of the master and not in its memory."""
    read = written = 0
    sizes = unit.records(route.crosses)
    if route.records == "nvme":
        read = written = sum(sizes.chunks[route.kept_records :])
    if route.parameters == "nvme":
        read += fetch_count * (unit.home - sum(unit.chunks[: route.kept_parameters]))
        for position, nbytes, old in zip(unit.trained_positions, unit.trained, sizes.read, strict=True):
            if position >= route.kept_parameters:
                written += nbytes
                read += old if route.emission is not Emission.RESIDENT else 0
    return Traffic(0, 0, read, written)


def spilled_by(problem: Problem, placement: Placement, micro_batches: int) -> int:
    """Bytes of gradients that a step writes to NVMe and reads again, for the next addition or the update: those that find no
    buffer in host memory.

    Every backward goes over them in the same order and the oldest leave first, so that where some must leave,
    each micro-batch but the last makes all of them leave."""
    routed = zip(problem.footprint.units, placement.routes, strict=True)
    spilling = [unit for unit, route in routed if unit.trained and route.gradients_in is None]
    chunks = [nbytes for unit in spilling for nbytes in (unit.gradients_wide if micro_batches > 1 else unit.gradients)]
    last = spilled_nbytes(chunks, placement.retained_gradient_buffers)
    return (micro_batches - 1) * sum(chunks) + last if last else 0
