"""Scratch files: a folder of the run's own in each path that the user gave.

    <path>/offload-<pid>-<random>/     0700; one per run and path
        lock                           held with flock as long as the run lives
        <store>.swap                   0600, reserved in full before anything is written to it

Two runs given the same path never share a folder. A folder whose lock is free was left by a run that was killed: the
next run removes it. Everything is made with O_EXCL and O_NOFOLLOW below a descriptor of the folder, so nothing that
somebody else puts there is ever written through, and only files with our names are ever removed.
"""

from __future__ import annotations

import errno
import logging
import os
import secrets
import shutil
import warnings
import weakref
from collections.abc import Sequence
from pathlib import Path

from offload.errors import ConfigError
from offload.tiers.io.failure import storage_error
from offload.tiers.scratch_file import ScratchFile, create_file, refuses_direct_io, reserve
from offload.tiers.scratch_lock import FOLDER_PREFIX, LOCK_NAME, RunFolder, make_run_folder, remove_abandoned

__all__ = ["FOLDER_PREFIX", "LOCK_NAME", "ScratchFile", "ScratchFolder", "free_nbytes"]

_log = logging.getLogger(__name__)


def free_nbytes(paths: Sequence[str | os.PathLike[str]]) -> int:
    """What could be written to the paths in equal shares; paths on one file system share its room. A path that does not exist
    yet counts as the folder that it would be made in. 0 where nobody can say."""
    try:
        existing = [next(one for one in (path, *path.parents) if one.exists()) for path in map(_absolute, paths)]
        devices = [os.stat(path).st_dev for path in existing]
        shares = zip(existing, devices, strict=True)
        free = [shutil.disk_usage(path).free // devices.count(device) for path, device in shares]
    except OSError:
        return 0
    return min(free, default=0) * len(free)


def _absolute(path: str | os.PathLike[str]) -> Path:
    return Path(path).expanduser().absolute()


class ScratchFolder:
    """The run's folders, one in each of the user's paths.

    Close it after the stores that have files in it; their files then need no name any more. Removed at `close()`, at
    exit of the process, and when it is dropped; a forked child removes nothing."""

    def __init__(self, paths: Sequence[str | os.PathLike[str]]) -> None:
        """Make the folders. A path that does not exist is created if the folder above it does.

        Raises `ConfigError` where a path cannot be right, `StorageError` where the system refuses; then nothing of
        it is left."""
        if not paths:
            raise ConfigError("no path was given for NVMe: expected one or more folders in Config(nvme=...)")
        self.paths = tuple(map(_absolute, paths))
        run_name = f"{FOLDER_PREFIX}{os.getpid()}-{secrets.token_hex(8)}"
        self._folders: list[RunFolder] = []
        self._finalizer = weakref.finalize(self, _remove_all, self._folders, os.getpid())
        try:
            self._direct = tuple(self._open_path(path, run_name) for path in self.paths)
        except BaseException:
            self.close()
            raise

    @property
    def path_count(self) -> int:
        return len(self.paths)

    @property
    def folders(self) -> tuple[Path, ...]:
        """The run's own folder in each path."""
        return tuple(folder.path for folder in self._folders)

    @property
    def direct(self) -> tuple[bool, ...]:
        """For each path, whether its files bypass the page cache (O_DIRECT)."""
        return self._direct

    def require_free(self, nbytes_per_path: Sequence[int]) -> None:
        """Raise `ConfigError` where the paths cannot hold so many bytes more; paths on one file system share its room.

        Call it with the sum over all stores before the first is made: then nothing was written when room is short."""
        needed_nbytes: dict[int, int] = {}
        for folder, nbytes in zip(self._folders, nbytes_per_path, strict=True):
            device = os.fstat(folder.fileno).st_dev
            needed_nbytes[device] = needed_nbytes.get(device, 0) + nbytes
        for path, folder in zip(self.paths, self._folders, strict=True):
            needed = needed_nbytes[os.fstat(folder.fileno).st_dev]
            free = shutil.disk_usage(folder.path).free
            if needed > free:
                raise ConfigError(
                    f"{str(path)!r} is too small: the run needs {needed} bytes ({needed / 2**30:.2f} GiB) on its file "
                    f"system and {free} bytes ({free / 2**30:.2f} GiB) are free; free space there, name "
                    "a larger file system in Config(nvme=...), or keep more on cpu"
                )

    def create(self, name: str, nbytes_per_path: Sequence[int]) -> tuple[ScratchFile, ...]:
        """Make one file of that name and size in each path, the space reserved in full. It reads as zeros.

        The caller owns the files and closes them. Raises `ConfigError` where there is too little room (nothing was made
        then), `StorageError` where the system refuses."""
        if not self._finalizer.alive:
            raise AssertionError(f"scratch file {name!r} was asked for after close()")
        if not name or not all(character.isalnum() or character in "_-." for character in name):
            raise AssertionError(f"scratch file name {name!r}: letters, digits, '_', '-' and '.' only")
        self.require_free(nbytes_per_path)
        files: list[ScratchFile] = []
        try:
            for folder, direct, nbytes in zip(self._folders, self._direct, nbytes_per_path, strict=True):
                files.append(create_file(folder, f"{name}.swap", nbytes, direct=direct))
                reserve(files[-1])
        except BaseException:
            for file in files:
                file.close()
            raise
        return tuple(files)

    def close(self) -> None:
        """Remove the folders and what is in them; files still open keep their space until they close. May be called
        again."""
        self._finalizer()

    def _open_path(self, path: Path, run_name: str) -> bool:
        """Make the run's folder in `path`; whether direct I/O works there."""
        _require_folder(path)
        remove_abandoned(path)
        folder = make_run_folder(path, run_name, self._folders)
        if file_system_of(path) in ("tmpfs", "ramfs"):
            warnings.warn(
                f"{str(path)!r} is on a file system in memory: what is put there counts as host memory, outside of "
                "cpu_memory. Name a folder on a drive in Config(nvme=...)",
                RuntimeWarning,
                stacklevel=4,
            )
        refusal = refuses_direct_io(folder)
        if refusal:
            warnings.warn(
                f"{str(path)!r}: its file system does not support direct I/O (O_DIRECT: {refusal}), so files there "
                "go through "
                "the page cache: right, but slower, and with memory that cpu_memory does not bound",
                RuntimeWarning,
                stacklevel=4,
            )
        return not refusal


def _require_folder(path: Path) -> None:
    try:
        path.mkdir(mode=0o700)
        _log.info("created the folder %s", path)
    except FileExistsError:
        if not path.is_dir():
            raise ConfigError(
                f"{str(path)!r} is not a folder: expected an existing folder, or one to create, in Config(nvme=...)"
            ) from None
    except FileNotFoundError:
        raise ConfigError(
            f"{str(path)!r} cannot be created because the folder above it, {str(path.parent)!r}, does not "
            "exist: create it (is the drive mounted?), or correct Config(nvme=...)"
        ) from None
    except OSError as error:
        raise storage_error("cannot create the folder", path, error.errno or errno.EIO) from error


def file_system_of(path: Path) -> str:
    """The type of the file system that `path` lies on, such as "ext4"; "" where the system does not say."""
    device = os.stat(path).st_dev
    wanted = f"{os.major(device)}:{os.minor(device)}"
    try:
        lines = Path("/proc/self/mountinfo").read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        return ""
    for line in lines:
        # "id parent major:minor root mount-point options [optional ...] - type source super-options"
        before, _, after = line.partition(" - ")
        if before.split()[2] == wanted:
            return after.split()[0]
    return ""


def _remove_all(folders: list[RunFolder], process_id: int) -> None:
    if os.getpid() != process_id:
        return  # a forked child: the folders are the parent's
    while folders:
        folder = folders.pop()
        try:
            folder.remove()
        except OSError as error:
            _log.warning("left in place: %s, which could not be removed (%s)", folder.path, error.strerror)
