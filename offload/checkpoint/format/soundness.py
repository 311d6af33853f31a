# SPDX-License-Identifier: Apache-2.0
"""Which checkpoints are sound: read through once, and again only where their files have changed since."""

from __future__ import annotations

import logging
import os
from pathlib import Path

from offload.checkpoint.format.opened import OpenedCheckpoint
from offload.errors import CheckpointError

_log = logging.getLogger(__name__)

_Files = frozenset[tuple[str, int, int, int]]


class Soundness:
    """What one engine knows of checkpoints. From any thread."""

    def __init__(self) -> None:
        self._known: dict[Path, tuple[_Files, bool]] = {}

    def note_sound(self, path: Path) -> None:
        """It was written, or read through, just now."""
        self._known[path.absolute()] = (_files_of(path), True)

    def is_sound(self, path: Path) -> bool:
        """Whether every byte is as it was written. Reads all of it where that is not known. What is wrong goes to the log."""
        files = _files_of(path)
        known = self._known.get(path.absolute())
        if known is None or known[0] != files:
            known = self._known[path.absolute()] = files, self._read(path)
        return known[1]

    def forget(self, path: Path) -> None:
        """It was removed."""
        self._known.pop(path.absolute(), None)

    def is_known_damaged(self, path: Path) -> bool:
        """Whether it was found damaged, and is as it was then. Reads the manifest and the sizes of files."""
        known = self._known.get(path.absolute())
        if known is None or known[0] != _files_of(path):
            return not self._read(path, contents=False)
        return not known[1]

    def _read(self, path: Path, *, contents: bool = True) -> bool:
        try:
            with OpenedCheckpoint(path) as opened:
                opened.check_files()
                if contents:
                    opened.check_contents()
        except CheckpointError as error:
            _log.warning("%s does not count among the last checkpoints and is left where it is: %s", path, error)
            return False
        return True


def _files_of(path: Path) -> _Files:
    """What tells that a file was written to since."""
    found = []
    try:
        for entry in os.scandir(path):
            status = entry.stat(follow_symlinks=False)
            found.append((entry.name, status.st_ino, status.st_size, status.st_mtime_ns))
    except OSError:
        found.clear()  # reading it says why
    return frozenset(found)
