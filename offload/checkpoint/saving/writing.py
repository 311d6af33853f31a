# SPDX-License-Identifier: Apache-2.0
"""Writing a checkpoint's files: the state of one moment, chunk by chunk, while training goes on or waits.

A chunk's way, all of it on the lane of the save:

    take      its update of the last step is over; its stores keep it from now on, where they can (`copies.py`)
    share     its file takes over what the file system can share of what is kept
    read      into a buffer, or where it lies: for its checksums, and to be written
    write     what is not shared, to its place in its unit's file (`offload.checkpoint.saving.unit_file`)
    drop      its stores give the second place back

An update that comes first has the chunk kept itself, and goes on. For what no store can keep (memory, a drive without room) it
waits; the lane takes that next. So no second copy of anything is kept in memory.
"""

from __future__ import annotations

import logging
import os
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import nn

from offload.checkpoint.format.manifest import BufferEntry, Manifest, RandomEntry
from offload.checkpoint.format.tensor_file import TensorFile, TensorSpec, known_dtype
from offload.checkpoint.format.unit_tensors import UnitTensors, owned_elements
from offload.checkpoint.model_names import buffers_once, plain_elements
from offload.checkpoint.random_state import CPU, DEVICE, take_random_state
from offload.checkpoint.saving.copies import Copies
from offload.checkpoint.saving.unit_file import ChunkCopy, UnitFile, parameter_entry
from offload.checkpoint.state_reading import Failures, Snapshots, StateReader, raw_arrays, stores_of
from offload.model.chunk import Chunk
from offload.model.unit import Unit
from offload.progress import Progress
from offload.step.chunk_stores import ChunkStore
from offload.step.components import Components
from offload.tiers.io.backend import Priority
from offload.tiers.store import ExtentSnapshot

