# SPDX-License-Identifier: Apache-2.0
"""Changes after initialize, calls in a wrong order, use after close(), and going on after exceptions."""

from __future__ import annotations

import os
import re
import signal
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import offload

from .models import IN_MEMORY, ON_CPU, ON_NVME, ON_NVME_IN_BACKWARD, Setup, adamw, stack, vector_batches
from .runs import Run, allocated_nbytes, assert_close, files_under, one_step, refused, run_engine, simple_loop

few = pytest.mark.parametrize("setup", (IN_MEMORY, ON_CPU, ON_NVME), ids=lambda s: s.name)
also_in_backward = pytest.mark.parametrize("setup", (IN_MEMORY, ON_CPU, ON_NVME, ON_NVME_IN_BACKWARD), ids=lambda s: s.name)


def _add_parameter(model: nn.Module, optimizer: Any) -> None:
    model.blocks[1].extra = nn.Parameter(torch.zeros(16))


def _add_block(model: nn.Module, optimizer: Any) -> None:
    model.blocks.append(type(model.blocks[0])(16))


def _remove_parameter(model: nn.Module, optimizer: Any) -> None:
    del model.blocks[1].norm.bias
    model.blocks[1].norm.register_parameter("bias", None)


def _remove_block(model: nn.Module, optimizer: Any) -> None:
    del model.blocks[2]


def _replace_parameter(model: nn.Module, optimizer: Any) -> None:
    model.outlet.weight = nn.Parameter(torch.eye(16))


def _add_group(model: nn.Module, optimizer: Any) -> None:
    optimizer.add_param_group({"params": [nn.Parameter(torch.zeros(3))]})


def _move_to_another_group(model: nn.Module, optimizer: Any) -> None:
    optimizer.param_groups[0]["params"].pop()


@pytest.mark.parametrize(
    ("change", "word"),
    [
        (_add_parameter, "blocks.1.extra"),
        (_add_block, "blocks.3."),
        (_remove_parameter, "blocks.1.norm.bias"),
        (_remove_block, "blocks.2."),
        (_replace_parameter, "outlet.weight"),
        (_add_group, "param_group"),
        (_move_to_another_group, "outlet.bias"),
    ],
)
@also_in_backward
def test_a_model_changed_after_initialize(opened: Any, setup: Setup, change: Any, word: str) -> None:
    """Told, with the name, by the change itself or within the next step; never trained on in silence."""
    model = stack()
    engine = opened(model, adamw(model), setup)
    run = Run(model, engine.optimizer, engine)
    one_step(run)
    with refused(offload.OffloadError, word):
        change(model, engine.optimizer)
        one_step(run)


@few
def test_a_non_scalar_loss(opened: Any, setup: Setup) -> None:
    model = stack()
    engine = opened(model, adamw(model), setup)
    with pytest.raises((offload.OffloadError, RuntimeError), match="scalar"):
        engine.backward(model(vector_batches(1)[0][0]))


@pytest.mark.parametrize(
    "setup", (IN_MEMORY, ON_CPU, Setup("cpu", "cpu"), Setup("nvme", "nvme"), ON_NVME), ids=lambda s: s.name
)
def test_use_after_close(opened: Any, nvme: Path, setup: Setup) -> None:
    model = stack()
    engine = opened(model, adamw(model), setup)
    run = Run(model, engine.optimizer, engine)
    one_step(run)
    expected = run.weights()
    x, y = vector_batches(1)[0]
    plain = stack()
    plain.load_state_dict(expected)
    loss = F.mse_loss(model(x), y)
    engine.close()
    engine.close()
    uses: dict[str, Callable[[], Any]] = {
        "step": lambda: engine.step(),
        "optimizer.step": lambda: engine.optimizer.step(),
        "backward": lambda: engine.backward(loss),
        "state_dict": lambda: engine.state_dict(),
        "clip_grad_norm_": lambda: engine.clip_grad_norm_(1.0),
        "no_sync": lambda: engine.no_sync().__enter__(),
        "gathered": lambda: engine.gathered(list(model.parameters())).__enter__(),
    }
    for name, use in uses.items():
        with refused(offload.OffloadError, "close"):
            use()
            pytest.fail(f"{name} passed after close()")
    # The model itself: its last weights, or told. Never garbage.
    for read, wanted in (
        (lambda: model(x).detach().clone(), plain(x).detach()),
        (lambda: model.inlet.weight.detach().clone(), expected["inlet.weight"]),
    ):
        try:
            got = read()
        except (offload.OffloadError, RuntimeError) as error:
            assert re.search("close|gathered|state_dict", str(error)), error
        else:
            assert_close(got, wanted)
    assert files_under(nvme) == []


@few
def test_the_context_manager_closes(opened: Any, nvme: Path, setup: Setup) -> None:
    model = stack()
    with opened(model, adamw(model), setup) as engine:
        one_step(Run(model, engine.optimizer, engine))
    with refused(offload.OffloadError, "close"):
        engine.step()


