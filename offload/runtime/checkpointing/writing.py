"""Writing a checkpoint's files: chunk by chunk, from the tiers through one buffer straight into their place in a file.

Where training goes on meanwhile, the state is that of the moment at which the `Snapshot` was made: what an update is about
to overwrite, and is not in its file yet, is written there first, from the memory in which the update has it anyway. So
nobody waits for the disk to be read, and no second copy of anything is kept. What the file system let the files share with
scratch files (`offload.runtime.checkpointing.sharing`) goes the same way, but only its checksums are taken.

A chunk is WAITING until somebody claims it, COPYING while it is written, COPIED then.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from enum import Enum
from functools import partial
from pathlib import Path

import torch
from torch import nn

from offload.device.records import Record
from offload.runtime.checkpointing.manifest import (
    MOMENTS,
    VALUE,
    BufferEntry,
    FileEntry,
    Manifest,
    ParameterEntry,
    PieceEntry,
    RandomEntry,
    TensorEntry,
)
from offload.runtime.checkpointing.model_names import buffers_once
from offload.runtime.checkpointing.random_state import CPU, DEVICE, take_random_state
from offload.runtime.checkpointing.sharing import Sharing
from offload.runtime.checkpointing.state_reading import ChunkState, PieceState, StateReader
from offload.runtime.checkpointing.tensor_file import DTYPE_CODES, METADATA, TensorFile, TensorSpec, known_dtype
from offload.runtime.checkpointing.unit_tensors import GapPart, UnitTensors, owned_elements, tensor_name
from offload.runtime.fetching import chunks_of
from offload.runtime.flats import ChunkOf, ParameterInfo, Unit
from offload.runtime.parts import Parts

Failures = Callable[[], AbstractContextManager[None]]


class _Copy(Enum):
    """See the module."""

    WAITING = "waiting"
    COPYING = "copying"
    COPIED = "copied"


class _UnitFile:
    """The file of one unit. Opened by whoever writes to it first."""

    def __init__(self, folder: Path, unit: Unit, rank: int, moments: Sequence[str]) -> None:
        """`moments`: what the optimizer keeps of a trained parameter."""
        self.unit, self.tensors, self._moments = unit, UnitTensors(unit, moments), moments
        self._folder, self._name = folder, f"unit-{unit.index:05d}-rank-{rank:05d}.safetensors"
        self._lock = threading.Lock()
        self._file: TensorFile | None = None
        self._steps = {info.index: info.step for info in unit.parameters}

    def write(self, state: ChunkState) -> None:
        """Write one chunk into its place, with the padding in it."""
        file = self.opened()
        for piece in state.pieces():
            start = piece.start - self.tensors.owned[piece.info.index].start
            for name, part in _parts_of(piece):
                file.write(name, start * part.element_size(), part.detach().cpu())
        for kind in self.tensors.arrays_of(state.chunk_of):
            for gap in self.tensors.gaps(state.chunk_of, kind):
                array = state.array(kind) if file.shares_blocks else None
                file.pad(gap.name, gap.start_nbytes, gap.nbytes, overwrite=array is not None and _holds_any(array, gap))
        file.write_back()

    def finish(self) -> None:
        self.opened().finish()

    def close(self) -> None:
        if self._file is not None:
            self._file.close()

    def enter(self, manifest: Manifest) -> None:
        """Enter the file and its parameters into the manifest."""
        file, specs = self.opened(), self.tensors.specs
        manifest.files.append(_file_entry(file))
        for info in self.tensors.infos:
            kept = self._moments if info.trainable else ()
            moments = [_entry(file, specs[tensor_name(info, name)]) if name in kept else None for name in MOMENTS]
            owned = self.tensors.owned[info.index]
            piece = PieceEntry(owned.start, owned.stop, _entry(file, specs[tensor_name(info, VALUE)]), *moments)
            manifest.parameters.append(_parameter_entry(info, self._steps[info.index], piece))
        manifest.padding += [_entry(file, spec) for spec in self.tensors.padding]

    def opened(self) -> TensorFile:
        """The file, made when it is first asked for. From any thread."""
        with self._lock:
            if self._file is None:
                self._file = TensorFile(self._folder, self._name, list(self.tensors.specs.values()), METADATA)
            return self._file


class Snapshot:
    """The state at construction, on its way into a folder's files.

    `copy` belongs to one thread, whichever; `before_update` is called by the thread of the updates.
    """

    def __init__(self, folder: Path, parts: Parts, manifest: Manifest, model: nn.Module, failures: Failures) -> None:
        """Buffers and random states are written now. `failures()`: around every read from a tier."""
        self._folder, self._parts, self._manifest = folder, parts, manifest
        self._rank = parts.ranks.index if parts.ranks is not None else 0
        self._reader = StateReader(parts, failures)
        moments = parts.records.moments if parts.records is not None else ()
        self._files = {unit.index: _UnitFile(folder, unit, self._rank, moments) for unit in parts.units if self._writes(unit)}
        self._order = [index for index in parts.residency.next_order() if index in self._files]
        self._changed = threading.Condition()
        self._copies = {chunk.key: _Copy.WAITING for file in self._files.values() for chunk in chunks_of(file.unit)}
        self._failure: Exception | None = None
        self._whole: list[TensorFile] = []
        try:
            self._write_whole(model)
            self._share(Sharing(parts, failures))
        except BaseException:
            self.close()
            raise

    def _writes(self, unit: Unit) -> bool:
        """Whether this rank writes what it holds of the unit: of what several ranks hold alike, one in turn does."""
        ranks = self._parts.ranks
        if not any(True for _ in owned_elements(unit)):
            return False
        if ranks is None:
            return True
        alike = tuple(range(ranks.world_size)) if self._parts.layout.stage == 0 else ranks.replicas
        return alike[unit.index % len(alike)] == ranks.index

    def _share(self, sharing: Sharing) -> None:
        """Now, in the moments in which nothing overwrites anything: what is shared stays what it is."""
        for unit_index in self._order:
            file = self._files[unit_index]
            for chunk_of in chunks_of(file.unit):
                sharing.chunk(chunk_of, file)

    # ---- by the updates ------------------------------------------------------------------------------------------

    def before_update(self, chunk_of: ChunkOf, values: torch.Tensor, record: Record) -> None:
        """The chunk's `record` and (where they are a part of the master) `values` are about to be overwritten where they are.

        A failure is the save's, not the update's.
        """
        if chunk_of.key in self._copies and self._claim(chunk_of, waits=True):
            self._fill(chunk_of, lambda: ChunkState(chunk_of, values, record))

    # ---- by the thread that copies ---------------------------------------------------------------------------------

    def copy(self) -> None:
        """Write every chunk that is not yet, in the order in which updates will come; make the files durable; enter them
        into the manifest. Raises the first failure of any thread."""
        written: _UnitFile | None = None
        for unit_index in self._order:
            file = self._files[unit_index]
            for chunk_of in chunks_of(file.unit):
                if self._claim(chunk_of, waits=False):
                    self._fill(chunk_of, partial(self._reader.chunk, chunk_of))
            self._await(file.unit)
            if written is not None:
                written.finish()  # what the drive has had a unit's time for
            written = file
        if written is not None:
            written.finish()
        for unit_index in sorted(self._files):
            self._files[unit_index].enter(self._manifest)
        self._finish_whole()

    def await_copies(self) -> None:
        """Wait until every chunk is copied, or the save failed: then anything may be overwritten."""
        for file in self._files.values():
            self._await(file.unit, raises=False)

    def close(self) -> None:
        """Close the files as they are and give buffers back. Nobody is kept waiting any more. Idempotent."""
        self._fail(AssertionError("the snapshot was closed"))
        self.await_copies()  # nobody may still be writing to a descriptor that is about to be closed
        for file in self._files.values():
            file.close()
        for one in self._whole:
            one.close()
        self._reader.close()

    # ---- claims ----------------------------------------------------------------------------------------------------

    def _claim(self, chunk_of: ChunkOf, *, waits: bool) -> bool:
        """Whether the caller is to write the chunk. `waits`: return only when nobody else is writing it."""
        with self._changed:
            if waits:
                self._changed.wait_for(lambda: self._copies[chunk_of.key] is not _Copy.COPYING)
            if self._failure is not None or self._copies[chunk_of.key] is not _Copy.WAITING:
                return False
            self._copies[chunk_of.key] = _Copy.COPYING
            return True

    def _fill(self, chunk_of: ChunkOf, state: Callable[[], ChunkState]) -> None:
        try:
            self._files[chunk_of.flat.layout.unit_index].write(state())
        except Exception as error:
            self._fail(error)
        finally:
            with self._changed:
                self._copies[chunk_of.key] = _Copy.COPIED
                self._changed.notify_all()

    def _fail(self, error: Exception) -> None:
        with self._changed:
            self._failure = self._failure or error
            self._changed.notify_all()

    def _await(self, unit: Unit, *, raises: bool = True) -> None:
        keys = [chunk_of.key for chunk_of in chunks_of(unit)]
        with self._changed:
            self._changed.wait_for(lambda: self._failure is not None or all(self._copies[key] is _Copy.COPIED for key in keys))
            # A chunk that somebody has begun to write or read is let go by him, whatever failed elsewhere.
            self._changed.wait_for(lambda: all(self._copies[key] is not _Copy.COPYING for key in keys))
            if raises and self._failure is not None:
                raise self._failure

    # ---- what is small -----------------------------------------------------------------------------------------------

    def _write_whole(self, model: nn.Module) -> None:
        """Buffers and random states, one file of each kind; none of buffers if there are none."""
        self._buffer_shapes = {fqn: list(buffer.shape) for fqn, buffer in buffers_once(model)}
        self._write_file("buffers", dict(buffers_once(model)) if self._rank == 0 else {})
        self._write_file("random", take_random_state(self._parts.accelerator.device))

    def _write_file(self, stem: str, tensors: Mapping[str, torch.Tensor]) -> None:
        specs = [TensorSpec(name, known_dtype(name, one.dtype), tuple(one.shape)) for name, one in tensors.items()]
        if specs:
            file = TensorFile(self._folder, f"{stem}-rank-{self._rank:05d}.safetensors", specs, METADATA)
            self._whole.append(file)
            for name, tensor in tensors.items():
                file.append(name, tensor.detach().cpu().contiguous())

    def _finish_whole(self) -> None:
        manifest = self._manifest
        for file in self._whole:
            file.finish()
            manifest.files.append(_file_entry(file))
        *buffers, random = self._whole
        for file in buffers:
            entries = {spec.name: _entry(file, spec) for spec in file.specs}
            manifest.buffers += [BufferEntry(fqn, shape, entries[fqn]) for fqn, shape in self._buffer_shapes.items()]
        states = {spec.name: _entry(random, spec) for spec in random.specs}
        manifest.random.append(RandomEntry(self._rank, states[CPU], states.get(DEVICE)))


def _parts_of(state: PieceState) -> Iterator[tuple[str, torch.Tensor]]:
    for kind, part in zip((VALUE, *MOMENTS), (state.value, state.exp_avg, state.exp_avg_sq), strict=True):
        if part is not None:
            yield tensor_name(state.info, kind), part


def _holds_any(array: torch.Tensor, gap: GapPart) -> bool:
    """Whether a bit is set in the padding."""
    return bool(array[gap.low : gap.high].view(torch.uint8).any())


def _entry(file: TensorFile, spec: TensorSpec) -> TensorEntry:
    return TensorEntry(file.name, DTYPE_CODES[spec.dtype], file.offsets[spec.name], spec.nbytes, file.crc32(spec.name))


def _file_entry(file: TensorFile) -> FileEntry:
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
