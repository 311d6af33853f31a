# SPDX-License-Identifier: Apache-2.0
"""Who needs all updates of the last step is woken once, and waits for no other."""

from __future__ import annotations

import json
import sys
import threading
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import offload
from offload.device.pending import Latch
from tests.inside import finish_updates, residency_of, units_of
from tests.small_sizes import small
from tests.updates import before_each_update

BLOCKS = 4


def opened(folder: Path, **fields: Any) -> Any:
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(8, 8) for _ in range(BLOCKS)))
    for block in model:
        offload.unit(block)
    where = {"optimizer_states": "nvme", "nvme": folder, **fields}
    return offload.initialize(model, torch.optim.AdamW(model.parameters()), where)


def backward(engine: Any) -> None:
    engine.module(torch.ones(2, 8)).square().mean().backward()


def test_it_is_woken_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    own, asks = threading.get_ident(), threading.Event()

    def late(unit: Any, update: Any) -> None:
        assert asks.wait(20)
        until = time.monotonic() + 20
        while sys._current_frames()[own].f_code is not Latch.wait.__code__:
            assert time.monotonic() < until, "nobody waits"
            time.sleep(0.001)  # who waits for each finds none of them over

    before_each_update(monkeypatch, late)
    with opened(tmp_path, parameters="device") as engine:
        backward(engine)
        engine.step()
        with engine.profile(tmp_path / "trace.json"):
            asks.set()
            finish_updates(engine)
        told = [one for one in json.loads((tmp_path / "trace.json").read_text())["traceEvents"] if one["ph"] == "X"]
        waits = [one["args"]["op"] for one in told if one["cat"] == "wait" and one["args"]["row"] == "main thread"]
        assert waits == ["update"] and not any(unit.update for unit in units_of(engine))


def test_the_failure_of_the_first_is_raised(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(unit: Any, update: Any) -> None:
        raise ArithmeticError(unit.name)

    before_each_update(monkeypatch, fail)
    with opened(tmp_path, parameters="device") as engine:
        backward(engine)
        engine.step()
        with pytest.raises(ArithmeticError, match="0"), engine.gathered([]):
            pass


def test_what_began_in_backward_is_not_waited_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It may yet be undone, and its update go on for long."""
    small(monkeypatch, quiet_steps=0)
    holds, go, went = threading.Event(), threading.Event(), list[bool]()

    def late(unit: Any, update: Any) -> None:
        if unit.name == "0" and holds.is_set():  # the last in backward, for whose room nobody waits
            went.append(go.wait(20))

    before_each_update(monkeypatch, late)
    with opened(tmp_path, parameters="nvme", update="backward") as engine:
        backward(engine)
        engine.step()
        engine.zero_grad()
        finish_updates(engine)  # those of the first step are not held up
        holds.set()
        backward(engine)
        begun = [unit for unit in units_of(engine) if unit.early is not None]
        (held_up,) = (unit.update for unit in begun if unit.name == "0")
        residency_of(engine).finish_updates(besides=begun)
        assert not held_up.job.done()
        go.set()
        engine.step()
    assert went and all(went)
