# SPDX-License-Identifier: Apache-2.0
"""What activation checkpointing keeps in memory: as much as the plan says, of either kind and however blocks are grouped."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

import offload
from tests.crosses import in_pairs
from tests.small_sizes import small

from .models import (
    IN_MEMORY,
    IN_PLACE_IN_BACKWARD,
    ON_CPU,
    ON_NVME,
    ON_NVME_IN_BACKWARD,
    ON_NVME_IN_PLACE,
    Block,
    Setup,
    adamw,
    llama,
    vector_batches,
)
from .runs import Loop, Run, assert_same_bits, run_engine, simple_loop, token_loop

SETUPS = (ON_NVME_IN_PLACE, IN_PLACE_IN_BACKWARD, ON_CPU, ON_NVME, ON_NVME_IN_BACKWARD)
everywhere = pytest.mark.parametrize("setup", SETUPS, ids=lambda setup: setup.name)
KINDS = (pytest.param(True, id="reentrant"), pytest.param(False, id="other"))


class Segments(nn.Module):
    """Blocks in checkpointed segments, in each of which the root computes with a parameter of its own too."""

    def __init__(self, reentrant: bool, length: int, count: int = 6) -> None:
        super().__init__()
        self.reentrant, self.length = reentrant, length
        self.inlet = nn.Linear(16, 16)
        self.scale = nn.Parameter(torch.ones(16))
        self.blocks = nn.ModuleList(Block() for _ in range(count))

    def segment(self, x: torch.Tensor, first: int) -> torch.Tensor:
        for block in self.blocks[first : first + self.length]:
            x = block(x) * self.scale
        return x

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.inlet(x)
        for first in range(0, len(self.blocks), self.length):
            x = checkpoint(self.segment, x, first, use_reentrant=self.reentrant)
        return x


def segments(length: int) -> Callable[[bool], nn.Module]:
    return lambda reentrant: Segments(reentrant, length)


def checkpointed_llama(reentrant: bool) -> nn.Module:
    model: Any = llama(layers=6)
    model.gradient_checkpointing_enable({"use_reentrant": reentrant})
    return model


CASES = [
    pytest.param(segments(1), simple_loop(4), id="a block each"),
    pytest.param(segments(3), simple_loop(4), id="three blocks each"),
    pytest.param(segments(6), simple_loop(4), id="all blocks"),
    pytest.param(checkpointed_llama, token_loop(4), id="transformers"),
]


def planned_nbytes(engine: Any) -> int:
    (line,) = (line for line in engine.stats()["planned"] if line["purpose"] == "parameters in use")
    return int(line["nbytes"])


# What is counted are the uses of units, by the kind of checkpoint and the length of its segments; a place has its residency.
@pytest.mark.parametrize(("setup", "reentrant", "build", "loop"), in_pairs(SETUPS, KINDS, CASES))
def test_as_much_is_resident_as_planned(
    opened: Any, setup: Setup, reentrant: bool, build: Callable[[bool], nn.Module], loop: Loop
) -> None:
    runs = []
    for where in (IN_MEMORY, setup):
        torch.manual_seed(1)
        model = build(reentrant)
        engine = opened(model, adamw(model), where)
        runs.append(run_engine(engine, loop))
    assert_same_bits(runs[1], runs[0])
    sizes = [unit["nbytes"] for unit in engine.stats()["units"]]
    assert engine.stats()["resident_peak_nbytes"] == planned_nbytes(engine) < sum(sizes) / 2


# What is the least depends on the same: the uses at a time, and the place.
@pytest.mark.parametrize(
    ("setup", "reentrant", "build", "loop"), in_pairs([Setup("nvme", "cpu"), ON_CPU, ON_NVME], KINDS, CASES)
)
def test_the_smallest_budget_is_enough(
    opened: Any,
    monkeypatch: pytest.MonkeyPatch,
    setup: Setup,
    reentrant: bool,
    build: Callable[[bool], nn.Module],
    loop: Loop,
) -> None:
    small(monkeypatch, chunk_numel=4096)  # so that buffers are small, and units count
    field = "device_memory" if setup.accelerator == "deferred" else "cpu_memory"
    model = build(reentrant)
    with pytest.raises(offload.BudgetError) as refusal:
        opened(model, adamw(model), setup, **{field: 1})
    budget = {field: refusal.value.smallest_nbytes}
    engine = opened(model, adamw(model), setup, **budget)
    run_engine(engine, loop)
    assert 0 < engine.stats()["resident_peak_nbytes"] <= planned_nbytes(engine)


class Twice(Segments):
    """Every segment is gone through two times, so its blocks get gradients in two backwards inside the backward."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.as_tensor(super().forward(super().forward(x)))


@everywhere
def test_a_block_in_several_checkpoints_is_updated_once_it_has_all_its_gradients(opened: Any, setup: Setup) -> None:
    runs = []
    for where in (IN_MEMORY, setup):
        torch.manual_seed(1)
        model = Twice(True, 2)
        engine = opened(model, adamw(model), where)
        runs.append(run_engine(engine, simple_loop(4)))
    assert_same_bits(runs[1], runs[0])
    assert engine.stats()["resident_peak_nbytes"] == planned_nbytes(engine)


@everywhere
def test_parts_that_are_called_on_their_own(opened: Any, setup: Setup) -> None:
    """No use of the root is around the checkpoints: the backwards inside the backward are no steps' ends."""

    def loop(run: Run) -> list[float]:
        model: Any = run.model
        losses = []
        for x, y in vector_batches(4):
            with torch.no_grad():
                model.blocks[1](x)
            x = x.requires_grad_()
            for block in (model.inlet, *model.blocks, model.blocks[0]):
                x = checkpoint(block, x, use_reentrant=True)
            loss = F.mse_loss(x, y)
            loss.backward()
            run.optimizer.step()
            run.optimizer.zero_grad()
            losses.append(loss.item())
        return losses

    runs = []
    for where in (IN_MEMORY, setup):
        torch.manual_seed(1)
        model = Segments(True, 1)
        model.scale.requires_grad_(False)
        engine = opened(model, adamw(model), where)
        runs.append(run_engine(engine, loop))
    assert_same_bits(runs[1], runs[0])
    assert engine.stats()["resident_peak_nbytes"] <= planned_nbytes(engine)
