"""A run's own folder: made, locked, and removed; and those of dead runs found and removed.

The lock is an flock on a file in the folder. The file gets its name only once it is locked, so a folder with a free
lock is always an abandoned one, and a folder without one is being made at this moment (or was, when a run was killed
within the same microseconds: those go after an hour).
"""

from __future__ import annotations

import errno
import fcntl
import logging
import os
import re
import stat
import time
import weakref
from pathlib import Path

from offload.tiers.io.failure import storage_error

FOLDER_PREFIX = "offload-"
LOCK_NAME = "lock"
SWAP_SUFFIX = ".swap"

_NEW_LOCK_NAME = "lock.new"
_FOLDER_NAME = re.compile(re.escape(FOLDER_PREFIX) + r"\d+-[0-9a-f]{16}")
_UNLOCKED_LIFETIME_SECONDS = 3600

_log = logging.getLogger(__name__)


class RunFolder:
    """One locked folder. `fileno` is a descriptor of the folder itself; the lock is held until `remove()`."""

    def __init__(self, path: Path, fileno: int, lock_fileno: int) -> None:
        self.path = path
        self.fileno = fileno
        self._lock_fileno = lock_fileno
        _held_folders.add(self)

    def remove(self) -> None:
        """Remove the folder with all files of ours, then let go of the lock."""
        try:
            _remove_folder(self.path, self.fileno)
        finally:
            self.let_go()

    def let_go(self) -> None:
        """Close the descriptors, so that this process no longer holds the lock. Removes nothing."""
        _held_folders.discard(self)
        for fileno in (self._lock_fileno, self.fileno):
            if fileno >= 0:
                os.close(fileno)
        self._lock_fileno = self.fileno = -1


_held_folders: weakref.WeakSet[RunFolder] = weakref.WeakSet()


def _let_go_in_child() -> None:
    # A lock is held by all processes that share its descriptor: a worker that outlives a killed run would keep the
    # run's folder from being cleaned up.
    for folder in tuple(_held_folders):
        folder.let_go()


os.register_at_fork(after_in_child=_let_go_in_child)


def make_run_folder(parent: Path, name: str, made: list[RunFolder]) -> RunFolder:
    """Make and lock `parent/name` and append it to `made`. Raises `StorageError`; nothing is left then."""
    path = parent / name
    folder_fileno = lock_fileno = -1
    try:
        os.mkdir(path, mode=0o700)
        folder_fileno = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
        lock_fileno = os.open(
            _NEW_LOCK_NAME,
            os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC,
            0o600,
            dir_fd=folder_fileno,
        )
        fcntl.flock(lock_fileno, fcntl.LOCK_EX | fcntl.LOCK_NB)
        os.rename(_NEW_LOCK_NAME, LOCK_NAME, src_dir_fd=folder_fileno, dst_dir_fd=folder_fileno)
    except OSError as error:
        if folder_fileno >= 0:
            RunFolder(path, folder_fileno, lock_fileno).remove()
        raise storage_error("cannot make and lock the run's folder", path, error.errno or errno.EIO) from error
    folder = RunFolder(path, folder_fileno, lock_fileno)
    made.append(folder)
    return folder


def remove_abandoned(parent: Path) -> None:
    """Remove the folders in `parent` that runs of this user left behind when they were killed."""
    try:
        names = [entry.name for entry in os.scandir(parent) if _FOLDER_NAME.fullmatch(entry.name)]
    except OSError as error:
        raise storage_error("cannot list the folder", parent, error.errno or errno.EIO) from error
    for name in names:
        try:
            _remove_if_abandoned(parent / name)
        except OSError as error:
            # Another run removes it at this moment, or it belongs to somebody else: not in our way.
            if error.errno not in (errno.ENOENT, errno.ELOOP, errno.ENOTDIR):
                _log.warning("left in place: %s, which an earlier run did not remove (%s)", parent / name, error.strerror)


def _remove_if_abandoned(path: Path) -> None:
    fileno = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
    lock_fileno = -1
    try:
        status = os.fstat(fileno)
        if status.st_uid != os.geteuid():
            return
        try:
            lock_fileno = os.open(LOCK_NAME, os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=fileno)
            fcntl.flock(lock_fileno, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except FileNotFoundError:
            if time.time() - status.st_mtime < _UNLOCKED_LIFETIME_SECONDS:
                return
        except BlockingIOError:
            return  # its run is alive
        _log.info("removing %s, left by a run that was killed", path)
        _remove_folder(path, fileno)
    finally:
        for opened in (lock_fileno, fileno):
            if opened >= 0:
                os.close(opened)


def _remove_folder(path: Path, fileno: int) -> None:
    """Remove our files below the folder that `fileno` is open on, the lock last, then the folder at `path`."""
    os.lseek(fileno, 0, os.SEEK_SET)  # btrfs lists what was there when the descriptor was opened, or last rewound
    for name in sorted(os.listdir(fileno), key=lambda name: name in (LOCK_NAME, _NEW_LOCK_NAME)):
        is_ours = name in (LOCK_NAME, _NEW_LOCK_NAME) or name.endswith(SWAP_SUFFIX)
        try:
            if is_ours and stat.S_ISREG(os.stat(name, dir_fd=fileno, follow_symlinks=False).st_mode):
                os.unlink(name, dir_fd=fileno)
        except FileNotFoundError:
            continue
    try:
        os.rmdir(path)
    except FileNotFoundError:
        return
    except OSError as error:
        _log.warning("left in place: %s, with files in it that offload did not make (%s)", path, error.strerror)
