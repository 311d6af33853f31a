"""Reflinks: two files that share blocks until one of them is written to. btrfs, XFS, and others since.

The kernel brings what the source's page cache still has to disk first and waits for direct writes to it, so a range is
shared as the last write that was waited for left it. That the target has it is durable with the target's next fsync,
which also has the drive bring its own cache to the medium.
"""

from __future__ import annotations

import errno
import fcntl
import os
import struct
from pathlib import Path

_FICLONERANGE: int = getattr(fcntl, "FICLONERANGE", 0x4020940D)  # Python has the name since 3.12
_ARGUMENT = struct.Struct("=qQQQ")  # struct file_clone_range
_PROBE_NBYTES = 64 * 1024  # a multiple of every block size

CANNOT = frozenset(
    {
        errno.EOPNOTSUPP,  # the file system has no shared blocks
        errno.ENOTTY,  # it knows no such call
        errno.ENOSYS,
        errno.EXDEV,  # two file systems, or two mounts
        errno.EINVAL,  # blocks larger than the range's alignment, or files of another kind (no copy on write, DAX)
        errno.EPERM,  # a sandbox, or a target that may not be changed so
        errno.EACCES,
        errno.ETXTBSY,  # the source is in use for swapping
    }
)
"""What says that these two files cannot share blocks. Everything else is a failure, as of a write: EIO, ENOSPC, EDQUOT, ..."""


def clone_range(source_fileno: int, source_offset: int, nbytes: int, target_fileno: int, target_offset: int) -> bool:
    """Make `nbytes` of the target the source's, without a copy; all numbers are multiples of the block size.

    Returns whether the two can share blocks at all. Raises `OSError` where it failed."""
    argument = _ARGUMENT.pack(source_fileno, source_offset, nbytes, target_offset)
    while True:
        try:
            fcntl.ioctl(target_fileno, _FICLONERANGE, argument)
        except InterruptedError:
            continue
        except OSError as error:
            if error.errno in CANNOT:
                return False
            raise
        return True


def works_between(source_fileno: int, target: Path) -> bool:
    """Whether a file and others in the folder `target` can share blocks, tried with one that has no name; True where that
    cannot be had. Nobody writes to the source, which becomes as long as the trial takes if it is shorter."""
    try:
        target_fileno = os.open(target, os.O_RDWR | os.O_TMPFILE | os.O_CLOEXEC, 0o600)
    except OSError:
        return True
    try:
        if os.fstat(source_fileno).st_size < _PROBE_NBYTES:
            os.ftruncate(source_fileno, _PROBE_NBYTES)
        return clone_range(source_fileno, 0, _PROBE_NBYTES, target_fileno, 0)
    except OSError:
        return True
    finally:
        os.close(target_fileno)
