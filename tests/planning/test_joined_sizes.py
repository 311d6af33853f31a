# SPDX-License-Identifier: Apache-2.0
"""How many small blocks are joined to one unit, by what a budget grants and what their states take."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

import offload
from offload.build.assembly import Described
from offload.device.arithmetic.rules import MOMENTS
from offload.device.deferred import DeferredAccelerator
from offload.layout import build_layout
from tests.small_sizes import small


@pytest.mark.parametrize("budget", ["device_memory", "cpu_memory"])
@pytest.mark.parametrize("trained", [True, False])
@pytest.mark.parametrize(
    ("dtype", "state_format", "expected"),
    [("fp32", "fp32", 1), ("bf16", "fp32", 1), ("bf16", "fp32", 4), ("bf16", "split", 1), ("bf16", "8bit", 1)],
)
def test_joined_blocks_take_a_sixteenth_of_the_budget_that_is_stated(
    budget: str, dtype: str, state_format: str, expected: int, trained: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With all their states, by what these take in their format; another block would take more than that."""
    small(monkeypatch, joined_numel=1 << 20)
    width, granted = 128, 1 << 24
    model = nn.Sequential(*(nn.Linear(width, width, bias=False) for _ in range(64))).requires_grad_(trained)
    model.append(nn.Linear(width, 2))
    fields: dict[str, Any] = {"dtype": dtype, "state_format": state_format, budget: granted}
    config = offload.Config(**fields).expecting(expected)
    described = Described.of(model, torch.optim.AdamW(model.parameters()), config, 1)
    known = described.known(DeferredAccelerator(), MOMENTS)
    layout = build_layout(known.specs, chunk_numel=width * width)
    sizes = known.decision(config, layout).problem.footprint.units[1]
    taken, count = sizes.home + sizes.gradients_kept + sizes.beside.nbytes, len(described.module_units[1].modules)
    assert taken <= granted / 16 < taken + taken / count or count == 64
    assert [info.unit_index for info in described.infos[:count]] == [1] * count
    assert [info.part_index for info in described.infos[:count]] == list(range(count))
    assert described.infos[count].unit_index == 2 and described.infos[count].part_index == 0
