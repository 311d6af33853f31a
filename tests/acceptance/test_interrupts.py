# SPDX-License-Identifier: Apache-2.0
"""Ctrl-C, and other exceptions that are no `Exception`: in the user's forward, and at any moment of the engine's work."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

import offload
from tests.warm import WarmProcess

from .ctrl_c import Interrupting
from .interrupting import Net, train
from .runs import digest
from .worker import finish

INTERRUPTS = [KeyboardInterrupt, SystemExit, GeneratorExit]


def engine_of(model: nn.Module, parameters: str, tmp_path: Path) -> offload.Engine:
    config = offload.Config(parameters=parameters, optimizer_states=parameters, nvme=tmp_path / "nvme")
    return offload.initialize(model, torch.optim.AdamW(model.parameters(), lr=1e-3), config)


def raise_in(module: nn.Module, error: type[BaseException], call: Callable[[], Any], at_call: int = 1) -> None:
    """Run `call` with the forward of `module` raising at its `at_call`th call."""
    forward, calls = module.forward, 0

    def raising(x: torch.Tensor) -> torch.Tensor:
        nonlocal calls
        calls += 1
        if calls == at_call:
            raise error
        return forward(x)

    module.forward = raising
    try:
        with pytest.raises(error):
            call()
    finally:
        del module.forward


class Recomputed(Net):
    use_reentrant = False

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=self.use_reentrant)
        return self.head(x)


class RecomputedByBackward(Recomputed):
    use_reentrant = True


@pytest.mark.parametrize("parameters", ["cpu", "nvme"])
@pytest.mark.parametrize("error", INTERRUPTS)
def test_after_an_interrupt_of_the_users_forward_everything_can_be_called(
    parameters: str, error: type[BaseException], tmp_path: Path
) -> None:
    torch.manual_seed(0)
    with engine_of(Net(), parameters, tmp_path) as engine:
        train(engine, 1)
        engine.save_checkpoint(tmp_path / "saves" / "step-1")
        train(engine, 2)
        expected = digest(engine.state_dict())
        model, x = engine.module, torch.ones(2, 64, requires_grad=True)

        def backward() -> None:
            engine.backward(model(x).sum())

        for interrupted in (model.head, model.blocks[2].down, model.blocks[0]):
            engine.resume_or_start(tmp_path / "saves")
            raise_in(interrupted, error, lambda: model(x))
            engine.save_checkpoint(tmp_path / "other")
            raise_in(interrupted, error, backward)
            assert engine.resume_or_start(tmp_path / "saves") == {}
            raise_in(interrupted, error, lambda: model(x))
            backward()  # the forward is an outermost one again
            engine.zero_grad()
            engine.load_checkpoint(tmp_path / "other")
            train(engine, 2)
            assert digest(engine.state_dict()) == expected


@pytest.mark.parametrize("kind", [Recomputed, RecomputedByBackward])
def test_after_an_interrupt_of_a_recomputation_everything_can_be_called(kind: type[Net], tmp_path: Path) -> None:
    torch.manual_seed(0)
    with engine_of(kind(), "nvme", tmp_path) as engine:
        train(engine, 1)
        engine.save_checkpoint(tmp_path / "step-1")
        train(engine, 1)
        expected = digest(engine.state_dict())
        x = torch.ones(2, 64, requires_grad=True)
        for at_call in (1, 2):
            raise_in(engine.module.blocks[1], KeyboardInterrupt, lambda: engine.module(x).sum().backward(), at_call)
            engine.zero_grad()
            engine.save_checkpoint(tmp_path / "other")
            engine.load_checkpoint(tmp_path / "step-1")
            train(engine, 1)
            assert digest(engine.state_dict()) == expected


@pytest.mark.parametrize("at_copy", [0, 1])
def test_an_interrupt_of_a_copy_in_close_stays_one(at_copy: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What a signal's own handler raises there is not held: the copy has failed, as giving it back finds again."""
    monkeypatch.setenv("OFFLOAD_ACCELERATOR", "deferred")
    engine = engine_of(Net(), "cpu", tmp_path)
    train(engine, 1)

    class Interrupting(TorchDispatchMode):
        left = at_copy

        def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            if function is torch.ops.aten.copy_.default:
                self.left -= 1
                if self.left == -1:
                    raise KeyboardInterrupt
            return function(*args, **(kwargs or {}))

    with pytest.raises(KeyboardInterrupt), Interrupting():
        engine.close()
    assert engine.closed


