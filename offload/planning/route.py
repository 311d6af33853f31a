# SPDX-License-Identifier: Apache-2.0
"""Where each unit's states live between uses, how its parameters come to where the model computes, and where its update runs.

A route is data. The planner makes one for each unit, and everything else follows it: which stores hold the unit's states, who
fetches it, where its gradients are summed, which memory its update's kernel addresses, where that finds the values and where it
leaves the new ones. Where a budget holds a part of the states, routes differ between units.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from enum import Enum
from functools import lru_cache
from itertools import chain, repeat

import numpy as np
import numpy.typing as npt

from offload.planning.budget import Tier
from offload.planning.sizes import Footprint, UnitSizes
from offload.planning.tier_choice import Choice

_GOLDEN = (5**0.5 - 1) / 2


class Memory(Enum):
    """Which memory something is computed in, and so which processor computes it."""

    HOST = "host"
    DEVICE = "device"


class FetchPath(Enum):
    """How a unit's parameters come to where the model computes.

    STAYS   they are there for good
    READ    the store reads straight into memory that the model computes on
    COPIED  from the store, through a staging buffer if it must be, by H2D
    """

    STAYS = "stays"
    READ = "read"
    COPIED = "copied"


class ValuePath(Enum):
    """Where an update finds a chunk's parameter values, and where it leaves the new ones.

    IN_PLACE  in the flat, which lies for good where the update's kernel can address it
    RESIDENT  in the flat, which must be resident meanwhile; from there they are written to their store
    STORE     in the store of the parameters, or a staging buffer on the way from it and back to it
    COPY_IN   computed by the host, their home is device memory: a staging buffer, and H2D
    COPY_OUT  computed by the device, their home is a store of the host: device memory, and D2H
    """

    IN_PLACE = "in place"
    RESIDENT = "resident"
    STORE = "store"
    COPY_IN = "copy in"
    COPY_OUT = "copy out"


_FROM_STORE = (ValuePath.RESIDENT, ValuePath.STORE)


class RecordPath(Enum):
    """How an update gets at a chunk's record, and leaves the new one.

    IN_PLACE  it lies in memory that the update's kernel can address
    FILE      read from a file into a staging buffer, and written from there
    """

    IN_PLACE = "in place"
    FILE = "file"


@dataclass(frozen=True, slots=True)
class Route:
    """One unit's.

    parameters  the tier of their home, as `gradients` and `records`: the furthest that any of the unit's chunks lies
    kept_parameters, kept_records  how many of its first chunks lie in host memory all the same
    model_in    the memory in which the model computes with the parameters
    update_in   the memory in which the unit's update computes
    undoable    whether the update may begin before `step()`: there is a second place for all that it writes
    keeps_values  whether such an update keeps the values that it overwrites in host memory: they are a part of their masters
    """

    parameters: Tier
    gradients: Tier
    records: Tier
    model_in: Memory
    update_in: Memory
    fetch_path: FetchPath
    value_path: ValuePath
    kept_parameters: int = 0
    kept_records: int = 0
    undoable: bool = False
    keeps_values: bool = False

    def __post_init__(self) -> None:
        """Refuse what nothing executes."""
        on_device = self.update_in is Memory.DEVICE
        reasons = {
            "there is no device memory beside the host's to update in": on_device and self.model_in is Memory.HOST,
            "the host cannot address records in device memory": self.records_in is Memory.DEVICE and not on_device,
            "records go to the device by way of host memory": on_device and self.records_in is not Memory.DEVICE,
            "the device updates with gradients that it has": on_device and self.gradients_in is not Memory.DEVICE,
            "what stays has no store to be read from": not self.has_store and self.value_path in _FROM_STORE,
            "values cross to the other memory": self.crosses and (self.home_in is self.update_in),
        }
        wrong = [reason for reason, holds in reasons.items() if holds]
        if wrong:
            raise AssertionError(f"{self} cannot be: {'; '.join(wrong)}")

    @property
    def has_store(self) -> bool:
        """Whether the parameters have a home in a store, rather than in the very memory that the model computes on."""
        return self.fetch_path is not FetchPath.STAYS

    @property
    def home_in(self) -> Memory:
        """The memory in which the home of its parameters lies, or through which they come from there."""
        return self.model_in if self.parameters == "device" else Memory.HOST

    @property
    def records_in(self) -> Memory:
        """The memory in which records lie, or through which they come from a file."""
        return self.model_in if self.records == "device" else Memory.HOST

    @property
    def crosses(self) -> bool:
        """Whether the update's kernel computes in another memory than the parameters' home."""
        return self.value_path in (ValuePath.COPY_IN, ValuePath.COPY_OUT)

    @property
    def gradients_in(self) -> Memory | None:
        """The memory in which gradients are summed; None: in host memory too, but they may spill from there."""
        if self.gradients == "nvme":
            return None
        on_device = self.gradients == "device" and self.model_in is Memory.DEVICE
        return Memory.DEVICE if on_device else Memory.HOST

    @property
    def gradients_leave_device(self) -> bool:
        """Whether gradients, computed on a device of its own, are summed in host memory."""
        return self.model_in is Memory.DEVICE and self.gradients_in is not Memory.DEVICE

    @property
    def brings_gradients(self) -> bool:
        """Whether the update finds its gradients in another memory than its own, and brings them over itself."""
        return self.gradients_in is Memory.DEVICE and self.update_in is Memory.HOST

    def parameter_tiers(self) -> Iterator[Tier]:
        """Of the unit's chunks, one after the other, without end."""
        return chain(repeat("cpu", self.kept_parameters), repeat(self.parameters))

    def record_homes(self) -> Iterator[tuple[Tier, RecordPath]]:
        """Of its trained chunks, one after the other, without end: where the record lies, and how an update gets at it."""
        path = RecordPath.FILE if self.records == "nvme" else RecordPath.IN_PLACE
        return chain(repeat(("cpu", RecordPath.IN_PLACE), self.kept_records), repeat((self.records, path)))


