# SPDX-License-Identifier: Apache-2.0
"""The device that an engine computes on: the room on it, and what is copied to it and from it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal

import pytest
import torch

from offload.build import assembly
from offload.device.accelerator import Accelerator
from offload.device.pending import Pending
from offload.planning import placement
from offload.step.residency.device_room import DeviceRoom


def room_beyond_units_in_use(patch: pytest.MonkeyPatch, nbytes: int) -> None:
    """For units that stay, for those that are fetched ahead, and for sums."""
    patch.setattr(DeviceRoom, "left", lambda room, units: nbytes)


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
    way: Literal["copy_in", "copy_out"],
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
