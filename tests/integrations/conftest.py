# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import offload.deepspeed as deepspeed

from ..ranks.crew import Crew

FRAMEWORKS = Path(__file__).parents[2] / "docs" / "performance" / "frameworks.json"
Result = tuple[Sequence[Any], Mapping[str, torch.Tensor]]
"""Losses (or, for each step, a list of what was logged), and weights at the end."""
CONFIG: dict[str, Any] = {"train_batch_size": 3, "optimizer": {"type": "AdamW", "params": {"lr": 0.01}}}


def small() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 2))


@pytest.fixture(autouse=True)
def environment(monkeypatch: pytest.MonkeyPatch) -> None:
    """Trainers of last year leave there what they run in, for every Accelerator that comes after."""
    monkeypatch.setenv("ACCELERATE_MIXED_PRECISION", "no")
    monkeypatch.delenv("ACCELERATE_MIXED_PRECISION")


@pytest.fixture
def start(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., deepspeed.DeepSpeedEngine]]:
    """`initialize` on a small model; engines are closed at the end."""
    monkeypatch.setenv("OFFLOAD_ACCELERATOR", "cpu")
    made: list[deepspeed.DeepSpeedEngine] = []

    def call(config: dict[str, Any] | None = None, **others: Any) -> deepspeed.DeepSpeedEngine:
        model = others.pop("model", None) or small()
        made.append(deepspeed.initialize(model=model, config=CONFIG | (config or {}), **others)[0])
        return made[-1]

    yield call
    for one in made:
        one.destroy()


@pytest.fixture(scope="session")
def two(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Crew]:
    """Two ranks, for jobs of `deepspeed_jobs`."""
    crew = Crew(2, tmp_path_factory.mktemp("two"), jobs="tests.integrations.deepspeed_jobs")
    yield crew
    crew.close()


class Distances:
    """How far a script with an engine ends from the plain one."""

    def __init__(self) -> None:
        self.found: dict[str, dict[str, float]] = {}

    def note(self, name: str, ours: Result, plain: Result) -> None:
        """`name`: as the table of docs/huggingface.md has it. Keys of attention have no biases in these models."""
        losses, others = (torch.tensor(one[0], dtype=torch.float64) for one in (ours, plain))
        assert losses.shape == others.shape and set(ours[1]) == set(plain[1])
        weights = [(ours[1][key].double() - plain[1][key].double()).abs().max().item() for key in ours[1]]
        relative = ((losses - others).abs() / others.abs().clamp_min(1e-3)).max().item()
        self.found[name] = {"steps": len(losses), "logged": relative, "weight": max(weights)}


@pytest.fixture(scope="session")
def distances() -> Iterator[Distances]:
    """What was noted goes into docs/performance/frameworks.json where FRAMEWORKS_TABLE is set."""
    noted = Distances()
    yield noted
    if os.environ.get("FRAMEWORKS_TABLE") and noted.found:
        before = json.loads(FRAMEWORKS.read_text(encoding="utf-8")) if FRAMEWORKS.exists() else {}
        FRAMEWORKS.write_text(json.dumps(before | noted.found, indent=2) + "\n", encoding="utf-8")
