# SPDX-License-Identifier: Apache-2.0
"""Optimizers without a kernel here: called on parts of parameters where they compute element by element, else refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

import offload
from offload.errors import ConfigError
from offload.model.own_optimizer import own_optimizer


class Averaging(torch.optim.Optimizer):
    """Made up: two arrays whose first values are not zeros, counts that are a tensor and a number, a group's number."""

    def __init__(self, params: Any, lr: float = 0.05, pull: float = 0.3) -> None:
        super().__init__(params, {"lr": lr, "pull": pull})
        self.floor = 1e-3

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for parameter in (one for one in group["params"] if one.grad is not None):
                state = self.state[parameter]
                if not state:
                    state["slow"], state["size"] = parameter.clone(), parameter.grad.abs() + self.floor
                    state["count"], state["tensor_count"] = 0, torch.zeros(1)
                state["count"] += 1
                state["tensor_count"] += 1
                state["size"].mul_(0.9).add_(parameter.grad.abs(), alpha=0.1)
                parameter.sub_(group["lr"] / state["count"] ** 0.5 * parameter.grad / (state["size"] + self.floor))
                state["slow"].lerp_(parameter, 0.2)
                parameter.lerp_(state["slow"], group["pull"] * float(state["tensor_count"]) / 10)


class Plain(torch.optim.Optimizer):
    """As DeepSpeed's tests have it."""

    def __init__(self, params: Any, lr: float = 0.1) -> None:
        super().__init__(params, {"lr": lr})

    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    parameter.data.add_(-group["lr"], parameter.grad.data)


KINDS = {
    "averaging": lambda p: Averaging(p),
    "plain": lambda p: Plain(p),
    "a stranger's class of a known name": lambda p: type("Lion", (Averaging,), {})(p),
    "rmsprop": lambda p: torch.optim.RMSprop(p, lr=0.01, momentum=0.5),
    "radam": lambda p: torch.optim.RAdam(p, lr=0.01, decoupled_weight_decay=True, weight_decay=0.1),
    "adamax": lambda p: torch.optim.Adamax(p, lr=0.01),
    "rprop": lambda p: torch.optim.Rprop(p),
    "adadelta": lambda p: torch.optim.Adadelta(p),
}


def _model() -> torch.nn.Sequential:
    torch.manual_seed(1)
    return torch.nn.Sequential(torch.nn.Linear(40, 300), torch.nn.GELU(), torch.nn.Linear(300, 8))


def _train(model: Any, optimizer: Any, steps: range) -> None:
    for index in steps:
        batch = torch.randn(6, 40, generator=torch.Generator().manual_seed(index))
        model(batch).square().sum().backward()
        optimizer.param_groups[0]["lr"] = 0.01 / (1 + index)  # what a scheduler does
        optimizer.step()
        optimizer.zero_grad()


def _in_memory(kind: str, steps: int) -> list[torch.Tensor]:
    model = _model()
    _train(model, KINDS[kind](model.parameters()), range(steps))
    return [one.detach() for one in model.parameters()]


@pytest.mark.parametrize("tier", ["cpu", "nvme"])
@pytest.mark.parametrize("kind", KINDS)
def test_trains_as_in_memory_and_resumes(kind: str, tier: str, tmp_path: Path) -> None:
    nvme = {"nvme": str(tmp_path / "nvme")} if tier == "nvme" else {}
    for first, last in ((0, 3), (3, 6)):
        model = _model()
        config = offload.Config(parameters=tier, optimizer_states=tier, dtype="fp32", **nvme)
        with offload.initialize(model, KINDS[kind](model.parameters()), config) as engine:
            if first:
                engine.load_checkpoint(tmp_path / "saved")
            _train(model, engine.optimizer, range(first, last))
            engine.save_checkpoint(tmp_path / "saved")
            found = {name: one.clone() for name, one in engine.state_dict().items()}
    for ours, expected in zip(found.values(), _in_memory(kind, 6), strict=True):
        torch.testing.assert_close(ours, expected, rtol=2e-6, atol=2e-6)


