"""Checkpoints named "step-<n>" in one folder: which there are, and which are no longer wanted."""

from __future__ import annotations

import os
import re
from pathlib import Path

from offload.checkpoint.staged_folder import MANIFEST_NAME, retire, take_back
from offload.errors import StorageError, UsageError

_NUMBERED = re.compile(r"step-(\d{1,18})")


def numbered(path: Path) -> list[Path]:
    """The checkpoints `step-<n>` in a folder, the newest first. Raises `StorageError` where it cannot be listed."""
    try:
        take_back(path)
        found = [(int(match[1]), path / match[0]) for name in os.listdir(path) if (match := _NUMBERED.fullmatch(name))]
    except FileNotFoundError:
        return []
    except OSError as error:
        raise StorageError(
            error.errno, f"{str(path)!r} cannot be listed ({error.strerror}): name the folder that holds the checkpoints."
        ) from error
    return [one for _, one in sorted(found, reverse=True)]


def newest_number(path: Path) -> int:
    """Of the checkpoints in a folder; 0 if there are none."""
    return max((int(found.name.removeprefix("step-")) for found in numbered(path)), default=0)


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


def retire_older(saved: Path, keep_last: int) -> None:
    """Remove all numbered checkpoints beside `saved` but the last so many. Raises `StorageError`."""
    for path in numbered(saved.parent)[keep_last:]:
        if path.name != saved.name and not path.is_symlink() and (path / MANIFEST_NAME).is_file():
            try:
                retire(path)
            except OSError as error:
                raise StorageError(
                    error.errno,
                    f"{str(path)!r} cannot be removed ({error.strerror}), {str(saved)!r} is saved: remove it yourself.",
                ) from error
