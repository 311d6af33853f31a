# SPDX-License-Identifier: Apache-2.0
"""The device that an engine computes on: the room on it, and what is copied to it and from it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any, Literal

import pytest
import torch

from offload.build import assembly
from offload.device.accelerator import Accelerator
from offload.device.deferred import DeferredAccelerator
from offload.device.device_memory import MemoryUse
from offload.device.lane import HostLane
from offload.device.pending import Pending
from offload.planning import placement
from offload.step.updates.records_on_device import RecordsOnDevice


def says_it_has(patch: pytest.MonkeyPatch, nbytes: int, kind: type[Accelerator] = DeferredAccelerator) -> None:
    """Such a device, so much memory, whatever it has: with none of it there is no room for units that stay, for those that
    are fetched ahead, and for sums."""

    def made(inner: type[Accelerator]) -> type[Accelerator]:
        def memory_use(device: Accelerator) -> MemoryUse | None:
            use = inner.memory_use(device)
            return use and replace(use, total=nbytes)

        return type(inner.__name__, (inner,), {"memory_use": memory_use})

    computed_on(patch, kind, made)


def records_stay_home(patch: pytest.MonkeyPatch) -> None:
    """Whatever room the device has: for tests of what stays there besides, which such a unit's parameters and gradients do."""
    patch.setattr(RecordsOnDevice, "may_come", lambda records, unit, spare_nbytes: False)


class _Around:
    """A lane, but for `submit`."""

    def __init__(self, lane: HostLane, submit: Callable[..., Pending]) -> None:
        self._lane, self._submit = lane, submit

    def submit(self, job: Callable[[], None], about: object = None, nbytes: int = 0) -> Pending:
        return self._submit(self._lane, job, about, nbytes)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._lane, name)


def at_update_lane(patch: pytest.MonkeyPatch, kind: type[Accelerator], submit: Callable[..., Pending]) -> None:
    """`at_lane` of the updates."""
    at_lane(patch, kind, "update", submit)


def at_lane(patch: pytest.MonkeyPatch, kind: type[Accelerator], of: str, submit: Callable[..., Pending]) -> None:
    """On such a device jobs come to the lane of this name by `submit(lane, job, about, nbytes)`."""

    def made(inner: type[Accelerator]) -> type[Accelerator]:
        def host_lane(device: Accelerator, name: str, **waits: bool) -> Any:
            lane = inner.host_lane(device, name, **waits)
            return _Around(lane, submit) if name == of else lane

        return type(inner.__name__, (inner,), {"host_lane": host_lane})

    computed_on(patch, kind, made)


def gradient_buffers(patch: pytest.MonkeyPatch, of: Callable[[int], int]) -> None:
    """How many device buffers gradients leave through, of as many as there would be."""
    count = placement._transit_buffer_count
    patch.setattr(placement, "_transit_buffer_count", lambda *given: of(count(*given)))


def computed_on(
    patch: pytest.MonkeyPatch, kind: type[Accelerator], made: Callable[[type[Accelerator]], type[Accelerator]]
) -> None:
    """Engines that are opened from now on are on what `made` makes of that kind of device, where they would be on one."""
    patch.setattr(assembly, kind.__name__, made(getattr(assembly, kind.__name__)))


def before_each_copy(
    patch: pytest.MonkeyPatch,
    kind: type[Accelerator],
    way: Literal["copy_in", "copy_out", "copy_out_beside_compute"],
    before: Callable[[torch.Tensor, torch.Tensor], object],
) -> None:
    """On such a device, with the destination and the source."""

    def made(inner: type[Accelerator]) -> type[Accelerator]:
        def copy(device: Accelerator, destination: torch.Tensor, source: torch.Tensor) -> Pending:
            before(destination, source)
            copied: Pending = getattr(inner, way)(device, destination, source)
            return copied

        return type(inner.__name__, (inner,), {way: copy})

    computed_on(patch, kind, made)
