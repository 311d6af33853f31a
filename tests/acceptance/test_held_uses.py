# SPDX-License-Identifier: Apache-2.0
"""Units that `gathered` holds, and what comes and goes with their forward alone."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import nn

import offload
from tests.inside import units_of

from .runs import digest


class Reading(nn.Module):
    """Reads the weight of another module's child, which it does not call."""

    def __init__(self, other: nn.Linear) -> None:
        super().__init__()
        self.own = nn.Linear(8, 8)
        self.others = [other]
        self.fails = False

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.own(x) @ self.others[0].weight
        if self.fails:
            raise ValueError("the user's own")
        return x


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        read = nn.Linear(8, 8)
        self.blocks = nn.ModuleList([Reading(read), read])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x)
        return x


def made(folder: Path) -> offload.Engine:
    torch.manual_seed(0)
    model = Net()
    config = offload.Config(parameters="nvme", optimizer_states="nvme", nvme=folder / "nvme", prefetch=0)
    return offload.initialize(model, torch.optim.AdamW(model.parameters(), lr=1e-2), config)


def step(engine: offload.Engine) -> None:
    engine.module(torch.ones(2, 8, requires_grad=True)).square().mean().backward()
    engine.step()
    engine.zero_grad()


@pytest.mark.parametrize("known_before", [False, True])
@pytest.mark.parametrize("accelerator", ["cpu", "deferred"])
def test_what_a_forward_reads_beside_is_not_held(
    accelerator: str, known_before: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A forward inside `gathered` reads another unit's weight, for the first time or not, and raises: every use is over,
    no unit is left with fewer uses than none, and training goes on to the same bits."""
    monkeypatch.setenv("OFFLOAD_ACCELERATOR", accelerator)
    with made(tmp_path) as engine:
        for _ in range(3):
            step(engine)
        expected = digest(engine.state_dict())
    with made(tmp_path) as engine:
        reading = engine.module.blocks[0]
        if known_before:
            step(engine)
        with engine.gathered(reading.own.weight):
            reading.fails = True
            with pytest.raises(ValueError, match="own"):
                engine.module(torch.ones(2, 8, requires_grad=True))
            reading.fails = False
            with torch.no_grad():
                engine.module(torch.ones(2, 8))
        assert [unit.uses.count for unit in units_of(engine)] == [0] * len(units_of(engine))
        for _ in range(2 if known_before else 3):
            step(engine)
        assert digest(engine.state_dict()) == expected
