# SPDX-License-Identifier: Apache-2.0
"""A model that never leaves memory: one use covers all its units, gradients stay where autograd left them until backward is
over, and one native call updates everything. Nothing that a loop can see is another thing for it."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import offload
from tests.native.paths import at_library_call
from tests.small_sizes import small
from tests.updates import before_each_update

from .runs import assert_same_bits

WIDTH = 16
BLOCKS = 6


class Stack(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(WIDTH, 32), nn.Tanh(), nn.Linear(32, WIDTH)) for _ in range(BLOCKS))
        self.recomputes = False
        self.middle: torch.Tensor | None = None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for index, block in enumerate(self.blocks):
            x = checkpoint(block, x, use_reentrant=False) if self.recomputes else block(x)
            if index == 2:
                self.middle = x
        return x


def made() -> Stack:
    torch.manual_seed(0)
    return Stack()


@pytest.fixture
def engine() -> Iterator[Any]:
    model = made()
    with offload.initialize(
        model, torch.optim.AdamW(model.parameters(), lr=0.01), {"parameters": "cpu", "optimizer_states": "cpu"}
    ) as engine:
        yield engine


def batch(seed: int = 0) -> torch.Tensor:
    return torch.randn(3, WIDTH, generator=torch.Generator().manual_seed(seed))


def plain(micro_batches: int, steps: int) -> dict[str, torch.Tensor]:
    model = made()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01, foreach=False)
    for step in range(steps):
        for micro in range(micro_batches):
            model(batch(10 * step + micro)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    return model.state_dict()


def loop(engine: Any, micro_batches: int, steps: int) -> dict[str, torch.Tensor]:
    for step in range(steps):
        for micro in range(micro_batches):
            engine.module(batch(10 * step + micro)).square().mean().backward()
        engine.step()
        engine.zero_grad()
    state: dict[str, torch.Tensor] = engine.state_dict()
    return state


@pytest.mark.parametrize("micro_batches", [1, 2, 3])
def test_it_trains_as_pytorch_does(engine: Any, micro_batches: int) -> None:
    expected = plain(micro_batches, 4)
    for name, value in loop(engine, micro_batches, 4).items():
        torch.testing.assert_close(value, expected[name], rtol=2e-6, atol=2e-7)


def test_recomputed_blocks_bring_the_same_bits(engine: Any) -> None:
    expected = loop(engine, 2, 3)
    model = made()
    model.recomputes = True
    with offload.initialize(model, torch.optim.AdamW(model.parameters(), lr=0.01), {}) as recomputing:
        for name, value in loop(recomputing, 2, 3).items():
            assert torch.equal(value, expected[name]), name


def test_one_native_call_updates_everything_and_no_parameter_has_a_hook(engine: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    counts: list[int] = []
    at_library_call(monkeypatch, {"offload_update": lambda _, rows, count: counts.append(count)})
    loop(engine, 1, 3)
    assert counts == [BLOCKS * 4] * 3
    for parameter in engine.module.parameters():
        assert not parameter._backward_hooks and not parameter._post_accumulate_grad_hooks


def test_between_forwards_parameters_are_guarded_and_inside_they_are_plain(engine: Any) -> None:
    model, seen = engine.module, list[type]()
    weight = model.blocks[1][0].weight
    model.blocks[1].register_forward_hook(lambda *_: seen.append(type(weight)))
    loss = model(batch()).sum()
    assert seen == [nn.Parameter] and type(weight) is not nn.Parameter
    with pytest.raises(offload.ParameterAccessError, match="written"):
        weight.data.zero_()
    weight.register_hook(lambda _: seen.append(type(weight)))
    loss.backward()
    assert seen == [nn.Parameter] * 2 and type(weight) is not nn.Parameter
    with pytest.raises(offload.ParameterAccessError, match="taken over"):
        weight.grad.sum()


def test_a_graph_of_old_values_is_refused_by_name_wherever_backward_enters_it(engine: Any) -> None:
    model = engine.module
    model(batch(1)).square().mean().backward()
    model(batch())
    middle = model.middle
    engine.step()
    engine.zero_grad()
    with pytest.raises(offload.UsageError, match=r"blocks\.2.* before optimizer\.step"):
        middle.sum().backward()
    assert all(parameter.grad is None for parameter in model.parameters())
    loop(engine, 1, 1)


def test_a_second_order_graph_of_old_values_is_refused(engine: Any) -> None:
    model = engine.module
    x = batch().requires_grad_()
    (first,) = torch.autograd.grad(model.blocks[4](model.blocks[3](x)).square().sum(), x, create_graph=True)
    model(batch(1)).square().mean().backward()
    engine.step()
    engine.zero_grad()
    with pytest.raises(offload.UsageError, match=r"blocks\.[34].* before optimizer\.step"):
        first.square().sum().backward()


def test_gradients_of_the_last_step_are_not_added_to(engine: Any) -> None:
    model = engine.module
    model(batch()).square().mean().backward()
    engine.step()
    model(batch(1)).square().mean().backward()
    with pytest.raises(offload.UsageError, match="those of the last step"):
        engine.step()
    engine.zero_grad()
    loop(engine, 1, 1)


def test_a_gradient_that_a_loop_keeps_stays_that_of_its_step(engine: Any) -> None:
    model = engine.module
    weight = model.blocks[0][0].weight
    model(batch()).square().mean().backward()
    kept = weight.grad
    engine.step()
    engine.zero_grad()
    model(batch(1)).square().mean().backward()
    assert weight.grad is not kept and kept.step_index == 0 and weight.grad.step_index == 1
    with pytest.raises(offload.ParameterAccessError, match="consumed"):
        torch.nn.utils.get_total_norm([kept])


def test_a_backward_that_the_loop_cut_short_leaves_what_pytorch_would(engine: Any) -> None:
    model, expected = engine.module, made()
    optimizer = torch.optim.AdamW(expected.parameters(), lr=0.01, foreach=False)
    for one, step, zero in ((model, engine.step, engine.zero_grad), (expected, optimizer.step, optimizer.zero_grad)):

        def fail(_: torch.Tensor) -> None:
            raise ArithmeticError("of the loop")

        output = one(batch())
        handle = one.middle.register_hook(fail)
        with pytest.raises(ArithmeticError):
            output.square().mean().backward()
        handle.remove()
        one(batch(1)).square().mean().backward()  # adds to what the first half left
        step()
        zero()
    state = engine.state_dict()
    for name, value in expected.state_dict().items():
        torch.testing.assert_close(state[name], value, rtol=2e-6, atol=2e-7)


def test_a_part_that_is_called_alone_trains(engine: Any) -> None:
    model, expected = engine.module, made()
    optimizer = torch.optim.AdamW(expected.parameters(), lr=0.01, foreach=False)
    for one, step in ((model, engine.step), (expected, optimizer.step)):
        one.blocks[3](batch()).square().mean().backward()
        step()
    state = engine.state_dict()
    for name, value in expected.state_dict().items():
        torch.testing.assert_close(state[name], value, rtol=2e-6, atol=2e-7)


def test_units_that_a_step_left_out_stay_as_they_are_and_the_others_are_updated_together(engine: Any) -> None:
    model, before = engine.module, engine.state_dict()
    loop(engine, 1, 1)
    for parameter in model.blocks[5].parameters():
        parameter.requires_grad_(False)
    model.blocks[2][0].weight.requires_grad_(False)
    middle = engine.state_dict()
    after = loop(engine, 1, 2)
    for name, value in after.items():
        is_frozen = name.startswith("blocks.5.") or name == "blocks.2.0.weight"
        assert torch.equal(value, middle[name]) == is_frozen, name
        assert not torch.equal(value, before[name])


def test_a_profile_shows_every_unit_and_changes_no_bit(engine: Any, tmp_path: Path) -> None:
    expected = loop(engine, 2, 3)
    model = made()
    with offload.initialize(model, torch.optim.AdamW(model.parameters(), lr=0.01), {}) as recorded:
        with recorded.profile(tmp_path / "trace.json"):
            found = loop(recorded, 2, 3)
        text = (tmp_path / "trace.json").read_text()
    assert all(torch.equal(value, found[name]) for name, value in expected.items())
    assert all(f"blocks.{index}" in text for index in range(BLOCKS))


class Reading(nn.Module):
    """Computes with what it never calls, and which is a unit: before and behind a call of another."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.blocks = nn.ModuleList(nn.Linear(8, 8) for _ in range(2))
        self.scales = nn.ParameterList(torch.randn(8, 8) for _ in range(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x @ self.scales[0]
        for block, scale in zip(self.blocks, list(self.scales)[1:], strict=True):
            x = torch.tanh(block(x)) @ scale
        return x


@pytest.mark.parametrize("update", ["step", "auto"])
def test_values_that_are_read_without_a_call_wait_for_their_update(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, update: str
) -> None:
    """It runs beside the forward, which was given values of before it, or of its middle."""
    monkeypatch.setenv("OFFLOAD_ACCELERATOR", "cpu")
    small(monkeypatch, joined_numel=0)
    before_each_update(monkeypatch, lambda unit, update: time.sleep(0.02))
    found = []
    for fields in ({}, {"parameters": "cpu", "optimizer_states": "nvme", "nvme": str(tmp_path), "update": update}):
        model = Reading()
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.05)
        with offload.initialize(model, optimizer, offload.Config(**fields)) as engine:
            losses = []
            for index in range(4):
                x = torch.randn(4, 8, generator=torch.Generator().manual_seed(index))
                loss = model(x).square().mean()
                loss.backward()
                engine.step()
                engine.zero_grad()
                losses.append(loss.item())
            found.append([losses, engine.state_dict()])
    assert_same_bits(*found)