def routes_of(units: Sequence[UnitSizes], choice: Choice, *, unified: bool, sharded: bool) -> tuple[Route, ...]:
    """The route of each unit, but for what is `undoable`. `unified`: the model computes where host memory lies. `sharded`: a
    unit's chunks are one rank's part of it."""
    made: dict[tuple[Tier, Tier, Tier, int, int], Route] = {}
    routes = []
    kept, near = choice.kept, choice.near
    parameters_left, kept_records_of = kept.parameter_count, _kept_records(units, choice, unified)
    for unit in units:
        parameters: Tier = "device" if unit.index in near.parameters else choice.parameters
        records: Tier = "device" if unit.index in near.records else choice.states
        gradients: Tier = "device" if unit.index in near.gradients else choice.gradients
        kept_parameters, kept_records = 0, kept_records_of.get(unit.index, 0)
        if parameters == "nvme":
            kept_parameters = min(parameters_left, len(unit.chunks))
            parameters_left -= kept_parameters
            if unit.index < kept.unit_count:
                parameters, kept_parameters = "cpu", 0
        told = (parameters, gradients, records, kept_parameters, kept_records)
        route = made.get(told)
        if route is None:
            route = _route(parameters, gradients, records, unified=unified, sharded=sharded)
            if kept_parameters or kept_records:
                route = replace(route, kept_parameters=kept_parameters, kept_records=kept_records)
            made[told] = route
        routes.append(route)
    return tuple(routes)


def kept_first(units: Sequence[UnitSizes], *, unified: bool) -> tuple[tuple[int, int], ...]:
    """The trained chunks of units whose records might lie on NVMe, in the order in which these are kept in host memory: each as
    (position of the unit, position in the unit). `unified`: the model computes where host memory lies. There one unit after the
    other: those behind lie on NVMe as a whole, so that their updates begin in backward (`Route.undoable`), whose processor has
    nothing to spare for them later."""
    counts = tuple(len(unit.trained) for unit in units)
    return _kept_order(counts, unified)


def _kept_order(counts: tuple[int, ...], unified: bool) -> tuple[tuple[int, int], ...]:
    return _one_after_the_other(counts) if unified else _in_turn(counts)


