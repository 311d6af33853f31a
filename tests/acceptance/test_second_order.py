# SPDX-License-Identifier: Apache-2.0
"""Gradients of gradients, with parameters that come and go: as in PyTorch, to the bit in every placement, in the same room."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

import offload

from .models import (
    IN_MEMORY,
    IN_PLACE_IN_BACKWARD,
    ON_CPU,
    ON_NVME,
    ON_NVME_IN_PLACE,
    Setup,
    Stack,
    Tied,
    adamw,
    stack,
    vector_batches,
)
from .runs import Run, assert_close, assert_same_bits, refused, run_engine, run_plain

SETUPS = (ON_CPU, ON_NVME, ON_NVME_IN_PLACE, IN_PLACE_IN_BACKWARD)
anywhere = pytest.mark.parametrize("setup", SETUPS, ids=lambda s: s.name)
few = pytest.mark.parametrize("setup", (ON_CPU, ON_NVME_IN_PLACE), ids=lambda s: s.name)


def input_penalty(run: Run, x: torch.Tensor, y: torch.Tensor) -> list[Any]:
    """As of WGAN-GP; a forward comes between the two backwards."""
    x = x.clone().requires_grad_()
    (slope,) = torch.autograd.grad(run.model(x).square().sum(), x, create_graph=True)
    with torch.no_grad():
        run.model(y)
    penalty = (slope.norm(dim=1) - 1).square().mean()
    (penalty + F.mse_loss(run.model(x.detach()), y)).backward()
    return [penalty.item(), x.grad]


def parameter_penalty(run: Run, x: torch.Tensor, y: torch.Tensor) -> list[Any]:
    """Beside gradients that are there already, which it adds to."""
    F.mse_loss(run.model(x), y).backward()
    slopes = torch.autograd.grad(F.mse_loss(run.model(y), x), list(run.model.parameters()), create_graph=True)
    penalty = sum(slope.square().sum() for slope in slopes) * 0.1
    assert isinstance(penalty, torch.Tensor)
    penalty.backward()
    return [penalty.item()]


def products(run: Run, x: torch.Tensor, y: torch.Tensor) -> list[Any]:
    """Hessian-vector product, Jacobian and Hessian by torch.autograd.functional, and a third order."""
    model = run.model
    found = [
        torch.autograd.functional.hvp(lambda v: model(v).square().sum(), x, y)[1],
        torch.autograd.functional.jacobian(lambda v: model(v).square().sum(0), x),
        torch.autograd.functional.hessian(lambda v: model(v).pow(3).sum(), x[:1]),
    ]
    slope = point = x[:2].clone().requires_grad_()
    value = model(point).pow(2).sum()
    for _ in range(3):
        (slope,) = torch.autograd.grad(value, point, create_graph=True)
        value = slope.pow(2).sum()
    F.mse_loss(model(x), y).backward()
    return [*found, slope.detach()]


def backward_twice(run: Run, x: torch.Tensor, y: torch.Tensor) -> list[Any]:
    """A graph that is kept, with one of second order between; and gradients of parameters that are looked at alone."""
    model, x = run.model, x.clone().requires_grad_()
    loss = F.mse_loss(model(x), y)
    loss.backward(retain_graph=True)
    (slope,) = torch.autograd.grad(loss, x, create_graph=True)
    slope.square().sum().backward(retain_graph=True)
    seen = torch.autograd.grad(loss, list(model.blocks[1].parameters()), retain_graph=True)
    loss.backward()
    return [*seen, x.grad]


KINDS = (input_penalty, parameter_penalty, products, backward_twice)


def loop_of(kind: Any) -> Any:
    def loop(run: Run) -> list[Any]:
        seen = []
        for x, y in vector_batches(3):
            seen += kind(run, x, y)
            run.optimizer.step()
            run.optimizer.zero_grad()
        return seen

    return loop


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.__name__)
@anywhere
def test_gradients_of_gradients(opened: Any, setup: Setup, kind: Any) -> None:
    plain, loop = stack(), loop_of(kind)
    expected = run_plain(plain, adamw(plain), loop)
    model, in_memory = stack(), stack()
    found = run_engine(opened(model, adamw(model), setup), loop)
    assert_close(found, expected)
    assert_same_bits(found, run_engine(opened(in_memory, adamw(in_memory), IN_MEMORY), loop))


class Checkpointed(Stack):
    """Computed again in every backward."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=False)
        return self.outlet(self.inlet(x))


