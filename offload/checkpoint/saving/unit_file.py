# SPDX-License-Identifier: Apache-2.0
"""The file of one unit in a checkpoint, filled chunk by chunk by one thread.

Each array of a chunk comes by the first of three ways that it can:

    shared blocks     what its store keeps on NVMe just as it belongs in the file, where the file system can share blocks
    direct I/O        what is in memory so: on the engine's own queues, without a copy through the page cache
    the page cache    everything else: other state formats, engines without files of their own, other file systems

Whichever it is, the array is in memory too, for its checksums.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import torch

from offload.checkpoint.format.direct_file import ALIGN, DirectFile, open_direct
from offload.checkpoint.format.manifest import MOMENTS, VALUE, Manifest, ParameterEntry, PieceEntry
from offload.checkpoint.format.staged_folder import write_failure
from offload.checkpoint.format.tensor_file import TensorFile
from offload.checkpoint.format.unit_tensors import GapPart, UnitTensors, tensor_name
from offload.checkpoint.state_reading import ChunkRead, ChunkState, PieceState, settle
from offload.device.pending import AllOf, Pending
from offload.errors import StorageError
from offload.model.chunk import Chunk
from offload.model.file_dtypes import DTYPE_CODES
from offload.model.flat import ParameterInfo
from offload.model.unit import Unit
from offload.tiers.io.backend import IoBackend, Priority
from offload.tiers.store import ExtentSnapshot


class UnitFile:
    """See the module. Made on the drive when something is first written to it."""

    def __init__(self, folder: Path, unit: Unit, rank: int, tensors: UnitTensors, backend: IoBackend | None) -> None:
        """`tensors`: of the unit. `backend`: for direct I/O, if there is one."""
        self.unit, self.tensors = unit, tensors
        self._folder, self._name = folder, f"unit-{unit.index:05d}-rank-{rank:05d}.safetensors"
        self._backend = backend
        self._file: TensorFile | None = None
        self._direct: DirectFile | None = None
        self._steps = {info.index: info.step for info in unit.parameters}

    def finish(self) -> None:
        """Make the file durable and close it. Every chunk must have been written."""
        try:
            self.opened().finish()
        finally:
            self.close()

    def close(self) -> None:
        """Close it as it is. Idempotent."""
        for file in (self._file, self._direct):
            if file is not None:
                file.close()

    def enter(self, manifest: Manifest) -> None:
        """Enter the file and its parameters into the manifest."""
        file = self.opened()
        manifest.files.append(file.entry)
        for info in self.tensors.infos:
            kept = self.tensors.moments if info.trainable else ()
            moments = [file.tensor_entry(tensor_name(info, name)) if name in kept else None for name in MOMENTS]
            owned = self.tensors.owned[info.index]
            piece = PieceEntry(owned.start, owned.stop, file.tensor_entry(tensor_name(info, VALUE)), *moments)
            manifest.parameters.append(parameter_entry(info, self._steps[info.index], [piece]))
        manifest.padding += [file.tensor_entry(spec.name) for spec in self.tensors.padding]

    @property
    def nbytes(self) -> int:
        """Of its tensors."""
        return sum(spec.nbytes for spec in self.tensors.specs.values())

    def opened(self) -> TensorFile:
        """The file, made when it is first asked for."""
        if self._file is None:
            self._file = TensorFile(self._folder, self._name, list(self.tensors.specs.values()))
            if self._backend is not None:
                self._direct = open_direct(self._file.path)
        return self._file

    def share(self, chunk: Chunk, kind: str, snapshot: ExtentSnapshot, part: range) -> bool:
        """Have the file share the blocks of the chunk's array, which is that part of the snapshot; False where they cannot."""
        file = self.opened()
        try:
            return snapshot.clone(part, file, self._offset(chunk, kind))
        except OSError as error:
            raise write_failure("sharing blocks with", file.path, error) from error

    def write_directly(self, chunk: Chunk, kind: str, array: torch.Tensor | None, priority: Priority) -> Pending | None:
        """Write the chunk's array, whose memory may not change until that is over; None where that cannot be had."""
        self.opened()
        if self._direct is None or self._backend is None or array is None or array.device.type != "cpu":
            return None
        content, offset = array.reshape(-1).view(torch.uint8), self._offset(chunk, kind)
        if (content.data_ptr() | offset | content.numel()) % ALIGN:
            return None
        return self._backend.write(self._direct, content, offset, priority=priority)

    def _offset(self, chunk: Chunk, kind: str) -> int:
        name, place = self.tensors.place(chunk, kind)
        return self.opened().offsets[name] + place


class ChunkCopy:
    """One chunk on its way from its stores into its unit's file: `write`, then `finish`. Others may be on theirs meanwhile."""

    def __init__(self, file: UnitFile, chunk: Chunk, read: ChunkRead, shared: set[str]) -> None:
        """`shared`: the arrays that the file has already."""
        self.file, self.chunk = file, chunk
        self._read, self._brought = read, shared
        self._state: ChunkState | None = None
        self._transfers: list[Pending] = []

    def write(self, priority: Priority) -> None:
        """Wait until it is read, and have written what goes directly. Nothing if that was done."""
        if self._state is not None:
            return
        state = self._state = self._read.wait()
        for kind in self.file.tensors.arrays_of(self.chunk):
            if kind not in self._brought:
                transfer = self.file.write_directly(self.chunk, kind, state.array(kind), priority)
                if transfer is not None:
                    self._transfers.append(transfer)
                    self._brought.add(kind)

    def finish(self) -> None:
        """Write everything else, padding too, and take the checksums. Returns when it is in the file."""
        file, tensors, state = self.file.opened(), self.file.tensors, self._state
        assert state is not None
        for piece in state.pieces():
            start = piece.start - tensors.owned[piece.info.index].start
            for kind, part in _arrays_of(piece):
                bring = file.take if kind in self._brought else file.write
                bring(tensor_name(piece.info, kind), start * part.element_size(), part.detach().cpu())
        try:
            AllOf(self._transfers).wait()
        except StorageError as error:
            raise write_failure("writing", file.path, error) from error
        kinds = tensors.arrays_of(self.chunk)
        for kind in kinds:
            array = state.array(kind) if kind in self._brought else None  # then whatever is in the padding is in the file too
            for gap in tensors.gaps(self.chunk, kind):
                file.pad(gap.name, gap.start_nbytes, gap.nbytes, overwrite=array is not None and _holds_any(array, gap))
        if not self._brought.issuperset(kinds):
            file.write_back()

    def settle(self) -> None:
        """Wait until nothing of it is in flight, however that ends."""
        self._read.settle()
        settle(AllOf(self._transfers))


def _arrays_of(state: PieceState) -> Iterator[tuple[str, torch.Tensor]]:
    for kind, part in zip((VALUE, *MOMENTS), (state.value, state.exp_avg, state.exp_avg_sq), strict=True):
        if part is not None:
            yield kind, part


def _holds_any(array: torch.Tensor, gap: GapPart) -> bool:
    """Whether a bit is set in the padding."""
    return bool(array[gap.low : gap.high].view(torch.uint8).any())


def parameter_entry(info: ParameterInfo, step: int, pieces: list[PieceEntry]) -> ParameterEntry:
    return ParameterEntry(
        fqns=list(info.fqns),
        shape=list(info.shape),
        stride=list(info.stride),
        dtype=DTYPE_CODES[info.dtype],
        group=info.group_index,
        step=step,
        pieces=pieces,
    )
