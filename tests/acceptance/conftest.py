# SPDX-License-Identifier: Apache-2.0
"""Fixtures: a seed, one way to open an engine in a named setup, so that each test says only what it is about."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import offload
from tests.small_sizes import small

from .models import Setup
from .speculating import at_once


@pytest.fixture(autouse=True)
def settled(monkeypatch: pytest.MonkeyPatch) -> None:
    """A seed; the cpu accelerator, on machines with a GPU too."""
    monkeypatch.setenv("OFFLOAD_ACCELERATOR", "cpu")
    torch.manual_seed(0)


@pytest.fixture
def nvme(tmp_path: Path) -> Path:
    directory = tmp_path / "nvme"
    directory.mkdir()
    return directory


Opener = Callable[..., "offload.Engine"]


@pytest.fixture
def opened(nvme: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Opener]:
    """`opened(model, optimizer, setup, **config)` is an engine on the setup's accelerator, closed after the test.
    `micro_batches`: as of `Config.expecting`."""
    engines: list[Any] = []

    def open_engine(
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        setup: Setup,
        *,
        weights: Path | None = None,
        micro_batches: int = 1,
        **fields: Any,
    ) -> Any:
        monkeypatch.setenv("OFFLOAD_ACCELERATOR", setup.accelerator)
        config = offload.Config(**setup.fields(nvme, **fields)).expecting(micro_batches)
        engine = offload.initialize(model, optimizer, config, weights=weights)
        engines.append(engine)
        return engine

    yield open_engine
    for engine in reversed(engines):
        engine.close()


@pytest.fixture
def speculating(monkeypatch: pytest.MonkeyPatch) -> None:
    """With chunks so small that gradients are spilled."""
    small(monkeypatch, chunk_numel=4096)
    at_once(monkeypatch)
