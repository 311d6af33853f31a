# SPDX-License-Identifier: Apache-2.0
"""What wrappers and loops do around a model in training: conversions without effect, an optimizer's state_dict, clipping."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from accelerate import Accelerator
from torch import nn
from torch.nn.utils import clip_grad_norm_, get_total_norm

import offload
from tests.acceptance.models import ALL_SETUPS, ON_NVME, Setup, adamw, stack, two_groups, vector_batches
from tests.acceptance.runs import Run, assert_close, assert_same_bits, one_step, simple_loop
from tests.crosses import in_turn

everywhere = pytest.mark.parametrize("setup", ALL_SETUPS, ids=lambda setup: setup.name)
Opener = Callable[..., offload.Engine]


@pytest.fixture
def opened(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Opener]:
    engines: list[offload.Engine] = []

    def open_engine(model: nn.Module, setup: Setup, optimizer: Any = None, **fields: Any) -> offload.Engine:
        monkeypatch.setenv("OFFLOAD_ACCELERATOR", setup.accelerator)
        engines.append(offload.initialize(model, optimizer or adamw(model), setup.fields(tmp_path, **fields)))
        return engines[-1]

    yield open_engine
    for engine in engines:
        engine.close()


# ---- module.to() and its like

SAME: dict[str, Callable[[nn.Module], Any]] = {
    "to(device)": lambda model: model.to("cpu"),
    "to(torch.device)": lambda model: model.to(torch.device("cpu"), non_blocking=True),
    "to(dtype)": lambda model: model.to(torch.float32),
    "to(both)": lambda model: model.to(device="cpu", dtype=torch.float32),
    "to(tensor)": lambda model: model.to(torch.zeros(1)),
    "to()": lambda model: model.to(memory_format=torch.channels_last),  # of 4 dimensions there are none
    "cpu": lambda model: model.cpu(),
    "float": lambda model: model.float(),
    "type": lambda model: model.type(torch.float32),
    "a block": lambda model: model.blocks[1].to("cpu"),
}
OTHER: dict[str, Callable[[nn.Module], Any]] = {
    "to": lambda model: model.to(torch.bfloat16),
    "half": lambda model: model.half(),
    "double": lambda model: model.double(),
    "bfloat16": lambda model: model.bfloat16(),
    "type": lambda model: model.type(torch.float16),
    "to_empty": lambda model: model.to_empty(device="cpu"),
    "share_memory": lambda model: model.share_memory(),
}


class Recurrent(nn.Module):
    """Looks at `.data` of its weights after each conversion."""

    def __init__(self) -> None:
        super().__init__()
        self.rnn = nn.LSTM(16, 16, batch_first=True)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.rnn(x[:, None])[0][:, 0]


@everywhere
@pytest.mark.parametrize("build", [stack, Recurrent])
def test_conversions_that_change_nothing_do_nothing(opened: Opener, setup: Setup, build: Callable[[], nn.Module]) -> None:
    model = build()
    plain = build()
    plain.load_state_dict(model.state_dict())
    engine = opened(model, setup)
    optimizer = adamw(plain)
    calls = [call for name, call in SAME.items() if name != "a block" or build is stack]
    for (x, y), call in zip(vector_batches(len(calls)), calls, strict=True):
        for one, steps in ((plain, optimizer), (model, engine.optimizer)):
            assert call(one) is not None
            loss = F.mse_loss(one(x), y)
            loss.backward()
            call(one)  # with gradients in place
            steps.step()
            call(one)
            steps.zero_grad()
    assert_close(engine.state_dict(), plain.state_dict())


@everywhere
def test_conversions_that_would_change_something_name_themselves(opened: Opener, setup: Setup) -> None:
    model = stack()
    engine = opened(model, setup)
    one_step(Run(model, engine.optimizer, engine))
    before = engine.state_dict()
    for name, call in OTHER.items():
        with pytest.raises(
            offload.ParameterAccessError, match=rf"module\.{name}\(\).*before offload\.initialize.*Config\(dtype"
        ):
            call(model)
    assert_same_bits(engine.state_dict(), before)
    one_step(Run(model, engine.optimizer, engine))
    weight = model.blocks[0].up.weight
    for same in (weight.to("cpu"), weight.float(), weight.type(torch.float32), weight.cpu()):
        assert same is weight
    assert weight.type() == "torch.FloatTensor"


# ---- the optimizer's state_dict


@everywhere
def test_the_optimizers_state_dict_goes_back_where_it_came_from(opened: Opener, setup: Setup, tmp_path: Path) -> None:
    model = stack()
    engine = opened(model, setup, two_groups(model))
    run = Run(model, engine.optimizer, engine)
    one_step(run)
    state = engine.optimizer.state_dict()
    plain = two_groups(stack()).state_dict()
    assert [set(group) - {"params"} for group in state["param_groups"]] == [
        set(group) - {"params"} for group in plain["param_groups"]
    ]
    assert [group["params"] for group in state["param_groups"]] == [group["params"] for group in plain["param_groups"]]
    assert "save_checkpoint" in str(state["offload"])
    torch.save(state, tmp_path / "optimizer")
    groups = engine.optimizer.param_groups
    groups[0]["lr"], groups[1]["betas"] = 0.5, (0.1, 0.2)
    parameters = groups[0]["params"]
    engine.optimizer.load_state_dict(torch.load(tmp_path / "optimizer"))
    assert engine.optimizer.param_groups is groups and groups[0]["params"] is parameters
    assert groups[0]["lr"] == state["param_groups"][0]["lr"] and groups[1]["betas"] == state["param_groups"][1]["betas"]
    one_step(run)
    with pytest.raises(offload.UsageError, match=r"step 1.*2 steps.*load_checkpoint"):
        engine.optimizer.load_state_dict(state)
    with pytest.raises(offload.UsageError, match="groups"):
        engine.optimizer.load_state_dict(engine.optimizer.state_dict() | {"param_groups": state["param_groups"][:1]})
    with pytest.raises(offload.UsageError, match=r"before offload\.initialize"):
        engine.optimizer.load_state_dict(plain)


@pytest.mark.parametrize(
    ("kind", "refused_at"),
    [
        (torch.optim.AdamW, "load"),
        (torch.optim.Adagrad, "load"),
        (partial(torch.optim.SGD, momentum=0.9), "step"),
        (offload.Lion, "step"),
    ],
)
def test_no_other_optimizer_takes_the_engines_state_dict_for_a_fresh_one(
    opened: Opener, kind: Callable[..., torch.optim.Optimizer], refused_at: str, tmp_path: Path
) -> None:
    """Its moments are not in it: torch's optimizers would begin anew without a word."""
    model = stack()
    engine = opened(model, Setup("nvme", "nvme"), kind(model.parameters(), lr=1e-3))
    one_step(Run(model, engine.optimizer, engine))
    torch.save(engine.optimizer.state_dict(), tmp_path / "optimizer")
    other = stack()
    plain = kind(other.parameters(), lr=1e-3)
    state = torch.load(tmp_path / "optimizer", weights_only=True)
    with pytest.raises(Exception) as refusal:
        plain.load_state_dict(state)
        assert refused_at == "step"
        other(torch.ones(2, 16)).sum().backward()
        before = [one.clone() for one in other.parameters()]
        plain.step()
    if refused_at == "load":
        assert "tiers of an offload engine" in str(refusal.value) and "save_checkpoint" in str(refusal.value)
    else:
        assert "bytes" in str(refusal.value)
        assert all(torch.equal(one, two) for one, two in zip(other.parameters(), before, strict=True))
    with pytest.raises(offload.ConfigError, match="tiers of an offload engine"):
        offload.initialize(other, plain, offload.Config(parameters="cpu", optimizer_states="cpu"))


