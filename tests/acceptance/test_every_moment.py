# SPDX-License-Identifier: Apache-2.0
"""An exception of a signal's handler at every moment of a call: what the engine cannot hold leaves it usable, or failed and
saying so; it holds no parameters, keeps no other thread waiting, and swallows no later Ctrl-C."""

from __future__ import annotations

import signal
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import offload
from tests.small_sizes import small

from .moments import interrupted_at
from .runs import digest


@pytest.fixture(autouse=True)
def impatient(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    small(monkeypatch, patience_seconds=5.0)
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


class Story:
    def __init__(self, parameters: str, folder: Path) -> None:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(8, 8), nn.ModuleList([nn.Linear(8, 8)])[0])
        config = offload.Config(parameters=parameters, optimizer_states=parameters, nvme=folder / "nvme")
        self.engine = offload.initialize(model, torch.optim.AdamW(model.parameters(), lr=1e-3), config)
        self.model, self.base, self.other = model, folder / "base", folder / "other"
        self.step()
        self.engine.save_checkpoint(self.base)
        self.step()
        self.expected = digest(self.engine.state_dict())

    def gathered(self) -> None:
        with self.engine.gathered(self.model[0].weight):
            self.model[0].weight.data.mul_(0.5)

    def step(self) -> None:
        self.model(torch.ones(2, 8)).square().sum().backward()
        self.engine.step()
        self.engine.zero_grad()

    def load(self) -> None:
        self.engine.load_checkpoint(self.base)

    def save(self) -> None:
        self.engine.save_checkpoint(self.other)

    def state(self) -> None:
        self.engine.state_dict()

    def judge(self) -> None:
        """After an interrupt."""
        found = list[Exception]()
        other = threading.Thread(target=lambda: self._evaluate(found))
        other.start()
        other.join(20)
        assert not other.is_alive()
        failed = isinstance(found[0], offload.EngineFailedError) if found else False
        assert failed or not found, found
        try:
            self.engine.zero_grad()
            self.step()
        except offload.EngineFailedError as error:
            assert "KeyboardInterrupt" in str(error)
        assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
        self.engine.load_checkpoint(self.base)
        self.step()
        assert digest(self.engine.state_dict()) == self.expected

    def _evaluate(self, found: list[Exception]) -> None:
        try:
            with torch.no_grad():
                self.model(torch.ones(2, 8))
        except Exception as error:
            found.append(error)


def go_through(story: Story, call: Callable[[], Any], *, first: int = 0, stride: int = 1) -> None:
    moment = first
    while interrupted_at(moment, call):
        story.judge()
        moment += stride
    assert moment > first + 8 * stride
    story.engine.close()


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")  # Python's word on what a destructor raised
@pytest.mark.parametrize("name", ["gathered", "load"])
def test_some_moments(name: str, tmp_path: Path) -> None:
    story = Story("cpu", tmp_path)
    go_through(story, getattr(story, name), first=2, stride={"gathered": 13, "load": 97}[name])


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
@pytest.mark.parametrize("parameters", ["device", "cpu", "nvme"])
@pytest.mark.parametrize("name", ["gathered", "step", "load", "save", "state"])
def test_every_moment(name: str, parameters: str, tmp_path: Path) -> None:
    story = Story(parameters, tmp_path)
    go_through(story, getattr(story, name), stride=1 if name in ("gathered", "state") else 5)


@pytest.mark.parametrize("name", ["gathered", "step", "load", "save", "state"])
def test_the_gradient_mode_is_the_users(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A handler that raises as `torch.no_grad` begins or ends leaves the mode as it is then, and no load mends that: what runs
    in every step and between two does without."""
    monkeypatch.setenv("OFFLOAD_ACCELERATOR", "deferred")
    story = Story("nvme", tmp_path)
    changed: list[str] = []

    def look(frame: Any, event: str, function: Any) -> None:
        if event == "c_call" and function is torch._C._set_grad_enabled:
            changed.append(frame.f_back.f_back.f_code.co_filename)

    sys.setprofile(look)
    try:
        getattr(story, name)()
    finally:
        sys.setprofile(None)
    assert not changed
    story.engine.close()


def test_a_block_whose_end_an_interrupt_cut_short_is_over_where_that_is_handled(tmp_path: Path) -> None:
    story = Story("cpu", tmp_path)
    moment, handled = 0, 0
    while True:
        try:
            _cut_at_end(story, moment)
        except KeyboardInterrupt:
            story.save()  # while the exception, and its traceback, are there
            handled += 1
            moment += 1
            continue
        break
    assert handled > 1
    story.engine.close()


def _cut_at_end(story: Story, moment: int) -> None:
    """An interrupt at one of the few moments before the work at the block's end."""

    def look(frame: Any, event: str, _: Any) -> None:
        nonlocal moment
        if event == "call" and frame.f_code.co_filename.endswith("gathered_blocks.py") and moment >= 0:
            moment -= 1
            if moment < 0 and frame.f_code.co_name in ("__exit__", "take_back", "_take_all_back"):
                raise KeyboardInterrupt

    with story.engine.gathered(story.model[0].weight):
        story.model[0].weight.data.mul_(0.5)
        sys.setprofile(look)
    sys.setprofile(None)
