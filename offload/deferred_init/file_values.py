# SPDX-License-Identifier: Apache-2.0
"""Values that lie in files of safetensors: recorded as what is to be read, and read when they are asked for.

Libraries that load safetensors map the file and make tensors over the mapping (`torch.asarray` of a part of its storage).
Nothing is read by that: where the bytes lie says which part of which file is meant, and `FileBytes` stands in a recording
for reading it.

Thread-safety: `MappedFiles` belongs to the thread that records; a `FileBytes` never changes.
"""

from __future__ import annotations

import ctypes
import os
from dataclasses import dataclass
from typing import Any

import torch

from offload.errors import InitializerError

_MAPS = "/proc/self/maps"
_COMPARED_NBYTES = 64


@dataclass(frozen=True, slots=True)
class FileBytes:
    """`nbytes` of a file from `offset`, as an operation of a recording. `identity`: of the file as it was then."""

    path: str
    offset: int
    nbytes: int
    identity: tuple[int, int]
    overloadpacket: Any = None  # it is no operator of torch's

    def __str__(self) -> str:
        return f"(reading {self.nbytes} bytes at {self.offset} of {self.path})"

    def __call__(self) -> torch.Tensor:
        """uint8 [nbytes], in memory of its own. Errors: `InitializerError` where the file is not what it was."""
        content = torch.empty(self.nbytes, dtype=torch.uint8)
        try:
            with open(self.path, "rb", buffering=0) as file:
                if _identity(os.fstat(file.fileno())) != self.identity:
                    raise InitializerError(f"{self.path} was changed or replaced after it was read inside deferred_init()")
                file.seek(self.offset)
                rest = memoryview(content.numpy().data)
                while rest:
                    count = file.readinto(rest)
                    if not count:
                        raise InitializerError(f"{self.path} ends before byte {self.offset + self.nbytes}; fetch it again")
                    rest = rest[count:]
        except OSError as error:
            raise InitializerError(f"{self.path} cannot be read: {error.strerror}; fetch it again") from error
        return content


@dataclass(frozen=True, slots=True)
class _Mapping:
    start: int
    stop: int
    file_offset: int
    path: str
    identity: tuple[int, int]
    held: torch.UntypedStorage
    """A part of it, which keeps the addresses from being given to another."""


class MappedFiles:
    """Finds the file under a storage."""

    def __init__(self) -> None:
        self._known: list[_Mapping] = []

    def find(self, storage: torch.UntypedStorage) -> FileBytes | None:
        """What of which file `storage` is; None where it is none's, or that cannot be told."""
        start, nbytes = storage.data_ptr(), storage.nbytes()
        if storage.device.type != "cpu" or not start or not nbytes:
            return None
        mapping = next((one for one in self._known if one.start <= start and start + nbytes <= one.stop), None)
        if mapping is None:
            mapping = _mapping_of(storage, start, nbytes)
            if mapping is None:
                return None
            self._known.append(mapping)
        return FileBytes(mapping.path, mapping.file_offset + start - mapping.start, nbytes, mapping.identity)


def _mapping_of(storage: torch.UntypedStorage, address: int, nbytes: int) -> _Mapping | None:
    """From what the system says of this memory, a line for each mapping: start-stop rights offset device inode path."""
    try:
        with open(_MAPS, encoding="utf-8", errors="surrogateescape") as lines:
            for line in lines:
                fields = line.rstrip("\n").split(maxsplit=5)
                start, stop = (int(number, 16) for number in fields[0].split("-"))
                if start <= address and address + nbytes <= stop:
                    return _checked(storage, address, start, stop, fields) if len(fields) == 6 else None
    except OSError:
        return None
    return None


def _checked(storage: torch.UntypedStorage, address: int, start: int, stop: int, fields: list[str]) -> _Mapping | None:
    """The mapping, if the file that has this name now holds what was mapped."""
    path, offset = fields[5], int(fields[2], 16)
    try:
        with open(path, "rb", buffering=0) as file:
            count = min(_COMPARED_NBYTES, storage.nbytes())
            file.seek(offset + address - start)
            if file.read(count) != ctypes.string_at(address, count):
                return None
            return _Mapping(start, stop, offset, path, _identity(os.fstat(file.fileno())), storage)
    except OSError:
        return None


def _identity(status: os.stat_result) -> tuple[int, int]:
    return status.st_size, status.st_mtime_ns
