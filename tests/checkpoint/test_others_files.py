# SPDX-License-Identifier: Apache-2.0
"""What a loop puts into a checkpoint's folder beside it: it stays, whatever becomes of the checkpoint."""

from __future__ import annotations

import logging
import os
import signal
from pathlib import Path
from typing import Any

import pytest

import offload
from offload.checkpoint.format.leftovers import remove_leftovers, take_back
from offload.checkpoint.format.staged_folder import StagedFolder
from tests.file_systems import at_call, raising

from ..acceptance.models import ON_CPU, Setup, adamw, stack
from ..acceptance.runs import refused
from .loops import Resumable
from .standing import Held

OTHERS = {"trainer_state.json": "state", "model.safetensors": "weights", "notes.txt": "notes", "logs/run.txt": "log"}


def put(folder: Path, others: dict[str, str] = OTHERS) -> None:
    for name, content in others.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(content)


def assert_kept(folder: Path, others: dict[str, str] = OTHERS) -> None:
    assert {name: (folder / name).read_text() for name in others if (folder / name).is_file()} == others


def saved_as_others_put(
    patch: pytest.MonkeyPatch, run: Resumable, target: Path, others: dict[str, str], state: Any = None
) -> Any:
    """A save that goes on; these files came when it had begun."""
    held = Held(patch, 1)
    save = run.engine.save_checkpoint(target, client_state=state, wait=False)
    assert held.reached.wait(60)
    put(target, others)
    held.go.set()
    return save


@pytest.mark.parametrize("before", ["nothing", "an empty folder", "a checkpoint"])
def test_what_comes_while_a_save_is_written_is_in_the_checkpoints_folder(
    opened: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, before: str
) -> None:
    """As it would be had the loop waited for the save."""
    run, target = Resumable(opened, Setup("nvme", "nvme", "cpu")), tmp_path / "saves" / "step-100"
    run.train(range(1))
    if before == "a checkpoint":
        run.engine.save_checkpoint(target, client_state={"n": 1})
    elif before == "an empty folder":
        target.mkdir(parents=True)
    with monkeypatch.context() as patch:
        saved_as_others_put(patch, run, target, OTHERS, {"n": 2}).wait()
    assert_kept(target)
    assert os.listdir(target.parent) == ["step-100"]
    assert run.engine.load_checkpoint(target) == {"n": 2}


def test_what_lies_beside_a_checkpoint_that_is_replaced_stays(opened: Any, tmp_path: Path) -> None:
    engine = opened((model := stack(blocks=1)), adamw(model), ON_CPU)
    others = {"trainer_state.json": "state", "model.safetensors": "weights"}
    for n in range(3):
        engine.save_checkpoint(tmp_path / "last", client_state={"n": n})
        if n == 0:
            put(tmp_path / "last", others)
        assert_kept(tmp_path / "last", others)
        assert engine.load_checkpoint(tmp_path / "last") == {"n": n}


@pytest.mark.parametrize("without_links", [False, True])
def test_a_file_that_comes_as_the_folder_gets_its_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, without_links: bool
) -> None:
    """Between the look at the target and the rename; some file systems have no links."""
    target, late = tmp_path / "step-1", [{"later.json": "later"}, {"late.json": "late"}]

    def overtaken(source: Path, destination: Path) -> None:
        if destination == target and late:
            put(target, late.pop())

    if without_links:
        monkeypatch.setattr(os, "link", raising(1))
    with StagedFolder(target, replace=True) as folder:
        (folder.path / "MANIFEST.json").write_text("{}")
        at_call(monkeypatch, "rename", before=overtaken)
        folder.commit()
    assert_kept(target, {"late.json": "late", "later.json": "later"})
    assert sorted(os.listdir(target)) == ["MANIFEST.json", "late.json", "later.json"] and os.listdir(tmp_path) == ["step-1"]


