# SPDX-License-Identifier: Apache-2.0
"""What the tests of updates that may be undone share."""

from __future__ import annotations

from contextlib import suppress
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from offload.device.cpu import CpuAccelerator
from offload.device.deferred import DeferredAccelerator
from offload.device.lane import HostLane
from offload.device.pending import Pending
from tests.devices import at_update_lane
from tests.small_sizes import small

from .models import Setup

ON_CPU_DEVICE = Setup("nvme", "nvme", "cpu", "backward")
ON_DEFERRED = Setup("nvme", "nvme", "deferred", "backward")
BOTH = (ON_CPU_DEVICE, ON_DEFERRED)
both = pytest.mark.parametrize("setup", BOTH, ids=lambda setup: setup.name)
NEVER, AT_TIMES, ALWAYS = 1e6, 3.0, 1e-3
"""Norms to clip to, where those of the gradients are 1 to 5."""
STEPS = 6


def at_once(patch: pytest.MonkeyPatch) -> None:
    """Every step speculates, and what it begins has run when backward goes on: so that there is something to undo."""

    def run(lane: HostLane, *job: Any) -> Pending:
        pending = lane.submit(*job)
        with suppress(Exception):  # whoever waits for it is told
            pending.wait()
        return pending

    small(patch, quiet_steps=0)
    for kind in (CpuAccelerator, DeferredAccelerator):
        at_update_lane(patch, kind, run)


def counts(engine: Any) -> tuple[int, int]:
    stats = engine.stats()
    return stats["speculated_steps"], stats["undone_steps"]


def one_step(engine: Any, x: torch.Tensor, y: torch.Tensor) -> None:
    F.mse_loss(engine.module(x), y).backward()
    engine.step()
    engine.zero_grad()
