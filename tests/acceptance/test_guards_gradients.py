# SPDX-License-Identifier: Apache-2.0
"""Gradients, scalers and optimizers behind the engine's back: right, or told how (see guards.py)."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import offload

from .guards import CLIPPING, GRADIENT, SCALING, block_weight, check, everywhere
from .models import IN_MEMORY, Setup, adamw, stack, two_groups, vector_batches
from .runs import Run, assert_close, assert_same_bits, refused, run_engine, simple_loop


def _clip(run: Run) -> float:
    return torch.nn.utils.clip_grad_norm_(run.model.parameters(), 0.05).item()


def _clip_values(run: Run) -> None:
    torch.nn.utils.clip_grad_value_(run.model.parameters(), 1e-3)


def _grad_of(run: Run) -> torch.Tensor:
    grad = block_weight(run).grad
    assert grad is not None, "p.grad is None after backward: a loop that asks `if p.grad is not None` would be misled"
    return grad


def _halve(run: Run) -> None:
    _grad_of(run).mul_(0.25)


def _assign(run: Run) -> None:
    block_weight(run).grad = torch.full((48, 16), 0.5)


def _drop(run: Run) -> None:
    block_weight(run).grad = None


def _norm_of_all(run: Run) -> float:
    return sum(p.grad.norm().item() ** 2 for p in run.model.parameters() if p.grad is not None) ** 0.5


GRADIENT_CASES: dict[str, tuple[Callable[[Run], Any], tuple[str, ...]]] = {
    "clip_grad_norm_": (_clip, CLIPPING),
    "clip_grad_value_": (_clip_values, (*CLIPPING, *GRADIENT)),
    "read": (lambda run: _grad_of(run).clone(), GRADIENT),
    "norm": (lambda run: _grad_of(run).norm().item(), GRADIENT),
    "norm of all that are not None": (_norm_of_all, GRADIENT),
    "write": (_halve, GRADIENT),
    "assign": (_assign, GRADIENT),
    "assign None": (_drop, (*GRADIENT, "zero_grad")),
    "zero_grad of the model": (lambda run: run.model.zero_grad(), ("optimizer.zero_grad", "engine.")),
    "zero_grad of the optimizer": (lambda run: run.optimizer.zero_grad(), ()),
    "zero_grad of a block": (lambda run: run.model.blocks[1].zero_grad(), ("optimizer.zero_grad", "engine.")),
    "zeros by zero_grad": (lambda run: run.optimizer.zero_grad(set_to_none=False), ("set_to_none",)),
    "zeros by the model": (lambda run: run.model.zero_grad(set_to_none=False), ("set_to_none", "optimizer.zero_grad")),
}


@everywhere
@pytest.mark.parametrize("name", GRADIENT_CASES)
def test_gradients_between_backward_and_step(opened: Any, setup: Setup, name: str) -> None:
    operation, words = GRADIENT_CASES[name]
    check(opened, setup, operation, words, "after backward")


@everywhere
def test_a_gradient_assigned_without_backward(opened: Any, setup: Setup) -> None:
    """In torch the next step applies it (with the gradients of backward added to it)."""
    check(opened, setup, _assign, GRADIENT, "before forward")


@everywhere
def test_a_loop_that_zeroes_only_by_the_model(opened: Any, setup: Setup) -> None:
    """model.zero_grad() instead of optimizer.zero_grad(), with a backward that is thrown away by it."""
    batches = vector_batches(5)

    def loop(run: Run) -> None:
        for x, y in batches:
            F.mse_loss(run.model(y), x).backward()
            run.model.zero_grad()
            F.mse_loss(run.model(x), y).backward()
            run.optimizer.step()
            run.model.zero_grad()

    plain, model = stack(), stack()
    loop(Run(plain, adamw(plain)))
    engine = opened(model, adamw(model), setup)
    try:
        _, weights = run_engine(engine, loop)
    except (offload.OffloadError, RuntimeError) as error:
        assert "zero_grad" in str(error), error
        return
    assert_close(weights, plain.state_dict())


class _Sparse(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(16, 16) for _ in range(3))

    def forward(self, x: torch.Tensor, count: int) -> torch.Tensor:
        for block in list(self.blocks)[:count]:
            x = torch.tanh(block(x))
        return x


@everywhere
def test_zeroed_gradients_are_gradients(opened: Any, setup: Setup) -> None:
    """With set_to_none=False an unused parameter has a gradient of zeros: torch decays and moves it. Or it is told."""
    batches = vector_batches(6)

    def loop(run: Run) -> None:
        for step, (x, y) in enumerate(batches):
            F.mse_loss(run.model(x, 1 + step % 3), y).backward()
            run.optimizer.step()
            run.optimizer.zero_grad(set_to_none=False)

    torch.manual_seed(1)
    plain = _Sparse()
    model = copy.deepcopy(plain)
    loop(Run(plain, adamw(plain)))
    engine = opened(model, adamw(model), setup)
    try:
        _, weights = run_engine(engine, loop)
    except (offload.OffloadError, RuntimeError) as error:
        assert "set_to_none" in str(error), error
        return
    assert_close(weights, plain.state_dict())


@everywhere
def test_a_users_gradient_hook(opened: Any, setup: Setup) -> None:
    """Hooks on a parameter, registered before or after initialize, scale what the optimizer sees."""
    batches = vector_batches(4)

    def loop(run: Run) -> list[float]:
        seen: list[float] = []
        run.model.outlet.weight.register_hook(lambda grad: grad * 0.25)
        run.model.inlet.weight.register_hook(lambda grad: seen.append(grad.norm().item()))
        for x, y in batches:
            F.mse_loss(run.model(x), y).backward()
            run.optimizer.step()
            run.optimizer.zero_grad()
        return seen

    plain, model = stack(), stack()
    for one in (plain, model):
        one.blocks[1].up.weight.register_hook(lambda grad: grad * 3.0)
    expected = loop(Run(plain, adamw(plain)))
    assert len(expected) == 4
    seen, weights = run_engine(opened(model, adamw(model), setup), loop)
    assert_close(seen, expected)
    assert_close(weights, plain.state_dict())


@everywhere
@pytest.mark.parametrize("unscale", [False, True])
def test_grad_scaler(opened: Any, setup: Setup, unscale: bool) -> None:
    batches = vector_batches(5)

    def loop(run: Run) -> list[float]:
        scaler = torch.amp.GradScaler("cpu", init_scale=1024.0, growth_interval=2)
        scales = []
        for x, y in batches:
            scaler.scale(F.mse_loss(run.model(x), y)).backward()
            if unscale:
                scaler.unscale_(run.optimizer)
                torch.nn.utils.clip_grad_norm_(run.model.parameters(), 0.05)
            scaler.step(run.optimizer)
            scaler.update()
            run.optimizer.zero_grad()
            scales.append(scaler.get_scale())
        return scales

    plain, model = stack(), stack()
    expected = loop(Run(plain, adamw(plain)))
    engine = opened(model, adamw(model), setup)
    try:
        scales, weights = run_engine(engine, loop)
    except (offload.OffloadError, RuntimeError) as error:
        assert any(word in str(error) for word in (*SCALING, *CLIPPING)), error
        return
    assert_close(scales, expected)
    assert_close(weights, plain.state_dict())


@everywhere
@pytest.mark.parametrize("enabled", [False])
def test_a_disabled_grad_scaler_is_nothing(opened: Any, setup: Setup, enabled: bool) -> None:
    batches = vector_batches(4)

    def loop(run: Run) -> None:
        scaler = torch.amp.GradScaler("cpu", enabled=enabled)
        for x, y in batches:
            scaler.scale(F.mse_loss(run.model(x), y)).backward()
            scaler.step(run.optimizer)
            scaler.update()
            run.optimizer.zero_grad()

    plain, model = stack(), stack()
    loop(Run(plain, adamw(plain)))
    _, weights = run_engine(opened(model, adamw(model), setup), loop)
    assert_close(weights, plain.state_dict())


@everywhere
def test_fp16_with_the_losss_own_backward(opened: Any, setup: Setup) -> None:
    """The engine un-scales fp16 gradients; a loss that was not scaled by it must not be un-scaled in silence."""
    model, twin = stack(), stack()
    engine = opened(model, adamw(model), setup, dtype="fp16", loss_scale=64.0)
    other = opened(twin, adamw(twin), IN_MEMORY, dtype="fp16", loss_scale=64.0)
    for x, y in vector_batches(4):
        for one, backward in ((engine, None), (other, other.backward)):
            loss = F.mse_loss(one.module(x.half()).float(), y)
            if backward is not None:
                backward(loss)
            else:
                try:
                    loss.backward()
                    one.step()
                except (offload.OffloadError, RuntimeError) as error:
                    assert "engine.backward" in str(error), error
                    return
                one.optimizer.zero_grad()
                continue
            one.step()
            one.optimizer.zero_grad()
    assert_close(engine.state_dict(), other.state_dict(), 1e-3)


def _raises(_: torch.Tensor) -> None:
    raise ZeroDivisionError


@everywhere
@pytest.mark.parametrize("before", ["of the output", "of the input", "cut short"])
def test_fp16_with_the_losss_own_backward_after_one_of_a_scaled_loss(opened: Any, setup: Setup, before: str) -> None:
    """One that left no gradient of a parameter, or an exception cut short, says nothing of the next."""
    found = []
    for comes_before in (True, False):
        model = stack()
        engine = opened(model, adamw(model), setup, dtype="fp16", loss_scale=64.0)
        for x, y in vector_batches(3):
            if comes_before:
                given = x.half().requires_grad_()
                output = engine.module(given)
                scaled = engine.scaled(F.mse_loss(output.float(), y))
                if before == "cut short":
                    hook = next(model.parameters()).register_hook(_raises)
                    with pytest.raises(ZeroDivisionError):
                        scaled.backward()
                    hook.remove()
                else:
                    torch.autograd.grad(scaled, output if before == "of the output" else given)
                with refused(offload.UsageError, "engine.backward"):
                    F.mse_loss(engine.module(x.half()).float(), y).backward()
                engine.zero_grad()
            engine.scaled(F.mse_loss(engine.module(x.half()).float(), y)).backward()
            engine.step()
            engine.zero_grad()
        found.append(engine.state_dict())
    assert_same_bits(*found)


@everywhere
def test_the_optimizers_state_dict(opened: Any, setup: Setup) -> None:
    """The numbers of its groups are torch's; an empty state would be silence, were it not said where the state is."""

    def operation(run: Run) -> Any:
        state = run.optimizer.state_dict()
        whole = len(state["state"]) == len(list(run.model.parameters()))
        assert whole or "save_checkpoint" in state["offload"]["state"], "the optimizer's state is neither whole nor elsewhere"
        return [group["lr"] for group in state["param_groups"]] + [group["params"] for group in state["param_groups"]]

    assert check(opened, setup, operation, (), "after step")


