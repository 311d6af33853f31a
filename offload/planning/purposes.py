# SPDX-License-Identifier: Apache-2.0
"""What memory is for. The plan counts it by these names, and so does whoever allocates or leases it."""

from __future__ import annotations

from dataclasses import dataclass

from offload.planning.budget import Tier

UNITS_IN_USE = "parameters in use"
"""Units while the model computes with them, and on their way."""
FETCHED = "fetched parameters"
"""A shard or a chunk of parameters on its way to the device."""
UPDATED_PARAMETERS = "updated parameters"
"""What an update leaves, on its way to where parameters lie."""
RECORDS = "optimizer records"
"""A record that is read ahead, updated or written."""
RECORDS_ON_DEMAND = "optimizer records out of order"
"""The one that somebody waits for, where all others are taken."""
ROOM_TO_UNDO = "room to undo updates"
"""Second places of what updates write that begin before `step()`."""
GRADIENT_BUFFERS = "gradients"
"""A chunk's gradient until its update."""
RELOADED = "gradients read back"
"""A chunk's gradient that was spilled."""
LANDING = "gradients to add"
"""A micro-batch's gradient that came from the device and is to be added to the sum."""
ACCUMULATED = "accumulated gradients"
"""The fp32 sums of several micro-batches. They take memory when a second one comes."""
SQUARES = "sums of squares"
"""Sums of squares on their way from the device."""


@dataclass(frozen=True, slots=True)
class StateNames:
    """What a state is called in the plan where it lies in its furthest tier, where it is kept in host memory all the same, and
    where it lies on the device all the same."""

    furthest: str
    kept: str
    near: str

    def of(self, tier: Tier, furthest: Tier) -> str:
        """What lies in `tier` of a state whose furthest tier is `furthest`."""
        return self.furthest if tier == furthest else self.near if tier == "device" else self.kept


PARAMETERS = StateNames("parameters", "parameters kept in memory", "parameters kept on the device")
OPTIMIZER_STATES = StateNames("optimizer states", "optimizer states kept in memory", "optimizer states kept on the device")
GRADIENTS = StateNames("gradients", "gradients kept in memory", "gradients kept on the device")
