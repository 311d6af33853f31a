"""How long a step takes at least, by what it moves: what placements are compared by.

A step has two halves, and what moves in one of them is not moved in the other: under the forward units come, updates of the
last step run and their records are read and written; under the backward units come again, gradients leave and spill. In each
half links work side by side, so it lasts as long as the slowest of them; reads and writes share a drive, and everything that
host memory has to bear shares that. Nothing is known of the model's compute before it runs: it hides what is shorter than
itself, whatever the placement, so what is compared is what is left to hide.
"""

from __future__ import annotations

from offload.planning.load import Cost, Load
from offload.planning.placement import Placement, Problem
from offload.planning.plan import Verb, plan
from offload.planning.route import Emission, Memory, Route
from offload.planning.sizes import UnitSizes
from offload.planning.trace import Trace
from offload.planning.traffic import spilled_by


def cost(problem: Problem, placement: Placement) -> Cost:
    """Of a step with as many micro-batches as are planned for."""
    forward, backward = Load(), Load()
    micro_batches, unified = problem.micro_batches, problem.accelerator.unified
    counts = _fetches(problem, placement, micro_batches)
    spilled = spilled_by(problem, placement, micro_batches)
    backward.written += spilled
    backward.read += spilled * (micro_batches - 1) / micro_batches
    forward.read += spilled / micro_batches
    for unit, route, (first, second) in zip(problem.footprint.units, placement.routes, counts, strict=True):
        _comes(forward, unit, route, first, unified=unified)
        _comes(backward, unit, route, second, unified=unified)
        if unit.trained:
            _leaves(backward, unit, route, micro_batches, unified=unified)
            early = route.undoable and problem.config.update != "step"
            _is_updated(backward if early else forward, unit, route, micro_batches, unified=unified)
    return Cost(forward.seconds_by(problem.rates), backward.seconds_by(problem.rates))


def _fetches(problem: Problem, placement: Placement, micro_batches: int) -> list[tuple[int, int]]:
    """How often the schedule fetches each unit under a forward, and under a backward."""
    fetched, events = problem.fetched(placement.routes), problem.expected.trace.events
    counts = [[0, 0] for _ in fetched]
    trace = Trace(events * micro_batches)
    schedule = plan(trace, fetched, placement.unit_capacity_nbytes or 0, placement.prefetch)
    for position, ops in enumerate(schedule.at):
        half = int(2 * (position % len(events)) >= len(events))
        for op in ops:
            counts[op.unit_index][half] += op.verb is Verb.FETCH and fetched[op.unit_index] > 0
    return [(first, second) for first, second in counts]


def _comes(load: Load, unit: UnitSizes, route: Route, count: int, *, unified: bool) -> None:
    if not count or not route.has_store or route.parameters == "device":
        return
    if not unified:
        load.to_device += count * unit.home
    if route.parameters == "nvme":
        load.read += count * (unit.home - sum(unit.chunks[: route.kept_parameters]))


def _leaves(load: Load, unit: UnitSizes, route: Route, micro_batches: int, *, unified: bool) -> None:
    """Gradients, as they come."""
    if unified or route.gradients_in is Memory.DEVICE:
        return
    load.from_device += micro_batches * unit.gradients_nbytes
    load.memory += (micro_batches - 1) * (unit.gradients_nbytes + 2 * sum(unit.gradients_wide))


def _is_updated(load: Load, unit: UnitSizes, route: Route, micro_batches: int, *, unified: bool) -> None:
    sizes, trained = unit.records(route.crosses), sum(unit.trained)
    gradients = sum(unit.gradients_wide) if micro_batches > 1 else unit.gradients_nbytes
    if route.records == "nvme":
        moved = sum(sizes.chunks[route.kept_records :])
        load.read, load.written = load.read + moved, load.written + moved
    if route.parameters == "nvme":
        for position, nbytes, old in zip(unit.trained_positions, unit.trained, sizes.read, strict=True):
            if position >= route.kept_parameters:
                load.written += nbytes
                load.read += old if route.emission is not Emission.RESIDENT else 0
    arithmetic = 2 * sizes.nbytes + gradients + trained + sum(sizes.read)
    if route.update_in is Memory.HOST:
        load.memory += arithmetic
        load.chunk_count += len(unit.trained)
    else:
        load.device_memory += arithmetic
    if unified:
        return
    if route.brings_gradients:
        load.from_device += gradients
    if route.emission is Emission.COPY_IN:
        load.to_device, load.from_device = load.to_device + trained, load.from_device + sum(sizes.read)
    elif route.emission is Emission.COPY_OUT:
        load.to_device, load.from_device = load.to_device + sum(sizes.read), load.from_device + trained
