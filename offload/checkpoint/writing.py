"""Writing a checkpoint's files: chunk by chunk, from the tiers through a buffer straight into their place in a file.

Where training waits, updates of the last step are made now and write what they leave, from the memory in which they have it,
so that it is not read again; of the rest the next chunk is read while one is checked and written. Where training goes on
meanwhile, the state is that of the moment at which the `Snapshot` was made. Nobody waits for that:

    updates of the last step    are made when training comes to them; the save takes a chunk when its update is over
    what a later update is      is kept by its store, which writes the new version elsewhere (`Store.keep`), and copied when
    about to overwrite          the drive has time; or shared with the file, where the file system can
                                (`offload.checkpoint.sharing`); or, in memory and where a drive has no room, written
                                to its file first, from the memory in which the update has it anyway

So no update waits for a copy that the save has not begun, and no second copy of anything is kept in memory. What is shared is
read for its checksums alone. How far each chunk is: `offload.checkpoint.copies`.
"""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import nn

from offload.checkpoint.chunk_copy import ChunkCopy
from offload.checkpoint.copies import Copies, Copy
from offload.checkpoint.manifest import BufferEntry, Manifest, RandomEntry
from offload.checkpoint.model_names import buffers_once
from offload.checkpoint.random_state import CPU, DEVICE, take_random_state
from offload.checkpoint.sharing import BlockSharing
from offload.checkpoint.state_reading import ChunkState, Failures, StateReader, stores_of
from offload.checkpoint.tensor_file import METADATA, TensorFile, TensorSpec, known_dtype
from offload.checkpoint.unit_file import UnitFile, file_entry, tensor_entry
from offload.checkpoint.unit_tensors import owned_elements
from offload.device.records import Record
from offload.model.chunk import Chunk
from offload.model.unit import Unit
from offload.step.components import Components
from offload.tiers.io.backend import Priority

_AT_ONCE = 2
"""Chunks that are copied at the same time where training waits: one is read while another is checked and written. They hold
48 MiB of fp32 states; beside training, where the drive has other things to do, one holds half of that."""
_FINISHED_TOGETHER = 16
"""Files: the first sync waits for all that the drive has in flight, the others find it idle."""


@dataclass(frozen=True, slots=True)
class Small:
    """What is whole in host memory: buffers by fqn, and random states."""

    buffers: Mapping[str, torch.Tensor]
    random: Mapping[str, torch.Tensor]

    @staticmethod
    def of(model: nn.Module, device: torch.device) -> Small:
        """On the thread of the model, whose stream computes buffers."""
        return Small({fqn: buffer.detach().cpu() for fqn, buffer in buffers_once(model)}, take_random_state(device))


