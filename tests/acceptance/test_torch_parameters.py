# SPDX-License-Identifier: Apache-2.0
"""Unused, frozen, tied, strided, mixed parameters against plain PyTorch, fp32. Unchanged means to the bit."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import offload

from .models import (
    ADAM_OPTIONS,
    ALL_SETUPS,
    ON_CPU,
    ON_NVME,
    STEP_SETUPS,
    Block,
    MasterOptimizer,
    Setup,
    Sometimes,
    Tied,
    adamw,
    stack,
    vector_batches,
)
from .runs import Run, assert_close, assert_same_bits, compare, refused, run_engine, simple_loop

anywhere = pytest.mark.parametrize("setup", ALL_SETUPS, ids=lambda s: s.name)
at_step = pytest.mark.parametrize("setup", STEP_SETUPS, ids=lambda s: s.name)
few = pytest.mark.parametrize("setup", (ON_CPU, ON_NVME), ids=lambda s: s.name)


@anywhere
def test_unused_parameters(opened: Any, setup: Setup) -> None:
    """Without a gradient: weight to the bit, moments and step count stay; no decay; no earlier step's gradient."""
    batches = vector_batches(9)

    def loop(run: Run) -> list[float]:
        losses = []
        for step, (x, y) in enumerate(batches):
            use = step in (1, 4, 5, 8)
            before = run.weights()
            loss = F.mse_loss(run.model(x, use), y)
            loss.backward()
            run.optimizer.step()
            run.optimizer.zero_grad()
            losses.append(loss.item())
            after = run.weights()
            for name in before:
                idle = "never" in name or (not use and ("sometimes" in name or "alone" in name))
                assert torch.equal(before[name], after[name]) == idle, f"step {step}: {name}"
        return losses

    start, _ = compare(Sometimes, loop, setup, opened, max_grad_norm=None)
    assert any("never" in name for name in start)


@few
def test_zero_grad_drops_what_a_step_did_not_use(opened: Any, setup: Setup) -> None:
    """The gradient of a backward whose step never came must not turn up later."""
    batches = vector_batches(6)

    def loop(run: Run) -> None:
        for x, y in batches:
            F.mse_loss(run.model(y * 3, True), x).backward()
            run.optimizer.zero_grad()
            F.mse_loss(run.model(x, False), y).backward()
            run.optimizer.step()
            run.optimizer.zero_grad()

    start, weights = compare(Sometimes, loop, setup, opened)
    for name in start:
        if "sometimes" in name or "alone" in name:
            assert_same_bits(weights[name], start[name], name)


def _half_frozen() -> nn.Module:
    model = stack()
    for name, p in model.named_parameters():
        p.requires_grad_("up" not in name and "inlet" not in name)
    return model


@anywhere
def test_frozen_parameters(opened: Any, setup: Setup) -> None:
    start, weights = compare(_half_frozen, simple_loop(), setup, opened)
    for name in start:
        same = "up" in name or "inlet" in name
        assert torch.equal(start[name], weights[name]) == same, name


@few
def test_frozen_parameters_that_the_optimizer_also_has(opened: Any, setup: Setup) -> None:
    start, weights = compare(
        _half_frozen, simple_loop(), setup, opened, lambda m: torch.optim.AdamW(m.parameters(), **ADAM_OPTIONS)
    )
    assert_same_bits(weights["inlet.weight"], start["inlet.weight"])


@few
def test_parameters_that_the_optimizer_does_not_have(opened: Any, setup: Setup) -> None:
    """They require a gradient and get one, and no optimizer moves them: legal in torch."""
    start, weights = compare(
        stack, simple_loop(), setup, opened, lambda m: torch.optim.AdamW(m.blocks.parameters(), **ADAM_OPTIONS)
    )
    assert_same_bits(weights["inlet.weight"], start["inlet.weight"])
    assert_same_bits(weights["outlet.bias"], start["outlet.bias"])


