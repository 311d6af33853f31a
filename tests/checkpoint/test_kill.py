# SPDX-License-Identifier: Apache-2.0
"""kill -9 in a save: what was saved before, or the new one, is there whole; and nothing is left lying about for good."""

from __future__ import annotations

import errno
import fcntl
import json
import os
import shutil
import time
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch

import offload
from offload.checkpoint.format import leftovers
from offload.checkpoint.format.folders import open_folder
from offload.checkpoint.format.leftovers import remove_leftovers, take_back
from offload.checkpoint.format.staged_folder import StagedFolder
from tests.file_systems import no_locks
from tests.warm import WarmProcess

from ..acceptance.models import ON_CPU, adamw, stack
from ..acceptance.runs import refused


@pytest.fixture
def saves(tmp_path: Path) -> Path:
    folder = tmp_path / "saves"
    folder.mkdir()
    return folder


def killed(**arguments: Any) -> tuple[dict[str, Any], list[int]]:
    """The worker's last line, and at which step each of its runs was resumed."""
    done = WarmProcess.run(["-m", "tests.checkpoint.killing", json.dumps(arguments)], 900)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]
    *steps, last = done.stdout.split("\n")[:-1]
    return json.loads(last), [int(step) for step in steps]


KINDS = {
    "replaced": {"numbered": False, "placement": "cpu", "wait": True},
    "numbered": {"numbered": True, "placement": "cpu", "wait": True},
    "nvme": {"numbered": True, "placement": "nvme", "wait": True},
    "beside": {"numbered": False, "placement": "cpu", "wait": False},
    "nvme beside": {"numbered": True, "placement": "nvme", "wait": False},
}


def check_every_operation(folder: Path, kind: str, stride: int) -> int:
    result, steps = killed(kind="every", folder=str(folder), stride=stride, **KINDS[kind])
    # A folder that was killed before it was locked goes after an hour; everything else is gone.
    left = [name for name in result["left"] if not name.startswith(".offload-new-")]
    assert left == ([f"step-{steps[-1] + 1}"] if KINDS[kind]["numbered"] else ["saved"])
    gains = [after - before for before, after in pairwise(steps[1:])]
    # Killed before the rename a run gains nothing, killed after it its step: never less, never more.
    assert set(gains) == {0, 1} and gains == sorted(gains)
    kills: int = result["kills"]
    return kills


@pytest.mark.parametrize("kind", ["replaced", "nvme beside"])
def test_at_every_fourth_operation_of_a_save(tmp_path: Path, kind: str) -> None:
    assert check_every_operation(tmp_path / "saves", kind, 4) >= 10


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_at_every_operation_of_a_save(tmp_path: Path, kind: str) -> None:
    assert check_every_operation(tmp_path / "saves", kind, 1) >= 40


def check_random_moments(folder: Path, kind: str, count: int) -> None:
    result, steps = killed(kind="random", folder=str(folder), count=count, seed=3, **KINDS[kind])
    assert result["kills"] == count
    assert len([name for name in result["left"] if not name.startswith(".offload-new-")]) == 1
    assert steps == sorted(steps) and steps[-1] > steps[0]
    scratch = Path(f"{folder}-scratch")
    assert not scratch.exists() or not os.listdir(scratch)  # nothing is left of those that were killed


def test_at_random_moments(tmp_path: Path) -> None:
    check_random_moments(tmp_path / "saves", "nvme beside", 6)


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_often_at_random_moments(tmp_path: Path, kind: str) -> None:
    check_random_moments(tmp_path / "saves", kind, 60)


def test_what_a_living_save_writes_is_left_alone(saves: Path, opened: Any) -> None:
    model = stack(blocks=1)
    engine = opened(model, adamw(model), ON_CPU)
    with StagedFolder(saves / "other", replace=True) as living:
        (living.path / "unit.safetensors").write_bytes(b"half")
        engine.save_checkpoint(saves / "saved")
        assert (living.path / "unit.safetensors").exists()
    assert os.listdir(saves) == ["saved"]


def test_leftovers_are_removed_and_an_aside_is_taken_back(saves: Path, opened: Any) -> None:
    model = stack(blocks=1)
    engine = opened(model, adamw(model), ON_CPU)
    engine.save_checkpoint(saves / "saved", client_state={"n": 1})
    token = "0123456789abcdef"
    os.rename(saves / "saved", saves / f".offload-aside-{token}-saved")
    for stage in ("new", "saving", "removing"):
        (saves / f".offload-{stage}-{token}").mkdir()
        (saves / f".offload-{stage}-{token}" / "unit.safetensors").write_bytes(b"x")
    (saves / ".offload-mine").mkdir()
    assert engine.load_checkpoint(saves / "saved") == {"n": 1}
    engine.save_checkpoint(saves / "another")
    left = {".offload-mine", f".offload-new-{token}", "another", "saved"}
    assert set(os.listdir(saves)) == left
    hours_ago = time.time() - 2 * 3600
    os.utime(saves / f".offload-new-{token}", (hours_ago, hours_ago))
    engine.save_checkpoint(saves / "another")
    assert set(os.listdir(saves)) == left - {f".offload-new-{token}"}


@pytest.mark.parametrize("code", [errno.EROFS, errno.EACCES, errno.EPERM, errno.EIO])
def test_an_aside_that_cannot_have_its_name_hides_no_other(
    saves: Path, opened: Any, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, code: int
) -> None:
    """On a mount that is read-only, say. Another failure is one."""
    engine = opened((model := stack(blocks=1)), adamw(model), ON_CPU)
    for n in (1, 2):
        engine.save_checkpoint(saves / f"step-{n}", client_state={"n": n})
    aside = saves / ".offload-aside-0123456789abcdef-step-2"
    os.rename(saves / "step-2", aside)

    def rename(*_: object) -> None:
        raise OSError(code, os.strerror(code))

    with monkeypatch.context() as patch:
        patch.setattr(os, "rename", rename)
        if code == errno.EIO:
            with pytest.raises(offload.StorageError):
                engine.resume_or_start(saves)
            return
        assert engine.resume_or_start(saves) == {"n": 1}
    assert str(aside) in caplog.text
    assert engine.resume_or_start(saves) == {"n": 2}


