# SPDX-License-Identifier: Apache-2.0
"""Optimizer options, clipping, schedules, accumulation: against plain PyTorch with torch.optim, in fp32."""

from __future__ import annotations

import contextlib
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
    IN_MEMORY,
    ON_CPU,
    ON_NVME,
    ON_NVME_IN_BACKWARD,
    STEP_SETUPS,
    Setup,
    adamw,
    stack,
    two_groups,
    vector_batches,
)
from .runs import Run, assert_close, compare, run_engine, simple_loop

anywhere = pytest.mark.parametrize("setup", ALL_SETUPS, ids=lambda s: s.name)
at_step = pytest.mark.parametrize("setup", STEP_SETUPS, ids=lambda s: s.name)
few = pytest.mark.parametrize("setup", (ON_CPU, ON_NVME), ids=lambda s: s.name)


@anywhere
def test_plain_loop(opened: Any, setup: Setup) -> None:
    compare(stack, simple_loop(20), setup, opened)


@anywhere
def test_adam_with_weight_decay(opened: Any, setup: Setup) -> None:
    compare(stack, simple_loop(20), setup, opened, lambda m: torch.optim.Adam(m.parameters(), **ADAM_OPTIONS))


@few
def test_defaults_of_the_optimizers(opened: Any, setup: Setup) -> None:
    """Every option left out: AdamW's and Adam's defaults differ (weight decay 1e-2 and none)."""
    compare(stack, simple_loop(), setup, opened, lambda m: torch.optim.AdamW(m.parameters()))


@few
def test_defaults_of_adam(opened: Any, setup: Setup) -> None:
    compare(stack, simple_loop(), setup, opened, lambda m: torch.optim.Adam(m.parameters()))


@anywhere
def test_clipping(opened: Any, setup: Setup) -> None:
    compare(stack, simple_loop(8, clip=0.05), setup, opened, max_grad_norm=0.05)


@few
def test_clipping_that_does_not_strike(opened: Any, setup: Setup) -> None:
    compare(stack, simple_loop(8, clip=1e3), setup, opened, max_grad_norm=1e3)


@anywhere
def test_several_groups_with_a_scheduler(opened: Any, setup: Setup) -> None:
    batches = vector_batches(10)

    def loop(run: Run) -> list[Any]:
        scheduler = torch.optim.lr_scheduler.OneCycleLR(run.optimizer, [2e-2, 4e-2], total_steps=10)
        losses = []
        for x, y in batches:
            loss = F.mse_loss(run.model(x), y)
            loss.backward()
            run.optimizer.step()
            scheduler.step()
            run.optimizer.zero_grad()
            losses += [loss.item(), *scheduler.get_last_lr()]
        return losses

    # OneCycleLR also cycles beta1, so betas change between steps too.
    compare(stack, loop, setup, opened, two_groups)


@few
def test_hooks_around_the_steps_of_the_optimizer_that_was_given(opened: Any, setup: Setup) -> None:
    """Registered on it before `initialize` and afterwards: one that sets the rate, and one that counts."""

    def loop(run: Run) -> list[Any]:
        given = source if run.engine is not None else run.optimizer
        rates: list[float] = []
        counting = given.register_step_post_hook(lambda stepped, *_: rates.append(stepped.param_groups[0]["lr"]))
        losses = simple_loop(5)(run)
        counting.remove()
        return losses + simple_loop(2)(run) + rates

    def halving(model: nn.Module) -> torch.optim.Optimizer:
        nonlocal source
        source = adamw(model)

        def halve(stepped: torch.optim.Optimizer, *_: Any) -> None:
            stepped.param_groups[0]["lr"] *= 0.5

        source.register_step_pre_hook(halve)
        return source

    source: torch.optim.Optimizer
    compare(stack, loop, setup, opened, halving)


@few
def test_a_scheduler_made_before_initialize(opened: Any, setup: Setup) -> None:
    """It holds the user's own optimizer; engine.optimizer has the same param_groups, so it still sets the rate."""
    plain, model = stack(), stack()
    plain_optimizer, optimizer = adamw(plain), adamw(model)
    schedulers = [torch.optim.lr_scheduler.ExponentialLR(one, 0.5) for one in (plain_optimizer, optimizer)]
    engine = opened(model, optimizer, setup)
    runs = [Run(plain, plain_optimizer), Run(model, engine.optimizer, engine)]
    for x, y in vector_batches(5):
        for run, scheduler in zip(runs, schedulers, strict=True):
            F.mse_loss(run.model(x), y).backward()
            run.optimizer.step()
            scheduler.step()
            run.optimizer.zero_grad()
    assert_close(runs[1].weights(), runs[0].weights())


