# SPDX-License-Identifier: Apache-2.0
"""One sentence per errno: what a failed operation on a file means for the user and what to do about it.

The table has every errno that Linux documents for the calls on files, folders and locks that are made here.
"""

from __future__ import annotations

import errno
import os
from dataclasses import asdict, dataclass

from offload.errors import StorageError


@dataclass(frozen=True, slots=True)
class Place:
    """What the user can do about a place: the words that the table below leaves open."""

    elsewhere: str
    larger: str
    local: str
    correct: str
    shorter: str
    after_loss: str


SCRATCH = Place(
    elsewhere="name another path in Config(nvme=...)",
    larger="name a larger one in Config(nvme=...)",
    local="name a path on a local file system (ext4, XFS, btrfs) in Config(nvme=...)",
    correct="correct Config(nvme=...)",
    shorter="choose a shorter one in Config(nvme=...)",
    after_loss="resume from the last checkpoint on another path",
)
CHECKPOINT = Place(
    elsewhere="save elsewhere",
    larger="save to a larger one",
    local="save to a local file system (ext4, XFS, btrfs)",
    correct="correct the path that was given",
    shorter="give a shorter one",
    after_loss="save to another drive",
)

_DEVICE_GONE = "the device is gone: look at dmesg, and {after_loss}"
_DAMAGED = "the file system is damaged: check it (fsck, xfs_repair), and {after_loss}"
_NO_ANSWER = "the network file system does not answer: {local}"
_CLOSED = "the file was closed under offload, by something outside of it that closes descriptors it does not own"
_OURS = "offload asked for what the kernel refuses, which is its own fault: report it, with this message"

_REMEDIES: dict[int, str] = {
    errno.EACCES: "this user may not write there: change the permissions, or {elsewhere}",
    errno.EAGAIN: "the system is short of requests or locks for the moment: try again, or close other programs",
    errno.EBADF: _CLOSED,
    errno.EBADMSG: _DAMAGED,
    errno.EBUSY: "something else has it in use (a mount point, a swap file): {elsewhere}",
    errno.ECANCELED: "the transfer was cancelled with its queue: resume from the last checkpoint",
    errno.ECONNABORTED: _NO_ANSWER,
    errno.ECONNREFUSED: _NO_ANSWER,
    errno.ECONNRESET: _NO_ANSWER,
    errno.EDEADLK: "the file system's locks wait for one another: {local}",
    errno.EDQUOT: "the disk quota of this user is used up: raise it, or {elsewhere}",
    errno.EEXIST: "there is already something of this name, which offload did not make: remove it",
    errno.EFAULT: _OURS,
    errno.EFBIG: "the file system or `ulimit -f` does not allow a file of this size: raise the limit, or {larger}",
    errno.EHOSTDOWN: _NO_ANSWER,
    errno.EHOSTUNREACH: _NO_ANSWER,
    errno.EILSEQ: "the file system does not allow these letters in a name: choose another name",
    errno.EINTR: "a signal cut it short: try again",
    errno.EINVAL: "the file system refuses direct I/O of this size or alignment, or a name like this: {local}",
    errno.EIO: "the device reported an error: look at dmesg and the drive's SMART data, do not trust it, and {after_loss}",
    errno.EISDIR: "there is a folder where offload makes a file: remove it, or {elsewhere}",
    errno.EKEYEXPIRED: "the folder is encrypted and its key has expired: renew it, or {elsewhere}",
    errno.ELOOP: "there is a symbolic link where offload makes its own file, or a circle of them: remove it",
    errno.EMFILE: "the process has too many open files: raise `ulimit -n`",
    errno.EMLINK: "the folder above holds as many folders as the file system allows: {elsewhere}",
    errno.ENAMETOOLONG: "the path is longer than the file system allows: {shorter}",
    errno.ENFILE: "the system has too many open files: raise fs.file-max",
    errno.ENODATA: "the file is shorter than it was made, something else truncated it: keep other programs away from "
    "the folder and resume from the last checkpoint",
    errno.ENODEV: _DEVICE_GONE,
    errno.ENOENT: "it, or a folder above it, does not exist, or was removed meanwhile: create it, or {correct}",
    errno.ENOKEY: "the folder is encrypted and its key is not there: unlock it, or {elsewhere}",
    errno.ENOLCK: "the file system has no room for another lock: {local}",
    errno.ENOMEM: "the kernel had no memory for it: lower cpu_memory, or close other programs",
    errno.ENOSPC: "the file system is full: free space there, or {larger}",
    errno.ENOSYS: "this kernel, or a sandbox around the process, has no such call: {local}",
    errno.ENOTCONN: "the file system's own process (FUSE) or server has gone: mount it again, or {elsewhere}",
    errno.ENOTDIR: "a part of the path is not a folder: {correct}",
    errno.ENOTEMPTY: "something else put files into a folder of offload's: remove them",
    errno.ENOTSUP: "the file system cannot do that: {local}",
    errno.ENOTTY: "the file system cannot do that: {local}",
    errno.ENXIO: _DEVICE_GONE,
    errno.EOVERFLOW: "the file is larger than this file system's calls can say: {local}",
    errno.EPERM: "the system forbids it to this user: change the permissions (and attributes, see lsattr), or {elsewhere}",
    errno.EPIPE: _NO_ANSWER,
    errno.EREMOTEIO: "the network file system or its server reported an error: {local}",
    errno.EROFS: "the file system is mounted read-only (Linux does that after an I/O error, see dmesg): remount it, or "
    "{elsewhere}",
    errno.ESPIPE: "there is a pipe or socket where offload makes its own file: remove it",
    errno.ESTALE: "the network file system lost the file: {local}",
    errno.ETIMEDOUT: "the device or network file system did not answer: {local}",
    errno.ETXTBSY: "the file is being run as a program: {elsewhere}",
    errno.EUCLEAN: _DAMAGED,
    errno.EXDEV: "a mount point lies between the two folders: {elsewhere}",
}
_OTHERS = "Linux documents no such error for files: look at dmesg for the reason, or {elsewhere}"


def remedy_of(code: int, place: Place = SCRATCH) -> str:
    """What to do about errno `code`."""
    return _REMEDIES.get(code, _OTHERS).format(**asdict(place))


def errno_text(code: int) -> str:
    """Such as `ENOSPC, No space left on device`."""
    return f"{errno.errorcode.get(code, f'errno {code}')}, {os.strerror(code)}"


def storage_error(operation: str, path: object, code: int, place: Place = SCRATCH) -> StorageError:
    """A `StorageError` (with `.errno`) for an operation on a path, such as "cannot create the folder"."""
    return StorageError(code, f"{operation} {str(path)!r} ({errno_text(code)}): {remedy_of(code, place)}")


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