def test_an_interrupt_as_a_load_makes_a_failed_engine_anew(tmp_path: Path) -> None:
    """The model is taken by then: it says what failed, and the next load has it whole."""
    torch.manual_seed(0)
    with engine_of(Net(), "nvme", tmp_path) as engine:
        engine.save_checkpoint(tmp_path / "step-1")
        train(engine, 1)
        expected = digest(engine.state_dict())
        engine._training.fail(RuntimeError("the drive"))
        with pytest.raises(KeyboardInterrupt), Interrupting(1, "library_models"):
            engine.load_checkpoint(tmp_path / "step-1")
        with pytest.raises(offload.EngineFailedError, match="the drive"):
            engine.module(torch.ones(2, 64))
        engine.load_checkpoint(tmp_path / "step-1")
        train(engine, 1)
        assert digest(engine.state_dict()) == expected


def test_an_interrupt_that_the_users_forward_catches_ends_what_it_interrupted_alone(tmp_path: Path) -> None:
    class Catching(Net):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            for block in self.blocks:
                try:
                    x = block(x)
                except KeyboardInterrupt:
                    assert self.head.weight.numel()
            with pytest.raises(offload.UsageError, match="inside a forward"):
                engine.save_checkpoint(tmp_path / "refused")
            return self.head(x)

    torch.manual_seed(0)
    with engine_of(Catching(), "nvme", tmp_path) as engine:
        x, forward = torch.ones(2, 64), engine.module.blocks[1].forward

        def raising(_: torch.Tensor) -> torch.Tensor:
            raise KeyboardInterrupt

        engine.module.blocks[1].forward = raising
        engine.module(x).sum().backward()
        engine.module.blocks[1].forward = forward
        engine.step()
        engine.save_checkpoint(tmp_path / "step-1")


def start(tmp_path: Path, raised: str, count: int, ends: int, seed: int, **variables: str) -> WarmProcess:
    placements: list[dict[str, Any]] = [
        {"parameters": tier, "optimizer_states": tier, "nvme": str(tmp_path / raised)} for tier in ("device", "cpu", "nvme")
    ]
    arguments = {"placements": placements, "folder": str(tmp_path / raised), "count": count, "ends": ends, "seed": seed}
    return WarmProcess(["-m", "tests.acceptance.interrupting", json.dumps({**arguments, "raised": raised})], **variables)


def judge(process: WarmProcess, raised: str, count: int) -> None:
    for tier, found in finish(process).items():
        if tier == "stderr":
            continue
        assert found["interrupted"] == count, (tier, found)
        assert not found.get("wrong"), (tier, found)
        assert raised != "SIGINT" or not found.get("unusable"), (tier, found)


def test_interrupts_at_seeded_moments(tmp_path: Path) -> None:
    processes = {raised: start(tmp_path, raised, count=10, ends=4, seed=0) for raised in ("SIGINT", "handler")}
    for raised, process in processes.items():
        judge(process, raised, 10)


@pytest.mark.slow
@pytest.mark.parametrize("backend", ["io_uring", "threads", "aiofiles", "deferred"])
@pytest.mark.parametrize("raised", ["SIGINT", "handler"])
def test_hundreds_of_interrupts_at_seeded_moments(raised: str, backend: str, tmp_path: Path) -> None:
    variables = {"OFFLOAD_ACCELERATOR": "deferred"} if backend == "deferred" else {"OFFLOAD_IO": backend}
    judge(start(tmp_path, raised, count=150, ends=50, seed=1, **variables), raised, 150)
