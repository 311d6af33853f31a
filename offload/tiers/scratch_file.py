# SPDX-License-Identifier: Apache-2.0
"""One scratch file: without a name, reserved in full, with direct I/O where the file system has it.

Nobody else can open it or take it away, and the system frees its space when the process ends, in whatever way.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import functools
import logging
import mmap
import os
import secrets
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from offload.tiers.io.failure import errno_text, storage_error

_KEEP_SIZE, _PUNCH_HOLE = 1, 2  # of Linux fallocate

CANNOT_ALLOCATE = frozenset({errno.EOPNOTSUPP, errno.ENOSYS})
"""What a file system answers that cannot allocate ahead."""

_HAS_NO_NAMELESS_FILES = frozenset({errno.EOPNOTSUPP, errno.EISDIR, errno.EINVAL, errno.ENOSYS})
"""What O_TMPFILE is answered where there are none. EINVAL may be the answer to O_DIRECT as well: the other way says."""

_FLAGS = os.O_RDWR | os.O_CLOEXEC

_log = logging.getLogger(__name__)


class ScratchFile:
    """An open scratch file. `direct`: it bypasses the page cache, so memory, offsets and sizes are 4 KiB aligned."""

    def __init__(self, path: Path, fileno: int, nbytes: int, *, direct: bool) -> None:
        self.path = path
        self.nbytes = nbytes
        self.direct = direct
        self._fileno = fileno
        self._process_id = os.getpid()
        # A transfer in flight holds the file, so this cannot come too early.
        self._finalizer = weakref.finalize(self, os.close, fileno)
        self._finalizer.atexit = False
        _open_files.add(self)

    def fileno(self) -> int:
        if self._fileno < 0:
            other = f" in process {self._process_id}, which this one was forked from" if os.getpid() != self._process_id else ""
            raise AssertionError(
                f"scratch file {str(self.path)!r} is used here but is closed or open only{other or ' earlier'}"
            )
        return self._fileno

    def close(self) -> None:
        """Close the descriptor. May be called again. Nothing may be in flight."""
        _open_files.discard(self)
        self._fileno = -1
        self._finalizer()


_open_files: weakref.WeakSet[ScratchFile] = weakref.WeakSet()


def _close_in_child() -> None:
    # Else a forked worker that outlives the run would keep their disk space.
    for file in tuple(_open_files):
        file.close()


os.register_at_fork(after_in_child=_close_in_child)


def create_file(folder: Path, name: str, nbytes: int, *, direct: bool) -> ScratchFile:
    """Make a file without a name in `folder`, empty so far; `name` stands for it in messages. Raises `StorageError`."""
    path = folder / f"{name}.swap (nameless)"
    flags = _FLAGS | (os.O_DIRECT if direct else 0)
    try:
        try:
            fileno = os.open(folder, flags | os.O_TMPFILE | os.O_EXCL, 0o600)  # O_EXCL: nobody can ever give it a name
        except OSError as error:
            if error.errno not in _HAS_NO_NAMELESS_FILES:
                raise
            fileno = _open_and_unlink(folder / f".offload-{os.getpid()}-{secrets.token_hex(8)}.swap", flags)
    except OSError as error:
        raise storage_error("cannot create the scratch file", path, error.errno or errno.EIO) from error
    return ScratchFile(path, fileno, nbytes, direct=direct)


def _open_and_unlink(path: Path, flags: int) -> int:
    try:
        return os.open(path, flags | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, 0o600)
    finally:
        with contextlib.suppress(FileNotFoundError):
            os.unlink(path)  # also where Linux had made it before it refused a flag


def reserve(file: ScratchFile) -> None:
    """Give the file its size, every block allocated, so that a full disk is known now and not in the middle of a step.

    A file system that cannot allocate ahead gives the size alone, and a warning in the log says so.
    Raises `StorageError`."""
    if file.nbytes == 0:
        return
    code = allocate(file, 0, file.nbytes)
    if code == 0:
        return
    if code not in CANNOT_ALLOCATE:
        raise storage_error(f"cannot reserve {file.nbytes} bytes for the scratch file", file.path, code)
    try:
        os.ftruncate(file.fileno(), file.nbytes)
    except OSError as error:
        raise storage_error("cannot set the size of the scratch file", file.path, error.errno or errno.EIO) from error
    _log.warning(
        "%s: its file system cannot reserve space ahead (%s); if other programs fill it, a later write fails",
        file.path,
        errno_text(code),
    )


def allocate(file: ScratchFile, offset_nbytes: int, nbytes: int) -> int:
    """Give the range blocks where it has none; the errno that it failed with, or 0."""
    return _fallocate(file.fileno(), 0, offset_nbytes, nbytes)


def give_back(file: ScratchFile, offset_nbytes: int, nbytes: int) -> None:
    """Take the range's blocks away. Blocks that stay taken are a warning in the log, but where none were allocated ahead."""
    code = _fallocate(file.fileno(), _KEEP_SIZE | _PUNCH_HOLE, offset_nbytes, nbytes)
    if code and code not in CANNOT_ALLOCATE:
        _log.warning("%s: %d bytes that were reserved stay taken (%s)", file.path, nbytes, errno_text(code))


def _fallocate(fileno: int, mode: int, offset_nbytes: int, nbytes: int) -> int:
    """Linux fallocate; the errno it failed with, or 0.

    Not os.posix_fallocate: where the file system has no such operation, the C library imitates it by writing to every
    block of the file."""
    while _libc_fallocate()(fileno, mode, offset_nbytes, nbytes) != 0:
        code = ctypes.get_errno()
        if code != errno.EINTR:
            return code
    return 0


@functools.cache
def _libc_fallocate() -> Callable[[int, int, int, int], int]:
    function: Any = ctypes.CDLL(None, use_errno=True).fallocate64
    function.argtypes = (ctypes.c_int, ctypes.c_int, ctypes.c_int64, ctypes.c_int64)
    call: Callable[[int, int, int, int], int] = function
    return call


def refuses_direct_io(folder: Path) -> str:
    """Why direct I/O with 4 KiB blocks does not work in the folder; "" where it does. Tried with one block.

    Raises `StorageError` where not even ordinary I/O works."""
    try:
        file = create_file(folder, "probe", 0, direct=True)
    except OSError as error:
        if error.errno == errno.EINVAL:
            return errno_text(errno.EINVAL)
        raise
    try:
        return _try_block(file)
    except OSError as error:
        if error.errno in (errno.EINVAL, errno.EOPNOTSUPP, errno.ENOTSUP):
            return errno_text(error.errno)
        raise storage_error("cannot write and read back a block in", folder, error.errno or errno.EIO) from error
    finally:
        file.close()


def _try_block(file: ScratchFile) -> str:
    """Write a block and read it back, both aligned to 4 KiB and to nothing larger, as every extent may be."""
    block_nbytes = 4096
    with (
        mmap.mmap(-1, 4 * block_nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS) as memory,
        memoryview(memory) as pages,
    ):
        odd = 1 - torch.frombuffer(memory, dtype=torch.uint8).data_ptr() // block_nbytes % 2
        written = pages[odd * block_nbytes : (odd + 1) * block_nbytes]
        read = pages[(odd + 2) * block_nbytes : (odd + 3) * block_nbytes]
        with written, read:
            written[:] = bytes(range(256)) * (block_nbytes // 256)
            if os.pwrite(file.fileno(), written, block_nbytes) != block_nbytes:
                return "a block was written in part"
            if os.preadv(file.fileno(), [read], block_nbytes) != block_nbytes:
                return "a block was read in part"
            return "" if read == written else "a block was read back differently"