@pytest.mark.parametrize("kind", ["averaging", "plain"])
def test_wrappers_get_back_what_they_had(kind: str) -> None:
    """Also of one that keeps nothing."""
    model = _model()
    with offload.initialize(model, KINDS[kind](model.parameters())) as engine:
        _train(model, engine.optimizer, range(2))
        state = engine.optimizer.state_dict()
        engine.optimizer.param_groups[0]["lr"] = 7.0
        engine.optimizer.load_state_dict(state)
        assert engine.optimizer.param_groups[0]["lr"] == 0.01 / 2


@pytest.mark.parametrize("options", [{"eps": (1e-3, 1e-4)}, {"betas": (0.9,)}, {"betas": 0.9}, {"momentum": None}])
def test_options_mean_what_the_optimizer_takes_them_for(options: dict[str, Any]) -> None:
    model = _model()
    with offload.initialize(model, Plain([{"params": list(model.parameters()), **options}])) as engine:
        _train(model, engine.optimizer, range(2))
        engine.optimizer.param_groups[0]["lr"] = float("nan")
        model(torch.ones(6, 40)).sum().backward()
        with pytest.raises(offload.UsageError, match=r"lr=nan .* is no number to step with"):
            engine.step()
        found = list(engine.state_dict().values())
    for ours, expected in zip(found, _in_memory("plain", 2), strict=True):
        torch.testing.assert_close(ours, expected, rtol=2e-6, atol=2e-6)


def _deep() -> torch.nn.Sequential:
    torch.manual_seed(1)
    return torch.nn.Sequential(*(torch.nn.Sequential(torch.nn.Linear(1100, 1100), torch.nn.Tanh()) for _ in range(3)))


def _train_deep(model: Any, optimizer: Any) -> None:
    """With a number that is a tensor, and changes in place right after each step."""
    optimizer.param_groups[0]["lr"] = rate = torch.tensor(0.01)
    for index in range(4):
        model(torch.randn(2, 1100, generator=torch.Generator().manual_seed(index))).square().sum().backward()
        optimizer.step()
        rate.mul_(0.5)
        optimizer.zero_grad()


@pytest.mark.parametrize("update", ["step", "backward"])
def test_updates_go_by_the_numbers_of_their_step(update: Any, tmp_path: Path) -> None:
    """Also those that begin before it, and go on: none has to be undone, as the numbers are those that it began with."""
    reference = _deep()
    _train_deep(reference, Plain(reference.parameters()))
    model = _deep()
    config = offload.Config(parameters="nvme", optimizer_states="nvme", nvme=str(tmp_path), update=update)
    with offload.initialize(model, Plain(model.parameters()), config) as engine:
        _train_deep(model, engine.optimizer)
        found = list(engine.state_dict().values())
        counts = [engine.stats()[name] for name in ("speculated_steps", "undone_steps")]
    for ours, expected in zip(found, reference.parameters(), strict=True):
        torch.testing.assert_close(ours, expected.detach(), rtol=2e-6, atol=2e-6)
    assert counts == ([4, 0] if update == "backward" else [0, 0])


def test_steps_of_equal_numbers_are_equal() -> None:
    named = list(_model().named_parameters())
    optimizer = torch.optim.RMSprop(named, lr=torch.tensor(0.01))
    [group] = optimizer.param_groups
    group["bounds"] = [0.1, (torch.tensor([1.0, 2.0]), "any")]
    own = own_optimizer(optimizer)
    first, second = own.step_of(group), own.step_of(group)
    assert first == second and hash(first) == hash(second)
    group["bounds"][1][0][1] = 3.0
    assert own.step_of(group) != first
    group["bounds"][1][0][1] = 2.0
    group["lr"].mul_(2)
    assert own.step_of(group) != first == second


