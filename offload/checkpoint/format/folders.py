# SPDX-License-Identifier: Apache-2.0
"""Folders as the system has them: made, opened, locked, made durable."""

from __future__ import annotations

import fcntl
import logging
import os
from enum import Enum
from pathlib import Path

_log = logging.getLogger(__name__)


def sync(path: Path) -> None:
    """Make a file durable, or the names in a folder."""
    fileno = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        os.fsync(fileno)
    finally:
        os.close(fileno)


def make_parents(path: Path) -> None:
    """Make the folder and all above it that are missing, durably."""
    missing: list[Path] = []
    while not path.exists():
        missing.append(path)
        path = path.parent
    for folder in reversed(missing):
        folder.mkdir(exist_ok=True)
        sync(folder.parent)


class Lock(Enum):
    """What came of asking for a folder's lock without waiting."""

    OURS = "ours"
    HELD = "held by a living process"
    UNKNOWN = "the file system has no locks"


def lock_folder(fileno: int, *, shared: bool = False) -> Lock:
    """Ask for the lock of an open folder; it is let go when `fileno` is closed."""
    try:
        fcntl.flock(fileno, (fcntl.LOCK_SH if shared else fcntl.LOCK_EX) | fcntl.LOCK_NB)
    except BlockingIOError:
        return Lock.HELD
    except OSError as error:
        _log.debug("no folder locks: %s", error)
        return Lock.UNKNOWN
    return Lock.OURS


def open_folder(path: Path, *, follow: bool = False) -> int:
    """A descriptor of the folder `path`, which must be one itself unless links are to be followed."""
    return os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC | (0 if follow else os.O_NOFOLLOW))
