# SPDX-License-Identifier: Apache-2.0
"""What one unit moves over each link, holds in each tier, and passes through, by its route: the only place that says so.

Traffic, cost, the plan's lines and what is weighed all count by it.
"""

from __future__ import annotations

from collections.abc import Iterator
from enum import Enum
from itertools import compress

from offload.planning.budget import FETCH_BUFFERS, IN_WRITING, READ_AHEAD, Tier
from offload.planning.purposes import (
    FETCHED,
    GRADIENT_BUFFERS,
    GRADIENTS,
    OPTIMIZER_STATES,
    PARAMETERS,
    RECORDS,
    RECORDS_ON_DEMAND,
    RELOADED,
    UPDATED_PARAMETERS,
    StateNames,
)
from offload.planning.route import Memory, Route, ValuePath
from offload.planning.sizes import UnitSizes


class Link(Enum):
    """What bytes pass through. The memories: beyond what the other links pass through them."""

    TO_DEVICE = "host to device"
    FROM_DEVICE = "device to host"
    READ = "NVMe read"
    WRITTEN = "NVMe written"
    HOST_MEMORY = "host memory"
    DEVICE_MEMORY = "device memory"


Moves = Iterator[tuple[Link, int]]


def fetched(unit: UnitSizes, route: Route) -> Moves:
    """By one fetch of its parameters."""
    if not route.has_store or route.parameters == "device":
        return
    if route.model_in is Memory.DEVICE:
        yield Link.TO_DEVICE, unit.home
    if route.parameters == "nvme":
        yield Link.READ, unit.home - sum(unit.chunks[: route.kept_parameters])


def gradients_leave(unit: UnitSizes, route: Route, micro_batches: int) -> Moves:
    """By gradients of all micro-batches, as they come. What spills is counted over all units (`traffic.spilled_by`)."""
    if route.model_in is Memory.HOST or route.gradients_in is Memory.DEVICE:
        return
    yield Link.FROM_DEVICE, micro_batches * unit.gradients_nbytes
    yield Link.HOST_MEMORY, (micro_batches - 1) * (unit.gradients_nbytes + 2 * sum(unit.gradients_wide))


def updated(unit: UnitSizes, route: Route, micro_batches: int) -> Moves:
    """By its update. Each record is read and written once; parameters are written once, and read where they are a part of the
    master and not in its memory."""
    sizes, trained = unit.records(route.crosses), sum(unit.trained)
    gradients = sum(unit.gradients_wide) if micro_batches > 1 else unit.gradients_nbytes
    if route.records == "nvme":
        records = sum(sizes.chunks[route.kept_records :])
        yield Link.READ, records
        yield Link.WRITTEN, records
    if route.parameters == "nvme":
        on_drive = [position >= route.kept_parameters for position in unit.trained_positions]
        yield Link.WRITTEN, sum(compress(unit.trained, on_drive))
        yield Link.READ, sum(compress(sizes.read, on_drive)) if route.value_path is not ValuePath.RESIDENT else 0
    if route.brings_gradients:
        yield Link.FROM_DEVICE, gradients
    if route.crosses:
        new, present = Link.TO_DEVICE, Link.FROM_DEVICE
        if route.value_path is ValuePath.COPY_OUT:
            new, present = present, new
        yield new, trained
        yield present, sum(sizes.read)
    if route.undoable:  # those in memory come to their second place first
        kept = sizes.chunks[: route.kept_records] if route.records == "nvme" else sizes.chunks
        yield Link.HOST_MEMORY, sum(kept)
        if route.keeps_values:
            in_memory = [position < route.kept_parameters for position in unit.trained_positions]
            former = sum(compress(unit.trained, in_memory)) if route.parameters == "nvme" else trained
            yield Link.HOST_MEMORY, 2 * former
    arithmetic = 2 * sizes.nbytes + gradients + trained + sum(sizes.read)
    yield Link.HOST_MEMORY if route.update_in is Memory.HOST else Link.DEVICE_MEMORY, arithmetic


def held(unit: UnitSizes, route: Route) -> Iterator[tuple[StateNames, Tier, int]]:
    """Of each state, in each tier."""
    near = sum(unit.chunks[: route.kept_parameters])
    yield PARAMETERS, "cpu", near
    yield PARAMETERS, route.parameters, unit.home - near
    sizes = unit.records(route.crosses)
    near = sum(sizes.chunks[: route.kept_records])
    yield OPTIMIZER_STATES, "cpu", near
    yield OPTIMIZER_STATES, route.records, sizes.nbytes - near
    yield GRADIENTS, route.gradients, unit.gradients_kept


def passed_through(
    unit: UnitSizes, route: Route, retained: int, parameter_buffer: int, *, gradient_parts: int
) -> Iterator[tuple[Tier, str, int, int]]:
    """Buffers that its states pass through, which all units share: tier, purpose, how many, bytes of each. `retained`: how many
    for fp32 gradients on their way to NVMe, each cut into `gradient_parts`. `parameter_buffer`: bytes of one for any chunk's
    parameters."""
    comes_from_file = route.parameters == "nvme" and route.kept_parameters < len(unit.chunks)
    if comes_from_file and route.model_in is Memory.DEVICE:
        yield "cpu", FETCHED, FETCH_BUFFERS, parameter_buffer
    if not unit.trained:
        return
    sizes, gradient = unit.records(route.crosses), max(unit.gradients_wide)
    if route.records == "nvme" and route.kept_records < len(unit.trained) and sizes.nbytes:
        # read ahead, in the update's hands, in writing
        yield "cpu", RECORDS, READ_AHEAD + 1 + IN_WRITING, max(sizes.chunks)
        # one for a unit whose turn comes before that of those read ahead
        yield "cpu", RECORDS_ON_DEMAND, 1, max(sizes.chunks)
    spills = route.gradients_in is None and retained > 0
    if spills:
        yield "cpu", GRADIENT_BUFFERS, retained * gradient_parts, gradient // gradient_parts
    if spills or route.brings_gradients:
        # a gradient comes back with each record that is read ahead, in hand, or out of order; one in writing has none any more
        yield "cpu", RELOADED, READ_AHEAD + 1 + 1, gradient
    if route.value_path is ValuePath.COPY_IN or (comes_from_file and route.value_path is not ValuePath.RESIDENT):
        # updated parameters on their way home, and where the update reads them too, those read ahead
        yield "cpu", UPDATED_PARAMETERS, (READ_AHEAD if any(sizes.read) else 0) + 1 + IN_WRITING, parameter_buffer
    if route.value_path is ValuePath.COPY_OUT:
        # in the update's hands; on its way home meanwhile, where that is memory: to a file's buffer it has gone before
        yield "device", UPDATED_PARAMETERS, 1 if comes_from_file and not route.kept_parameters else 2, parameter_buffer
