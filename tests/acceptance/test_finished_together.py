# SPDX-License-Identifier: Apache-2.0
"""Who needs all updates of the last step is woken once, and waits for no other."""

from __future__ import annotations

import threading
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import offload
from offload.step import clip_history
from offload.step.threads.timeline import Timeline
from offload.step.updates.update import Updates
from tests.inside import finish_updates, residency_of, units_of

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


@pytest.fixture
def waits(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What the model's thread waited for."""
    found, waiting = list[str](), Timeline.waiting

    def told(self: Timeline, what: str, about: object = None) -> Any:
        found.append(what)
        return waiting(self, what, about)

    monkeypatch.setattr(Timeline, "waiting", told)
    return found


def test_it_is_woken_once(tmp_path: Path, waits: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    run, applied = Updates._run, list[str]()

    def run_late(updates: Updates, unit: Any, update: Any) -> None:
        time.sleep(0.01)  # who waits for each finds none of them over
        run(updates, unit, update)
        applied.append(unit.name)

    monkeypatch.setattr(Updates, "_run", run_late)
    with opened(tmp_path, parameters="device") as engine:
        backward(engine)
        engine.step()
        waits.clear()
        finish_updates(engine)
        assert len(applied) == BLOCKS and waits == ["update"]


def test_the_failure_of_the_first_is_raised(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(updates: Updates, unit: Any, update: Any) -> None:
        time.sleep(0.01)
        raise ArithmeticError(unit.name)

    with opened(tmp_path, parameters="device") as engine:
        monkeypatch.setattr(Updates, "_run", fail)
        backward(engine)
        engine.step()
        with pytest.raises(ArithmeticError, match="0"), engine.gathered([]):
            pass


def test_what_began_in_backward_is_not_waited_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It may yet be undone, and its update go on for long."""
    monkeypatch.setattr(clip_history, "QUIET_STEPS", 0)
    run, go, went = Updates._run, threading.Event(), list[bool]()

    def run_late(updates: Updates, unit: Any, update: Any) -> None:
        if unit.name == "0":  # the last in backward, for whose room nobody waits
            went.append(go.wait(20))
        run(updates, unit, update)

    with opened(tmp_path, parameters="nvme", update="backward") as engine:
        backward(engine)
        engine.step()
        engine.zero_grad()
        monkeypatch.setattr(Updates, "_run", run_late)
        backward(engine)
        begun = [unit for unit in units_of(engine) if unit.early is not None]
        (held_up,) = (unit.update for unit in begun if unit.name == "0")
        residency_of(engine).finish_updates(besides=begun)
        assert not held_up.job.done()
        go.set()
        engine.step()
    assert went and all(went)
