# SPDX-License-Identifier: Apache-2.0
"""A second thread that evaluates while the first one trains: both get what they would get alone."""

from __future__ import annotations

import itertools
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

import offload
from offload.device.cpu import CpuAccelerator
from offload.device.lane import HostLane
from offload.device.pending import Pending
from offload.model.unit import Unit
from offload.step.calls import Call
from offload.step.thread_safety import taking_turns
from tests.devices import at_update_lane
from tests.inside import parts_of
from tests.small_sizes import small

from .models import IN_PLACE_IN_BACKWARD, ON_CPU, ON_NVME_IN_PLACE, Setup, Stack, adamw, stack, vector_batches
from .runs import Run, assert_close, assert_same_bits, refused, run_engine, run_plain

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
    small(monkeypatch, patience_seconds=0.0)
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


def test_zero_grad_takes_its_turn_before_it_touches_any_gradient(opened: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """What other ranks' reductions bring is settled there: no other thread is in the model meanwhile."""
    model = Stack()
    engine = opened(model, adamw(model), ON_CPU)
    gradient_sync, turn = type(parts_of(engine).gradient_sync), engine._training.turn
    taken: list[bool] = []

    def settle(_: Any) -> None:
        def take() -> None:
            taken.append(turn.acquire(taken, blocking=False))

        other = threading.Thread(target=take)
        other.start()
        other.join(60)

    monkeypatch.setattr(gradient_sync, "settle", settle)
    engine.zero_grad()
    assert taken == [False]


class _Holder:
    pass


@pytest.mark.parametrize("calls_again", [True, False])
def test_a_wait_for_the_turn_that_an_interrupt_ended_keeps_nobody_waiting(calls_again: bool) -> None:
    """Also while the interrupt is being handled, and so keeps alive what waited: a save in the handler, another thread."""
    turn, mine, other = taking_turns.Turn(backward_elsewhere=False), _Holder(), _Holder()
    took, may_end = threading.Event(), threading.Event()

    def work() -> None:
        turn.acquire(other)
        took.set()
        assert may_end.wait(60)
        turn.release(other)

    def next_one() -> None:
        turn.acquire(other)
        turn.release(other)

    beside = threading.Thread(target=work)
    beside.start()
    assert took.wait(60)
    before = signal.signal(signal.SIGALRM, signal.default_int_handler)
    try:
        signal.setitimer(signal.ITIMER_REAL, 0.2)
        turn.acquire(mine)
    except KeyboardInterrupt:
        may_end.set()
        beside.join(60)
        then = threading.Thread(target=next_one, daemon=True)
        if calls_again:
            assert turn.acquire(mine)
            turn.release(mine)
        then.start()
        then.join(20)
        assert not then.is_alive()
    else:
        raise AssertionError("no interrupt came")
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


def test_a_call_goes_on_while_it_leaves_a_generator_that_another_thread_looks_at(monkeypatch: pytest.MonkeyPatch) -> None:
    """The frame of a generator that is left leads nowhere: the thread that looks at the other's stack must look again."""
    calls: list[Call] = []
    inside, go, left, end = (threading.Event() for _ in range(4))

    def generator() -> Iterator[int]:
        inside.set()
        assert go.wait(60)
        yield 1

    class Busy(nn.Module):
        def forward(self, x: int) -> int:
            calls.append(Call(self))
            for _ in generator():
                left.set()
                assert end.wait(60)
            return x

    frames = sys._current_frames

    def frames_before() -> Any:
        monkeypatch.setattr(sys, "_current_frames", frames)
        found = frames()
        go.set()
        assert left.wait(60)
        return found

    busy = threading.Thread(target=lambda: Busy()(1))
    busy.start()
    assert inside.wait(60)
    monkeypatch.setattr(sys, "_current_frames", frames_before)
    assert calls[0].is_running()
    end.set()
    busy.join(60)
    assert not calls[0].is_running()


def test_two_threads_that_hand_an_update_to_the_lane_hand_it_over_once(opened: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """The thread that lends other ranks what it updates, and that which drives the model."""
    submitted, others = list[object](), list[threading.Thread]()

    def slow(lane: HostLane, job: Any, about: object, nbytes: int) -> Pending:
        if isinstance(about, Unit) and about not in submitted:
            others.append(threading.Thread(target=parts_of(engine).updates.apply, args=(about,)))
            others[-1].start()
            threading.Event().wait(0.1)
        submitted.append(about)
        return lane.submit(job, about, nbytes)

    found = []
    for setup in (ON_CPU, replace(ON_NVME_IN_PLACE, update="step")):  # "auto" takes back what the lane has not begun
        model = stack()
        engine = opened(model, adamw(model), setup)
        at_update_lane(monkeypatch, CpuAccelerator, slow)
        x, y = vector_batches(1)[0]
        F.mse_loss(model(x), y).backward()
        engine.step()
        found.append(engine.state_dict())
    for other in others:
        other.join(60)
    units = [about for about in submitted if isinstance(about, Unit)]
    assert others and len(units) == len(set(units))
    assert_same_bits(found[1], found[0])
