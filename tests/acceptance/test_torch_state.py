# SPDX-License-Identifier: Apache-2.0
"""Taking a model and an optimizer over and handing them back: against plain PyTorch with torch.optim, in fp32."""

from __future__ import annotations

import contextlib
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import save_file
from torch import nn

import offload

from .models import (
    ALL_SETUPS,
    IN_MEMORY,
    ON_CPU,
    ON_NVME,
    STEP_SETUPS,
    Normalized,
    Setup,
    Sometimes,
    Tied,
    adamw,
    byte_batches,
    gpt2,
    llama,
    stack,
    two_groups,
    vector_batches,
)
from .runs import Run, assert_close, assert_same_bits, compare, run_engine, simple_loop, token_loop

anywhere = pytest.mark.parametrize("setup", ALL_SETUPS, ids=lambda s: s.name)
at_step = pytest.mark.parametrize("setup", STEP_SETUPS, ids=lambda s: s.name)
few = pytest.mark.parametrize("setup", (ON_CPU, ON_NVME), ids=lambda s: s.name)


@anywhere
@pytest.mark.parametrize("kind", [torch.optim.AdamW, torch.optim.Adam])
def test_an_optimizer_that_already_has_state(opened: Any, setup: Setup, kind: type[torch.optim.Optimizer]) -> None:
    """Five steps in plain torch, then the engine takes over moments and step counts and goes on."""

    def warmed(model: nn.Module) -> Any:
        optimizer = two_groups(model, kind)
        plain_steps(Run(model, optimizer))
        return optimizer

    def plain_steps(run: Run) -> None:
        for step, (x, y) in enumerate(vector_batches(5, seed=3)):
            F.mse_loss(run.model(x, step < 2), y).backward()  # step counts differ among parameters
            run.optimizer.step()
            run.optimizer.zero_grad()

    batches = vector_batches(6)

    def loop(run: Run) -> None:
        for step, (x, y) in enumerate(batches):
            F.mse_loss(run.model(x, step % 2 == 0), y).backward()
            run.optimizer.step()
            run.optimizer.zero_grad()

    compare(Sometimes, loop, setup, opened, warmed)


@anywhere
def test_state_dict_goes_back_into_the_plain_model(opened: Any, setup: Setup) -> None:
    for build in (gpt2, Normalized, Tied):
        model = build()
        loop = token_loop(2) if build is gpt2 else simple_loop(2)
        engine = opened(model, adamw(model), setup)
        loop(Run(model, engine.optimizer, engine))
        state = engine.state_dict()
        assert all(value.device.type == "cpu" and value.isfinite().all() for value in state.values())
        fresh = build()
        fresh.load_state_dict(state)
        batch = byte_batches(1)[0] if build is gpt2 else vector_batches(1)[0][0]
        model.eval(), fresh.eval()
        with torch.no_grad():
            ours, theirs = model(batch), fresh(batch)
        ours, theirs = (getattr(one, "logits", one) for one in (ours, theirs))
        assert_close(ours, theirs, what=build.__name__)
        state[next(iter(state))].zero_()  # what was handed out is the user's own
        assert not torch.equal(engine.state_dict()[next(iter(state))], state[next(iter(state))])
        engine.close()


@few
def test_state_dict_between_backward_and_step_is_the_old_one(opened: Any, setup: Setup) -> None:
    model = stack()
    engine = opened(model, adamw(model), setup)
    before = Run(model, engine.optimizer, engine).weights()
    x, y = vector_batches(1)[0]
    F.mse_loss(model(x), y).backward()
    assert_same_bits(engine.state_dict(), before)
    engine.optimizer.step()
    plain = stack()
    optimizer = adamw(plain)
    F.mse_loss(plain(x), y).backward()
    optimizer.step()
    assert_close(engine.state_dict(), plain.state_dict())


