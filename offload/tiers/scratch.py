# SPDX-License-Identifier: Apache-2.0
"""Scratch files: one for each store and path that the user gave, without a name there.

So two runs in one folder never meet, nothing is to be cleaned up after a run that was killed, and nothing that removes old
files can remove them. All that a run needs of the folders is done when its stores are made.
"""

from __future__ import annotations

import errno
import logging
import os
import shutil
import warnings
from collections.abc import Sequence
from pathlib import Path

from offload.device.virtual.current import virtual_machine
from offload.errors import ConfigError
from offload.tiers.io.failure import storage_error
from offload.tiers.scratch_file import ScratchFile, create_file, refuses_direct_io, reserve

__all__ = ["ScratchFile", "ScratchFolder", "free_nbytes"]

_log = logging.getLogger(__name__)


def free_nbytes(paths: Sequence[str | os.PathLike[str]]) -> int:
    """What could be written to the paths in equal shares; paths on one file system share its room. A path that does not exist
    yet counts as the folder that it would be made in. 0 where nobody can say. Of a machine in numbers all that it has."""
    if (machine := virtual_machine()) is not None:
        return int(machine.nvme_nbytes)
    try:
        existing = [_existing(path) for path in paths]
        devices = [os.stat(path).st_dev for path in existing]
        shares = zip(existing, devices, strict=True)
        free = [shutil.disk_usage(path).free // devices.count(device) for path, device in shares]
    except OSError:
        return 0
    return min(free, default=0) * len(free)


def _absolute(path: str | os.PathLike[str]) -> Path:
    return Path(path).expanduser().absolute()


def _existing(path: str | os.PathLike[str]) -> Path:
    """The path, or the folder that it would be made in."""
    absolute = _absolute(path)
    return next(one for one in (absolute, *absolute.parents) if one.exists())


class ScratchFolder:
    """The user's paths, as places for scratch files."""

    def __init__(self, paths: Sequence[str | os.PathLike[str]]) -> None:
        """A path that does not exist is created if the folder above it does.

        Raises `ConfigError` where a path cannot be right, `StorageError` where the system refuses."""
        if not paths:
            raise ConfigError("no path was given for NVMe: expected one or more folders in Config(nvme=...)")
        self.paths = tuple(map(_absolute, paths))
        self.direct = tuple(map(_prepare, self.paths))
        """For each path, whether its files bypass the page cache (O_DIRECT)."""

    @property
    def path_count(self) -> int:
        return len(self.paths)

    def require_free(self, nbytes_per_path: Sequence[int]) -> None:
        """Raise `ConfigError` where the paths cannot hold so many bytes more; paths on one file system share its room.

        Call it with the sum over all stores before the first is made: then nothing was written when room is short."""
        needed_nbytes: dict[int, int] = {}
        for path, nbytes in zip(self.paths, nbytes_per_path, strict=True):
            device = os.stat(path).st_dev
            needed_nbytes[device] = needed_nbytes.get(device, 0) + nbytes
        for path in self.paths:
            needed = needed_nbytes[os.stat(path).st_dev]
            free = shutil.disk_usage(path).free
            if needed > free:
                raise ConfigError(
                    f"{str(path)!r} is too small: the run needs {needed} bytes ({needed / 2**30:.2f} GiB) on its file "
                    f"system and {free} bytes ({free / 2**30:.2f} GiB) are free; free space there, name "
                    "a larger file system in Config(nvme=...), or keep more on cpu"
                )

    def create(self, name: str, nbytes_per_path: Sequence[int]) -> tuple[ScratchFile, ...]:
        """Make one file of that size in each path, the space reserved in full. It reads as zeros. `name`: for messages.

        The caller owns the files and closes them. Raises `ConfigError` where there is too little room (nothing was made
        then), `StorageError` where the system refuses."""
        for path in self.paths:  # a cleaner of temporary files may have removed one since
            try:
                path.mkdir(mode=0o700, parents=True, exist_ok=True)
            except OSError as error:
                raise storage_error("cannot create the folder", path, error.errno or errno.EIO) from error
        self.require_free(nbytes_per_path)
        files: list[ScratchFile] = []
        try:
            for path, direct, nbytes in zip(self.paths, self.direct, nbytes_per_path, strict=True):
                files.append(create_file(path, name, nbytes, direct=direct))
                reserve(files[-1])
        except BaseException:
            for file in files:
                file.close()
            raise
        return tuple(files)


def _prepare(path: Path) -> bool:
    """Make the folder where it is missing; whether direct I/O works there."""
    _require_folder(path)
    if file_system_of(path) in ("tmpfs", "ramfs"):
        warnings.warn(
            f"{str(path)!r} is on a file system in memory: what is put there counts as host memory, outside of "
            "cpu_memory. Name a folder on a drive in Config(nvme=...)",
            RuntimeWarning,
            stacklevel=4,
        )
    refusal = refuses_direct_io(path)
    if refusal:
        warnings.warn(
            f"{str(path)!r}: its file system does not support direct I/O (O_DIRECT: {refusal}), so files there go through "
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
    """The type of the file system that `path` lies on, or would, such as "ext4"; "" where the system does not say."""
    device = os.stat(_existing(path)).st_dev
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
