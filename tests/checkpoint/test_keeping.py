# SPDX-License-Identifier: Apache-2.0
"""Saves that hold no step up: stores keep what is overwritten, and updates of the last step may still be to come."""

from __future__ import annotations

import errno
import threading
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch

import offload
from tests.drives import drive_is
from tests.file_systems import free_room, no_syncs, raising, reservations
from tests.inside import finish_updates, parts_of
from tests.native.paths import at_library_call
from tests.tiers.faulty_io import Fault, FaultyBackend
from tests.updates import training_rests

from ..acceptance.models import ON_CPU, ON_CPU_IN_PLACE, Setup
from ..acceptance.runs import assert_same_bits, refused
from ..acceptance.speculating import at_once, counts
from ..scratch_files import scratch_files
from .loops import Resumable, files_of
from .standing import FillingDrive, Held, HeldUpdates, begun_at_the_end, chunk_count

OWN_NBYTES = 4 * 4096
"""What a file system may take for its own account of where files lie."""


def allocated_nbytes(run: Resumable) -> int:
    """What the scratch files take of the drive."""
    folder = parts_of(run.engine).records.room_for_snapshots()[0][0].path.parent
    return sum(path.stat().st_blocks for path in scratch_files(folder)) * 512


@pytest.mark.parametrize("update", ["step", "backward"])
@pytest.mark.parametrize("at", [1, 3])
def test_updates_on_nvme_wait_for_nothing(
    opened: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, at: int, update: Any
) -> None:
    """However slow the save is, steps go on: their stores keep what it has not copied, and give the room back afterwards."""
    run = Resumable(opened, Setup("nvme", "nvme", "cpu", update))
    losses = run.train(range(2))
    run.save(tmp_path / "waited")
    before = allocated_nbytes(run)
    held = Held(monkeypatch, at)
    save = begun_at_the_end(run, tmp_path / "beside", monkeypatch)
    assert held.reached.wait(60)
    losses += run.train(range(2, 4))
    finish_updates(run.engine)
    assert not save.done() and len(held.read) == at, "the save stands, and nobody wrote anything for it"
    assert allocated_nbytes(run) > before + OWN_NBYTES
    held.go.set()
    save.wait()
    assert files_of(tmp_path / "beside") == files_of(tmp_path / "waited")
    assert len(set(held.read)) == len(held.read) == chunk_count(run)
    assert abs(allocated_nbytes(run) - before) <= OWN_NBYTES
    losses += run.train(range(4, 5))
    alone = Resumable(opened, ON_CPU)
    assert_same_bits(alone.train(range(5)), losses)
    assert_same_bits(alone.weights(), run.weights())


@pytest.mark.parametrize("max_norm", [1e6, 1.8, 1e-3])
def test_speculated_updates_under_a_slow_save(
    opened: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, max_norm: float
) -> None:
    """Updates that begin before the norm is known, and are undone: they too turn between places."""
    at_once(monkeypatch)
    run = Resumable(opened, Setup("nvme", "nvme", "cpu", "backward"), max_grad_norm=max_norm)
    losses = run.train(range(2))
    run.save(tmp_path / "waited")
    with monkeypatch.context() as patch:
        held = Held(patch, 2)
        save = begun_at_the_end(run, tmp_path / "beside", patch)
        assert held.reached.wait(60)
        losses += run.train(range(2, 5))
        finish_updates(run.engine)
        held.go.set()
        save.wait()
    assert files_of(tmp_path / "beside") == files_of(tmp_path / "waited")
    speculated, undone = counts(run.engine)
    assert speculated > 0 and (undone > 0) == (max_norm < 1e6) and (undone < speculated) == (max_norm > 1e-3)
    alone = Resumable(opened, ON_CPU, max_grad_norm=max_norm)
    assert_same_bits(alone.train(range(5)), losses)
    assert_same_bits(alone.weights(), run.weights())


