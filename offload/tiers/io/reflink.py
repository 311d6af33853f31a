# SPDX-License-Identifier: Apache-2.0
"""Reflinks: two files that share blocks until one of them is written to. btrfs, XFS, and others since.

The kernel brings what the source's page cache still has to disk first and waits for direct writes to it, so a range is
shared as the last write that was waited for left it. That the target has it is durable with the target's next fsync,
which also has the drive bring its own cache to the medium.

Not `os.copy_file_range`: where the file system cannot share it copies, and a save has the bytes in memory for their checksum by
then. On ext4 that read the drive twice and took ten times the processor time of writing them from there.
"""

from __future__ import annotations

import errno
import fcntl
import struct

_FICLONERANGE: int = getattr(fcntl, "FICLONERANGE", 0x4020940D)  # Python has the name since 3.12
_ARGUMENT = struct.Struct("=qQQQ")  # struct file_clone_range

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
