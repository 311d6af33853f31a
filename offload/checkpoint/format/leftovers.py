# SPDX-License-Identifier: Apache-2.0
"""Folders that are no longer wanted, and what a kill left of a save: removed, or taken back.

Names in the parent of a target folder T, each with a token of its own:

    .offload-new-*         being made, not yet locked (microseconds)
    .offload-saving-*      being written; locked (flock on the folder) as long as its process lives
    .offload-aside-*-T     the former T, while the new one takes its name; holds until the new one has it
    .offload-removing-*    no longer wanted

A kill leaves some of these. The next save in the same parent takes back or removes those whose lock is free: an aside
folder whose T is missing becomes T again, everything else goes. A folder whose lock is held belongs to a living process
and is left alone. On file systems without such locks (NFS has none for folders) so is what may be in writing; what is no
longer wanted goes, even if another process is reading it.
"""

from __future__ import annotations

import errno
import logging
import os
import re
import secrets
import shutil
import time
from pathlib import Path

from offload.checkpoint.format.folders import Lock, lock_folder, open_folder, sync
from offload.checkpoint.format.manifest import MANIFEST_NAME
from offload.checkpoint.format.others_files import CHECKPOINT_FILE, move_others

PREFIX = ".offload-"
_TOKEN = r"[0-9a-f]{16}"
_NEW = re.compile(rf"\.offload-new-{_TOKEN}")
_SAVING = re.compile(rf"\.offload-saving-{_TOKEN}")
_REMOVING = re.compile(rf"\.offload-removing-{_TOKEN}")
_STAGED = re.compile(rf"\.offload-(new|saving)-{_TOKEN}")
_ASIDE = re.compile(rf"\.offload-aside-{_TOKEN}-(.+)", re.DOTALL)
_NEW_LIFETIME_SECONDS = 3600
_PASSED_OVER = (errno.EROFS, errno.EACCES, errno.EPERM, errno.ENOTDIR, errno.ELOOP)
"""What one aside folder cannot have its name for, or why it is none of ours: it must not hide the others."""
_LATE_FILES = 3
"""Of other ranks, which had found the folder before it lost its name."""
OUR_FILE = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,199}\.(safetensors|json)|MANIFEST\.json(\.new)?")
"""What a folder made here may hold; a folder with anything else in it is never removed."""
_STAGED_FILE = re.compile(rf"{OUR_FILE.pattern}|[A-Za-z0-9_]+\.pt")
"""The same of one that has no name of its own yet, at any depth: what becomes another project's checkpoint, too."""

_log = logging.getLogger(__name__)


def take_back(parent: Path) -> None:
    """Give aside folders whose target is missing their name again: a kill came between two renames."""
    for name in _names(parent):
        match = _ASIDE.fullmatch(name)
        if match is None or os.path.lexists(parent / match[1]):
            continue
        try:
            _give_name_back(parent / name, parent / match[1])
        except FileNotFoundError:
            continue  # somebody else did
        except OSError as error:
            if error.errno not in _PASSED_OVER:
                raise
            _log.warning(
                "%s is %s, put aside when a save was killed, and cannot be given its name (%s): it is passed over",
                parent / name, match[1], error.strerror,
            )  # fmt: skip


def _give_name_back(aside: Path, target: Path) -> None:
    """Rename it, unless a living process holds it."""
    fileno = open_folder(aside)
    try:
        if lock_folder(fileno) is not Lock.HELD and not os.path.lexists(target):
            os.rename(aside, target)
            sync(target.parent)
    finally:
        os.close(fileno)


def remove_leftovers(parent: Path) -> None:
    """Remove what killed saves left in `parent`."""
    for name in _names(parent):
        path, aside = parent / name, _ASIDE.fullmatch(name)
        if aside is not None:
            _remove_superseded(path, parent / aside[1])
        elif _SAVING.fullmatch(name) or _REMOVING.fullmatch(name) or _is_old_new(path):
            remove_quietly(path)


