from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import nn

import offload.deepspeed as deepspeed

from ..ranks.crew import Crew

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