@pytest.mark.parametrize("setup", [IN_MEMORY, ON_CPU, ON_NVME], ids=lambda s: s.name)
def test_initialize_changes_no_value(opened: Any, setup: Setup) -> None:
    """Before any step: outputs and state are to the bit those of the model as it was, and it stays that object."""
    model = gpt2()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    shapes = [(name, p.shape, p.dtype, p.device, p.requires_grad) for name, p in model.named_parameters()]
    identities = [id(p) for p in model.parameters()]
    tokens = byte_batches(1)[0]
    expected = model(input_ids=tokens).logits.detach()
    kind = type(model)
    engine = opened(model, adamw(model), setup)
    assert engine.module is model and type(model) is kind
    assert identities == [id(p) for p in model.parameters()]
    assert shapes == [(name, p.shape, p.dtype, p.device, p.requires_grad) for name, p in model.named_parameters()]
    assert all(isinstance(p, nn.Parameter) for p in model.parameters())
    assert_same_bits(model(input_ids=tokens).logits.detach(), expected)
    assert_same_bits(engine.state_dict(), before)
    assert shapes == [(name, p.shape, p.dtype, p.device, p.requires_grad) for name, p in model.named_parameters()]


def test_inference_without_an_optimizer(opened: Any) -> None:
    model = gpt2()
    tokens = byte_batches(1)[0]
    expected = model(input_ids=tokens).logits.detach()
    engine = opened(model, None, Setup("nvme", "auto", "deferred"))
    with torch.no_grad():
        for _ in range(3):
            assert_same_bits(engine.module(input_ids=tokens).logits, expected)


@pytest.mark.parametrize("build", [gpt2, llama, stack])
@pytest.mark.parametrize("setup", [IN_MEMORY, ON_NVME], ids=lambda s: s.name)
def test_deferred_init_gives_the_same_bits(opened: Any, setup: Setup, build: Any) -> None:
    """The builders seed the generator themselves, inside deferred_init: initialize replays from that seed."""
    expected = build()
    with offload.deferred_init():
        model = build()
    assert all(p.device.type == "meta" for p in model.parameters())
    engine = opened(model, adamw(model), setup)
    assert_same_bits(engine.state_dict(), expected.state_dict())
    loop = simple_loop(4) if build is stack else token_loop(4)
    losses, weights = run_engine(engine, loop)
    assert_close(losses, loop(Run(expected, adamw(expected))))
    assert_close(weights, expected.state_dict())


class Recurrent(nn.Module):
    """An LSTM keeps weak references to its own weights, which must survive their leaving the meta device."""

    def __init__(self) -> None:
        super().__init__()
        self.rnn = nn.LSTM(16, 32, 2, batch_first=True)
        self.outlet = nn.Linear(32, 16)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.outlet(self.rnn(x)[0])


@pytest.mark.parametrize("deferred", [False, True])
@pytest.mark.parametrize("setup", [IN_MEMORY, ON_CPU, ON_NVME], ids=lambda s: s.name)
def test_a_recurrent_model(opened: Any, setup: Setup, deferred: bool) -> None:
    torch.manual_seed(5)
    expected = Recurrent()
    torch.manual_seed(5)
    with offload.deferred_init() if deferred else contextlib.nullcontext():
        model = Recurrent()
    batches = [torch.randn(2, 5, 16, generator=torch.Generator().manual_seed(index)) for index in range(4)]

    def loop(run: Run) -> list[float]:
        losses = []
        for x in batches:
            loss = F.mse_loss(run.model(x), x)
            loss.backward()
            run.optimizer.step()
            run.optimizer.zero_grad()
            losses.append(loss.item())
        return losses

    losses, weights = run_engine(opened(model, adamw(model), setup), loop)
    assert_close(losses, loop(Run(expected, adamw(expected))))
    assert_close(weights, expected.state_dict())


@pytest.mark.parametrize("setup", [IN_MEMORY, ON_NVME], ids=lambda s: s.name)
def test_weights_from_a_file_bring_buffers_too(opened: Any, nvme: Path, setup: Setup) -> None:
    trained = Normalized()
    simple_loop(4)(Run(trained, adamw(trained)))
    save_file({name: value.contiguous() for name, value in trained.state_dict().items()}, nvme / "model.safetensors")
    model = Normalized()
    fields = setup.fields(nvme)
    with offload.initialize(model, adamw(model), fields, weights=nvme / "model.safetensors") as engine:
        assert_same_bits(engine.state_dict(), trained.state_dict())
