# SPDX-License-Identifier: Apache-2.0
"""What the tests of updates that may be undone share."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F

from offload.step.updates.update import Updates
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
    launch = Updates.launch

    def launch_and_run(self: Updates, unit_index: int) -> Any:
        job = launch(self, unit_index)
        job.wait()
        return job

    small(patch, quiet_steps=0)
    patch.setattr(Updates, "launch", launch_and_run)


def counts(engine: Any) -> tuple[int, int]:
    stats = engine.stats()
    return stats["speculated_steps"], stats["undone_steps"]


def one_step(engine: Any, x: torch.Tensor, y: torch.Tensor) -> None:
    F.mse_loss(engine.module(x), y).backward()
    engine.step()
    engine.zero_grad()