@everywhere
def test_accelerates_own_loop(opened: Opener, setup: Setup) -> None:
    """It moves the model, loads the optimizer's state back, clips by torch, wraps the scheduler."""

    def loop(run: Run) -> list[float]:
        accelerator = Accelerator(cpu=True)
        scheduler = torch.optim.lr_scheduler.LambdaLR(run.optimizer, lambda step: 0.9**step)
        model, optimizer, scheduler = accelerator.prepare(run.model, run.optimizer, scheduler)
        norms = []
        for x, y in vector_batches(4):
            accelerator.backward(F.mse_loss(model(x), y))
            norms.append(float(accelerator.clip_grad_norm_(model.parameters(), 0.3)))
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()
        return norms

    model, plain = stack(), stack()
    engine = opened(model, setup)
    assert_close(loop(Run(model, engine.optimizer, engine)), loop(Run(plain, adamw(plain))))
    assert_close(engine.state_dict(), plain.state_dict())


# ---- clipping by torch


def _by_hand(model: nn.Module, max_norm: float) -> torch.Tensor:
    """As loops did it before there was a function for it."""
    gradients = [p.grad.detach() for p in model.parameters() if p.grad is not None]
    norm = torch.norm(torch.stack([torch.norm(gradient, 2.0) for gradient in gradients]), 2.0)
    for gradient in gradients:
        gradient.mul_(torch.clamp(max_norm / (norm + 1e-6), max=1.0))
    return norm


def _in_two_calls(model: nn.Module, max_norm: float) -> torch.Tensor:
    norm = get_total_norm([p.grad for p in model.parameters() if p.grad is not None])
    torch.nn.utils.clip_grads_with_norm_(model.parameters(), max_norm, norm)
    return norm


CLIPPING: list[Callable[[nn.Module, float], torch.Tensor]] = [
    lambda model, max_norm: clip_grad_norm_(model.parameters(), max_norm),
    lambda model, max_norm: clip_grad_norm_(model.parameters(), max_norm, foreach=True, error_if_nonfinite=True),
    lambda model, max_norm: clip_grad_norm_(list(model.parameters()), max_norm, foreach=False),
    _by_hand,
    _in_two_calls,
]


