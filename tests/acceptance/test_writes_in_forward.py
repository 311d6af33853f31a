# SPDX-License-Identifier: Apache-2.0
"""Forwards that write to their own parameters, and parameters that share memory: as in plain PyTorch, or refused by name."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch
import torch.nn.functional as F
from torch import nn

import offload

from .models import ALL_SETUPS, IN_MEMORY, ON_CPU, ON_NVME, ON_NVME_IN_PLACE, Setup, adamw, byte_batches, vector_batches
from .runs import Run, assert_same_bits, compare, one_step, refused

anywhere = pytest.mark.parametrize("setup", [*ALL_SETUPS, ON_NVME_IN_PLACE], ids=lambda setup: setup.name)


class Words(nn.Module):
    """Looks up renormalised rows, in a unit of their own or in a block, and renormalises more itself."""

    def __init__(self, trained: bool = True) -> None:
        super().__init__()
        self.words = nn.Embedding(64, 16, max_norm=1.0)
        self.blocks = nn.ModuleList(nn.Linear(16, 16) for _ in range(3))
        self.more = nn.Embedding(64, 16)
        self.bag = nn.EmbeddingBag(64, 16, max_norm=0.5, norm_type=1.0)
        with torch.no_grad():
            for one in (self.words, self.bag, self.more):
                one.weight.mul_(3)
        self.words.weight.requires_grad_(trained)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.words(tokens) + F.embedding(tokens, self.more.weight, max_norm=2.0)
        for block in self.blocks:
            x = torch.tanh(block(x)) + x
        return x.mean(1) + self.bag(tokens)


class Clamped(nn.Module):
    """A clipped critic; one block writes to another's weight, and to one that is not trained."""

    class Layer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(16, 16)
            self.count = nn.Parameter(torch.zeros(3), requires_grad=False)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            with torch.no_grad():
                self.linear.weight.clamp_(-0.1, 0.1)
                self.linear.bias.copy_(self.linear.bias / 2)
                self.count.add_(1)
            return torch.tanh(self.linear(x)) + x + self.count.sum() / 100

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(self.Layer() for _ in range(4))
        self.scale = nn.Parameter(torch.ones(16))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x)
        with torch.no_grad():
            self.scale.div_(self.scale.norm())
        return x * self.scale


def lookups(run: Run) -> list[float]:
    losses = []
    for tokens in byte_batches(6):
        tokens = tokens % 64
        loss = run.model(tokens).square().mean()
        loss.backward()
        run.optimizer.step()
        run.optimizer.zero_grad()
        for evaluating in (torch.no_grad, torch.inference_mode):
            with evaluating():
                losses.append(run.model((tokens + 7) % 64).square().mean().item())
        losses.append(loss.item())
    return losses


def regression(run: Run) -> list[float]:
    losses = []
    for x, y in vector_batches(6):
        loss = F.mse_loss(run.model(x), y)
        loss.backward()
        run.optimizer.step()
        run.optimizer.zero_grad()
        losses.append(loss.item())
    return losses


@anywhere
@pytest.mark.parametrize("build", [Words, lambda: Words(trained=False)], ids=["trained", "frozen"])
def test_max_norm(opened: Any, setup: Setup, build: Callable[[], nn.Module]) -> None:
    compare(build, lookups, setup, opened)


@anywhere
def test_writes_without_gradients(opened: Any, setup: Setup) -> None:
    compare(Clamped, regression, setup, opened)


@pytest.mark.parametrize("setup", [IN_MEMORY, ON_CPU, ON_NVME], ids=lambda setup: setup.name)
def test_what_a_16_bit_master_would_not_see_is_refused(opened: Any, setup: Setup) -> None:
    model = Clamped()
    opened(model, adamw(model), setup, dtype="bf16")
    with refused(offload.UsageError, "layers.0.linear.weight", "forward wrote", "engine.gathered"):
        model(torch.ones(2, 16))


@pytest.mark.parametrize("setup", [IN_MEMORY, ON_NVME], ids=lambda setup: setup.name)
def test_max_norm_in_16_bits_is_refused_at_initialize(opened: Any, setup: Setup) -> None:
    model = Words()
    with refused(offload.ConfigError, "words", "max_norm=1.0", "engine.gathered"):
        opened(model, adamw(model), setup, dtype="bf16")
    assert opened(Words(trained=False).words, None, IN_MEMORY, dtype="bf16") is not None