_log = logging.getLogger(__name__)

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

    Made, used and closed by one thread, while that of the model waits until it is made. Updates come to its `copies`.
    """

    def __init__(
        self, folder: Path, parts: Components, manifest: Manifest, small: Small, failures: Failures, *, beside: bool
    ) -> None:
        """`small` is written now. `failures()`: around every read from a tier. `beside`: training goes on meanwhile."""
        self._folder, self._parts, self._manifest, self._failures = folder, parts, manifest, failures
        self._rank = parts.ranks.index
        self._at_once = 1 if beside else _AT_ONCE
        self._reader = StateReader(parts, failures, self._at_once)
        self._priority = Priority.BACKGROUND if beside else Priority.STATE
        moments = parts.records.moments if parts.records is not None else ()
        self._trained_only = manifest.without_frozen
        self._files = {
            unit.index: UnitFile(
                folder, unit, self._rank, UnitTensors(unit, moments, trained_only=self._trained_only), parts.backend
            )
            for unit in parts.units
            if self._writes(unit)
        }
        """Of each unit that is written, by its index."""
        self._progress = Progress(_log, "save: %.1f of %.1f GiB are written", sum(file.nbytes for file in self._files.values()))
        self._chunk_counts = {file: len(self._chunks(file.unit)) for file in self._files.values()}
        """What is still to come of each file that is not durable."""
        self._unfinished: list[UnitFile] = []
        self._has_room = self._has_room_for_snapshots()
        self._snapshots: dict[Chunk, Snapshots] = {}
        self._cannot_share: set[ChunkStore] = set()
        self._under_way: deque[ChunkCopy] = deque()
        order = [chunk for unit in parts.residency.next_order() if unit.index in self._files for chunk in self._chunks(unit)]
        self.copies = Copies(order, parts.updates, self._take_snapshots)
        self._whole: list[TensorFile] = []
        try:
            self._write_whole(small)
        except BaseException:
            self.close()
            raise

    def _writes(self, unit: Unit) -> bool:
        """Whether this rank writes what it holds of the unit: of what several ranks hold alike, one in turn does."""
        ranks = self._parts.ranks
        if not any(True for _ in owned_elements(unit, trained_only=self._trained_only)):
            return False
        alike = tuple(range(ranks.world_size)) if self._parts.layout.stage == 0 else ranks.replicas
        return alike[unit.index % len(alike)] == ranks.index

    def _chunks(self, unit: Unit) -> list[Chunk]:
        """What is written of the unit."""
        return [chunk for chunk in unit.chunks if chunk.flat.layout.trainable or not self._trained_only]

    def _file_of(self, chunk: Chunk) -> UnitFile:
        return self._files[chunk.flat.layout.unit_index]

    def _has_room_for_snapshots(self) -> bool:
        """Whether the scratch folders' file systems can hold every extent twice, and still the checkpoint."""
        needed = {os.stat(self._folder).st_dev: sum(file.nbytes for file in self._files.values())}
        for store in (self._parts.records, self._parts.parameter_store):
            for file, nbytes in store.room_for_snapshots() if store is not None else ():
                device, status = os.fstat(file.fileno()).st_dev, os.statvfs(file.fileno())
                needed[device] = needed.get(device, 0) + nbytes
                if needed[device] > status.f_bavail * status.f_frsize:
                    return False
        return True

    def _take_snapshots(self, chunk: Chunk) -> bool:
        """Have its stores keep what they can of the chunk's state of now; whether that is all. By the lane or an update, one at
        a time."""
        stores = stores_of(self._parts, chunk)
        taken: dict[ChunkStore, ExtentSnapshot] = {}
        for store in stores if self._has_room else ():
            with self._failures():
                store.settle_write(chunk)
            snapshot = store.snapshot(chunk)
            if snapshot is not None:
                taken[store] = snapshot
        self._snapshots[chunk] = taken
        return len(taken) == len(stores)

    def copy(self, make_update: Callable[[Chunk], bool]) -> None:
        """Write every chunk, in the order in which updates will come; make the files durable; enter them into the manifest.
        Raises the first failure of any thread. `make_update`: see `Copies.await_update`."""
        try:
            self._copy_all(make_update)
            for file in self._files.values():
                self._finish(file)
            self.copies.require_no_failure()
        except Exception as error:
            self.copies.fail(error)
            raise
        finally:
            self._abandon()
        for file in self._files.values():
            file.enter(self._manifest)
        if self._trained_only and self._rank == 0:
            frozen = (info for info in self._parts.parameters if not info.trainable)
            self._manifest.parameters += [parameter_entry(info, info.step, []) for info in frozen]
        self._finish_whole()

    def _copy_all(self, make_update: Callable[[Chunk], bool]) -> None:
        while True:
            chunk = self.copies.take()
            if chunk is not None:
                self._copy(chunk)
                continue
            while self._under_way:  # first: an update may wait for it
                self._complete_first()
            if not self.copies.await_update(make_update):
                return

    def _copy(self, chunk: Chunk) -> None:
        """Begin to copy the chunk, and complete those before it as far as makes room for it."""
        if self._under_way:
            self._under_way[-1].write(self._priority)
        shared = self._share(chunk)
        read = self._reader.begin(chunk, snapshots=self._snapshots.get(chunk, {}), priority=self._priority)
        self._under_way.append(ChunkCopy(self._file_of(chunk), chunk, read, shared))
        while len(self._under_way) >= self._at_once:
            self._complete_first()

    def _share(self, chunk: Chunk) -> set[str]:
        """Have the chunk's file share what it can of what is kept: the arrays that it has so."""
        file, shared = self._file_of(chunk), set[str]()
        for store, snapshot in self._snapshots.get(chunk, {}).items():
            for kind, part in raw_arrays(self._parts, store, chunk).items() if store not in self._cannot_share else ():
                if kind not in file.tensors.arrays_of(chunk):
                    continue
                if not file.share(chunk, kind, snapshot, part):
                    self._cannot_share.add(store)
                    break
                shared.add(kind)
        return shared

    def _complete_first(self) -> None:
        first = self._under_way[0]
        first.write(self._priority)
        first.finish()
        self._under_way.popleft()
        self._drop(first.chunk)
        self.copies.copied(first.chunk)
        self._chunk_counts[first.file] -= 1
        if self._chunk_counts[first.file] == 0:
            self._unfinished.append(first.file)
            self._progress.add(first.file.nbytes)
        if len(self._unfinished) == _FINISHED_TOGETHER:
            for file in self._unfinished:
                self._finish(file)
            self._unfinished.clear()

    def _finish(self, file: UnitFile) -> None:
        """Make the file durable. Nothing if it is."""
        if self._chunk_counts.pop(file, None) is not None:
            file.finish()

    def _abandon(self) -> None:
        """Let go of what a failure has left under way."""
        for one in self._under_way:
            one.settle()
        self._under_way.clear()
        self.copies.abandon()

    def _drop(self, chunk: Chunk) -> None:
        for snapshot in self._snapshots.pop(chunk, {}).values():
            snapshot.drop()

    def close(self) -> None:
        """Close the files as they are and give back what was kept, and buffers. Nobody is kept waiting any more. Idempotent.
        Not while `copy` runs."""
        self.copies.fail(AssertionError("the snapshot was closed"))
        for chunk in list(self._snapshots):
            self._drop(chunk)
        for unit_file in self._files.values():
            unit_file.close()
        for file in self._whole:
            file.close()
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
            file = TensorFile(self._folder, f"{stem}-rank-{self._rank:05d}.safetensors", specs)
            self._whole.append(file)
            for name, tensor in tensors.items():
                file.append(name, plain_elements(name, tensor))

    def _finish_whole(self) -> None:
        manifest = self._manifest
        for file in self._whole:
            file.finish()
            manifest.files.append(file.entry)
        *buffers, random = self._whole
        for file in buffers:
            manifest.buffers += [BufferEntry(fqn, shape, file.tensor_entry(fqn)) for fqn, shape in self._buffer_shapes.items()]
        device = random.tensor_entry(DEVICE) if DEVICE in random.offsets else None
        manifest.random.append(RandomEntry(self._rank, random.tensor_entry(CPU), device))
