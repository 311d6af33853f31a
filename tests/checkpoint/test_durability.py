# SPDX-License-Identifier: Apache-2.0
"""What must be on the disk before the checkpoint gets its name, and after: the order of syncs and renames."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest

import offload
from offload.checkpoint.format.staged_folder import StagedFolder
from tests.file_systems import at_call, no_syncs

from ..acceptance.models import ON_CPU, adamw, stack


def record(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, Path]]:
    """Every fsync, rename and removal from now on, in order, with the path (of a rename: the new one)."""
    done: list[tuple[str, Path]] = []
    no_syncs(monkeypatch, lambda path: done.append(("sync", path)))
    at_call(monkeypatch, "rename", after=lambda _, source, target, **__: done.append(("rename", Path(target))))
    at_call(monkeypatch, "rmdir", after=lambda _, path, **__: done.append(("remove", Path(path))))
    return done


@pytest.mark.parametrize("replaces", [False, True])
def test_order(opened: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, replaces: bool) -> None:
    model = stack(blocks=1)
    engine = opened(model, adamw(model), ON_CPU)
    target = tmp_path / "saves" / "saved"
    if replaces:
        engine.save_checkpoint(target)
    done = record(monkeypatch)
    engine.save_checkpoint(target)

    committed = done.index(("rename", target))
    saving = next(path for what, path in done if what == "rename" and ".offload-saving-" in path.name)
    synced = [path for what, path in done[:committed] if what == "sync" and path.is_relative_to(saving)]
    assert sorted(path.name for path in synced[:-1]) == sorted(os.listdir(target))
    assert synced[-2:] == [saving / "MANIFEST.json", saving]  # last of all, and then the folder that lists them
    assert ("sync", target.parent) in done[committed:]
    removed = [position for position, (what, _) in enumerate(done) if what == "remove"]
    if replaces:
        assert [done[position][1].name[:15] for position in removed] == [".offload-aside-"]
        assert removed[0] > done.index(("sync", target.parent), committed)
    else:
        assert not removed
        assert ("sync", tmp_path) in done[:committed]  # the parent was made on the way


def test_all_of_a_universal_checkpoint_is_synced(opened: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every file, and then every folder with what it lists."""
    model = stack(blocks=1)
    opened(model, adamw(model), ON_CPU).save_checkpoint(tmp_path / "saved")
    done = record(monkeypatch)
    offload.export_universal_checkpoint(tmp_path / "saved", tmp_path / "out")
    committed = done.index(("rename", tmp_path / "out"))
    saving = next(path for what, path in done if what == "rename" and ".offload-saving-" in path.name)
    synced = [path.relative_to(saving) for what, path in done[:committed] if what == "sync" and path.is_relative_to(saving)]
    written = [path.relative_to(tmp_path / "out") for path in (tmp_path / "out").rglob("*")]
    assert len(written) > 20 and sorted(synced) == sorted([*written, Path(".")])
    for place, path in enumerate(synced):
        assert all(synced.index(inside) < place for inside in written if inside.parent == path)


def test_a_folder_that_is_given_up_takes_what_others_still_make_with_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of several ranks one removes the folder, while another's file is about to be made in it."""
    late = ["late.json", "later.json"]

    def overtaken(path: Path, **rest: Any) -> None:
        if late:
            (Path(path) / late.pop()).touch()

    folder = StagedFolder(tmp_path / "step-1", replace=True)
    with pytest.raises(ValueError, match="enough"), folder:
        (folder.path / "unit.safetensors").touch()
        at_call(monkeypatch, "rmdir", before=overtaken)
        raise ValueError("enough")
    assert not late and os.listdir(tmp_path) == []


@pytest.mark.parametrize("call", ["mkdir", "open", "rename"])
def test_an_interrupt_as_a_folder_is_made_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, call: str) -> None:
    """As the call returns, before anything notes what it did."""
    left = ["once"]

    def interrupt(result: Any, path: Any, *arguments: Any, **rest: Any) -> None:
        if ".offload-new-" in str(path) and left:
            left.clear()
            if call == "open":
                os.close(result)
            raise KeyboardInterrupt

    at_call(monkeypatch, call, after=interrupt)
    with pytest.raises(KeyboardInterrupt), StagedFolder(tmp_path / "step-1", replace=True):
        pass
    assert os.listdir(tmp_path) == []
