# SPDX-License-Identifier: Apache-2.0
"""The device that an engine computes on: the room on it, and what is copied to it and from it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal

import pytest
import torch

from offload.planning import placement
from offload.step.residency.device_room import DeviceRoom


def room_beyond_units_in_use(patch: pytest.MonkeyPatch, nbytes: int) -> None:
    """For units that stay, for those that are fetched ahead, and for sums."""
    patch.setattr(DeviceRoom, "left", lambda room, units: nbytes)


def gradient_buffers(patch: pytest.MonkeyPatch, of: Callable[[int], int]) -> None:
    """How many device buffers gradients leave through, of as many as there would be."""
    count = placement._transit_buffer_count
    patch.setattr(placement, "_transit_buffer_count", lambda *given: of(count(*given)))


def before_each_copy(
    patch: pytest.MonkeyPatch,
    kind: type,
    way: Literal["copy_in", "copy_out"],
    before: Callable[[torch.Tensor, torch.Tensor], object],
) -> None:
    """Of accelerators of that kind, with the destination and the source."""
    copy = getattr(kind, way)

    def watched(self: Any, destination: torch.Tensor, source: torch.Tensor) -> Any:
        before(destination, source)
        return copy(self, destination, source)

    patch.setattr(kind, way, watched)