class Snapshot:
    """The state at construction, on its way into a folder's files.

    Made, used and closed by one thread, while that of the model waits until it is made; `before_update`, `updated` and
    `after_update` are called by the thread of the updates.
    """

    def __init__(
        self, folder: Path, parts: Components, manifest: Manifest, small: Small, failures: Failures, *, beside: bool
    ) -> None:
        """`small` is written now. `failures()`: around every read from a tier. `beside`: training goes on meanwhile."""
        self._folder, self._parts, self._manifest = folder, parts, manifest
        self._rank = parts.ranks.index
        self._at_once, self._finished_together = (1, 1) if beside else (_AT_ONCE, _FINISHED_TOGETHER)
        self._reader, self._sharing = StateReader(parts, failures, self._at_once), BlockSharing(parts, failures)
        self._priority = Priority.BACKGROUND if beside else Priority.STATE
        moments = parts.records.moments if parts.records is not None else ()
        self._files = {
            unit.index: UnitFile(folder, unit, self._rank, moments, parts.backend) for unit in parts.units if self._writes(unit)
        }
        self._order = [unit.index for unit in parts.residency.next_order() if unit.index in self._files]
        chunks = [chunk for file in self._files.values() for chunk in file.unit.chunks]
        self.copies = Copies(chunks, parts.updates)
        self._keeps = beside and self._has_room_to_keep()
        # What can be shared takes neither a write nor room, once it lies in its scratch file.
        self._writes_updated = not (beside or self._sharing.may_work_in(folder))
        self._kept: set[Chunk] = set()
        self._under_way: deque[ChunkCopy] = deque()
        self._unfinished: list[UnitFile] = []
        self._whole: list[TensorFile] = []
        try:
            self._write_whole(small)
        except BaseException:
            self.close()
            raise

    def _writes(self, unit: Unit) -> bool:
        """Whether this rank writes what it holds of the unit: of what several ranks hold alike, one in turn does."""
        ranks = self._parts.ranks
        if not any(True for _ in owned_elements(unit)):
            return False
        alike = tuple(range(ranks.world_size)) if self._parts.layout.stage == 0 else ranks.replicas
        return alike[unit.index % len(alike)] == ranks.index

    def _has_room_to_keep(self) -> bool:
        """Whether the scratch folders' file systems can hold every extent twice, and still the checkpoint."""
        needed: dict[int, int] = {}
        there = os.stat(self._folder).st_dev
        needed[there] = sum(file.nbytes for file in self._files.values())
        for places in (self._parts.records, self._parts.parameter_store):
            for file, nbytes in places.room_for_snapshots() if places is not None else ():
                device, status = os.fstat(file.fileno()).st_dev, os.statvfs(file.fileno())
                needed[device] = needed.get(device, 0) + nbytes
                if needed[device] > status.f_bavail * status.f_frsize:
                    return False
        return True

    # ---- by the updates ------------------------------------------------------------------------------------------

    def before_update(self, chunk: Chunk, values: torch.Tensor, record: Record) -> None:
        """The chunk's `record` and (where they are a part of the master) `values` are about to be overwritten where they are.

        A failure is the save's, not the update's.
        """
        self._by_update(self.copies.hold_for_update, ChunkState(chunk, values, record), self._keep_or_write)

    def updated(self, chunk: Chunk, values: torch.Tensor, record: Record) -> None:
        """The chunk's `record` and `values` (as above) are at hand as an update leaves them: if that is the one that was still
        to come, and training waits for the save, they are written from here, and need not be read again.

        A failure is the save's, not the update's.
        """
        if self._writes_updated:
            state = ChunkState(chunk, values, record)
            self._by_update(self.copies.hold_as_updated, state, lambda state: self._write(state, shared=False))

    def after_update(self, chunk: Chunk) -> None:
        """The chunk's update is over."""
        self.copies.updated()

    def _by_update(self, hold: Callable[[Chunk], bool], state: ChunkState, save: Callable[[ChunkState], Copy]) -> None:
        try:
            if hold(state.chunk):
                self.copies.become(state.chunk, save(state))
        except Exception as error:
            self.copies.fail(error)
        finally:
            self.copies.give_up_held()  # nothing, where all went well

    def _keep_or_write(self, state: ChunkState) -> Copy:
        shared, kept = self._see_to(state.chunk)
        return Copy.KEPT if kept else self._write(state, shared=shared)

    def _write(self, state: ChunkState, *, shared: bool) -> Copy:
        self._file_of(state.chunk).write(state, Priority.STATE, shared=shared)
        return Copy.COPIED

    # ---- by the thread that copies ---------------------------------------------------------------------------------

    def copy(self, make_update: Callable[[Chunk], bool]) -> None:
        """Write every chunk that is not yet, in the order in which updates will come; make the files durable; enter them
        into the manifest. Raises the first failure of any thread. `make_update`: see `Copies.hold_for_copy`."""
        try:
            for unit_index in self._order:
                file = self._files[unit_index]
                for chunk in file.unit.chunks:
                    self._copy(chunk, make_update)
                if len(self._unfinished) == self._finished_together:
                    self._finish()  # what the drive has had a unit's time for
                self._unfinished.append(file)
            self._finish()
        except Exception as error:
            self.copies.fail(error)
            raise
        finally:
            self._abandon()
        for unit_index in sorted(self._files):
            self._files[unit_index].enter(self._manifest)
        self._finish_whole()

    def _copy(self, chunk: Chunk, make_update: Callable[[Chunk], bool]) -> None:
        """Begin to copy the chunk, with those before it as far as makes room for it."""
        before = self._under_way[-1] if self._under_way else None
        if before is not None:
            before.begin_writing(self._priority)
        while len(self._under_way) >= self._at_once:
            self._complete_first()
        # Beside training nothing is under way now, so what is waited for here does not wait for what this thread holds.
        state = self.copies.hold_for_copy(chunk, make_update)
        if state is not Copy.COPIED:
            one = ChunkCopy(chunk, self._file_of(chunk))
            self._under_way.append(one)
            shared, kept = self._see_to(chunk) if state is Copy.HELD else (False, True)
            if kept:
                self.copies.become(chunk, Copy.KEPT)
            one.begin_reading(self._reader.begin(chunk, kept=kept), shared=shared)
        if before is not None:
            before.bring()
        if self._under_way and self._at_once == 1:
            self._complete_first()

    def _see_to(self, chunk: Chunk) -> tuple[bool, bool]:
        """Have the chunk shared, or else kept: whether it is (shared, kept). It is held: nobody overwrites it meanwhile."""
        shared = self._sharing.chunk(chunk, self._file_of(chunk))
        return shared, not shared and self._keep(chunk)

    def _complete_first(self) -> None:
        first = self._under_way[0]
        first.begin_writing(self._priority)
        first.bring()
        first.finish()
        self._drop_snapshots(first.chunk)
        self._under_way.popleft()
        self.copies.become(first.chunk, Copy.COPIED)

    def _finish(self) -> None:
        """Make the files durable whose chunks are all begun."""
        for file in self._unfinished:
            while any(one.file is file for one in self._under_way):
                self._complete_first()
            self.copies.require_copied(file.unit.chunks)
            file.finish()
        self._unfinished.clear()

    def _abandon(self) -> None:
        """Let go of what a failure has left under way."""
        for one in self._under_way:
            one.settle()
        self._under_way.clear()
        self.copies.give_up_held()  # nobody is to wait for it

    def _file_of(self, chunk: Chunk) -> UnitFile:
        return self._files[chunk.flat.layout.unit_index]

    def _keep(self, chunk: Chunk) -> bool:
        """Whether the stores keep all of the chunk's state of now."""
        stores = stores_of(self._parts, chunk) if self._keeps and chunk.flat.layout.trainable else ()
        if not stores:
            return False
        self._kept.add(chunk)  # first: what is kept in part is let go too
        if all(places.snapshot(chunk) for places in stores):
            return True
        self._drop_snapshots(chunk)
        return False

    def _drop_snapshots(self, chunk: Chunk) -> None:
        if chunk in self._kept:
            self._kept.remove(chunk)
            for places in stores_of(self._parts, chunk):
                places.drop_snapshot(chunk)

    def close(self) -> None:
        """Close the files as they are and give back what was kept, and buffers. Nobody is kept waiting any more. Idempotent.
        Not while `copy` runs."""
        self.copies.fail(AssertionError("the snapshot was closed"))
        self.copies.await_holders()  # nobody may still be writing to a descriptor that is about to be closed
        for chunk in list(self._kept):
            self._drop_snapshots(chunk)
        for file in self._files.values():
            file.close()
        for one in self._whole:
            one.close()
        self._reader.close()

    # ---- what is small -----------------------------------------------------------------------------------------------

    def _write_whole(self, small: Small) -> None:
        """Buffers and random states, one file of each kind; none of buffers if there are none."""
        self._buffer_shapes = {fqn: list(buffer.shape) for fqn, buffer in small.buffers.items()}
        self._write_file("buffers", small.buffers if self._rank == 0 else {})
        self._write_file("random", small.random)

    def _write_file(self, stem: str, tensors: Mapping[str, torch.Tensor]) -> None:
        specs = [TensorSpec(name, known_dtype(name, one.dtype), tuple(one.shape)) for name, one in tensors.items()]
        if specs:
            file = TensorFile(self._folder, f"{stem}-rank-{self._rank:05d}.safetensors", specs, METADATA)
            self._whole.append(file)
            for name, tensor in tensors.items():
                file.append(name, tensor.contiguous())

    def _finish_whole(self) -> None:
        manifest = self._manifest
        for file in self._whole:
            file.finish()
            manifest.files.append(file_entry(file))
        *buffers, random = self._whole
        for file in buffers:
            entries = {spec.name: tensor_entry(file, spec) for spec in file.specs}
            manifest.buffers += [BufferEntry(fqn, shape, entries[fqn]) for fqn, shape in self._buffer_shapes.items()]
        states = {spec.name: tensor_entry(random, spec) for spec in random.specs}
        manifest.random.append(RandomEntry(self._rank, states[CPU], states.get(DEVICE)))
