"""The file of one unit in a checkpoint, filled chunk by chunk, each by whoever has it at hand.

A chunk's arrays that are in memory just as they belong in the file go there by direct I/O, on the engine's own queues: no copy
through the page cache, and no processor time for one. Everything else (other state formats, engines without files of their
own, file systems without direct I/O) goes through the page cache.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from pathlib import Path

import torch

from offload.checkpoint.direct_file import ALIGN, DirectFile, open_direct
from offload.checkpoint.manifest import MOMENTS, VALUE, FileEntry, Manifest, ParameterEntry, PieceEntry, TensorEntry
from offload.checkpoint.staged_folder import write_failure
from offload.checkpoint.state_reading import ChunkState, PieceState, settle
from offload.checkpoint.tensor_file import METADATA, TensorFile, TensorSpec
from offload.checkpoint.unit_tensors import GapPart, UnitTensors, tensor_name
from offload.device.pending import AllOf, Pending
from offload.errors import StorageError
from offload.model.chunk import Chunk
from offload.model.file_dtypes import DTYPE_CODES
from offload.model.flat import ParameterInfo
from offload.model.unit import Unit
from offload.tiers.io.backend import IoBackend, Priority


class UnitFile:
    """See the module. Opened by whoever writes to it first; chunks come from any threads."""

    def __init__(self, folder: Path, unit: Unit, rank: int, moments: Sequence[str], backend: IoBackend | None) -> None:
        """`moments`: what the optimizer keeps of a trained parameter. `backend`: for direct I/O, if there is one."""
        self.unit, self.tensors, self._moments = unit, UnitTensors(unit, moments), moments
        self._folder, self._name = folder, f"unit-{unit.index:05d}-rank-{rank:05d}.safetensors"
        self._backend = backend
        self._lock = threading.Lock()
        self._file: TensorFile | None = None
        self._direct: DirectFile | None = None
        self._steps = {info.index: info.step for info in unit.parameters}

    def write(self, state: ChunkState, priority: Priority, *, shared: bool) -> None:
        """Bring one chunk to its place, with the padding in it. `shared`: some of it is there, in shared blocks."""
        writing = self.begin(state, priority, shared=shared)
        try:
            writing.bring()
        except BaseException:
            writing.settle()
            raise
        writing.finish()

    def begin(self, state: ChunkState, priority: Priority, *, shared: bool) -> ChunkWrite:
        """As `write`, as far as it goes without waiting; the chunk's memory may not change until the rest is done."""
        self.opened()
        arrays = {kind: state.array(kind) for kind in self.tensors.arrays_of(state.chunk)}
        transfers = None if shared else self._start(state.chunk, arrays, priority)
        return ChunkWrite(self, state, arrays, transfers, shared)

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
        file, specs = self.opened(), self.tensors.specs
        manifest.files.append(file_entry(file))
        for info in self.tensors.infos:
            kept = self._moments if info.trainable else ()
            moments = [tensor_entry(file, specs[tensor_name(info, name)]) if name in kept else None for name in MOMENTS]
            owned = self.tensors.owned[info.index]
            piece = PieceEntry(owned.start, owned.stop, tensor_entry(file, specs[tensor_name(info, VALUE)]), *moments)
            manifest.parameters.append(_parameter_entry(info, self._steps[info.index], piece))
        manifest.padding += [tensor_entry(file, spec) for spec in self.tensors.padding]

    def opened(self) -> TensorFile:
        """The file, made when it is first asked for. From any thread."""
        with self._lock:
            if self._file is None:
                self._file = TensorFile(self._folder, self._name, list(self.tensors.specs.values()), METADATA)
                if self._backend is not None:
                    self._direct = open_direct(self._file.path)
            return self._file

    @property
    def nbytes(self) -> int:
        """Of its tensors."""
        return sum(spec.nbytes for spec in self.tensors.specs.values())

    def _start(self, chunk: Chunk, arrays: dict[str, torch.Tensor | None], priority: Priority) -> list[Pending] | None:
        """Write all arrays of the chunk by direct I/O; None where that cannot be had for each of them."""
        if self._direct is None or self._backend is None:
            return None
        writes: list[tuple[torch.Tensor, int]] = []
        for kind, array in arrays.items():
            if array is None or array.device.type != "cpu":
                return None
            content = array.reshape(-1).view(torch.uint8)
            name, place = self.tensors.place(chunk, kind)
            offset = self.opened().offsets[name] + place
            if (content.data_ptr() | offset | content.numel()) % ALIGN:
                return None
            writes.append((content, offset))
        pendings: list[Pending] = []
        try:
            for content, offset in writes:
                pendings.append(self._backend.write(self._direct, content, offset, priority=priority))
        except BaseException:
            settle(AllOf(pendings))
            raise
        return pendings


