# SPDX-License-Identifier: Apache-2.0
"""What the schedule computes beforehand is what the engine then holds."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import offload
from offload.planning.schedule import plan, required_nbytes
from tests.inside import residency_of
from tests.planning.simulation import simulate


@pytest.mark.parametrize("accelerator", ["cpu", "deferred"])
@pytest.mark.parametrize("prefetch", [0, 1, 2])
def test_simulated_peak_is_the_measured_peak(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, accelerator: str, prefetch: int
) -> None:
    monkeypatch.setenv("OFFLOAD_ACCELERATOR", accelerator)
    blocks = [nn.Sequential(nn.Linear(64, 64 * scale), nn.ReLU(), nn.Linear(64 * scale, 64)) for scale in (1, 3, 2, 4, 1)]
    model = nn.Sequential(*blocks)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    config = {"parameters": "nvme", "optimizer_states": "cpu", "nvme": tmp_path, "prefetch": prefetch}
    with offload.initialize(model, optimizer, config) as engine:
        residency = residency_of(engine)
        sizes = [unit["nbytes"] for unit in engine.stats()["units"]]
        for _ in range(4):
            loss = F.mse_loss(model(torch.ones(2, 64)), torch.zeros(2, 64))
            loss.backward()
            engine.step()
            engine.zero_grad()
        trace = residency.schedule.trace
        schedule = plan(trace, sizes, residency.room.capacity_nbytes, prefetch)
        assert residency.room.peak_resident_nbytes == simulate(schedule, sizes) <= residency.room.capacity_nbytes
        assert residency.room.capacity_nbytes >= required_nbytes(trace, sizes, prefetch)
        assert residency.room.peak_resident_nbytes > sum(sizes) // 4
