# SPDX-License-Identifier: Apache-2.0
"""While the loop gets its next batch: the first fetch of the next forward. And which cores add micro-batches."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch

from offload import _native
from offload.model.unit_state import UnitState
from tests.inside import residency_of, units_of
from tests.native.paths import at_library_call
from tests.small_sizes import small

from .models import (
    IN_MEMORY,
    ON_CPU,
    ON_CPU_IN_PLACE,
    ON_NVME,
    ON_NVME_AT_STEP,
    Setup,
    adamw,
    byte_batches,
    gpt2,
    llama,
    stack,
    vector_batches,
)
from .runs import Run, assert_same_bits, run_engine

away = pytest.mark.parametrize("setup", (ON_CPU, ON_NVME, ON_NVME_AT_STEP), ids=lambda setup: setup.name)


def train(run: Run, micro_batches: int = 1, width: int = 16) -> list[float]:
    losses = []
    for step in range(4):
        for x, y in vector_batches(micro_batches, width, seed=step):
            loss = torch.nn.functional.mse_loss(run.model(x), y)
            losses.append(loss.item())
            loss.backward()
        run.optimizer.step()
        run.optimizer.zero_grad()
    return losses


@away
@pytest.mark.parametrize("frozen", [False, True], ids=["trained", "frozen at first"])
def test_step_begins_the_first_fetch_of_the_next_forward(opened: Any, setup: Setup, frozen: bool) -> None:
    model = stack()
    first = next(module for name, module in model.named_modules() if name == "blocks.0")
    if frozen:
        first.requires_grad_(False)
    optimizer = torch.optim.AdamW([one for one in model.parameters() if one.requires_grad])
    engine = opened(model, optimizer, setup)
    x, y = vector_batches(1)[0]
    for _ in range(3):
        torch.nn.functional.mse_loss(model(x), y).backward()
        before = on_their_way(engine)
        engine.step()
        assert not before and on_their_way(engine)[:1] in (["(root)"], ["blocks.0"])
        engine.zero_grad()


def on_their_way(engine: Any) -> list[str]:
    return [unit.name for unit in units_of(engine) if unit.residency.state is UnitState.FETCHING]


@pytest.mark.parametrize(
    ("make", "embedding"), [(gpt2, "transformer.wte"), (llama, "model.embed_tokens")], ids=["tied", "apart"]
)
def test_step_begins_the_fetch_of_an_embedding_that_its_backward_left_out(opened: Any, make: Any, embedding: str) -> None:
    """Where an update needs its unit in memory, and begins at the step. What is there of units that come later goes for it."""
    weights = []
    for setup in (Setup("nvme", "nvme", "cpu", "step"), IN_MEMORY):
        model = make()
        engine = opened(model, adamw(model), setup)
        for tokens in byte_batches(3):
            model(input_ids=tokens, labels=tokens).loss.backward()
            before = on_their_way(engine)
            engine.step()
            assert setup is IN_MEMORY or (embedding not in before and embedding in on_their_way(engine))
            engine.zero_grad()
        weights.append(engine.state_dict())
    assert_same_bits(*weights)


@away
def test_the_budget_is_kept_and_no_bit_changes(opened: Any, setup: Setup) -> None:
    found = []
    for one in (Setup(), setup):
        model = stack()
        engine = opened(model, adamw(model), one)
        found.append(run_engine(engine, train))
        residency = residency_of(engine)
        assert residency.room.peak_resident_nbytes <= residency.room.capacity_nbytes
    assert_same_bits(*found)


@pytest.fixture
def three_threads() -> Iterator[None]:
    _native.set_thread_count(3)
    yield
    _native.set_thread_count(0)


@pytest.mark.usefixtures("three_threads")
@pytest.mark.parametrize("setup", [ON_CPU, ON_CPU_IN_PLACE], ids=lambda setup: setup.name)
def test_all_cores_add_micro_batches_where_none_computes_the_model(
    opened: Any, setup: Setup, monkeypatch: pytest.MonkeyPatch
) -> None:
    small(monkeypatch, all_cores_numel=0)
    added: list[bool] = []

    def watched(threads: int, *arguments: Any) -> None:
        if arguments[6]:  # adds to what is there
            added.append(threads == _native.default_threads().pointer)

    at_library_call(monkeypatch, {"offload_gradient_ingest": watched})
    found = []
    for one in (Setup(), setup):
        model = stack(width=64)
        added.clear()
        found.append(run_engine(opened(model, adamw(model), one), lambda run: train(run, 3, 64)))
    assert_same_bits(*found)
    assert added and (all(added) if setup.accelerator == "deferred" else not any(added))