def test_masters_and_split_states_are_the_same_numbers() -> None:
    """After a first step: what the two round to bf16 for the second differs in ties."""
    found = []
    for state_format in ("fp32", "split"):
        model = _model()
        config = offload.Config(parameters="cpu", optimizer_states="cpu", dtype="bf16", state_format=state_format)
        with offload.initialize(model, Averaging(model.parameters()), config) as engine:
            batch = torch.randn(6, 40, generator=torch.Generator().manual_seed(0)).bfloat16()
            model(batch).float().square().sum().backward()
            engine.step()
            found.append([engine.read(one, "value") for one in model.parameters()])
    assert all(torch.equal(*pair) for pair in zip(*found, strict=True))


class OfTheNorm(Plain):
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for parameter in group["params"]:
                parameter.data.sub_(group["lr"] * parameter.grad / parameter.grad.norm())


class CountingItself(Plain):
    calls = 0

    def step(self, closure: Any = None) -> None:
        self.calls += 1
        for group in self.param_groups:
            for parameter in group["params"]:
                parameter.data.sub_(group["lr"] / self.calls * parameter.grad)


@pytest.mark.parametrize(
    ("kind", "said"),
    [
        (OfTheNorm, "depends on more than that element"),
        (CountingItself, "depends on more than that element"),
        (torch.optim.NAdam, "'mu_product'"),
        (lambda p: torch.optim.RMSprop(p, momentum=0.5, centered=True), "more than 2 arrays"),
        (torch.optim.LBFGS, "LBFGS"),
    ],
)
def test_what_needs_whole_parameters_is_refused(kind: Any, said: str) -> None:
    model = _model()
    before = [one.clone() for one in model.parameters()]
    with pytest.raises(ConfigError, match=said):
        offload.initialize(model, kind(model.parameters()), offload.Config())
    assert all(torch.equal(one, other) for one, other in zip(model.parameters(), before, strict=True))


class Wrapping(torch.optim.Optimizer):
    """Holds another and is all that it is, as Accelerate's does."""

    state = property(lambda self: self.inner.state, lambda self, state: setattr(self.inner, "state", state))
    param_groups = property(
        lambda self: self.inner.param_groups, lambda self, given: setattr(self.inner, "param_groups", given)
    )
    defaults = property(lambda self: self.inner.defaults, lambda self, given: setattr(self.inner, "defaults", given))

    def __init__(self, inner: torch.optim.Optimizer) -> None:
        self.inner = inner

    def step(self, closure: Any = None) -> None:
        self.inner.step()


def test_what_wraps_another_is_refused_and_that_one_is_as_it_was() -> None:
    model = _model()
    inner = torch.optim.AdamW(model.parameters())
    _train(model, inner, range(2))
    wrapper, groups, state = Wrapping(inner), inner.param_groups, inner.state
    with pytest.raises(ConfigError, match="Wrapping wraps another, AdamW in its attribute 'inner': pass that one"):
        offload.initialize(model, wrapper, offload.Config())
    assert inner.param_groups is groups and inner.state is state and len(state) == len(list(model.parameters()))
    offload.initialize(model, inner, offload.Config()).close()


def test_states_that_it_has_already_are_taken_over() -> None:
    model = _model()
    optimizer = KINDS["radam"](model.parameters())
    _train(model, optimizer, range(3))
    with offload.initialize(model, optimizer, offload.Config(parameters="cpu", optimizer_states="cpu")) as engine:
        _train(model, engine.optimizer, range(3, 6))
        found = list(engine.state_dict().values())
    for ours, expected in zip(found, _in_memory("radam", 6), strict=True):
        torch.testing.assert_close(ours, expected, rtol=2e-6, atol=2e-6)


def test_narrow_states_are_refused() -> None:
    model = _model()
    with pytest.raises(ConfigError, match="state_format='8bit' rounds"):
        offload.initialize(model, Plain(model.parameters()), offload.Config(dtype="bf16", state_format="8bit"))
