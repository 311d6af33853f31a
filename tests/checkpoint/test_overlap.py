# SPDX-License-Identifier: Apache-2.0
"""A save that training waits for reads a chunk while the one before it is written, and has updates that are still to come made
meanwhile. One beside training takes one at a time."""

from __future__ import annotations

import errno
from pathlib import Path
from typing import Any

import pytest

import offload
from tests.crosses import in_turn
from tests.drives import drive_is
from tests.small_sizes import small

from ..acceptance.models import Setup
from ..acceptance.runs import assert_same_bits, refused
from ..tiers.faulty_io import Fault, FaultyBackend
from .loops import Resumable, byte_model, files_of
from .standing import FillingDrive

SETUP = Setup("nvme", "nvme", "cpu", "step")
"""Units that are not in memory at the step wait for the next forward; of what backward begins any part may be over."""


class Watched(FaultyBackend):
    """Knows what is in flight to a checkpoint, and what of it was when each read was submitted."""

    def __init__(self) -> None:
        super().__init__(0)
        self.writes: list[Any] = []
        self.in_flight: list[int] = []
        self.fails_at = -1

    def read(self, *given: Any, **named: Any) -> Any:
        self.in_flight.append(sum(not one.settled for one in self.writes))
        return super().read(*given, **named)

    def write(self, file: Any, *given: Any, **named: Any) -> Any:
        saves = file.path.suffix == ".safetensors"
        if saves and len(self.writes) == self.fails_at:
            self.faults[self.submitted_count] = Fault("errno", errno.EIO)
        pending = super().write(file, *given, **named)
        if saves:
            self.writes.append(pending)
        return pending


@pytest.fixture
def backend(monkeypatch: pytest.MonkeyPatch) -> Watched:
    small(monkeypatch, chunk_numel=4096)
    made = Watched()
    drive_is(monkeypatch, made)
    return made


def settled(opened: Any, setup: Setup = SETUP, **fields: Any) -> Resumable:
    """After a step all of whose updates are over."""
    run = Resumable(opened, setup, **fields)
    run.train(range(1))
    run.engine.state_dict()
    return run


def test_what_is_in_flight_at_once(opened: Any, backend: Watched, tmp_path: Path) -> None:
    run = settled(opened)
    for wait, most in ((False, 0), (True, 3)):
        backend.in_flight.clear()
        backend.writes.clear()
        run.engine.save_checkpoint(tmp_path / str(wait), wait=wait).wait()
        assert len(backend.writes) >= 12, "too little for this to say anything"
        assert max(backend.in_flight) == most, "the chunk's value and moments, all written while the next chunk is read"
    saved = [files_of(tmp_path / str(wait)) for wait in (False, True)]
    assert saved[0] == saved[1]


@pytest.mark.parametrize("fails_at", [0, 4, 11])
def test_a_write_that_fails_while_more_is_read(opened: Any, backend: Watched, tmp_path: Path, fails_at: int) -> None:
    expected = settled(opened)
    losses = expected.train(range(1, 3))
    backend.writes.clear()
    run = settled(opened)
    backend.fails_at = fails_at
    with refused(offload.StorageError, "Earlier checkpoints are untouched"):
        run.save(tmp_path / "saved")
    assert not backend._queue, "nothing is left in flight"
    assert len(backend.writes) > fails_at and backend.struck
    assert run.train(range(1, 3)) == losses
    assert_same_bits(run.weights(), expected.weights())
    run.save(tmp_path / "saved")
    run.load(tmp_path / "saved")
    assert_same_bits(run.weights(), expected.weights())


# ---- updates that are still to come ----------------------------------------------------------------------------------

SETUPS = (
    SETUP,
    Setup("nvme", "nvme", "cpu"),
    Setup("nvme", "nvme", "cpu", "backward"),
    Setup("nvme", "nvme", "deferred"),
    Setup("cpu", "nvme", "cpu"),
    Setup("nvme", "cpu", "cpu"),
    Setup("nvme", "device", "cpu"),
    Setup("device", "nvme", "cpu"),
)


FIELDS: tuple[dict[str, Any], ...] = ({}, {"dtype": "bf16"}, {"dtype": "bf16", "state_format": "split"})


# A save takes a chunk from where its update left it: by the place. What the chunk holds is the format's.
@pytest.mark.parametrize(("setup", "fields"), in_turn(SETUPS, FIELDS))
def test_the_files_are_those_of_a_save_after_the_updates(
    opened: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, setup: Setup, fields: dict[str, Any]
) -> None:
    small(monkeypatch, chunk_numel=4096)
    later = settled(opened, setup, **fields)
    later.save(tmp_path / "later")
    run = Resumable(opened, setup, **fields)
    run.train(range(1))
    if setup == SETUP:
        assert run.engine.stats()["pending_updates"], "updates of units that were not in memory are still to come"
    run.save(tmp_path / "at once")
    assert files_of(tmp_path / "at once") == files_of(tmp_path / "later")
    assert run.train(range(1, 3)) == later.train(range(1, 3))
    assert_same_bits(run.weights(), later.weights())


@pytest.mark.parametrize("at", [0, 4])
def test_no_room_while_updates_are_made(opened: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, at: int) -> None:
    small(monkeypatch, chunk_numel=4096)
    later = settled(opened, model=byte_model(width=32))
    losses = later.train(range(1, 3))
    drive = FillingDrive()
    drive_is(monkeypatch, drive)
    run = Resumable(opened, SETUP, model=byte_model(width=32))
    run.train(range(1))
    assert run.engine.stats()["pending_updates"]
    drive.room = at
    with refused(offload.StorageError, "ENOSPC", "Earlier checkpoints are untouched"):
        run.save(tmp_path / "saved")
    assert drive.is_full and not drive.late, "a save that failed takes nothing more"
    assert [path.name for path in tmp_path.iterdir() if path.name != "nvme"] == []
    assert run.train(range(1, 3)) == losses
    assert_same_bits(run.weights(), later.weights())