class Attentive(nn.Module):
    """Weights that are read without a call, several outputs, a unit that is used twice. No bias of keys: its gradient is 0."""

    def __init__(self) -> None:
        super().__init__()
        self.attention = nn.ModuleList(nn.MultiheadAttention(16, 2, bias=False, batch_first=True) for _ in range(2))
        self.blocks = nn.ModuleList([nn.GRU(16, 16, batch_first=True), nn.GRU(16, 16, batch_first=True)])
        self.again = nn.Linear(16, 16)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = x.reshape(2, -1, 16)
        for attention, block in zip(self.attention, self.blocks, strict=True):
            h, weights = attention(h, h, h)
            h, last = block(self.again(h) * (1 + weights.sum()))
            h = h + last.transpose(0, 1)
        return h.reshape(x.shape)


def _seeded(build: Any) -> nn.Module:
    torch.manual_seed(1)
    return build()


@pytest.mark.parametrize("build", [Checkpointed, Attentive, Tied], ids=lambda build: build.__name__)
@few
def test_models(opened: Any, setup: Setup, build: Any) -> None:
    torch.backends.mkldnn.enabled, before = False, torch.backends.mkldnn.enabled
    try:
        plain, model, in_memory = (_seeded(build) for _ in range(3))
        found = run_engine(opened(model, adamw(model), setup), loop_of(input_penalty))
        assert_close(found, run_plain(plain, adamw(plain), loop_of(input_penalty)), atol=2e-5)
        assert_same_bits(found, run_engine(opened(in_memory, adamw(in_memory), IN_MEMORY), loop_of(input_penalty)))
    finally:
        torch.backends.mkldnn.enabled = before


@few
def test_two_engines_in_one_graph(opened: Any, setup: Setup) -> None:
    """A generator and a discriminator with a penalty on what was generated."""

    def loop(makers: Any) -> list[Any]:
        (first, one), (second, two) = makers
        seen = []
        for x, _ in vector_batches(3):
            middle = first(x)
            (slope,) = torch.autograd.grad(second(middle).square().sum(), middle, create_graph=True)
            (slope.square().mean() + middle.mean()).backward()
            for optimizer in (one, two):
                optimizer.step()
                optimizer.zero_grad()
            seen.append(slope.detach())
        return seen

    plain = [stack(), stack(blocks=2)]
    expected = loop([(model, adamw(model)) for model in plain])
    models = [stack(), stack(blocks=2)]
    engines = [opened(model, adamw(model), setup) for model in models]
    found = loop([(engine.module, engine.optimizer) for engine in engines])
    assert_close(found, expected)
    for engine, model in zip(engines, plain, strict=True):
        assert_close(engine.state_dict(), model.state_dict())


@pytest.mark.parametrize("setup", (ON_NVME, ON_NVME_IN_PLACE), ids=lambda s: s.name)
def test_it_takes_no_more_room(opened: Any, setup: Setup) -> None:
    model = stack(64, 6)

    def step() -> None:
        for x, y in vector_batches(1, 64):
            input_penalty(Run(model, engine.optimizer), x, y)
        engine.step()
        engine.zero_grad()

    engine = opened(model, adamw(model), setup, prefetch=0)
    x, y = vector_batches(1, 64)[0]
    F.mse_loss(model(x), y).backward()
    engine.step()
    engine.zero_grad()
    before = engine.stats()["resident_peak_nbytes"]
    for _ in range(3):
        step()
    assert engine.stats()["resident_peak_nbytes"] <= before


@few
def test_a_second_backward_after_the_step(opened: Any, setup: Setup) -> None:
    """Its graph is of the old weights."""
    model = stack()
    engine = opened(model, adamw(model), setup)
    x, y = vector_batches(1)[0]
    x.requires_grad_()
    (slope,) = torch.autograd.grad(model(x).square().sum(), x, create_graph=True)
    F.mse_loss(model(x), y).backward()
    engine.step()
    engine.zero_grad()
    with refused(offload.UsageError, "before optimizer.step()", "forward again"):
        slope.square().sum().backward()
    engine.zero_grad()
    F.mse_loss(model(x), y).backward()
    engine.step()
