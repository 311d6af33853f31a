"""Where each unit's states live between uses, how its parameters come to where the model computes, and where its update runs.

A route is data. The planner makes one for each unit, and everything else follows it: who fetches the unit, which memory its
update's kernel addresses, where that finds the values and where it leaves the new ones. Placements are the cases in which all
routes are equal.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

from offload.layout import Layout
from offload.planning.budget import Placement, Tier


class Memory(Enum):
    """Which memory an update computes in, and so which processor computes it."""

    HOST = "host"
    DEVICE = "device"


class Arrival(Enum):
    """How a unit's parameters come to where the model computes.

    STAYS   they are there for good
    READ    the store reads straight into memory that the model computes on
    COPIED  from the store, through a staging buffer if it must be, by H2D
    """

    STAYS = "stays"
    READ = "read"
    COPIED = "copied"


class Emission(Enum):
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


@dataclass(frozen=True, slots=True)
class Route:
    """One unit's.

    parameters  the tier of their home, as `gradients` and `records`: the furthest that any of the unit's chunks lies
    update_in   the memory in which the unit's update computes
    undoable    whether the update may begin before `step()`: there is a second place for all that it writes
    """

    parameters: Tier
    gradients: Tier
    records: Tier
    update_in: Memory
    arrival: Arrival
    emission: Emission
    undoable: bool = False

    @property
    def has_store(self) -> bool:
        """Whether the parameters have a home in a store, rather than in the very memory that the model computes on."""
        return self.arrival is not Arrival.STAYS


def routes_of(layout: Layout, placement: Placement, *, unified: bool) -> tuple[Route, ...]:
    """The route of each of the layout's units. `unified`: the model computes where host memory lies."""
    stays = placement.unit_capacity_nbytes is None
    sharded = layout.shards_parameters
    arrival = Arrival.STAYS if stays else Arrival.READ if unified and not sharded else Arrival.COPIED
    on_device = placement.optimizer_states == "device"
    update_in = Memory.DEVICE if on_device and not unified else Memory.HOST
    emission = _shard_emission(placement, unified) if sharded else _emission(stays, on_device, unified)
    return tuple(
        Route(
            parameters="cpu" if unit.index < placement.kept.unit_count else placement.parameters,
            gradients=placement.gradients,
            records=placement.optimizer_states,
            update_in=update_in,
            arrival=arrival,
            emission=emission,
            undoable=unit.index in placement.undoable_units,
        )
        for unit in layout.units
    )


def _emission(stays: bool, on_device: bool, unified: bool) -> Emission:
    if unified:
        return Emission.IN_PLACE if stays else Emission.RESIDENT
    if stays:
        return Emission.IN_PLACE if on_device else Emission.COPY_IN
    return Emission.COPY_OUT if on_device else Emission.STORE


def _shard_emission(placement: Placement, unified: bool) -> Emission:
    """Shards are updated at home: what is resident holds the other ranks' too, and is gathered anew."""
    if unified or (placement.parameters == "device") == (placement.optimizer_states == "device"):
        return Emission.STORE
    return Emission.COPY_IN if placement.parameters == "device" else Emission.COPY_OUT