@lru_cache
def _one_after_the_other(counts: tuple[int, ...]) -> tuple[tuple[int, int], ...]:
    """`counts`: of each unit's trained chunks."""
    return tuple((unit, index) for unit, count in enumerate(counts) for index in range(count))


@lru_cache
def _in_turn(counts: tuple[int, ...]) -> tuple[tuple[int, int], ...]:
    """An order of which any first part has about the same share of each unit, and the first chunks of it. A unit's chunks come
    at equal distances. Where each unit's first one comes goes by the fractional parts of the multiples of the golden ratio: any
    part of them lies evenly among all."""
    chunks = _one_after_the_other(counts)
    return tuple(sorted(chunks, key=lambda one: (one[1] + one[0] * _GOLDEN % 1.0) / counts[one[0]]))


def _kept_records(units: Sequence[UnitSizes], choice: Choice, unified: bool) -> Mapping[int, int]:
    """By unit, how many of the records that might lie on NVMe lie in host memory."""
    if choice.states != "nvme" or not choice.kept.record_count:
        return {}
    waiting = [unit for unit in units if unit.index not in choice.near.records]
    positions = _kept_positions(tuple(len(unit.trained) for unit in waiting), unified)
    counts = np.bincount(positions[: choice.kept.record_count], minlength=len(waiting))
    return {unit.index: count for unit, count in zip(waiting, counts.tolist(), strict=True)}


@lru_cache
def _kept_positions(counts: tuple[int, ...], unified: bool) -> npt.NDArray[np.intp]:
    """Of each chunk of `kept_first` the position of its unit."""
    return np.array([position for position, _ in _kept_order(counts, unified)], dtype=np.intp)


def alike(footprint: Footprint, routes: Sequence[Route]) -> list[tuple[UnitSizes, Route, int]]:
    """The first of all units that are alike and have one route, the route, and how many they are."""
    found: dict[tuple[int, int], tuple[Route, int]] = {}
    for kind, route in zip(footprint.kinds, routes, strict=True):
        told = kind, id(route)
        found[told] = route, found[told][1] + 1 if told in found else 1
    return [(footprint.units[kind], route, count) for (kind, _), (route, count) in found.items()]


def with_undo(routes: Sequence[Route], keeps_values: Mapping[int, bool]) -> tuple[Route, ...]:
    """The same, those of these units undoable, by their indices."""
    made: dict[tuple[int, bool], Route] = {}
    changed = list(routes)
    for index, keeps in keeps_values.items():
        told = id(routes[index]), keeps
        if told not in made:
            made[told] = replace(routes[index], undoable=True, keeps_values=keeps)
        changed[index] = made[told]
    return tuple(changed)


@lru_cache
def _route(parameters: Tier, gradients: Tier, records: Tier, *, unified: bool, sharded: bool) -> Route:
    stays = not sharded and (parameters == "device" or (parameters == "cpu" and unified))
    fetch_path = FetchPath.STAYS if stays else FetchPath.READ if unified and not sharded else FetchPath.COPIED
    on_device = records == "device"
    return Route(
        parameters=parameters,
        gradients=gradients,
        records=records,
        model_in=Memory.HOST if unified else Memory.DEVICE,
        update_in=Memory.DEVICE if on_device and not unified else Memory.HOST,
        fetch_path=fetch_path,
        value_path=_shard_value_path(parameters, records, unified) if sharded else _value_path(stays, on_device, unified),
    )


def _value_path(stays: bool, on_device: bool, unified: bool) -> ValuePath:
    if unified:
        return ValuePath.IN_PLACE if stays else ValuePath.RESIDENT
    if stays:
        return ValuePath.IN_PLACE if on_device else ValuePath.COPY_IN
    return ValuePath.COPY_OUT if on_device else ValuePath.STORE


def _shard_value_path(parameters: Tier, records: Tier, unified: bool) -> ValuePath:
    """Shards are updated at home: what is resident holds the other ranks' too, and is gathered anew."""
    if unified or (parameters == "device") == (records == "device"):
        return ValuePath.STORE
    return ValuePath.COPY_IN if parameters == "device" else ValuePath.COPY_OUT
