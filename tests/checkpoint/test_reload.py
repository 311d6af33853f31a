# SPDX-License-Identifier: Apache-2.0
"""An engine that failed is unusable until it loads a checkpoint, and then goes on as if nothing had been."""

from __future__ import annotations

import errno
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch

import offload
from tests.drives import drives_from
from tests.tiers.faulty_io import Fault, FaultyBackend

from ..acceptance.models import Setup, adamw, stack
from ..acceptance.runs import assert_same_bits

EIO = Fault("errno", errno.EIO)
STEPS = 6
SETUPS = (
    Setup("nvme", "nvme", "deferred"),
    Setup("nvme", "nvme", "deferred", "backward"),
    Setup("nvme", "nvme", "cpu"),
    Setup("cpu", "nvme", "cpu"),
    Setup("device", "nvme", "deferred"),
)


class Drive:
    """The backend of the next engine, and whether it works."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        drives_from(patch, self._open)
        self.opened: list[FaultyBackend] = []

    def _open(self) -> FaultyBackend:
        self.opened.append(FaultyBackend(len(self.opened)))
        return self.opened[-1]

    def breaks(self) -> None:
        last = self.opened[-1]
        last.faults = {last.submitted_count + ahead: EIO for ahead in range(10_000)}


@pytest.fixture
def drive(monkeypatch: pytest.MonkeyPatch) -> Drive:
    return Drive(monkeypatch)


class Run:
    """A tiny training with a scheduler."""

    def __init__(self, setup: Setup, nvme: Path, patch: pytest.MonkeyPatch) -> None:
        patch.setenv("OFFLOAD_ACCELERATOR", setup.accelerator)
        self.model = stack(width=8, blocks=2)
        optimizer = adamw(self.model)
        self.engine = offload.initialize(self.model, optimizer, setup.fields(nvme))
        self.scheduler = torch.optim.lr_scheduler.StepLR(self.engine.optimizer, 2)

    def steps(self, start: int, stop: int) -> Iterator[float]:
        for n in range(start, stop):
            loss = self.model(torch.randn(3, 8, generator=torch.Generator().manual_seed(n))).square().mean()
            loss.backward()
            self.engine.optimizer.step()
            self.engine.optimizer.zero_grad()
            self.scheduler.step()
            yield loss.item()


def plain(tmp_path: Path, patch: pytest.MonkeyPatch) -> tuple[list[float], dict[str, torch.Tensor]]:
    run = Run(Setup("device", "device", "cpu"), tmp_path / "none", patch)
    with run.engine:
        return list(run.steps(0, STEPS)), run.engine.state_dict()


def fails(work: Callable[[], object]) -> None:
    with pytest.raises(offload.StorageError):
        work()


@pytest.mark.parametrize("setup", SETUPS, ids=str)
def test_a_failed_engine_goes_on_from_a_checkpoint(
    setup: Setup, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, drive: Drive
) -> None:
    losses, weights = plain(tmp_path, monkeypatch)
    run = Run(setup, tmp_path / "nvme", monkeypatch)
    with run.engine as engine:
        assert list(run.steps(0, 3)) == losses[:3]
        engine.save_checkpoint(tmp_path / "saved", client_state={"scheduler": run.scheduler.state_dict()})
        drive.breaks()
        fails(lambda: [list(run.steps(3, STEPS)), engine.state_dict()])
        for attempt in (engine.step, engine.state_dict, lambda: run.model(torch.randn(3, 8))):
            with pytest.raises(offload.EngineFailedError, match=r"load_checkpoint"):
                attempt()

        run.scheduler.load_state_dict(engine.load_checkpoint(tmp_path / "saved")["scheduler"])
        assert list(run.steps(3, STEPS)) == losses[3:]
        assert_same_bits(engine.state_dict(), weights)
        assert len(drive.opened) == 2


def test_a_second_failure_and_a_second_load(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, drive: Drive) -> None:
    losses, weights = plain(tmp_path, monkeypatch)
    run = Run(SETUPS[0], tmp_path / "nvme", monkeypatch)
    with run.engine as engine:
        list(run.steps(0, 2))
        engine.save_checkpoint(tmp_path / "saves" / "step-2", client_state={"scheduler": run.scheduler.state_dict()})
        for _ in range(2):
            drive.breaks()
            fails(lambda: [list(run.steps(2, STEPS)), engine.state_dict()])
            state = engine.resume_or_start(tmp_path / "saves")
            assert state is not None
            run.scheduler.load_state_dict(state["scheduler"])
        assert list(run.steps(2, STEPS)) == losses[2:]
        assert_same_bits(engine.state_dict(), weights)


def test_it_stays_unusable_where_the_load_fails(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, drive: Drive) -> None:
    run = Run(SETUPS[0], tmp_path / "nvme", monkeypatch)
    with run.engine as engine:
        list(run.steps(0, 1))
        engine.save_checkpoint(tmp_path / "saved")
        drive.breaks()
        fails(lambda: [list(run.steps(1, 3)), engine.state_dict()])
        with pytest.raises(offload.CheckpointError):
            engine.load_checkpoint(tmp_path / "none")
        with pytest.raises(offload.EngineFailedError, match="no checkpoint in"):
            engine.resume_or_start(tmp_path / "empty")
        with pytest.raises(offload.EngineFailedError):
            engine.step()
        engine.load_checkpoint(tmp_path / "saved")
        assert engine.stats()["steps"] == 1


def test_gradients_that_are_not_finite(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What update="backward" had begun by the time a later gradient shows it is undone: the engine has not failed."""
    losses, _ = plain(tmp_path, monkeypatch)
    run = Run(SETUPS[1], tmp_path / "nvme", monkeypatch)
    with run.engine as engine:
        list(run.steps(0, 2))
        first = next(run.model.parameters())
        hook = first.register_hook(lambda grad: grad * float("nan"))
        with pytest.raises(offload.NonFiniteGradientError):
            list(run.steps(2, 3))
        hook.remove()
        engine.zero_grad()
        assert list(run.steps(2, STEPS)) == losses[2:]


def test_a_closed_engine_stays_closed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = Run(SETUPS[0], tmp_path / "nvme", monkeypatch)
    with run.engine as engine:
        engine.save_checkpoint(tmp_path / "saved")
    with pytest.raises(offload.UsageError, match="closed"):
        engine.load_checkpoint(tmp_path / "saved")
