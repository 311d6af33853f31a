# SPDX-License-Identifier: Apache-2.0
"""A step that comes again, numbers without sense, graphs from before a step: as PyTorch, or told before anything changes."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F

import offload
from offload.step import loss_scale

from .models import (
    ALL_SETUPS,
    IN_MEMORY_IN_BACKWARD,
    IN_PLACE_IN_BACKWARD,
    ON_CPU,
    ON_CPU_IN_BACKWARD,
    ON_NVME,
    ON_NVME_IN_BACKWARD,
    Setup,
    adamw,
    stack,
    vector_batches,
)
from .runs import Run, assert_close, assert_same_bits, one_step, refused

anywhere = pytest.mark.parametrize(
    "setup", (*ALL_SETUPS, IN_MEMORY_IN_BACKWARD, ON_CPU_IN_BACKWARD, IN_PLACE_IN_BACKWARD), ids=lambda s: s.name
)
few = pytest.mark.parametrize("setup", (ON_CPU, ON_NVME, ON_NVME_IN_BACKWARD), ids=lambda s: s.name)


@anywhere
def test_a_second_step_on_the_same_gradients(opened: Any, setup: Setup) -> None:
    """PyTorch applies them twice; here the first step consumed them. Also where only a part of the gradients is new."""
    model = stack()
    engine = opened(model, adamw(model), setup)
    run = Run(model, engine.optimizer, engine)
    one_step(run)
    x, y = vector_batches(1)[0]
    F.mse_loss(model(x), y).backward()
    engine.step()
    before = run.weights()
    with refused(offload.UsageError, "zero_grad", "twice"):
        engine.step()
    for block in model.blocks:
        block.zero_grad()
    model.blocks[0](x).sum().backward()
    with refused(offload.UsageError, "inlet.weight", "zero_grad"):
        engine.step()
    engine.zero_grad()
    engine.step()  # without any gradient it does nothing, as in PyTorch
    assert_same_bits(run.weights(), before)
    one_step(run)


@anywhere
def test_gradients_between_a_step_and_zero_grad(opened: Any, setup: Setup) -> None:
    """A GAN's loop: the generator's backward goes through the critic, whose gradients the critic's own turn drops first. A
    step that would use them raises."""

    def play(generator: Any, turn: Any, critic: Any, critics_turn: Any) -> list[float]:
        losses = []
        for x, y in vector_batches(4):
            critics_turn.zero_grad()
            loss = F.softplus(critic(generator(x).detach())).mean() + F.softplus(-critic(y)).mean()
            loss.backward()
            critics_turn.step()
            turn.zero_grad()
            fooled = F.softplus(-critic(generator(x))).mean()
            fooled.backward()
            turn.step()
            losses += [loss.item(), fooled.item()]
        return losses

    torch.manual_seed(1)
    models = [(stack(), stack(blocks=2)) for _ in range(2)]
    (one, other), plain = models[0], models[1]
    engines = opened(one, adamw(one), setup), opened(other, adamw(other), setup)
    losses = play(one, engines[0].optimizer, other, engines[1].optimizer)
    optimizers = [adamw(model) for model in plain]
    assert_close(losses, play(plain[0], optimizers[0], plain[1], optimizers[1]))
    for engine, model in zip(engines, plain, strict=True):
        assert_close(engine.state_dict(), model.state_dict())
    with refused(offload.UsageError, "zero_grad", "twice"):
        engines[1].step()
    with refused(offload.UsageError, "zero_grad", "clip_grad_norm_"):
        engines[1].clip_grad_norm_(1.0)
    engines[1].zero_grad()
    one_step(Run(other, engines[1].optimizer, engines[1]))


@anywhere
def test_a_graph_from_before_the_step(opened: Any, setup: Setup) -> None:
    """Also when the next forward has waited for the updates, and when a checkpoint was loaded meanwhile."""
    model = stack()
    engine = opened(model, adamw(model), setup)
    run = Run(model, engine.optimizer, engine)
    x, y = vector_batches(1)[0]
    for looks in (False, True):
        loss = F.mse_loss(model(x), y)
        one_step(run)
        if looks:
            with torch.no_grad():
                model(x)
        before = run.weights()
        with refused(offload.UsageError, "before optimizer.step()", "forward again"):
            loss.backward()
        engine.zero_grad()
        assert_same_bits(run.weights(), before)
    one_step(run)
    loss = F.mse_loss(model(x), y)
    engine.load_state_dict(before)
    with refused(offload.UsageError, "load", "forward again"):
        loss.backward()
    engine.zero_grad()
    one_step(run)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("lr", float("nan")),
        ("lr", float("inf")),
        ("lr", -1e-3),
        ("lr", "fast"),
        ("lr", torch.tensor([0.1, 0.2])),
        ("lr", 1e300),
        ("betas", (0.9, 1.0)),
        ("betas", (float("nan"), 0.9)),
        ("betas", (0.9,)),
        ("eps", -1.0),
        ("eps", float("nan")),
        ("weight_decay", float("nan")),
        ("weight_decay", -0.1),
        ("weight_decay", None),
        ("amsgrad", True),
    ],
)
@few
def test_numbers_that_make_no_sense(opened: Any, setup: Setup, name: str, value: Any) -> None:
    model = stack()
    engine = opened(model, adamw(model), setup)
    run = Run(model, engine.optimizer, engine)
    one_step(run)
    before = run.weights()
    x, y = vector_batches(1)[0]
    group = engine.optimizer.param_groups[0]
    F.mse_loss(model(x), y).backward()
    good, group[name] = group[name], value
    with refused(offload.UsageError, name, "group 0"):
        engine.step()
    group[name] = good
    assert_same_bits(run.weights(), before)
    engine.step()
    engine.zero_grad()
    assert all(bool(weight.isfinite().all()) for weight in run.weights().values())


@pytest.mark.parametrize("fields", [{"dtype": "fp16"}, {"loss_scale": "skip"}], ids=str)
@few
def test_a_run_that_leaves_every_step_out(opened: Any, setup: Setup, fields: dict[str, Any]) -> None:
    """Told when it goes on for ever, and where the cause is gone it trains again."""
    model = stack(width=8, blocks=1)
    engine = opened(model, adamw(model), setup, **fields)
    x, y = vector_batches(1, 8)[0]

    def one(bad: bool) -> None:
        engine.backward(F.mse_loss(model(x).float(), y) * (float("inf") if bad else 1.0))
        engine.step()
        engine.zero_grad()

    before, halvings = engine.state_dict(), 30 if "dtype" in fields else 0
    for _ in range(halvings + loss_scale.MOST_LOST_STEPS - 1):
        one(bad=True)
    for _ in range(2):
        with refused(offload.NonFiniteGradientError, "in a row", "detect_anomaly"):
            one(bad=True)
    assert_same_bits(engine.state_dict(), before)
    one(bad=False)
    one(bad=True)
    assert engine.stats()["steps"] == 1