class ChunkWrite:
    """One chunk on its way into its unit's file: `bring` and `finish`, in this order, by one thread."""

    def __init__(
        self,
        file: UnitFile,
        state: ChunkState,
        arrays: dict[str, torch.Tensor | None],
        transfers: list[Pending] | None,
        shared: bool,
    ) -> None:
        """`transfers`: those that bring all of it; None: there are none. `shared`: see `UnitFile.write`."""
        self._file, self._state, self._arrays = file, state, arrays
        self._transfers = AllOf(transfers) if transfers is not None else None
        self._shared = shared

    def bring(self) -> None:
        """Write what no transfer brings, and take the checksums of everything."""
        file, owned = self._file.opened(), self._file.tensors.owned
        bring = file.write if self._transfers is None else file.take
        for piece in self._state.pieces():
            start = piece.start - owned[piece.info.index].start
            for name, part in _parts_of(piece):
                bring(name, start * part.element_size(), part.detach().cpu())

    def finish(self) -> None:
        """Wait for the transfers, and write the padding."""
        file, tensors = self._file.opened(), self._file.tensors
        if self._transfers is not None:
            try:
                self._transfers.wait()
            except StorageError as error:
                raise write_failure("writing", file.path, error) from error
        whole = self._shared or self._transfers is not None  # whatever is in the padding is in the file too
        for kind, array in self._arrays.items():
            for gap in tensors.gaps(self._state.chunk, kind):
                overwrite = whole and array is not None and _holds_any(array, gap)
                file.pad(gap.name, gap.start_nbytes, gap.nbytes, overwrite=overwrite)
        if self._transfers is None:
            file.write_back()

    def settle(self) -> None:
        """Wait until nothing of it is in flight, however it ends."""
        if self._transfers is not None:
            settle(self._transfers)


def _parts_of(state: PieceState) -> Iterator[tuple[str, torch.Tensor]]:
    for kind, part in zip((VALUE, *MOMENTS), (state.value, state.exp_avg, state.exp_avg_sq), strict=True):
        if part is not None:
            yield tensor_name(state.info, kind), part


def _holds_any(array: torch.Tensor, gap: GapPart) -> bool:
    """Whether a bit is set in the padding."""
    return bool(array[gap.low : gap.high].view(torch.uint8).any())


def tensor_entry(file: TensorFile, spec: TensorSpec) -> TensorEntry:
    return TensorEntry(file.name, DTYPE_CODES[spec.dtype], file.offsets[spec.name], spec.nbytes, file.crc32(spec.name))


def file_entry(file: TensorFile) -> FileEntry:
    return FileEntry(file.name, file.nbytes, file.header_nbytes, file.header_crc32)


def _parameter_entry(info: ParameterInfo, step: int, piece: PieceEntry) -> ParameterEntry:
    return ParameterEntry(
        fqns=list(info.fqns),
        shape=list(info.shape),
        stride=list(info.stride),
        dtype=DTYPE_CODES[info.dtype],
        group=info.group_index,
        step=step,
        pieces=[piece],
    )
