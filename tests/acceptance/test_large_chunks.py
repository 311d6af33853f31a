# SPDX-License-Identifier: Apache-2.0
"""Models with many chunks have larger ones: the same bits."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import offload
from offload import layout
from tests.inside import layout_of
from tests.small_sizes import small

from .models import ON_CPU, ON_NVME, ON_NVME_IN_PLACE, Setup, adamw, vector_batches
from .runs import assert_same_bits

WIDTH, STEPS = 1024, 2


def trained(setup: Setup, folder: Path, monkeypatch: pytest.MonkeyPatch) -> tuple[int, list[Any]]:
    """The largest chunk, and losses and weights."""
    monkeypatch.setenv("OFFLOAD_ACCELERATOR", setup.accelerator)
    torch.manual_seed(5)
    model = nn.Sequential(nn.Linear(WIDTH, 5 * WIDTH), nn.Linear(5 * WIDTH, WIDTH))
    losses = []
    with offload.initialize(model, adamw(model), offload.Config(**setup.fields(folder), max_grad_norm=1.0)) as engine:
        for x, _ in vector_batches(STEPS, WIDTH):
            for _ in range(2):
                loss = model(x).square().mean()
                engine.backward(loss)
            engine.step()
            engine.optimizer.zero_grad()
            losses.append(loss.item())
        return layout_of(engine).chunk_numel, [losses, engine.state_dict()]


@pytest.mark.parametrize("setup", [ON_CPU, ON_NVME, ON_NVME_IN_PLACE], ids=lambda setup: setup.name)
def test_larger_chunks_change_no_bit(setup: Setup, nvme: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    usual, expected = trained(setup, nvme, monkeypatch)
    small(monkeypatch, many_chunks=1)
    larger, found = trained(setup, nvme, monkeypatch)
    assert (usual, larger) == (layout.CHUNK_NUMEL, 8 * layout.CHUNK_NUMEL)
    assert_same_bits(found, expected)
