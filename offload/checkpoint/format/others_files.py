# SPDX-License-Identifier: Apache-2.0
"""What others put into a checkpoint's folder: their own, so it outlives the checkpoint that it lay beside."""

from __future__ import annotations

import errno
import logging
import os
import re
from pathlib import Path

from offload.checkpoint.format.folders import sync

CHECKPOINT_FILE = re.compile(
    r"MANIFEST\.json|((unit-[0-9]{5,}|buffers|random)-rank-[0-9]{5,}|part-[0-9]{5,}|buffers)\.safetensors"
)
"""What saves and imports write into a checkpoint."""

_log = logging.getLogger(__name__)


def is_of_checkpoint(name: str) -> bool:
    """Whether a checkpoint's own file has that name."""
    return CHECKPOINT_FILE.fullmatch(name) is not None


def move_others(aside: Path, target: Path) -> None:
    """Move what is not a checkpoint's own from a former folder into that which has its name now, durably.

    What cannot move stays where it is, and the log says so."""
    try:
        names = [name for name in os.listdir(aside) if not is_of_checkpoint(name)]
    except FileNotFoundError:
        return  # somebody else removed it
    for name in names:
        try:
            _move(aside / name, target / name)
        except FileNotFoundError:
            continue  # somebody else moved it
        except OSError as error:
            _log.warning("%s lies at %s now (%s)", target / name, aside / name, error.strerror)
    if names:
        sync(target)


def _move(source: Path, target: Path) -> None:
    """Rename, but never over something."""
    try:
        os.link(source, target, follow_symlinks=False)
    except FileExistsError:
        if not os.path.samestat(os.lstat(source), os.lstat(target)):  # else a kill came between the two calls
            raise
        os.unlink(source)
    except OSError:  # a folder, or a file system without links
        if os.path.lexists(target):
            raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST)) from None
        os.rename(source, target)
    else:
        os.unlink(source)
