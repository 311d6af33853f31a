# SPDX-License-Identifier: Apache-2.0
"""What the engine's Python does for a block of a model, counted in calls: no load of the machine changes that."""

from __future__ import annotations

import sys
from pathlib import Path
from types import FrameType
from typing import Any

import pytest
import torch

import offload

ROOT = Path(__file__).resolve().parent.parent.parent
MOST_CALLS = 380
"""Of Python functions in a step for each block of 12 parameters, PyTorch's own and the model's among them."""


def test_a_block_beside_a_device_takes_few_calls(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    few, many = (calls_of_a_step(count) for count in (4, 12))
    assert (many - few) / 8 < MOST_CALLS


def calls_of_a_step(block_count: int) -> int:
    import overhead
    from stub_device import stub_device

    model = overhead.built("blocks")
    del model.layers[block_count:]
    for layer in model.layers:
        offload.unit(layer)
    with (
        stub_device(),
        offload.initialize(
            model, torch.optim.AdamW(model.parameters()), offload.Config(parameters="cpu", optimizer_states="cpu")
        ) as engine,
    ):
        for _ in range(3):
            step(engine)
        return calls(lambda: step(engine))


def step(engine: Any) -> None:
    engine.module(torch.ones(4, 64)).square().mean().backward()
    engine.optimizer.step()
    engine.optimizer.zero_grad()


def calls(work: Any) -> int:
    """Of Python functions, in this thread."""
    count = 0

    def heard(frame: FrameType, event: str, _: Any) -> None:
        nonlocal count
        count += event == "call"

    sys.setprofile(heard)
    try:
        work()
    finally:
        sys.setprofile(None)
    return count