class _Breaks(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
        raise ZeroDivisionError("in backward")


def _raise(*_: Any) -> None:
    raise ZeroDivisionError("in forward")


def _interrupted_loop(run: Run, where: str) -> list[float]:
    losses = []
    for step, (x, y) in enumerate(vector_batches(7)):
        if step in (2, 4):
            block = run.model.blocks[1]
            hook = (
                block.register_forward_pre_hook(_raise)
                if where == "forward"
                else block.register_forward_hook(lambda module, args, out: _Breaks.apply(out))
            )
            with pytest.raises(ZeroDivisionError, match=where):
                F.mse_loss(run.model(x), y).backward()
            hook.remove()
            run.optimizer.zero_grad()
        loss = F.mse_loss(run.model(x), y)
        loss.backward()
        run.optimizer.step()
        run.optimizer.zero_grad()
        losses.append(loss.item())
    return losses


@pytest.mark.parametrize("where", ["forward", "backward"])
@few
def test_an_exception_of_the_users_then_going_on(opened: Any, setup: Setup, where: str) -> None:
    model, plain = stack(), stack()
    expected = _interrupted_loop(Run(plain, adamw(plain)), where)
    losses, weights = run_engine(opened(model, adamw(model), setup), lambda run: _interrupted_loop(run, where))
    assert_close(losses, expected)
    assert_close(weights, plain.state_dict())


@pytest.mark.parametrize("clip", [None, 1e6])
def test_an_exception_in_the_backward_of_an_update_in_backward(opened: Any, clip: float | None) -> None:
    """Blocks behind the exception may have been updated already: undone, or refused, never half a step in silence."""
    model, plain = stack(), stack()
    expected = _interrupted_loop(Run(plain, adamw(plain)), "backward")
    engine = opened(model, adamw(model), ON_NVME_IN_BACKWARD, max_grad_norm=clip)
    try:
        losses, weights = run_engine(engine, lambda run: _interrupted_loop(run, "backward"))
    except offload.OffloadError as error:
        assert re.search("backward|step", str(error)), error
        return
    assert_close(losses, expected)
    assert_close(weights, plain.state_dict())


class Interrupt(BaseException):
    """As KeyboardInterrupt: not an Exception."""


@pytest.mark.parametrize("where", ["forward", "backward", "between"])
@pytest.mark.parametrize("setup", (ON_CPU, ON_NVME, ON_NVME_IN_BACKWARD), ids=lambda s: s.name)
def test_an_interrupt_leaves_an_engine_that_closes(opened: Any, nvme: Path, setup: Setup, where: str) -> None:
    """It comes out as it is; close() ends, gives everything back, and the path serves the next engine."""

    def strike(*_: Any) -> None:
        raise Interrupt

    model = stack()
    with pytest.raises(Interrupt), opened(model, adamw(model), setup) as engine:
        run = Run(model, engine.optimizer, engine)
        one_step(run)
        if where == "forward":
            model.blocks[1].register_forward_pre_hook(strike)
        if where == "backward":
            model.blocks[1].register_full_backward_hook(strike)
        x, y = vector_batches(1)[0]
        F.mse_loss(model(x), y).backward()
        strike()
    with refused(offload.OffloadError, "close"):
        engine.step()
    assert allocated_nbytes(nvme) == 0
    fresh, plain = stack(), stack()
    losses, _ = run_engine(opened(fresh, adamw(fresh), setup), simple_loop(3))
    assert_close(losses, simple_loop(3)(Run(plain, adamw(plain))))


@few
def test_nothing_is_said_when_all_is_well(opened: Any, setup: Setup) -> None:
    """No warning of ours or of torch's through an ordinary run."""
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        model = stack()
        engine = opened(model, adamw(model), setup, max_grad_norm=1.0)
        run_engine(engine, simple_loop(3))
        engine.close()


@few
def test_no_attribute_is_set_on_parameters(opened: Any, setup: Setup) -> None:
    model = stack()
    engine = opened(model, adamw(model), setup)
    one_step(Run(model, engine.optimizer, engine))
    assert all(vars(p) == {} for p in model.parameters())


IN_A_FORK = {
    "forward": lambda engine, save, loss, folder: engine.module(torch.ones(2, 16)),
    "backward": lambda engine, save, loss, folder: loss.backward(),
    "step": lambda engine, save, loss, folder: engine.optimizer.step(),
    "zero_grad": lambda engine, save, loss, folder: engine.optimizer.zero_grad(),
    "state_dict": lambda engine, save, loss, folder: engine.state_dict(),
    "gathered": lambda engine, save, loss, folder: engine.gathered(engine.module.parameters()).__enter__(),
    "wait": lambda engine, save, loss, folder: save.wait(),
    "save": lambda engine, save, loss, folder: engine.save_checkpoint(folder / "other"),
    "load": lambda engine, save, loss, folder: engine.load_checkpoint(folder / "saved"),
    "export": lambda engine, save, loss, folder: engine.export(folder / "exported"),
    "stats": lambda engine, save, loss, folder: engine.stats(),
}


@pytest.mark.parametrize("setup", (ON_CPU, ON_NVME), ids=lambda s: s.name)
def test_a_forked_process_is_told(opened: Any, tmp_path: Path, setup: Setup) -> None:
    """It has neither the engine's threads nor its files, so it would wait for ever. It may leave the engine's block."""
    model = stack()
    engine = opened(model, adamw(model), setup)
    one_step(Run(model, engine.optimizer, engine))
    save = engine.save_checkpoint(tmp_path / "saved", wait=False)
    loss = model(torch.ones(2, 16)).sum()
    child = os.fork()
    if child == 0:
        wrong = len(IN_A_FORK)
        try:
            signal.alarm(20)
            with engine:
                for call in IN_A_FORK.values():
                    try:
                        call(engine, save, loss, tmp_path)
                    except offload.UsageError as error:
                        wrong -= "forked" in str(error)
        finally:
            os._exit(wrong)
    assert os.waitpid(child, 0)[1] == 0
    loss.backward()
    engine.step()
    save.wait()
    assert engine.load_checkpoint(tmp_path / "saved") == {}