@few
def test_learning_rate_set_by_hand(opened: Any, setup: Setup) -> None:
    batches = vector_batches(6)

    def loop(run: Run) -> list[float]:
        losses = []
        for step, (x, y) in enumerate(batches):
            for group in run.optimizer.param_groups:
                group["lr"] = 0.0 if step == 3 else 1e-2 / (step + 1)
                group["weight_decay"] = 0.05 * step
            loss = F.mse_loss(run.model(x), y)
            loss.backward()
            run.optimizer.step()
            run.optimizer.zero_grad()
            losses.append(loss.item())
        return losses

    compare(stack, loop, setup, opened)


@at_step
@pytest.mark.parametrize("with_no_sync", [False, True])
def test_accumulation(opened: Any, setup: Setup, with_no_sync: bool) -> None:
    batches = vector_batches(18)

    def loop(run: Run) -> list[float]:
        losses = []
        for index, (x, y) in enumerate(batches):
            last = index % 3 == 2
            with contextlib.nullcontext() if last or not with_no_sync else run.no_sync():
                loss = F.mse_loss(run.model(x), y) / 3
                loss.backward()
            losses.append(loss.item())
            if last:
                run.optimizer.step()
                run.optimizer.zero_grad()
        return losses

    compare(stack, loop, setup, opened)


def test_accumulation_with_an_update_in_backward(opened: Any) -> None:
    """no_sync() says that more is to come, so the update begins only in the last backward."""
    batches = vector_batches(12)

    def loop(run: Run) -> list[float]:
        losses = []
        for index, (x, y) in enumerate(batches):
            with run.no_sync() if index % 2 == 0 else contextlib.nullcontext():
                loss = F.mse_loss(run.model(x), y)
                loss.backward()
            losses.append(loss.item())
            if index % 2:
                run.optimizer.step()
                run.optimizer.zero_grad()
        return losses

    compare(stack, loop, ON_NVME_IN_BACKWARD, opened)


@at_step
def test_every_backward_within_no_sync(opened: Any, setup: Setup) -> None:
    """no_sync() puts work off, it does not drop gradients."""
    batches = vector_batches(8)

    def loop(run: Run) -> None:
        for index, (x, y) in enumerate(batches):
            with run.no_sync():
                F.mse_loss(run.model(x), y).backward()
            if index % 2:
                run.optimizer.step()
                run.optimizer.zero_grad()

    compare(stack, loop, setup, opened)


@few
def test_gradients_are_kept_when_they_are_not_zeroed(opened: Any, setup: Setup) -> None:
    """A loop without zero_grad() accumulates over steps, in torch. Here too, or it is told."""
    batches = vector_batches(4)

    def loop(run: Run) -> None:
        for x, y in batches:
            F.mse_loss(run.model(x), y).backward()
            run.optimizer.step()

    try:
        compare(stack, loop, setup, opened)
    except offload.OffloadError as error:
        assert "zero_grad" in str(error)


class Flat(nn.Module):
    """One million weights up to 1/2, whose gradient is what forward is given: no feedback between the two runs.

    Not larger: from 1 on neighbouring fp32 numbers are 1.2e-7 apart, so one rounding that falls the other way (torch's
    square root is not always the nearest) would exceed any bound of 1e-7.
    """

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.rand(1000, 1000) * 0.8 - 0.4)

    def forward(self, gradient: torch.Tensor) -> torch.Tensor:
        return (self.weight * gradient).sum()


@pytest.mark.parametrize("setup", [IN_MEMORY, Setup("nvme", "nvme")], ids=lambda s: s.name)
def test_a_hundred_steps_of_a_million_weights(opened: Any, setup: Setup) -> None:
    """Differs from torch.optim.AdamW(foreach=False) by at most 1e-7, with torch's own defaults."""
    draw = torch.Generator().manual_seed(4)

    def loop(run: Run) -> None:
        draw.manual_seed(4)
        for _ in range(100):
            run.model(torch.randn(1000, 1000, generator=draw) * 0.1).backward()
            run.optimizer.step()
            run.optimizer.zero_grad()

    torch.manual_seed(1)
    plain = Flat()
    model = copy.deepcopy(plain)
    loop(Run(plain, torch.optim.AdamW(plain.parameters(), foreach=False)))
    _, weights = run_engine(opened(model, torch.optim.AdamW(model.parameters(), foreach=False), setup), loop)
    assert (weights["weight"] - plain.weight.detach()).abs().max().item() <= 1e-7