def test_writes_while_a_save_copies_what_was_there_are_refused(opened: Any, tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = Clamped()
    engine = opened(model, adamw(model), ON_NVME)
    one_step(Run(model, engine.optimizer, engine))
    before = engine.state_dict()
    save = engine.save_checkpoint(tmp_path / "saved", wait=False)
    try:
        model(torch.ones(2, 16))
    except offload.UsageError as error:
        assert "wait=False" in str(error)
    save.wait()
    engine.load_checkpoint(tmp_path / "saved")
    assert_same_bits(engine.state_dict(), before)


# ---- memory that parameters share ----------------------------------------------------------------------------------------


def holding(*parameters: nn.Parameter) -> nn.Module:
    model = nn.Module()
    for name, parameter in zip("abc", parameters, strict=False):
        model.register_parameter(name, parameter)
    return model


def views(*cut: Any, frozen: int = 0) -> nn.Module:
    base = torch.randn(24, 8)
    made = [nn.Parameter(base if part is None else base[part], requires_grad=index >= frozen) for index, part in enumerate(cut)]
    return holding(*made)


SHARING = {
    "the same tensor twice": lambda: views(None, None),
    "slices": lambda: views(slice(0, 16), slice(8, 24)),
    "one inside the other": lambda: views(slice(20, 21), None),
    "columns": lambda: views((slice(None), slice(0, 5)), (slice(None), slice(4, 8))),
    "a transposed one": lambda: holding(*(nn.Parameter(one) for base in [torch.randn(4, 6)] for one in (base, base.t()))),
    "one that is not trained": lambda: views(None, slice(8, 24), frozen=1),
    "another dtype": lambda: holding(
        *(nn.Parameter(one) for base in [torch.randn(8)] for one in (base, base.view(torch.bfloat16)[9:10]))
    ),
}
everywhere = pytest.mark.parametrize("setup", [IN_MEMORY, ON_CPU, ON_NVME], ids=lambda setup: setup.name)


@everywhere
@pytest.mark.parametrize("build", SHARING.values(), ids=SHARING)
def test_parameters_that_overlap_are_refused(opened: Any, setup: Setup, build: Callable[[], nn.Module]) -> None:
    model = build()
    before = {name: (value.data_ptr(), value.clone()) for name, value in model.named_parameters()}
    with refused(offload.ConfigError, "'a'", "'b'", "overlap", "clone"):
        opened(model, adamw(model), setup)
    for name, value in model.named_parameters():
        assert value.data_ptr() == before[name][0] and torch.equal(value, before[name][1])


@everywhere
def test_elements_that_share_memory_are_refused_where_they_are_trained(opened: Any, setup: Setup) -> None:
    for made in (torch.ones(1).expand(8), torch.randn(12).as_strided((4, 4), (2, 1))):
        model = holding(nn.Parameter(made), nn.Parameter(torch.ones(3)))
        with refused(offload.ConfigError, "'a'", "share memory", "clone"):
            opened(model, adamw(model), setup)


BUFFERS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "all of it": lambda value: value,
    "rows": lambda value: value[8:16],
    "a column": lambda value: value[:, 3],
    "its bytes": lambda value: value.view(torch.uint8)[0],
}


@everywhere
@pytest.mark.parametrize("view", BUFFERS.values(), ids=BUFFERS)
def test_a_buffer_that_is_a_view_of_a_trained_parameter_is_refused(
    opened: Any, setup: Setup, view: Callable[[torch.Tensor], torch.Tensor]
) -> None:
    model = views(None)
    model.register_buffer("shown", view(model.a.detach()))
    value = model.a.detach().clone()
    with refused(offload.ConfigError, "'shown'", "'a'", "overlap", "clone"):
        opened(model, adamw(model), setup)
    assert torch.equal(model.a, value)


def test_a_buffer_in_a_storage_of_its_own_over_the_same_memory_is_refused(opened: Any) -> None:
    array = numpy.zeros((24, 8), dtype=numpy.float32)
    model = holding(nn.Parameter(torch.from_numpy(array)))
    model.register_buffer("shown", torch.from_numpy(array[3:5]))
    with refused(offload.ConfigError, "'shown'", "'a'", "overlap"):
        opened(model, adamw(model), IN_MEMORY)


@everywhere
def test_a_buffer_that_is_none_of_a_trained_parameter_works(opened: Any, setup: Setup) -> None:
    """Of one that is frozen, beside one in the same memory, empty, a copy."""
    model = views(slice(0, 8), slice(8, 24), frozen=1)
    model.register_buffer("frozen", model.a.detach())
    model.register_buffer("none", model.b.detach()[:0])
    model.register_buffer("copy", model.b.detach().clone(), persistent=False)
    base = torch.randn(24, 8)
    model.c = nn.Parameter(base[:8])
    model.register_buffer("beside", base[8:])
    opened(model, adamw(model), setup)


def test_deferred_parameters_that_overlap_are_refused(opened: Any) -> None:
    with offload.deferred_init():
        model = views(slice(0, 16), slice(8, 24))
    with refused(offload.ConfigError, "'a'", "'b'", "overlap"):
        opened(model, adamw(model), IN_MEMORY)


@everywhere
def test_what_only_lies_close_together_works(opened: Any, setup: Setup) -> None:
    """Parts of one tensor, interleaved columns, one Parameter under two names, empty ones, frozen ones that share memory."""
    base, fused = torch.randn(24, 8), torch.randn(4, 8)
    model = holding(nn.Parameter(base[:, ::2]), nn.Parameter(base[:, 1::2]), nn.Parameter(fused[:, :3]))
    model.rest = nn.Parameter(fused[:, 3:])
    model.again = model.a
    model.empty, model.other_empty = nn.Parameter(base[3:3]), nn.Parameter(base[3:3])
    model.one, model.two = (nn.Parameter(torch.ones(1).expand(8), requires_grad=False) for _ in range(2))
    model.same, model.twin = (nn.Parameter(fused.view(-1)[20:24], requires_grad=False) for _ in range(2))
    model.rest = nn.Parameter(fused[:2, 3:])
    values = {name: value.detach().clone() for name, value in model.named_parameters()}
    engine = opened(model, adamw(model), setup)
    assert_same_bits({name: engine.state_dict()[name] for name in values}, values)