@pytest.mark.parametrize("name", ["MANIFEST.json", "unit-00000-rank-00000.safetensors", "unit-00077-rank-00000.safetensors"])
def test_a_file_with_a_name_of_the_checkpoints_own_is_not_replaced(
    opened: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    """The save fails, and training goes on."""
    run, target = Resumable(opened, Setup("nvme", "nvme", "cpu")), tmp_path / "saves" / "step-100"
    run.train(range(1))
    with monkeypatch.context() as patch:
        save = saved_as_others_put(patch, run, target, {name: "mine", "notes.txt": "notes"})
        with refused(offload.CheckpointError, name, str(target), "another name"):
            save.wait()
    assert_kept(target, {name: "mine", "notes.txt": "notes"})
    assert os.listdir(target.parent) == ["step-100"] and len(os.listdir(target)) == 2
    run.train(range(1, 2))
    run.engine.save_checkpoint(tmp_path / "saves" / "step-101")


def test_a_checkpoint_is_put_back_where_the_new_one_cannot_have_its_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Another writer's file comes between the two renames. The former checkpoint is whole, and the log says where."""
    target, late = tmp_path / "step-1", ["once"]
    put(target, {"MANIFEST.json": "old", "buffers-rank-00000.safetensors": "old"})

    def overtaken(source: Path, destination: Path) -> None:
        if destination == target and late:
            late.clear()
            put(target, {"unit-00000-rank-00000.safetensors": "theirs"})

    with pytest.raises(offload.CheckpointError, match="unit-00000"), StagedFolder(target, replace=True) as folder:
        (folder.path / "MANIFEST.json").write_text("new")
        at_call(monkeypatch, "rename", before=overtaken)
        folder.commit()
    (aside,) = tmp_path.glob(".offload-aside-*")
    assert str(aside) in caplog.text and (aside / "MANIFEST.json").read_text() == "old"
    assert_kept(target, {"unit-00000-rank-00000.safetensors": "theirs"})
    remove_leftovers(tmp_path)
    assert len(os.listdir(aside)) == 2


def test_a_link_that_comes_meanwhile_stays(tmp_path: Path) -> None:
    target = tmp_path / "step-1"
    (tmp_path / "mine").mkdir()
    with pytest.raises(offload.CheckpointError, match="not a folder"), StagedFolder(target, replace=True) as folder:
        target.symlink_to(tmp_path / "mine")
        folder.commit()
    assert target.is_symlink() and sorted(os.listdir(tmp_path)) == ["mine", "step-1"]


def test_another_programs_manifest(opened: Any, tmp_path: Path) -> None:
    """Beside its own weights it makes no checkpoint."""
    engine = opened((model := stack(blocks=1)), adamw(model), ON_CPU)
    others = {"MANIFEST.json": "{}", "model.safetensors": "weights"}
    put(tmp_path / "theirs", others)
    with refused(offload.CheckpointError, "theirs", "complete checkpoint"):
        engine.save_checkpoint(tmp_path / "theirs")
    assert_kept(tmp_path / "theirs", others)


# ---- kills -----------------------------------------------------------------------------------------------------------

CHANGES = ("rename", "link", "unlink", "rmdir", "fsync")


def commit_and_be_killed(target: Path, index: int) -> bool:
    """In a process of its own, a folder of one new file that others' files join; whether it was killed at its `index`-th
    operation, and did not come to its end."""
    child = os.fork()
    if child == 0:
        calls = iter(range(1 << 30))

        def watched(*_: Any, **__: Any) -> None:
            if next(calls) == index:
                os.kill(os.getpid(), signal.SIGKILL)

        patch, status = pytest.MonkeyPatch(), 1
        try:
            with StagedFolder(target, replace=True) as folder:
                for name in ("MANIFEST.json", "unit-00000-rank-00000.safetensors"):
                    (folder.path / name).write_text("new")
                put(target)
                for name in CHANGES:
                    at_call(patch, name, before=watched)
                folder.commit()
            status = 0
        finally:
            os._exit(status)
    _, ended = os.waitpid(child, 0)
    assert os.waitstatus_to_exitcode(ended) in (0, -signal.SIGKILL)
    return os.waitstatus_to_exitcode(ended) != 0


@pytest.mark.parametrize("replaces", [False, True])
def test_at_every_operation_of_a_commit(tmp_path: Path, replaces: bool) -> None:
    """What others put there is there for the next who reads, and all of it in one folder for the next who saves."""
    found = []
    for index in range(100):
        parent = tmp_path / str(index)
        target = parent / "saved"
        if replaces:
            put(target, dict.fromkeys(("MANIFEST.json", "unit-00000-rank-00000.safetensors"), "old"))
        was_killed = commit_and_be_killed(target, index)
        take_back(parent)
        remove_leftovers(parent)
        assert_kept(target)
        assert os.listdir(parent) == ["saved"]
        manifest, unit = target / "MANIFEST.json", target / "unit-00000-rank-00000.safetensors"
        found.append(manifest.read_text() if manifest.exists() else None)
        assert unit.exists() is manifest.exists() and (not unit.exists() or unit.read_text() == found[-1])
        if not was_killed:
            break
    assert len(found) > 10 and found[-1] == "new"
    assert found == sorted(found, key=lambda one: one == "new") and set(found) == {"new", "old" if replaces else None}


def test_the_only_checkpoint_is_not_removed_for_a_folder_that_is_none(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """A save was killed between its two renames, and a loop made the folder anew before anybody read or saved."""
    aside = tmp_path / ".offload-aside-0123456789abcdef-saved"
    put(aside, {"MANIFEST.json": "whole", "unit-00000-rank-00000.safetensors": "whole"})
    put(tmp_path / "saved")
    with caplog.at_level(logging.WARNING):
        remove_leftovers(tmp_path)
    assert str(aside) in caplog.text and len(os.listdir(aside)) == 2
    assert_kept(tmp_path / "saved")