# torch clips what stands for gradients, by the dtype; when the updates that wait for it run is the place's matter.
@pytest.mark.parametrize(("setup", "dtype"), in_turn(ALL_SETUPS, ("fp32", "bf16", "fp16")))
def test_clipping_by_torch_is_the_engines_to_the_bit(opened: Opener, setup: Setup, dtype: str) -> None:
    def clipped(clip: Callable[[nn.Module, float], Any] | None, max_norm: float) -> list[Any]:
        model = stack()
        engine = opened(model, setup, dtype=dtype, **({"loss_scale": 64.0} if dtype == "fp16" else {}))
        norms = []
        for x, y in vector_batches(3):
            with engine.no_sync():  # two micro-batches
                engine.backward(F.mse_loss(model(y).float(), x))
            engine.backward(F.mse_loss(model(x).float(), y))
            norms.append(float(engine.clip_grad_norm_(max_norm) if clip is None else clip(model, max_norm)))
            assert engine.grad_norm == norms[-1]
            engine.step()
            assert engine.grad_norm == norms[-1]
            engine.zero_grad()
        state = engine.state_dict()
        engine.close()
        return [norms, state]

    expected = clipped(None, 0.3)
    for clip in CLIPPING if dtype == "fp32" else CLIPPING[:1]:
        assert_same_bits(clipped(clip, 0.3), expected)
    if dtype == "fp32":
        assert_same_bits(clipped(CLIPPING[0], 1e9), clipped(None, 1e9))


@everywhere
def test_the_norm_after_clipping_is_that_of_the_clipped(opened: Opener, setup: Setup) -> None:
    model, plain = stack(), stack()
    engine = opened(model, setup)
    optimizer = adamw(plain)
    for x, y in vector_batches(3):
        norms = []
        for one in (plain, model):
            F.mse_loss(one(x), y).backward()
            clip_grad_norm_(one.parameters(), 0.7)
            gradients = [p.grad for p in one.parameters()]
            norms.append([float(get_total_norm(gradients)), float(clip_grad_norm_(one.parameters(), 0.3))])
            norms[-1].append(float(get_total_norm(gradients)))
        assert_close(norms[1], norms[0])
        for one in (optimizer, engine.optimizer):
            one.step()
            one.zero_grad()
    assert_close(engine.state_dict(), plain.state_dict())


@everywhere
def test_clipping_of_a_part_is_refused(opened: Opener, setup: Setup) -> None:
    model, other = stack(), stack()
    engine = opened(model, setup)
    x, y = vector_batches(1)[0]
    F.mse_loss(model(x) + other(x), y).backward()
    parts: list[tuple[Callable[[], Any], str]] = [
        (lambda: clip_grad_norm_(model.blocks.parameters(), 1.0), r"without that of inlet\.weight.*max_grad_norm"),
        (lambda: clip_grad_norm_(model.inlet.weight, 1.0, foreach=True), "without"),
        (lambda: get_total_norm([p.grad for p in model.blocks.parameters()]), "without"),
        (lambda: clip_grad_norm_([*model.parameters(), model.inlet.weight], 1.0), "twice"),
        (lambda: clip_grad_norm_([*model.parameters(), *other.parameters()], 1.0), "put together"),
        (lambda: clip_grad_norm_(model.parameters(), 1.0, norm_type=math.inf), "norm_type=inf"),
        (lambda: clip_grad_norm_(model.parameters(), 1.0, norm_type=1.0, foreach=True), "norm_type=1"),
        (lambda: model.inlet.weight.grad.norm().item(), r"inlet\.weight.*engine\.grad_norm"),
        (lambda: model.inlet.weight.grad.mul_(0.5), "max_grad_norm"),
        (lambda: model.inlet.weight.grad.norm(dim=0), "max_grad_norm"),
    ]
    for call, words in parts:
        with pytest.raises(offload.ParameterAccessError, match=words):
            call()
    model.inlet.weight.grad.mul_(torch.tensor(0.5))
    for refused in (engine.step, lambda: clip_grad_norm_(model.parameters(), 1.0)):
        with pytest.raises(offload.UsageError, match=r"different numbers.*inlet\.weight.*all together"):
            refused()
    engine.zero_grad()
    simple_loop(2)(Run(model, engine.optimizer, engine))


def test_a_backward_after_clipping_is_refused(opened: Opener) -> None:
    model = stack()
    engine = opened(model, ON_NVME)
    (x, y), (z, _) = vector_batches(2)
    F.mse_loss(model(x), y).backward()
    clip_grad_norm_(model.parameters(), 0.01)
    with pytest.raises(offload.UsageError, match="after the last backward"):
        F.mse_loss(model(z), y).backward()
    engine.zero_grad()
    F.mse_loss(model(x), y).backward()
    engine.step()
    with pytest.raises(offload.ParameterAccessError, match=r"engine\.grad_norm"):
        clip_grad_norm_(model.parameters(), 0.01)