def _remove_superseded(aside: Path, target: Path) -> None:
    """Remove an aside folder, if another has its name."""
    if not os.path.lexists(target):
        return
    if os.path.lexists(aside / MANIFEST_NAME) and not os.path.lexists(target / MANIFEST_NAME):
        _log.warning("%s is no checkpoint; the one that was there lies at %s", target, aside)
    else:
        remove_quietly(aside, target)


def retire(path: Path) -> None:
    """Take a complete checkpoint's name away and remove it, unless it holds files that are not ours."""
    foreign = [name for name in os.listdir(path) if not (OUR_FILE.fullmatch(name) or _is_folder_of_ours(path / name))]
    if foreign:
        _log.warning("kept: %s, which holds %s", path, foreign[0])
        return
    removing = _renamed(path, "removing")  # first of all: nothing half removed is ever under a checkpoint's name
    sync(path.parent)
    remove_quietly(removing)


def remove_quietly(path: Path, target: Path | None = None) -> None:
    """Remove a folder of ours if no process uses it; what cannot be removed now is left for the next save.

    `target`: of an aside folder, that which has its name now."""
    try:
        fileno = open_folder(path)
        try:
            lock = lock_folder(fileno)
            if lock is Lock.UNKNOWN and _SAVING.fullmatch(path.name):
                _log.warning(
                    "left in place: %s. Its file system has no locks (flock), so another process may be writing it: remove it "
                    "yourself where none is.",
                    path,
                )
            elif lock is not Lock.HELD:
                if target is not None:
                    move_others(path, target)
                _empty_and_remove(path, OUR_FILE if target is None else CHECKPOINT_FILE)
        finally:
            os.close(fileno)
    except FileNotFoundError:
        return  # somebody else removed it
    except OSError as error:
        _log.warning("left in place: %s (%s)", path, error.strerror)


def _renamed(path: Path, stage: str) -> Path:
    renamed = path.parent / f"{PREFIX}{stage}-{secrets.token_hex(8)}"
    os.rename(path, renamed)
    return renamed


def remove_for_all(path: Path) -> None:
    """Remove a staged folder that other ranks may be writing to: what they are about to make they find no folder for."""
    removing = _renamed(path, "saving")
    for _ in range(_LATE_FILES):
        try:
            return _empty_and_remove(removing)
        except OSError as error:
            if error.errno != errno.ENOTEMPTY:
                raise
    _empty_and_remove(removing)


def _is_folder_of_ours(path: Path) -> bool:
    """Whether it is a folder with nothing but files that an export writes."""
    if path.is_symlink() or not path.is_dir():
        return False
    return all(OUR_FILE.fullmatch(name) for name in os.listdir(path))


def _empty_and_remove(path: Path, ours: re.Pattern[str] = OUR_FILE) -> None:
    """`ours`: the files that go; where anything else is left, so is the folder."""
    if _STAGED.fullmatch(path.name) and all(_STAGED_FILE.fullmatch(name) for *_, names in os.walk(path) for name in names):
        return shutil.rmtree(path)
    fileno = open_folder(path)
    try:
        # The manifest goes first, so that a half-removed checkpoint is none.
        for name in sorted(os.listdir(fileno), key=lambda name: name != MANIFEST_NAME):
            if ours.fullmatch(name):
                os.unlink(name, dir_fd=fileno)
            elif ours is OUR_FILE and _is_folder_of_ours(path / name):  # of an adapter
                _empty_and_remove(path / name)
    finally:
        os.close(fileno)
    os.rmdir(path)


def _names(parent: Path) -> list[str]:
    try:
        return [name for name in os.listdir(parent) if name.startswith(PREFIX)]
    except FileNotFoundError:
        return []


def _is_old_new(path: Path) -> bool:
    if not _NEW.fullmatch(path.name):
        return False
    try:
        return time.time() - os.lstat(path).st_mtime > _NEW_LIFETIME_SECONDS
    except FileNotFoundError:
        return False
