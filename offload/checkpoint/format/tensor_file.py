# SPDX-License-Identifier: Apache-2.0
"""Writing safetensors files piece by piece: the header first, from the sizes alone, then bytes at any offset.

The file is one that every safetensors reader opens. Beyond what that format asks for, the header is padded with spaces
so that the data begins at a multiple of 4096 bytes, and tensors come in the order of falling item size, so that each is
aligned to its own.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from offload.checkpoint.format.crc32 import combine, crc32
from offload.checkpoint.format.manifest import FileEntry, TensorEntry
from offload.checkpoint.format.staged_folder import write_failure
from offload.device.arithmetic.rounding import round_into
from offload.errors import UsageError
from offload.layout import round_up
from offload.model.file_dtypes import DTYPE_CODES

DATA_ALIGN = 4096
"""Bytes. Where a file's data begins: what direct I/O and shared extents (reflinks) can start at."""

_METADATA = {"format": "pt"}
"""Of every data file; Hugging Face's reader asks for it."""
_STEP_NUMEL = 2**20


def known_dtype(name: str, dtype: torch.dtype) -> torch.dtype:
    """`dtype`, if files can hold it; else `UsageError`."""
    if dtype not in DTYPE_CODES:
        raise UsageError(f"{name!r} is of dtype {dtype}, which checkpoints cannot hold: convert it before saving.")
    return dtype


def raw_bytes(tensor: torch.Tensor) -> memoryview:
    """The memory of a contiguous CPU tensor, without a copy. The tensor must outlive it."""
    if not tensor.numel():
        return memoryview(b"")  # numpy's empty arrays may have no memory to view
    content: Any = tensor.detach().reshape(-1).view(torch.uint8).numpy()
    return memoryview(content)


@dataclass(frozen=True, slots=True)
class TensorSpec:
    """A tensor to be written: its name, dtype and shape in the file."""

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]

    @property
    def nbytes(self) -> int:
        return torch.Size(self.shape).numel() * self.dtype.itemsize


def lay_out(specs: Sequence[TensorSpec]) -> tuple[bytes, dict[str, int]]:
    """The header (with its length in front) and each tensor's offset in the file."""
    entries: dict[str, object] = {"__metadata__": _METADATA}
    relative: dict[str, int] = {}
    end = 0
    for spec in sorted(specs, key=lambda spec: -spec.dtype.itemsize):
        relative[spec.name] = end
        entries[spec.name] = {
            "dtype": DTYPE_CODES[spec.dtype],
            "shape": list(spec.shape),
            "data_offsets": [end, end + spec.nbytes],
        }
        end += spec.nbytes
    text = json.dumps(entries, separators=(",", ":")).encode()
    nbytes = round_up(8 + len(text), DATA_ALIGN)
    header = (nbytes - 8).to_bytes(8, "little") + text.ljust(nbytes - 8)
    return header, {name: nbytes + offset for name, offset in relative.items()}


