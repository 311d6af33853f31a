# SPDX-License-Identifier: Apache-2.0
"""An update that a save makes in the place of the thread that drives the model is in no other thread's hands."""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Any

import pytest
import torch

from tests.updates import training_rests

from ..acceptance.models import ON_CPU, Setup
from ..acceptance.runs import assert_same_bits
from .loops import BATCHES, Resumable, files_of
from .standing import Hands, HeldUpdates


@pytest.fixture
def hurried(monkeypatch: pytest.MonkeyPatch) -> None:
    """The save makes updates whenever it may."""
    training_rests(monkeypatch, always=True)


@contextmanager
def interrupted_at(moment: int, within: str) -> Iterator[Callable[[], bool]]:
    """A `KeyboardInterrupt` at that moment, as Python may handle a signal there, of what a function of this file calls."""
    left = moment

    def look(frame: FrameType, event: str, _: Any) -> None:
        nonlocal left
        if event in ("call", "c_return") and frame.f_code.co_filename == within:
            left -= 1
            if left == -1:
                raise KeyboardInterrupt

    sys.setprofile(look)
    try:
        yield lambda: left < 0
    except KeyboardInterrupt:
        pass
    finally:
        sys.setprofile(None)


def test_no_interrupt_makes_a_save_take_its_thread_for_ended(opened: Any, tmp_path: Path) -> None:
    """Python itself does, and for good, where one comes as `Thread.is_alive` looks (what mends its issue 45274)."""
    run = Resumable(opened, Setup("nvme", "nvme", "cpu"))
    run.train(range(1))
    moment, is_over = 0, False
    while not is_over:
        with interrupted_at(moment, threading.__file__) as came:
            run.engine.save_checkpoint(tmp_path / f"saved-{moment}", wait=False)
        assert threading.main_thread().is_alive(), moment
        is_over, moment = not came(), moment + 1
    assert moment > 5


def test_an_update_is_in_one_hand_whatever_python_says_of_threads(
    opened: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, hurried: None
) -> None:
    """The main thread waits for its save, and so makes the updates; an interrupt before had it marked as ended."""
    updates = HeldUpdates(monkeypatch)
    run = Resumable(opened, Setup("nvme", "nvme", "cpu"), update="step")
    run.train(range(1))
    run.weights()
    updates.hold()
    run.train(range(1, 2))
    monkeypatch.setattr(threading.Thread, "is_alive", lambda thread: thread is not threading.main_thread())
    updates.go_on(0.5)
    with Hands() as hands:
        run.save(tmp_path / "waited")
    assert hands.most == 1
    alone = Resumable(opened, ON_CPU)
    alone.train(range(2))
    alone.save(tmp_path / "expected")
    assert files_of(tmp_path / "waited") == files_of(tmp_path / "expected")


def test_closing_after_the_thread_that_saved_has_ended(opened: Any, tmp_path: Path) -> None:
    """Updates that its save is of are still to come: who closes the engine drives the model now, and makes them."""
    run = Resumable(opened, Setup("nvme", "nvme", "cpu"))
    saves: list[Any] = []

    def train_and_save() -> None:
        run.train(range(2))
        saves.append(run.engine.save_checkpoint(tmp_path / "beside", wait=False))

    trainer = threading.Thread(target=train_and_save)
    trainer.start()
    trainer.join(60)
    closing = threading.Thread(target=run.engine.close, daemon=True)
    closing.start()
    closing.join(60)
    assert not closing.is_alive() and saves[0].done()


def test_a_thread_that_evaluates_after_the_one_that_saved_has_ended(
    opened: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, hurried: None
) -> None:
    """A thread trains, begins a save and ends. Its save makes the updates, and an evaluation in another thread needs them."""
    updates = HeldUpdates(monkeypatch)
    run = Resumable(opened, Setup("nvme", "nvme", "cpu"), update="step")
    saves: list[Any] = []

    def train_and_save() -> None:
        run.train(range(1))
        run.weights()
        updates.hold()
        run.train(range(1, 2))
        updates.go_on(0.5)
        saves.append(run.engine.save_checkpoint(tmp_path / "beside", wait=False))

    trainer = threading.Thread(target=train_and_save)
    trainer.start()
    trainer.join(60)
    with torch.no_grad():
        loss = run.model(input_ids=BATCHES[0], labels=BATCHES[0]).loss.item()
    saves[0].wait()
    alone = Resumable(opened, ON_CPU)
    alone.train(range(2))
    with torch.no_grad():
        assert alone.model(input_ids=BATCHES[0], labels=BATCHES[0]).loss.item() == loss
    assert_same_bits(alone.weights(), run.weights())
