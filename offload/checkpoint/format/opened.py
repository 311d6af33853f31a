# SPDX-License-Identifier: Apache-2.0
"""A checkpoint opened for reading, checked in full before anything is done with it.

Files are opened relative to the folder's descriptor, by plain names, and only if they are regular files: no link is
followed, nothing outside the folder is touched. Sizes are compared with the model's and the files' before a byte is
read; nothing is allocated by a number from the checkpoint.
"""

from __future__ import annotations

import hashlib
import os
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch

from offload.checkpoint.format.crc32 import crc32
from offload.checkpoint.format.folders import lock_folder, open_folder
from offload.checkpoint.format.leftovers import take_back
from offload.checkpoint.format.manifest import MANIFEST_NAME, Manifest, TensorEntry
from offload.checkpoint.format.manifest_decoding import decode
from offload.checkpoint.format.staged_folder import raise_if_short
from offload.checkpoint.format.tensor_file import raw_bytes
from offload.errors import CheckpointError
from offload.model.file_dtypes import DTYPES

MAX_MANIFEST_NBYTES = 1 << 30
_SLAB_NBYTES = 4 * 2**20
_ELSE = "Load another checkpoint."


class OpenedCheckpoint:
    """A context manager. Holds a shared lock, so that no other process removes the folder meanwhile."""

    def __init__(self, path: Path) -> None:
        """Read the manifest. Raises `CheckpointError`."""
        self.path = path
        self._fileno = _open(path)
        self._open_file: tuple[str, int] | None = None
        self._slab = torch.empty(0, dtype=torch.uint8, device="cpu")
        try:
            lock_folder(self._fileno, shared=True)
            content = self._read_manifest()
            self.digest = hashlib.sha256(content).hexdigest()
            """Of the manifest: what two folders have alike that hold the same checkpoint."""
            self.manifest: Manifest = decode(content, str(path / MANIFEST_NAME))
        except BaseException:
            self.close()
            raise

    def __enter__(self) -> OpenedCheckpoint:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Idempotent."""
        self._close_file()
        fileno, self._fileno = self._fileno, -1  # first: an interrupt may come as it is closed
        if fileno >= 0:
            os.close(fileno)

    # ---- checking ------------------------------------------------------------------------------------------------

    def check_files(self) -> None:
        """Sizes, and that tensors fill each file without gap or overlap."""
        files = {entry.name: entry for entry in self.manifest.files}
        if len(files) != len(self.manifest.files):
            raise self.damaged(MANIFEST_NAME, "it lists a file twice")
        ranges: dict[str, list[tuple[int, int, str]]] = {name: [] for name in files}
        for what, tensor in self.manifest.tensors():
            if tensor.file not in ranges:
                raise self.damaged(MANIFEST_NAME, f"{what} lies in {tensor.file!r}, which it does not list")
            ranges[tensor.file].append((tensor.offset, tensor.offset + tensor.nbytes, what))
        for name, entry in files.items():
            position = entry.header_nbytes
            for start, stop, what in sorted(ranges[name]):
                if start != position:
                    raise self.damaged(MANIFEST_NAME, f"{what} begins at byte {start} of {name}, expected {position}")
                position = stop
            if position != entry.nbytes:
                raise self.damaged(MANIFEST_NAME, f"the tensors of {name} end at byte {position}, the file at {entry.nbytes}")
            with self._file(name) as fileno:
                found = os.fstat(fileno).st_size
            if found != entry.nbytes:
                raise self.damaged(name, f"it has {found} bytes, expected {entry.nbytes}")

    def check_contents(self, index: int = 0, count: int = 1) -> None:
        """Read every byte and compare the checksums: of all tensors, or the share `index` of `count`."""
        self.check_headers()
        for what, tensor in self.manifest.tensors()[index::count]:
            for _ in self._slabs(tensor.file, what, tensor.offset, tensor.nbytes, tensor.crc32):
                continue

    def check_headers(self) -> None:
        """Read the files' headers and compare the checksums."""
        for entry in self.manifest.files:
            for _ in self._slabs(entry.name, "the header", 0, entry.header_nbytes, entry.header_crc32):
                continue

    def checked_slabs(self, what: str, tensor: TensorEntry) -> Iterator[torch.Tensor]:
        """The range in parts of at most 4 MiB, 1-D of its dtype, each valid until the next; raises after the last one
        where the checksum of all of them is another."""
        for slab in self._slabs(tensor.file, what, tensor.offset, tensor.nbytes, tensor.crc32):
            yield slab.view(DTYPES[tensor.dtype])

    def _slabs(self, name: str, what: str, offset: int, nbytes: int, expected: int) -> Iterator[torch.Tensor]:
        found = 0
        for start in range(0, nbytes, _SLAB_NBYTES):
            slab = self.slab(min(_SLAB_NBYTES, nbytes - start))
            self._read(name, offset + start, slab)
            found = crc32(raw_bytes(slab), found)
            yield slab
        if found != expected:
            raise self.damaged(name, f"{what}, bytes [{offset}, {offset + nbytes}), has the checksum {found}, not {expected}")

    def damaged(self, name: str, what: str) -> CheckpointError:
        """The error that names a file of this checkpoint and what is wrong with it."""
        return CheckpointError(f"{str(self.path / name)!r} is damaged: {what}. {_ELSE}")

    # ---- reading -------------------------------------------------------------------------------------------------

    def slab(self, nbytes: int) -> torch.Tensor:
        """A buffer of at most 4 MiB: uint8 [nbytes], the same memory every time."""
        if not self._slab.numel():
            self._slab = torch.empty(_SLAB_NBYTES, dtype=torch.uint8, device="cpu")
        return self._slab[:nbytes]

    def read_elements(self, tensor: TensorEntry, start: int, into: torch.Tensor) -> None:
        """Fill `into` (contiguous, host memory, the entry's dtype) with the tensor's elements from `start` on."""
        if into.dtype != DTYPES[tensor.dtype]:
            raise AssertionError(f"{tensor.file}: {tensor.dtype} was read into {into.dtype}")
        if into.numel():
            self._read(tensor.file, tensor.offset + start * into.element_size(), into)

    def _read(self, name: str, offset: int, into: torch.Tensor) -> None:
        view = raw_bytes(into)
        with self._file(name) as fileno:
            while view:
                count = os.preadv(fileno, [view], offset)
                if count == 0:
                    raise self.damaged(name, f"it ends at byte {offset}")
                view, offset = view[count:], offset + count

    @contextmanager
    def _file(self, name: str) -> Iterator[int]:
        """The open file; errors of the system name it. The last one stays open."""
        try:
            if self._open_file is None or self._open_file[0] != name:
                self._close_file()
                self._open_file = name, self._open_regular(name)
            yield self._open_file[1]
        except OSError as error:
            raise_if_short(self.path / name, error)
            raise CheckpointError(f"{str(self.path / name)!r} cannot be read ({error.strerror}). {_ELSE}") from error

    def _open_regular(self, name: str) -> int:
        # O_NONBLOCK: opening a fifo must not wait for a writer.
        flags = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
        fileno = os.open(name, flags, dir_fd=self._fileno)
        if not stat.S_ISREG(os.fstat(fileno).st_mode):
            os.close(fileno)
            raise self.damaged(name, "it is not a regular file")
        return fileno

    def _close_file(self) -> None:
        opened, self._open_file = self._open_file, None
        if opened is not None:
            os.close(opened[1])

    def _read_manifest(self) -> bytes:
        with self._file(MANIFEST_NAME) as fileno:
            nbytes = os.fstat(fileno).st_size
            if nbytes > MAX_MANIFEST_NBYTES:
                raise self.damaged(MANIFEST_NAME, f"it has {nbytes} bytes, at most {MAX_MANIFEST_NBYTES} are read")
            content = bytearray()
            while len(content) <= MAX_MANIFEST_NBYTES and (chunk := os.pread(fileno, _SLAB_NBYTES, len(content))):
                content += chunk
        self._close_file()
        return bytes(content)


def _open(path: Path) -> int:
    try:
        if not os.path.lexists(path):
            take_back(Path(os.path.abspath(path)).parent)
        return open_folder(path, follow=True)
    except OSError as error:
        raise_if_short(path, error)
        raise CheckpointError(
            f"{str(path)!r} cannot be opened as a checkpoint ({error.strerror}): name the folder that save_checkpoint made."
        ) from error