class TensorFile:
    """One file in writing, by one thread. Parts of tensors come in any order, each byte once."""

    def __init__(self, folder: Path, name: str, specs: Sequence[TensorSpec]) -> None:
        self.name = name
        self.path = folder / name
        self._specs = {spec.name: spec for spec in specs}
        header, self.offsets = lay_out(specs)
        self.header_nbytes, self.header_crc32 = len(header), crc32(header)
        self.nbytes = self.header_nbytes + sum(spec.nbytes for spec in specs)
        self._ends = dict.fromkeys(self._specs, 0)
        self._parts: dict[str, list[tuple[int, int, int]]] = {name: [] for name in self._specs}  # (start, nbytes, crc32)
        self._fileno = -1
        try:
            self._fileno = _create(self.path)
            self._write(memoryview(header), 0)
            os.ftruncate(self._fileno, self.nbytes)  # what `pad` leaves out reads as zeros, at the end too
        except OSError as error:
            self.close()
            raise write_failure("writing", self.path, error) from error

    def append(self, name: str, values: torch.Tensor) -> None:
        """Write the next elements of the tensor `name`: contiguous, in host memory; 1-D where their dtype is another than its.

        Extra host memory then: 1 Mi elements."""
        dtype = self._specs[name].dtype
        for part in (values,) if values.dtype == dtype else _rounded(values, dtype):
            self.write(name, self._ends[name], part)
            self._ends[name] += part.numel() * dtype.itemsize

    def write(self, name: str, start_nbytes: int, tensor: torch.Tensor) -> None:
        """Write elements of the tensor `name`, of its dtype, from its byte `start_nbytes` on."""
        self._write_into(name, start_nbytes, raw_bytes(tensor))
        self.take(name, start_nbytes, tensor)

    def take(self, name: str, start_nbytes: int, tensor: torch.Tensor) -> None:
        """As `write`, of elements that somebody else brings to their place in the file: for their checksum alone."""
        view = raw_bytes(tensor)
        if start_nbytes + len(view) > self._specs[name].nbytes:
            raise AssertionError(f"{self.path}: more bytes for {name!r} than its shape holds")
        self._parts[name].append((start_nbytes, len(view), crc32(view)))

    def pad(self, name: str, start_nbytes: int, nbytes: int, *, overwrite: bool) -> None:
        """Bytes of the tensor `name` are zeros. `overwrite`: something else is there."""
        zeros = bytes(nbytes)
        if overwrite:
            self._write_into(name, start_nbytes, memoryview(zeros))
        self._parts[name].append((start_nbytes, nbytes, crc32(zeros)))

    def fileno(self) -> int:
        """The descriptor, for whoever brings bytes that are then only taken (`take`)."""
        return self._fileno

    @property
    def entry(self) -> FileEntry:
        """What a manifest says of the file."""
        return FileEntry(self.name, self.nbytes, self.header_nbytes, self.header_crc32)

    def tensor_entry(self, name: str) -> TensorEntry:
        """What a manifest says of a tensor, all bytes of which must be there."""
        spec = self._specs[name]
        return TensorEntry(self.name, DTYPE_CODES[spec.dtype], self.offsets[name], spec.nbytes, self._crc32(name))

    def _crc32(self, name: str) -> int:
        position, total = 0, 0
        for start, nbytes, checksum in sorted(self._parts[name]):
            if start != position:
                raise AssertionError(f"{self.path}: bytes of {name!r} from {position} on came twice or not at all")
            position, total = start + nbytes, combine(total, checksum, nbytes)
        if position != self._specs[name].nbytes:
            raise AssertionError(f"{self.path}: {position} of {self._specs[name].nbytes} bytes of {name!r} came")
        return total

    def write_back(self) -> None:
        """Have the drive begin with what is written so far, so that `finish` finds little left."""
        try:
            os.posix_fadvise(self._fileno, 0, 0, os.POSIX_FADV_DONTNEED)
        except OSError as error:
            raise write_failure("writing", self.path, error) from error

    def finish(self) -> None:
        """Make the file durable and close it. Every tensor must be complete (`tensor_entry` says so)."""
        try:
            os.fsync(self._fileno)
        except OSError as error:
            raise write_failure("syncing", self.path, error) from error
        finally:
            self.close()

    def close(self) -> None:
        """Close the file as it is. Idempotent."""
        if self._fileno >= 0:
            os.close(self._fileno)
            self._fileno = -1

    def _write_into(self, name: str, start_nbytes: int, view: memoryview) -> None:
        try:
            self._write(view, self.offsets[name] + start_nbytes)
        except OSError as error:
            raise write_failure("writing", self.path, error) from error

    def _write(self, view: memoryview, offset: int) -> None:
        while view:
            written = os.pwrite(self._fileno, view, offset)
            view, offset = view[written:], offset + written


def _rounded(values: torch.Tensor, dtype: torch.dtype) -> Iterator[torch.Tensor]:
    for part in values.split(_STEP_NUMEL):
        rounded = torch.empty(part.numel(), dtype=dtype, device="cpu")
        round_into(rounded, part)
        yield rounded


def write_file(path: Path, content: bytes) -> None:
    """A small file, durable when this returns."""
    try:
        fileno = _create(path)
        try:
            view = memoryview(content)
            while view:
                view = view[os.write(fileno, view) :]
            os.fsync(fileno)
        finally:
            os.close(fileno)
    except OSError as error:
        raise write_failure("writing", path, error) from error


def _create(path: Path) -> int:
    return os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, 0o644)
