# SPDX-License-Identifier: Apache-2.0
"""Checkpoints named "step-<n>" in one folder: which there are, and which are no longer wanted.

The newest is the one that was written last, whatever the numbers: another run's may be higher. When it was written is said
by the times of its own files, which a save sets behind all others' where the clock went back. Copies must keep these times.
"""

from __future__ import annotations

import os
import re
from pathlib import Path

from offload.checkpoint.format.leftovers import retire, take_back
from offload.checkpoint.format.manifest import MANIFEST_NAME
from offload.checkpoint.format.others_files import is_of_checkpoint
from offload.checkpoint.format.soundness import Soundness
from offload.checkpoint.format.staged_folder import raise_if_short, write_failure
from offload.config import expanded
from offload.errors import StorageError, UsageError

_NUMBERED = re.compile(r"step-([0-9]{1,18})")
_TICK_NS = 2_000_000_000
"""What every file system tells apart."""


def numbered(path: Path) -> list[Path]:
    """The checkpoints `step-<n>` in a folder, the one written last first. Raises `StorageError` where it cannot be listed."""
    try:
        take_back(path)
        names = [name for name in os.listdir(path) if _NUMBERED.fullmatch(name)]
    except FileNotFoundError:
        return []
    except OSError as error:
        raise_if_short(path, error)
        raise StorageError(
            error.errno, f"{str(path)!r} cannot be listed ({error.strerror}): name the folder that holds the checkpoints."
        ) from error
    return sorted((path / name for name in names), key=lambda one: (_written_ns(one), _number(one.name)), reverse=True)


def highest_number(path: Path) -> int:
    """Of the checkpoints in a folder; 0 if there are none."""
    return max((_number(found.name) for found in numbered(path)), default=0)


def _number(name: str) -> int:
    return int(name.removeprefix("step-"))


def _written_ns(path: Path) -> int:
    """The time of its oldest file: one that is damaged later makes it no newer. What others put beside them says nothing."""
    try:
        own = (entry for entry in os.scandir(path) if is_of_checkpoint(entry.name))
        return min((entry.stat(follow_symlinks=False).st_mtime_ns for entry in own), default=0)
    except OSError:
        return 0  # whoever opens it says why


def date_behind_others(folder: Path, target: Path) -> None:
    """The checkpoint in `folder`, which is about to become `target`, is the one written last of those beside it."""
    if not _NUMBERED.fullmatch(target.name):
        return
    latest = max((_written_ns(path) for path in numbered(target.parent) if path.name != target.name), default=-1)
    if _written_ns(folder) <= latest:
        try:
            for name in os.listdir(folder):
                _set_time(folder / name, latest + _TICK_NS)
        except OSError as error:
            raise write_failure("dating the files of", folder, error) from error


def _set_time(path: Path, time_ns: int) -> None:
    fileno = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
    try:
        os.utime(fileno, ns=(time_ns, time_ns))
        os.fsync(fileno)
    finally:
        os.close(fileno)


def checked_folder(given: object, call: str) -> Path:
    """The path of the folder that `call` was given; see `expanded`. Else a `UsageError`."""
    name = _name_of(given)
    if not name:
        raise UsageError(f"{call} was given {given!r}: expected the path of a folder, as 'ckpt'.")
    return expanded(name)


def checked_target(given: object) -> Path:
    """The folder that a checkpoint is to be saved as; see `expanded`. Raises `UsageError` where that is no name."""
    name = _name_of(given)
    if not Path(name).name:
        raise UsageError(
            f"save_checkpoint was given {given!r}: expected the folder that the checkpoint is to be, as 'ckpt/step-100'."
        )
    return expanded(name)


def _name_of(given: object) -> str:
    """The text of a path; "" of what is none."""
    name = os.fspath(given) if isinstance(given, (str, os.PathLike)) else None
    return name if isinstance(name, str) and "\0" not in name else ""


def check_keep_last(path: Path, keep_last: int | None) -> None:
    """Raise `UsageError` where checkpoints next to `path` cannot be counted, or not to so many."""
    if keep_last is None:
        return
    if isinstance(keep_last, bool) or not isinstance(keep_last, int) or keep_last < 1:
        raise UsageError(f"keep_last={keep_last!r} is not a count of checkpoints: expected 1, 2, ... or None.")
    if not _NUMBERED.fullmatch(path.name):
        raise UsageError(
            f"keep_last={keep_last} needs checkpoints that are numbered, and {path.name!r} is not: save to 'folder/step-<n>'."
        )


def retire_older(saved: Path, keep_last: int, soundness: Soundness) -> None:
    """Remove the numbered checkpoints beside `saved` but the last so many, with it, that are sound. Raises `StorageError`.

    What is damaged, and links, do not count and stay; so does what holds other files."""
    kept_count = 1
    for path in numbered(saved.parent):
        if path.name == saved.name or path.is_symlink():
            continue
        if kept_count < keep_last:
            kept_count += soundness.is_sound(path)
        elif (path / MANIFEST_NAME).is_file() and not soundness.is_known_damaged(path):
            try:
                retire(path)
            except OSError as error:
                raise StorageError(
                    error.errno,
                    f"{str(path)!r} cannot be removed ({error.strerror}), {str(saved)!r} is saved: remove it yourself.",
                ) from error
            soundness.forget(path)
