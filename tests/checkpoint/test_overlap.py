"""A save that training waits for: it writes what updates still to come leave from their memory, and reads a chunk of the rest
while the one before it is written. One beside training takes one at a time."""

from __future__ import annotations

import errno
from pathlib import Path
from typing import Any

import pytest

import offload
from offload.build import allocation, assembly
from offload.checkpoint import copies, writing
from offload.checkpoint.staged_folder import write_failure
from offload.tiers.io import reflink

from ..acceptance.models import Setup
from ..acceptance.runs import assert_same_bits, refused
from ..tiers.faulty_io import Fault, FaultyBackend
from .loops import Resumable, byte_model, files_of
from .standing import chunk_count

SETUP = Setup("nvme", "nvme", "cpu")


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
    monkeypatch.setattr(assembly, "CHUNK_NUMELS", (4096,))
    made = Watched()
    monkeypatch.setattr(allocation, "open_backend", lambda **_: made)
    return made


@pytest.fixture(autouse=True)
def _no_shared_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reflink, "works_between", lambda *_: False)


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
    Setup("nvme", "nvme", "cpu", "backward"),
    Setup("nvme", "nvme", "deferred"),
    Setup("cpu", "nvme", "cpu"),
    Setup("nvme", "cpu", "cpu"),
    Setup("nvme", "device", "cpu"),
    Setup("device", "nvme", "cpu"),
)


@pytest.fixture
def written_by_updates(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """The chunks that updates still to come wrote."""
    monkeypatch.setattr(assembly, "CHUNK_NUMELS", (4096,))
    keys: list[Any] = []
    original = copies.Copies.hold_as_updated

    def hold(self: Any, chunk: Any) -> bool:
        held = original(self, chunk)
        if held:
            keys.append(chunk)
        return held

    monkeypatch.setattr(copies.Copies, "hold_as_updated", hold)
    return keys


@pytest.mark.parametrize("fields", [{}, {"dtype": "bf16"}, {"dtype": "bf16", "state_format": "split"}], ids=str)
@pytest.mark.parametrize("setup", SETUPS, ids=lambda setup: setup.name)
def test_the_files_are_those_of_a_save_after_the_updates(
    opened: Any, tmp_path: Path, written_by_updates: list[Any], setup: Setup, fields: dict[str, Any]
) -> None:
    later = settled(opened, setup, **fields)
    later.save(tmp_path / "later")
    assert not written_by_updates
    run = Resumable(opened, setup, **fields)
    run.train(range(1))
    run.save(tmp_path / "at once")
    assert files_of(tmp_path / "at once") == files_of(tmp_path / "later")
    assert len(written_by_updates) == len(set(written_by_updates))
    if setup == SETUP:
        assert written_by_updates, "updates of units that were not in memory are still to come"
    assert run.train(range(1, 3)) == later.train(range(1, 3))
    assert_same_bits(run.weights(), later.weights())


def test_what_an_update_writes_is_not_read_again(opened: Any, backend: Watched, tmp_path: Path) -> None:
    """Every chunk's value and record are read once: by the update that is still to come, or else by the save."""
    run = settled(opened)
    run.train(range(1, 2))
    for unit in run.engine._parts.units:
        if unit.update is not None and unit.update.job is not None:  # of a unit that was in memory
            unit.update.job.wait()
    assert run.engine.stats()["pending_updates"]
    backend.log.clear()
    run.save(tmp_path / "saved")
    reads = [(offset, nbytes) for _, kind, offset, nbytes in backend.log if kind == "read"]
    assert len(backend.writes) >= 12
    assert len(reads) <= 2 * chunk_count(run)


@pytest.mark.parametrize("at", [0, 1])
def test_no_room_while_updates_are_made(
    opened: Any, tmp_path: Path, written_by_updates: list[Any], monkeypatch: pytest.MonkeyPatch, at: int
) -> None:
    later = settled(opened, model=byte_model(width=32))
    losses = later.train(range(1, 3))
    run = Resumable(opened, SETUP, model=byte_model(width=32))
    run.train(range(1))
    write = writing.UnitFile.write

    def full(file: Any, *given: Any, **named: Any) -> None:
        if len(written_by_updates) > at:
            raise write_failure("writing", Path("there"), OSError(errno.ENOSPC, "full"))
        write(file, *given, **named)

    with monkeypatch.context() as patch, refused(offload.StorageError, "Earlier checkpoints are untouched"):
        patch.setattr(writing.UnitFile, "write", full)
        run.save(tmp_path / "saved")
    assert len(written_by_updates) == at + 1, "a save that failed takes nothing more"
    assert [path.name for path in tmp_path.iterdir() if path.name != "nvme"] == []
    assert run.train(range(1, 3)) == losses
    assert_same_bits(run.weights(), later.weights())