def test_without_room_for_two_updates_wait(opened: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A drive that holds the checkpoint, and not the states twice beside it."""
    run = Resumable(opened, Setup("nvme", "nvme", "cpu"))
    run.train(range(2))
    run.save(tmp_path / "waited")
    held, before = Held(monkeypatch, 1), allocated_nbytes(run)
    free_room(monkeypatch, before)
    save = begun_at_the_end(run, tmp_path / "beside", monkeypatch)
    assert held.reached.wait(60)
    timer = threading.Timer(0.5, held.go.set)
    timer.start()
    run.train(range(2, 4))
    assert allocated_nbytes(run) == before
    save.wait()
    assert files_of(tmp_path / "beside") == files_of(tmp_path / "waited")
    assert len(set(held.read)) == len(held.read) == chunk_count(run)


def test_a_drive_that_fills_up_meanwhile(opened: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Room for some of the states twice: updates wait until the others are copied."""
    run = Resumable(opened, Setup("nvme", "nvme", "cpu"))
    run.train(range(2))
    run.save(tmp_path / "waited")
    held, given = Held(monkeypatch, 1), list[int]()

    def some(reserves: bool) -> int | None:
        given.extend([1] if reserves else [])
        return errno.ENOSPC if reserves and len(given) % 3 == 0 else None

    reservations(monkeypatch, some)
    before = allocated_nbytes(run)
    save = begun_at_the_end(run, tmp_path / "beside", monkeypatch)
    assert held.reached.wait(60)
    timer = threading.Timer(0.5, held.go.set)
    timer.start()
    run.train(range(2, 4))
    save.wait()
    assert files_of(tmp_path / "beside") == files_of(tmp_path / "waited")
    assert len(given) >= 3 and len(held.read) == chunk_count(run)
    assert abs(allocated_nbytes(run) - before) <= OWN_NBYTES


def test_a_save_that_fails_gives_back_what_was_kept(opened: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The room on the drive, before anything else is asked of it; and training and the next save are as if it had not been."""
    drive = FillingDrive()
    drive_is(monkeypatch, drive)
    run = Resumable(opened, Setup("nvme", "nvme", "cpu", "step"))
    losses, before = run.train(range(2)), allocated_nbytes(run)
    with monkeypatch.context() as patch:
        held, drive.room = Held(patch, 1), 0
        save = begun_at_the_end(run, tmp_path / "beside", patch)
        assert held.reached.wait(60)
        losses += run.train(range(2, 4))
        finish_updates(run.engine)
        assert allocated_nbytes(run) > before + OWN_NBYTES
        held.go.set()
        with refused(offload.StorageError, "ENOSPC"):
            save.wait()
    assert abs(allocated_nbytes(run) - before) <= OWN_NBYTES
    drive.room = None
    run.save(tmp_path / "next")
    alone = Resumable(opened, ON_CPU)
    assert_same_bits(alone.train(range(4)), losses)
    alone.save(tmp_path / "expected")
    assert files_of(tmp_path / "next") == files_of(tmp_path / "expected")


@pytest.mark.parametrize("fails", [False, True])
def test_nothing_of_a_save_stays_with_the_updates_after_it(
    opened: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fails: bool
) -> None:
    """They go to the native library together again, in as many calls as before."""
    run, calls = Resumable(opened, ON_CPU_IN_PLACE), list[object]()
    at_library_call(monkeypatch, {"offload_update": lambda *given: calls.append(given)})

    def calls_of(step: int) -> int:
        calls.clear()
        run.train([step])
        finish_updates(run.engine)
        return len(calls)

    run.train(range(2))
    finish_updates(run.engine)
    before = calls_of(2)
    with monkeypatch.context() as patch, refused(offload.StorageError, "ENOSPC") if fails else nullcontext():
        if fails:
            no_syncs(patch, lambda path: raising(errno.ENOSPC)() if path.suffix == ".safetensors" else None)
        run.engine.save_checkpoint(tmp_path / "beside", wait=False).wait()
    assert 0 < before == calls_of(3)


# ---- updates of the last step ----------------------------------------------------------------------------------------


@pytest.fixture
def never_idle(monkeypatch: pytest.MonkeyPatch) -> None:
    """However long a loaded machine holds this thread up, the save's makes no update in its place."""
    training_rests(monkeypatch, always=False)


AT_STEP = Setup("nvme", "nvme", "cpu", "step")
"""Units that are not in memory at the step wait for the next forward; of what backward begins any part may be over."""
FOLLOWING = (AT_STEP, Setup("nvme", "nvme", "cpu"), Setup("nvme", "nvme", "cpu", "backward"), Setup("nvme", "cpu", "cpu"))


@pytest.mark.usefixtures("never_idle")
@pytest.mark.parametrize("setup", FOLLOWING, ids=lambda setup: setup.name)
def test_a_save_begins_before_the_updates_of_the_last_step(opened: Any, tmp_path: Path, setup: Setup) -> None:
    run, again = Resumable(opened, setup), Resumable(opened, setup)
    for one, wait in ((run, False), (again, True)):
        one.train(range(2))
        save = one.engine.save_checkpoint(tmp_path / str(wait), wait=wait)
        if setup == AT_STEP:
            assert bool(one.engine.stats()["pending_updates"]) is not wait
        one.train(range(2, 4))
        save.wait()
    assert files_of(tmp_path / "False") == files_of(tmp_path / "True")
    assert_same_bits(run.weights(), again.weights())


HOW_IT_ENDS: dict[str, Callable[[Any, Any, Path], Any]] = {
    "wait": lambda run, save, folder: save.wait(),
    "save": lambda run, save, folder: run.engine.save_checkpoint(folder / "next"),
    "load": lambda run, save, folder: run.engine.load_checkpoint(folder / "earlier"),
    "gathered": lambda run, save, folder: run.weights(),
    "load_state_dict": lambda run, save, folder: run.engine.load_state_dict(run.engine.state_dict()),
    "close": lambda run, save, folder: run.engine.close(),
}


@pytest.mark.usefixtures("never_idle")
@pytest.mark.parametrize("ended_by", HOW_IT_ENDS)
def test_no_further_forward_comes(opened: Any, tmp_path: Path, ended_by: str) -> None:
    """Whoever waits for the save on the thread of the model has the updates made that it is of."""
    run = Resumable(opened, AT_STEP)
    run.train(range(1))
    run.save(tmp_path / "earlier")
    run.train(range(1, 2))
    save = run.engine.save_checkpoint(tmp_path / "beside", wait=False)
    assert run.engine.stats()["pending_updates"] and not save.done()
    HOW_IT_ENDS[ended_by](run, save, tmp_path)
    save.wait()
    alone = Resumable(opened, ON_CPU)
    alone.train(range(2))
    expected = alone.weights()
    alone.engine.load_checkpoint(tmp_path / "beside")
    assert_same_bits(alone.weights(), expected)


def test_values_that_are_set_meanwhile_are_not_saved(opened: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """`load_state_dict` goes around the updates, so it waits for the save."""
    run = Resumable(opened, Setup("nvme", "nvme", "cpu"))
    run.train(range(2))
    run.save(tmp_path / "waited")
    state = {name: torch.zeros_like(value) for name, value in run.engine.state_dict().items()}
    held = Held(monkeypatch, 1)
    run.save(tmp_path / "beside", wait=False)
    assert held.reached.wait(60)
    threading.Timer(0.3, held.go.set).start()
    run.engine.load_state_dict(state)
    run.engine.close()
    assert files_of(tmp_path / "beside") == files_of(tmp_path / "waited")


def test_waiting_on_another_thread(opened: Any, tmp_path: Path) -> None:
    """It gets what the thread of the model goes on to, and what that leaves undone when it ends, or does nothing."""
    run = Resumable(opened, Setup("nvme", "nvme", "cpu"))
    run.train(range(1))
    save = run.engine.save_checkpoint(tmp_path / "beside", wait=False)
    waiting = threading.Thread(target=save.wait)
    waiting.start()
    run.train(range(1, 2))
    waiting.join(60)
    assert save.done() and (tmp_path / "beside" / "MANIFEST.json").exists()
    left: list[Any] = []

    def begin() -> None:
        left.append(run.engine.save_checkpoint(tmp_path / "left", wait=False))

    driver = threading.Thread(target=begin)
    driver.start()
    driver.join(60)
    left[0].wait()
    idle = run.engine.save_checkpoint(tmp_path / "idle", wait=False)
    waiting = threading.Thread(target=idle.wait)
    waiting.start()
    waiting.join(60)
    losses = run.train(range(2, 4))
    run.save(tmp_path / "last")
    alone = Resumable(opened, ON_CPU)
    alone.train(range(2))
    alone.engine.save_checkpoint(tmp_path / "expected")
    assert files_of(tmp_path / "left") == files_of(tmp_path / "idle") == files_of(tmp_path / "expected")
    assert_same_bits(alone.train(range(2, 4)), losses)
    assert_same_bits(alone.weights(), run.weights())


def test_closing_while_the_save_makes_an_update(opened: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The thread of the model closes the engine just as the save's, taking it for idle, begins an update in its place."""
    updates = HeldUpdates(monkeypatch)
    run = Resumable(opened, Setup("nvme", "nvme", "cpu"), update="step")
    run.train(range(1))
    run.weights()
    updates.hold()
    run.train(range(1, 2))
    training_rests(monkeypatch, always=True)
    updates.go_on(0.3)
    save = run.engine.save_checkpoint(tmp_path / "beside", wait=False)
    run.engine.close()
    assert save.done()
    alone = Resumable(opened, ON_CPU)
    alone.train(range(2))
    alone.engine.save_checkpoint(tmp_path / "expected")
    assert files_of(tmp_path / "beside") == files_of(tmp_path / "expected")


@pytest.mark.usefixtures("never_idle")
def test_an_update_that_fails_fails_the_save(opened: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The update that the save is of: nobody is kept waiting for it."""
    backend = FaultyBackend(1)
    drive_is(monkeypatch, backend)
    run = Resumable(opened, AT_STEP)
    run.train(range(2))
    save = run.engine.save_checkpoint(tmp_path / "beside", wait=False)
    assert run.engine.stats()["pending_updates"]
    backend.faults.update({backend.submitted_count + n: Fault("errno", errno.EIO) for n in range(2000)})
    with pytest.raises(offload.OffloadError):
        run.train(range(2, 4))
    with pytest.raises(offload.OffloadError):
        save.wait()
    assert not (tmp_path / "beside").exists()
    with pytest.raises(offload.EngineFailedError):
        run.engine.save_checkpoint(tmp_path / "next")
