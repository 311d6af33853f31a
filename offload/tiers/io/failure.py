"""One sentence per errno: what a failed operation on a file means for the user and what to do about it."""

from __future__ import annotations

import errno
import os

from offload.errors import StorageError

_ANOTHER_PATH = "name another path in Config(nvme=...)"
_LOCAL_PATH = "name a path on a local file system (ext4, XFS, btrfs) in Config(nvme=...)"
_RESUME_ELSEWHERE = "resume from the last checkpoint on another path"

_REMEDIES: dict[int, str] = {
    errno.ENOSPC: "the file system is full: free space there, or name a larger one in Config(nvme=...)",
    errno.EDQUOT: f"the disk quota of this user is used up: raise it, or {_ANOTHER_PATH}",
    errno.EFBIG: "the file system or `ulimit -f` does not allow a file of this size: raise the limit, or give several "
    "paths in Config(nvme=[...])",
    errno.EROFS: "the file system is mounted read-only (Linux does that after an I/O error, see dmesg): remount it, or "
    + _ANOTHER_PATH,
    errno.EACCES: f"this user may not write there: change the permissions, or {_ANOTHER_PATH}",
    errno.EPERM: f"the system forbids it to this user: change the permissions, or {_ANOTHER_PATH}",
    errno.EIO: "the device reported an error: look at dmesg and the drive's SMART data, do not trust it, and "
    + _RESUME_ELSEWHERE,
    errno.ENODATA: "the file is shorter than it was made, something else truncated it: keep other programs away from "
    "the folder and resume from the last checkpoint",
    errno.EINVAL: f"the file system refuses direct I/O of this size or alignment: {_LOCAL_PATH}",
    errno.EBADF: "the file was closed under the transfer, by something outside of offload that closes descriptors it "
    "does not own",
    errno.ENXIO: f"the device is gone: look at dmesg, and {_RESUME_ELSEWHERE}",
    errno.ENODEV: f"the device is gone: look at dmesg, and {_RESUME_ELSEWHERE}",
    errno.ESTALE: f"the network file system lost the file: {_LOCAL_PATH}",
    errno.ETIMEDOUT: f"the device or network file system did not answer: {_LOCAL_PATH}",
    errno.ENOMEM: "the kernel had no memory for the transfer: lower cpu_memory, or close other programs",
    errno.ECANCELED: "the transfer was cancelled with its queue: resume from the last checkpoint",
    errno.EMFILE: "the process has too many open files: raise `ulimit -n`",
    errno.ENFILE: "the system has too many open files: raise fs.file-max",
    errno.ELOOP: "there is a symbolic link where offload makes its own file: remove it",
    errno.EEXIST: "there is already something of this name, which offload did not make: remove it",
    errno.ENOENT: "it, or a folder above it, does not exist: create it, or correct Config(nvme=...)",
    errno.ENOTDIR: "a part of the path is not a folder: correct Config(nvme=...)",
    errno.ENAMETOOLONG: "the path is longer than the file system allows: choose a shorter one in Config(nvme=...)",
}


def remedy_of(code: int) -> str:
    """What to do about errno `code`."""
    return _REMEDIES.get(code, f"look at dmesg for the reason, or {_ANOTHER_PATH}")


def errno_text(code: int) -> str:
    """Such as `ENOSPC, No space left on device`."""
    return f"{errno.errorcode.get(code, f'errno {code}')}, {os.strerror(code)}"


def storage_error(operation: str, path: object, code: int) -> StorageError:
    """A `StorageError` (with `.errno`) for an operation on a path, such as "cannot create the folder"."""
    return StorageError(code, f"{operation} {str(path)!r} ({errno_text(code)}): {remedy_of(code)}")


def transfer_error(
    *, is_write: bool, path: object, offset_nbytes: int, nbytes: int, done_nbytes: int, code: int
) -> StorageError:
    """A `StorageError` (with `.errno`) for a transfer of `nbytes` that failed at byte `offset_nbytes` of the file,
    after `done_nbytes` had moved."""
    return StorageError(
        code,
        f"{'write to' if is_write else 'read from'} {str(path)!r} failed at byte {offset_nbytes} ({errno_text(code)}); "
        f"{done_nbytes} of {nbytes} bytes had moved; {remedy_of(code)}",
    )