@pytest.mark.parametrize("kind", ["another user's", "file", "link"])
def test_an_aside_that_cannot_be_opened_hides_no_other(
    saves: Path, opened: Any, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, kind: str
) -> None:
    """Nor is a save beside it refused, nor what it is the name of."""
    engine = opened((model := stack(blocks=1)), adamw(model), ON_CPU)
    engine.save_checkpoint(saves / "step-1", client_state={"n": 1})
    aside = saves / ".offload-aside-0123456789abcdef-step-2"
    if kind == "file":
        aside.touch()
    elif kind == "link":
        aside.symlink_to(saves / "step-1")
    else:
        aside.mkdir()

        def of_others(path: Path, *, follow: bool = False) -> int:
            if path == aside:
                raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(path))
            return open_folder(path, follow=follow)

        monkeypatch.setattr(leftovers, "open_folder", of_others)
    assert engine.resume_or_start(saves) == {"n": 1}
    assert str(aside) in caplog.text
    with refused(offload.CheckpointError, "step-2", "cannot be opened"):
        engine.load_checkpoint(saves / "step-2")
    engine.save_checkpoint(saves / "step-2", client_state={"n": 2})
    assert engine.resume_or_start(saves) == {"n": 2}
    assert os.path.lexists(aside)


def test_an_aside_of_a_living_save_is_not_taken_back(saves: Path) -> None:
    aside = saves / ".offload-aside-0123456789abcdef-saved"
    aside.mkdir()
    fileno = os.open(aside, os.O_RDONLY)
    fcntl.flock(fileno, fcntl.LOCK_EX)
    take_back(saves)
    assert aside.exists()
    os.close(fileno)
    take_back(saves)
    assert os.listdir(saves) == ["saved"]


@pytest.mark.parametrize("code", [errno.ENOLCK, errno.EOPNOTSUPP, errno.EBADF])  # the last is NFS's answer
def test_without_locks_what_is_not_wanted_goes(
    saves: Path, opened: Any, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, code: int
) -> None:
    """Retired and replaced checkpoints, of this run and of one that was killed; what may be in writing stays, and is named."""
    no_locks(monkeypatch, code)
    engine = opened((model := stack(blocks=1)), adamw(model), ON_CPU)
    for n in (1, 2, 3, 4):
        engine.save_checkpoint(saves / f"step-{n}", client_state={"n": n}, keep_last=2)
        engine.save_checkpoint(saves / "last", client_state={"n": n})
    assert sorted(os.listdir(saves)) == ["last", "step-3", "step-4"] and not caplog.records
    token = "0123456789abcdef"
    for stage in (f"saving-{token}", f"removing-{token}", f"aside-{token}-last"):
        shutil.copytree(saves / "last", saves / f".offload-{stage}")
    engine.save_checkpoint(saves / "last")
    assert sorted(os.listdir(saves)) == [f".offload-saving-{token}", "last", "step-3", "step-4"]
    (record,) = caplog.records
    assert f".offload-saving-{token}" in record.getMessage() and "no locks" in record.getMessage()
    assert engine.resume_or_start(saves) == {"n": 4}


def test_leftovers_with_files_of_others_stay(saves: Path) -> None:
    left = saves / ".offload-saving-0123456789abcdef"
    left.mkdir()
    (left / "notes.txt").write_text("mine")
    (left / "unit.safetensors").write_text("ours")
    (saves / ".offload-removing-0123456789abcdef").symlink_to(left)
    remove_leftovers(saves)
    assert (left / "notes.txt").read_text() == "mine"


def test_nothing_is_left_of_a_universal_checkpoint_that_was_not_finished(
    saves: Path, opened: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It has files of other kinds than checkpoints have, in folders; neither a failure leaves them there nor a kill does."""
    model = stack(blocks=1)
    engine = opened(model, adamw(model), ON_CPU)
    engine.save_checkpoint(saves / "saved")
    offload.export_universal_checkpoint(saves / "saved", saves / "whole")
    os.rename(saves / "whole", saves / ".offload-saving-0123456789abcdef")

    def full(content: Any, path: Path) -> None:
        Path(path).touch()
        if path.name == "step.pt":
            raise RuntimeError("no room")

    monkeypatch.setattr(torch, "save", full)
    with refused(offload.StorageError, "step.pt", "no room"):
        offload.export_universal_checkpoint(saves / "saved", saves / "out")
    assert os.listdir(saves) == ["saved"]


def test_a_checkpoint_that_is_being_read_is_not_removed(saves: Path, opened: Any) -> None:
    from offload.checkpoint.format.opened import OpenedCheckpoint

    model = stack(blocks=1)
    engine = opened(model, adamw(model), ON_CPU)
    engine.save_checkpoint(saves / "saved", client_state={"n": 1})
    with OpenedCheckpoint(saves / "saved") as reading:
        engine.save_checkpoint(saves / "saved", client_state={"n": 2})
        reading.check_files()
        reading.check_contents()
        assert reading.manifest.client_state == {"n": 1}
    assert engine.load_checkpoint(saves / "saved") == {"n": 2}
    engine.save_checkpoint(saves / "saved")
    assert os.listdir(saves) == ["saved"]
    with refused(offload.CheckpointError, "nowhere"):
        engine.load_checkpoint(saves / "nowhere")
