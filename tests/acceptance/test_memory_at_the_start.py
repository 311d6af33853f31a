# SPDX-License-Identifier: Apache-2.0
"""While a model is brought into its tiers the engine holds no more host memory than was planned for training."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import nn

import offload
from offload.tiers.memory import PAGE_NBYTES
from tests.small_sizes import small

from .models import ON_NVME, ON_NVME_IN_PLACE, Setup, adamw

SETUPS = [
    ON_NVME,
    ON_NVME_IN_PLACE,
    Setup("cpu", "nvme", "deferred"),
    Setup("cpu", "nvme", "cpu"),
    Setup("device", "nvme", "deferred"),
]


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
@pytest.mark.parametrize("setup", SETUPS, ids=lambda setup: f"{setup.name}-{setup.accelerator}")
def test_what_is_held_was_planned(setup: Setup, dtype: str, nvme: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OFFLOAD_ACCELERATOR", setup.accelerator)
    small(monkeypatch, chunk_numel=65536)
    torch.manual_seed(3)
    widths = (64, 512, 1024, 1024, 512)
    model = nn.Sequential(*(nn.Sequential(nn.Linear(128, width), nn.Tanh(), nn.Linear(width, 128)) for width in widths))
    with offload.initialize(model, adamw(model), offload.Config(**setup.fields(nvme), dtype=dtype)) as engine:
        stats = engine.stats()
        lines = [line["nbytes"] for line in stats["planned"] if line["tier"] == "cpu"]
        assert stats["host_peak_nbytes"] <= sum(lines) + len(lines) * PAGE_NBYTES
        for _ in range(2):  # in buffers in which initial values were made
            engine.backward(model(torch.randn(4, 128)).square().mean())
            engine.step()
            engine.zero_grad()
