# SPDX-License-Identifier: Apache-2.0
"""Extents on NVMe: one scratch file per path, striped.

Stripe s of the store, bytes [s * stripe_nbytes, (s + 1) * stripe_nbytes), lies in file s % path_count as its stripe
s // path_count. One extent so becomes one transfer per stripe it touches, and one `Pending` for all.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator
from typing import Any

from torch import Tensor

from offload._native import CHECKSUM_BLOCK_NBYTES
from offload.device.pending import AllOf, Pending
from offload.device.recording import NOBODY, NVME_READ, NVME_WRITE, OpRecorder
from offload.layout import EXTENT_ALIGN, Extent
from offload.tiers.extent_guard import ExtentGuard
from offload.tiers.io import reflink
from offload.tiers.io.backend import IoBackend, OpenFile, Priority
from offload.tiers.io.failure import storage_error
from offload.tiers.scratch import ScratchFile, ScratchFolder
from offload.tiers.second_places import Asides, Files, Piece
from offload.tiers.store import ExtentSnapshot
from offload.tiers.verification import Stored, VerifiedRead, checksum, verification_is_on

STRIPE_NBYTES = 4 * 1024 * 1024


class NvmeStore:
    """Extents in files of a `ScratchFolder`, moved by an `IoBackend`. Owns its files; the backend may serve others.

    A read of what is no longer what was written fails with `CorruptDataError` (`offload.tiers.verification`).
    Close the stores before the backend."""

    def __init__(
        self,
        name: str,
        extents: Iterable[Extent],
        scratch: ScratchFolder,
        backend: IoBackend,
        *,
        stripe_nbytes: int = STRIPE_NBYTES,
        recorder: OpRecorder = NOBODY,
    ) -> None:
        """Reserves the whole space on disk. `name` stands for the files in messages. `recorder`: is told of transfers.

        Raises `ConfigError` where a path has too little room or `OFFLOAD_VERIFY` is neither 0 nor 1, `StorageError` where
        reserving it failed."""
        if stripe_nbytes <= 0 or stripe_nbytes % EXTENT_ALIGN:
            raise AssertionError(f"{name}: stripes of {stripe_nbytes} bytes are not a positive multiple of {EXTENT_ALIGN}")
        self.name = name
        extents = tuple(extents)
        self._guard = ExtentGuard(name, extents)
        self.nbytes = self._guard.nbytes
        self._stripe_nbytes = stripe_nbytes
        self._backend, self._recorder = backend, recorder
        self.verifies = verification_is_on()
        self._checksums: dict[Extent, list[int]] = {}
        """Of the pieces of each extent that was written, where reads are verified."""
        self._files: tuple[ScratchFile, ...] = scratch.create(
            name, striped_nbytes(self.nbytes, scratch.path_count, stripe_nbytes)
        )
        self._asides = Asides(name, self._files, scratch, self._pieces)

    def read(self, extent: Extent, into: Tensor, *, priority: Priority = Priority.PARAMETER) -> Pending:
        operation = self._guard.begin(extent, into, is_write=False)
        try:
            operation.start(self._read(extent, into, priority, self._asides.files(extent), self._checksums.get(extent)))
        except BaseException as error:
            self._guard.abandon(operation, error)
            raise
        return operation

    def write(
        self, extent: Extent, source: Tensor, *, priority: Priority = Priority.STATE, sums: Tensor | None = None
    ) -> Pending:
        operation = self._guard.begin(extent, source, is_write=True)
        try:
            if self.verifies:
                self._checksums[extent] = [_checksum(source, sums, piece) for piece in self._pieces(extent)]
            files = self._asides.about_to_write(extent)
            operation.start(self._submit(self._backend.write, extent, source, priority, files))
        except BaseException as error:
            self._guard.abandon(operation, error)
            raise
        return operation

    def snapshot(self, extent: Extent) -> ExtentSnapshot | None:
        self._guard.check_readable(extent, "a snapshot")
        files = self._asides.keep(extent)
        return _Snapshot(self, extent, files, self._checksums.get(extent)) if files is not None else None

    def room_for_snapshots(self) -> list[tuple[OpenFile, int]]:
        sizes = striped_nbytes(self.nbytes, len(self._files), self._stripe_nbytes)
        return list(zip(self._files, sizes, strict=True))

    def view(self, extent: Extent) -> Tensor | None:
        self._guard.check_extent(extent, "a view")
        return None

    def flush(self) -> None:
        self._guard.drain()
        for file in self._asides.all_files:
            # Through the page cache a failed write-back shows up here or never.
            if not file.direct:
                _sync(file)
        self._guard.raise_unseen()

    def close(self) -> None:
        if self._guard.close():
            for file in self._files:
                file.close()
            self._asides.close()

    def _read(self, extent: Extent, into: Tensor, priority: Priority, files: Files, expected: list[int] | None) -> Pending:
        """`expected`: the checksums of what the write left; None: of nothing, as where nothing was ever written."""
        transfers = self._submit(self._backend.read, extent, into, priority, files)
        if expected is None:
            return transfers
        pieces = zip(self._pieces(extent), expected, strict=True)
        return VerifiedRead(
            transfers,
            [
                Stored(files[piece.file_index].path, piece.file_offset_nbytes, _part(into, piece), total, piece.start_nbytes)
                for piece, total in pieces
            ],
        )

    def _submit(self, transfer: Any, extent: Extent, tensor: Tensor, priority: Priority, files: Files) -> Pending:
        """`transfer`: the backend's `read` or `write`."""
        recording = self._recorder.to
        parts: list[Pending] = []
        try:
            for piece in self._pieces(extent):
                part = _part(tensor, piece)
                parts.append(transfer(files[piece.file_index], part, piece.file_offset_nbytes, priority=priority))
                if recording is not None:
                    row = NVME_WRITE if transfer == self._backend.write else NVME_READ
                    drive = f", drive {piece.file_index + 1}" if len(files) > 1 else ""
                    recording.transfer(row + drive, self.name, part.nbytes, parts[-1], place=(self, extent))
        except BaseException:
            AllOf(parts).wait()  # nothing may be in flight when the caller takes its tensor back
            raise
        return parts[0] if len(parts) == 1 else AllOf(parts)

    def _pieces(self, extent: Extent) -> Iterator[Piece]:
        file_count = len(self._files)
        if file_count == 1:
            yield Piece(0, extent.offset_nbytes, 0, extent.nbytes)
            return
        position, end = extent.offset_nbytes, extent.offset_nbytes + extent.nbytes
        while position < end:
            stripe_index, within_nbytes = divmod(position, self._stripe_nbytes)
            nbytes = min(self._stripe_nbytes - within_nbytes, end - position)
            file_offset_nbytes = stripe_index // file_count * self._stripe_nbytes + within_nbytes
            yield Piece(stripe_index % file_count, file_offset_nbytes, position - extent.offset_nbytes, nbytes)
            position += nbytes