@anywhere
def test_another_optimizer_trains_what_this_one_does_not_have(opened: Any, setup: Setup) -> None:
    """Its steps come after this one's `zero_grad`, and every second time alone: the gradients are still there."""

    def loop(run: Run) -> list[float]:
        others = [*run.model.inlet.parameters(), *run.model.outlet.parameters()]
        other, losses = torch.optim.SGD(others, lr=1e-2), []
        for step, (x, y) in enumerate(vector_batches(6)):
            loss = F.mse_loss(run.model(x), y)
            loss.backward()
            run.optimizer.step()
            run.optimizer.zero_grad(set_to_none=step < 3)
            if step % 2:
                with run.gathered(others):
                    other.step()
                other.zero_grad()
            losses.append(loss.item())
        return losses

    compare(stack, loop, setup, opened, lambda m: torch.optim.AdamW(m.blocks.parameters(), **ADAM_OPTIONS))


class OfComplexNumbers(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inlet, self.outlet = nn.Linear(16, 16), nn.Linear(16, 16)
        self.turn = nn.Parameter(torch.randn(16, 16, dtype=torch.complex64) / 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.outlet((self.inlet(x).to(self.turn.dtype) @ self.turn).abs())


@anywhere
@pytest.mark.parametrize("is_frozen", [True, False])
def test_complex_parameters_that_are_not_trained(opened: Any, setup: Setup, is_frozen: bool) -> None:
    def build() -> nn.Module:
        model = OfComplexNumbers()
        model.turn.requires_grad_(not is_frozen)
        return model

    trained = lambda m: torch.optim.AdamW([*m.inlet.parameters(), *m.outlet.parameters()], **ADAM_OPTIONS)  # noqa: E731
    start, weights = compare(build, simple_loop(), setup, opened, trained)
    assert_same_bits(weights["turn"], start["turn"])
    assert not torch.equal(weights["inlet.weight"], start["inlet.weight"])


@anywhere
def test_a_trained_complex_parameter_is_refused(opened: Any, setup: Setup) -> None:
    model = OfComplexNumbers()
    parameters, before = list(model.parameters()), {name: value.clone() for name, value in model.state_dict().items()}
    with refused(offload.ConfigError, "'turn'", "complex64", "fp32, bf16 or fp16"):
        opened(model, adamw(model), setup)
    assert all(one is other for one, other in zip(model.parameters(), parameters, strict=True))
    assert_same_bits(dict(model.state_dict()), before)


class Strided(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.convolutions = nn.ModuleList(nn.Conv2d(4, 4, 3, padding=1) for _ in range(2))
        for one in self.convolutions:
            one.to(memory_format=torch.channels_last)
        self.transposed = nn.Parameter(torch.randn(24, 16).t())  # [16, 24], strides (1, 16)
        self.sliced = nn.Parameter(torch.randn(24, 32)[:, ::2])  # [24, 16], strides (32, 2)
        self.expanded = nn.Linear(16, 16)
        self.scalar = nn.Parameter(torch.tensor(1.5))
        self.empty = nn.Parameter(torch.empty(0, 16))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.expanded(x @ self.transposed @ self.sliced * 0.01)
        image = x[:, :, None, None] * torch.ones(2, 2)
        image = image.reshape(x.shape[0], 4, 4, 4)
        for one in self.convolutions:
            image = image + one(image)
        return image.mean(dim=(2, 3)).repeat(1, 4) * self.scalar + self.empty.sum()


@at_step
def test_a_gradient_without_elements_is_dropped(opened: Any, setup: Setup) -> None:
    model: Any = Strided()
    engine = opened(model, adamw(model), setup)
    before = engine.state_dict()
    model(vector_batches(1)[0][0]).sum().backward()
    assert model.empty.grad is not None
    engine.zero_grad()
    assert model.empty.grad is None
    assert_same_bits(engine.state_dict(), before)


@anywhere
def test_parameters_with_strides_without_elements_and_without_dimensions(opened: Any, setup: Setup) -> None:
    compare(Strided, simple_loop(), setup, opened)


class OnlyOnTheRoot(nn.Module):
    """No ModuleList, no submodule: parameters and a buffer on the root itself."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(16, 16) * 0.2)
        self.bias = nn.Parameter(torch.zeros(16))
        self.register_buffer("calls", torch.zeros((), dtype=torch.int64))
        self.register_buffer("hidden", torch.ones(16), persistent=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        return torch.tanh(x @ self.weight + self.bias) * self.hidden


@anywhere
def test_parameters_of_the_root_module(opened: Any, setup: Setup) -> None:
    _, weights = compare(OnlyOnTheRoot, simple_loop(), setup, opened)
    assert weights["calls"].item() == 6 and "hidden" not in weights


@anywhere
def test_a_sequential_without_any_module_list(opened: Any, setup: Setup) -> None:
    compare(
        lambda: nn.Sequential(nn.Linear(16, 32), nn.GELU(), nn.Sequential(nn.Linear(32, 32), nn.Linear(32, 16))),
        simple_loop(),
        setup,
        opened,
    )


@few
def test_a_single_linear_as_the_model(opened: Any, setup: Setup) -> None:
    compare(lambda: nn.Linear(16, 16), simple_loop(), setup, opened)


@anywhere
def test_tied_parameters_and_modules(opened: Any, setup: Setup) -> None:
    _, weights = compare(Tied, simple_loop(), setup, opened)
    assert_same_bits(weights["last.weight"], weights["first.weight"])
    assert_same_bits(weights["again.down.weight"], weights["blocks.1.down.weight"])


class Twice(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in (*self.blocks, *self.blocks, self.blocks[0]):
            x = block(x)
        return x


@anywhere
def test_a_module_called_twice(opened: Any, setup: Setup) -> None:
    """Its gradient is complete only after the last of its calls went backward: no update before."""
    compare(Twice, simple_loop(), setup, opened)


def test_mixed_dtypes(opened: Any) -> None:
    """Some blocks in bf16 among fp32: each keeps its dtype, all have fp32 masters. Against masters in plain torch."""

    class Mixed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.blocks = nn.ModuleList([Block(), Block().bfloat16(), Block()])

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            for block in self.blocks:
                x = block(x.to(block.up.weight.dtype)).float()
            return x

    torch.manual_seed(1)
    plain = Mixed()
    model = copy.deepcopy(plain)
    optimizer = MasterOptimizer(plain)
    expected = simple_loop(8)(Run(plain, optimizer))
    engine = opened(model, adamw(model), ON_NVME)
    losses, weights = run_engine(engine, simple_loop(8))
    # One bf16 rounding that falls to the other side is 2**-8 of a weight and a like part of a gradient; few do.
    assert_close(losses, expected, 1e-4)
    assert {name: p.dtype for name, p in model.named_parameters()} == {name: p.dtype for name, p in plain.named_parameters()}
    for name, master in optimizer.masters.items():
        assert weights[name].dtype == torch.float32, f"{name}: not the master"
        assert_close(weights[name], master.detach(), 2e-4, name)


@few
def test_bf16_keeps_an_fp32_master(opened: Any, setup: Setup) -> None:
    """A learning rate below bf16's resolution still moves the model: 40 steps of 1e-5 on weights of order 1."""
    torch.manual_seed(1)
    model = nn.Linear(16, 16, bias=False)
    with torch.no_grad():
        model.weight.fill_(1.0)
    engine = opened(model, adamw(model, lr=1e-5, weight_decay=0.0), setup, dtype="bf16")
    for _ in range(40):
        model(torch.ones(4, 16, dtype=torch.bfloat16)).float().sum().backward()
        engine.optimizer.step()
        engine.optimizer.zero_grad()
    weight = engine.state_dict()["weight"]
    assert model.weight.dtype == torch.bfloat16 and weight.dtype == torch.float32
    assert_close(weight, torch.full((16, 16), 1.0 - 40e-5), 1e-6)
