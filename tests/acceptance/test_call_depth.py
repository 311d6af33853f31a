# SPDX-License-Identifier: Apache-2.0
"""A model may be used, and recurse, as deep as Python's stack goes: its end is a `RecursionError`, and training goes on."""

from __future__ import annotations

import functools
import gc
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import offload
from tests.crosses import in_pairs

from .models import adamw, vector_batches
from .runs import assert_same_bits

WIDTH = 8
PLACES = [
    ("device", "device", ""),
    ("cpu", "cpu", ""),
    ("nvme", "nvme", ""),
    ("cpu", "cpu", "deferred"),
    ("nvme", "nvme", "deferred"),
]
places = pytest.mark.parametrize(("parameters", "states", "accelerator"), PLACES)


class _Recursing(nn.Module):
    """Where it is told to, in one of two ways: calls of a block at every depth, or blocks within each other."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(5)
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()) for _ in range(4))
        self.how = ""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for index, block in enumerate(self.blocks):
            x = block(x)
            if self.how and index == 1:
                x = self.deeper(x)
        return x

    def deeper(self, x: torch.Tensor) -> torch.Tensor:
        return self(x) if self.how == "modules" else self.deeper(self.blocks[2](x))


def _config(parameters: str, states: str, accelerator: str, folder: Path, monkeypatch: pytest.MonkeyPatch) -> offload.Config:
    if accelerator:
        monkeypatch.setenv("OFFLOAD_ACCELERATOR", accelerator)
    return offload.Config(parameters=parameters, optimizer_states=states, nvme=str(folder))


def _step(model: nn.Module, engine: Any, x: torch.Tensor, y: torch.Tensor) -> float:
    engine.zero_grad()
    loss = F.mse_loss(model(x), y)
    loss.backward()
    engine.step()
    return loss.item()


# A place has its own hooks and waits on the stack that ends; backward is followed where a gradient is wanted.
@pytest.mark.parametrize(
    ("parameters", "states", "accelerator", "how", "grad"), in_pairs(PLACES, ("calls", "modules"), (True, False))
)
def test_a_forward_that_recurses_for_ever_ends_and_training_goes_on(
    parameters: str, states: str, accelerator: str, how: str, grad: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = _config(parameters, states, accelerator, tmp_path, monkeypatch)
    found = []
    for recurses in (False, True):
        model = _Recursing()
        with offload.initialize(model, adamw(model), config) as engine:
            losses = []
            for x, y in vector_batches(3, WIDTH):
                if recurses:
                    model.how = how
                    with pytest.raises(RecursionError), torch.set_grad_enabled(grad):
                        model(x)
                    model.how = ""
                losses.append(_step(model, engine, x, y))
            found.append([losses, engine.state_dict()])
    assert_same_bits(*found)


def _as_deep_as_it_goes(work: Callable[[], Any]) -> Any:
    """Do it where no call is left, and where that ends for want of calls one call above, until it is done."""
    try:
        return _as_deep_as_it_goes(work)
    except RecursionError:
        return work()


@pytest.fixture
def uncollected() -> Iterator[None]:
    """What is garbage before this or becomes it is not collected: a finalizer that comes where no call is left is lost."""
    gc.collect()
    gc.disable()
    yield
    gc.enable()


@pytest.mark.filterwarnings("ignore:module forward hook with:UserWarning")  # PyTorch's own, where no call is left for the hook
@places
def test_a_step_that_is_tried_at_every_depth_is_made_once(
    parameters: str, states: str, accelerator: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, uncollected: None
) -> None:
    config = _config(parameters, states, accelerator, tmp_path, monkeypatch)
    found = []
    for deep in (False, True):
        model = _Recursing()
        with offload.initialize(model, adamw(model), config) as engine:
            losses = []
            for x, y in vector_batches(3, WIDTH):
                step = functools.partial(_step, model, engine, x, y)
                losses.append(_as_deep_as_it_goes(step) if deep else step())
            found.append([losses, engine.state_dict()])
    assert_same_bits(*found)


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")  # the finalizers that are lost
@places
def test_models_that_are_collected_where_no_call_is_left_do_not_stand_in_for_later_ones(
    parameters: str, states: str, accelerator: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, uncollected: None
) -> None:
    config = _config(parameters, states, accelerator, tmp_path, monkeypatch)
    losses = set()
    for _ in range(8):
        model = _Recursing()  # its parameters come to lie where the last one's were
        with offload.initialize(model, adamw(model), config) as engine:
            losses.add(_step(model, engine, *vector_batches(1, WIDTH)[0]))
        del model, engine
        _as_deep_as_it_goes(gc.collect)
    assert len(losses) == 1