class _Snapshot:
    """Implements `ExtentSnapshot`."""

    def __init__(self, store: NvmeStore, extent: Extent, files: Files, expected: list[int] | None) -> None:
        self._store, self._extent, self._files, self._expected = store, extent, files, expected
        self._is_shared = False

    def read(self, into: Tensor, *, priority: Priority = Priority.BACKGROUND) -> Pending:
        return self._store._read(self._extent, into, priority, self._files, self._expected)

    def clone(self, part: range, target: OpenFile, offset_nbytes: int) -> bool:
        for piece in self._store._pieces(self._extent):
            start, stop = max(part.start, piece.start_nbytes), min(part.stop, piece.start_nbytes + piece.nbytes)
            if start >= stop:
                continue
            source = self._files[piece.file_index].fileno()
            begin = piece.file_offset_nbytes + start - piece.start_nbytes
            if not reflink.clone_range(source, begin, stop - start, target.fileno(), offset_nbytes + start - part.start):
                return False
            self._is_shared = True
        return True

    def drop(self) -> None:
        self._store._asides.drop(self._extent, is_shared=self._is_shared)


def _part(tensor: Tensor, piece: Piece) -> Tensor:
    return tensor[piece.start_nbytes : piece.start_nbytes + piece.nbytes]


def _checksum(source: Tensor, sums: Tensor | None, piece: Piece) -> int:
    """`sums`: of the blocks of the extent. Pieces begin on blocks, as extents and stripes do."""
    of_piece = sums[piece.start_nbytes // CHECKSUM_BLOCK_NBYTES :] if sums is not None else None
    return checksum(_part(source, piece), of_piece)


def striped_nbytes(nbytes: int, path_count: int, stripe_nbytes: int = STRIPE_NBYTES) -> tuple[int, ...]:
    """Bytes that each of `path_count` files holds of a striped store of `nbytes`."""
    full_stripe_count, rest_nbytes = divmod(nbytes, stripe_nbytes)
    sizes = []
    for index in range(path_count):
        own_stripe_count = full_stripe_count // path_count + (index < full_stripe_count % path_count)
        sizes.append(own_stripe_count * stripe_nbytes + (rest_nbytes if index == full_stripe_count % path_count else 0))
    return tuple(sizes)


def _sync(file: ScratchFile) -> None:
    try:
        os.fdatasync(file.fileno())
    except OSError as error:
        raise storage_error("cannot bring to disk what was written to", file.path, error.errno or 0) from error