@everywhere
def test_the_optimizers_load_state_dict(opened: Any, setup: Setup) -> None:
    def operation(run: Run) -> None:
        donor = stack()
        optimizer = adamw(donor, lr=5e-3)
        simple_loop(3)(Run(donor, optimizer))
        run.optimizer.load_state_dict(optimizer.state_dict())

    check(opened, setup, operation, ("load_checkpoint", "initialize"), "after step")


@everywhere
def test_the_optimizers_state_by_parameter(opened: Any, setup: Setup) -> None:
    def operation(run: Run) -> Any:
        assert block_weight(run) in run.optimizer.state or run.engine is not None
        return run.optimizer.state[block_weight(run)]["exp_avg"].clone()

    check(opened, setup, operation, ("save_checkpoint", "state_dict"), "after step")


@everywhere
def test_the_users_first_optimizer(opened: Any, setup: Setup) -> None:
    """Stepping the optimizer that was given to initialize, not engine.optimizer: right or told, never nothing."""
    batches = vector_batches(4)
    plain, model = stack(), stack()
    plain_optimizer, optimizer = adamw(plain), adamw(model)
    engine = opened(model, optimizer, setup)
    for x, y in batches:
        F.mse_loss(plain(x), y).backward()
        plain_optimizer.step()
        plain_optimizer.zero_grad()
        F.mse_loss(model(x), y).backward()
        try:
            optimizer.step()
            optimizer.zero_grad()
        except (offload.OffloadError, RuntimeError) as error:
            assert "engine.optimizer" in str(error) or "engine.step" in str(error), error
            return
    assert_close(engine.state_dict(), plain.state_dict())


@everywhere
def test_the_optimizer_is_one(opened: Any, setup: Setup) -> None:
    model = stack()
    mine = two_groups(model)
    groups = [dict(group) for group in mine.param_groups]
    engine = opened(model, mine, setup)
    assert isinstance(engine.optimizer, torch.optim.Optimizer)
    for ours, before in zip(engine.optimizer.param_groups, groups, strict=True):
        assert [id(p) for p in ours["params"]] == [id(p) for p in before["params"]]
        assert {k: v for k, v in ours.items() if k != "params"} == {k: v for k, v in before.items() if k != "params"}
