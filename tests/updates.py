# SPDX-License-Identifier: Apache-2.0
"""The optimizer's updates and the saves beside them: held up on the way, or made when the test says."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest

from offload.device.cpu import CpuAccelerator
from offload.device.deferred import DeferredAccelerator
from offload.device.lane import HostLane
from offload.device.pending import Pending
from offload.model.unit import Unit

from .devices import at_update_lane
from .small_sizes import small


def before_each_update(patch: pytest.MonkeyPatch, before: Callable[[Unit, Any], object]) -> None:
    """Of engines that are opened from now on, on the lane of the host, as a unit's update is begun there: with the unit and its
    update."""

    def submit(lane: HostLane, job: Callable[[], None], about: object, nbytes: int) -> Pending:
        if not isinstance(about, Unit):
            return lane.submit(job, about, nbytes)
        unit, update = about, about.update

        def run() -> None:
            before(unit, update)
            job()

        return lane.submit(run, about, nbytes)

    for kind in (CpuAccelerator, DeferredAccelerator):
        at_update_lane(patch, kind, submit)


def training_rests(patch: pytest.MonkeyPatch, *, always: bool) -> None:
    """What a save thinks of the thread that drives the model: it makes updates in its place where that rests."""
    small(patch, quiet_seconds=0.0 if always else math.inf)
