# SPDX-License-Identifier: Apache-2.0
"""A second thread that evaluates while the first one trains: both get what they would get alone."""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch.utils.checkpoint import checkpoint

import offload
from offload.step.threads import taking_turns

from .models import IN_PLACE_IN_BACKWARD, ON_CPU, ON_NVME_IN_PLACE, Setup, Stack, adamw, stack, vector_batches
from .runs import Run, assert_close, refused, run_engine, run_plain

SETUPS = (ON_CPU, ON_NVME_IN_PLACE, IN_PLACE_IN_BACKWARD)
anywhere = pytest.mark.parametrize("setup", SETUPS, ids=lambda s: s.name)


class Beside:
    """Runs `work` again and again in a thread of its own."""

    def __init__(self, work: Callable[[], None]) -> None:
        self._work, self._ends = work, threading.Event()
        self.count, self.failures = 0, list[BaseException]()
        self._thread = threading.Thread(target=self._run)

    def _run(self) -> None:
        while not self._ends.is_set():
            try:
                self._work()
            except BaseException as error:
                self.failures.append(error)
                return
            self.count += 1

    def __enter__(self) -> Beside:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._ends.set()
        self._thread.join()


class Checkpointed(Stack):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=False)
        return self.outlet(self.inlet(x))


def train(run: Run) -> list[float]:
    losses = []
    for x, y in vector_batches(8):
        for part in (x, y):
            loss = F.mse_loss(run.model(part), y)
            loss.backward()
            losses.append(loss.item())
        run.optimizer.step()
        run.optimizer.zero_grad()
    return losses


@pytest.mark.parametrize("build", [Stack, Checkpointed], ids=lambda build: build.__name__)
@anywhere
def test_evaluating_while_training(opened: Any, setup: Setup, build: Any) -> None:
    torch.manual_seed(1)
    plain, model = build(), build()
    model.load_state_dict(plain.state_dict())
    expected = run_plain(plain, adamw(plain), train)
    engine = opened(model, adamw(model), setup)
    x = vector_batches(1)[0][0]

    modes = itertools.cycle((True, False))

    def evaluate() -> None:
        with torch.set_grad_enabled(next(modes)):
            assert model(x).isfinite().all()

    with Beside(evaluate) as beside:
        found = run_engine(engine, train)
    assert_close(found, expected)
    assert not beside.failures and beside.count > 8


class _Broken(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
        raise ZeroDivisionError


@anywhere
def test_what_one_thread_leaves_halfway_the_other_does_not_wait_for(opened: Any, setup: Setup) -> None:
    """An exception in forward, one in backward, and a thread that ends in the middle of a step."""
    model = stack()
    engine = opened(model, adamw(model), setup)
    x, y = vector_batches(1)[0]
    values: list[torch.Tensor] = []

    def in_another(work: Callable[[], Any]) -> None:
        thread = threading.Thread(target=lambda: values.append(work()))
        thread.start()
        thread.join(60)
        assert not thread.is_alive()

    hook = model.blocks[1].register_forward_hook(lambda *_: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        model(x)
    hook.remove()
    in_another(lambda: model(x).detach())
    hook = model.blocks[1].register_forward_hook(lambda module, args, output: _Broken.apply(output))
    with pytest.raises(ZeroDivisionError):
        F.mse_loss(model(x), y).backward()
    hook.remove()
    in_another(lambda: model(x).detach())
    engine.zero_grad()
    in_another(lambda: F.mse_loss(model(x), y).backward())
    engine.step()
    engine.zero_grad()
    in_another(lambda: model(x).detach())
    assert torch.equal(values[0], values[1]) and not torch.equal(values[1], values[3])


def test_a_thread_that_stops_in_a_forward_is_told_of(opened: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(taking_turns, "PATIENCE_SECONDS", 0.0)
    model = stack()
    engine = opened(model, adamw(model), ON_CPU)
    x, _ = vector_batches(1)[0]
    inside, goes_on = threading.Event(), threading.Event()

    def stop(*_: object) -> None:
        inside.set()
        goes_on.wait(60)

    hook = model.blocks[1].register_forward_pre_hook(stop)
    with Beside(lambda: model(x).sum().item()) as beside:
        assert inside.wait(60)
        hook.remove()
        with refused(offload.UsageError, "another thread"):
            model(x)
        goes_on.set()
    assert not beside.failures
    train(Run(model, engine.optimizer, engine))
