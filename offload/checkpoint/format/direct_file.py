# SPDX-License-Identifier: Apache-2.0
"""A second descriptor of a file in writing, past the page cache: for whole blocks that lie in aligned memory anyway."""

from __future__ import annotations

import errno
import os
from pathlib import Path

from offload.checkpoint.format.staged_folder import write_failure

ALIGN = 4096
"""Bytes: of memory, offset and size of every transfer."""


class DirectFile:
    """Implements `OpenFile`, for writing. Whoever gave it to a transfer closes it when that is over."""

    def __init__(self, path: Path, fileno: int) -> None:
        self.path = path
        self._fileno = fileno

    def fileno(self) -> int:
        if self._fileno < 0:
            raise AssertionError(f"{str(self.path)!r} is used here but is closed")
        return self._fileno

    def close(self) -> None:
        """Idempotent."""
        fileno, self._fileno = self._fileno, -1
        if fileno >= 0:
            os.close(fileno)


def open_direct(path: Path) -> DirectFile | None:
    """The existing file; None where its file system knows no direct I/O."""
    try:
        return DirectFile(path, os.open(path, os.O_WRONLY | os.O_DIRECT | os.O_NOFOLLOW | os.O_CLOEXEC))
    except OSError as error:
        if error.errno in (errno.EINVAL, errno.EOPNOTSUPP):
            return None
        raise write_failure("opening", path, error) from error
