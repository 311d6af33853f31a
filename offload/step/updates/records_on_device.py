# SPDX-License-Identifier: Apache-2.0
"""Records of whole units that visit the device, as far as the model leaves room where no budget says how much.

    come    a unit in use brings its records: copies of their homes, which stay reserved
    update  on the device, if all that it needs is there: gradients stay for it (`step/gradients/sums_on_device.py`), and new
            values stay in the unit's memory: nothing moves
    leave   other things want the memory, or somebody asks a store for what visits: home with it, and the host updates again

So a unit's route stays what it is, and whoever asks the stores finds all there (`Place.behind`). Bits do not depend on who
updates.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager

import torch

from offload.device.arithmetic.optimizer_step import takes_one_pass
from offload.device.pending import AllOf, Pending
from offload.layout import round_up
from offload.model.chunk import Chunk
from offload.model.unit import Unit
from offload.model.unit_state import UnitState
from offload.model.update import ChunkUpdate
from offload.planning.purposes import RECORDS, UPDATED_PARAMETERS
from offload.step.chunk_stores import ChunkStore
from offload.step.gradients.chunk_gradients import ChunkGradients
from offload.step.updates.record_paths import RecordAccess
from offload.step.updates.tools import UpdateTools
from offload.step.updates.value_paths import ValuesInUnit
from offload.tiers.staging import Lease

_ALIGN_NBYTES = 512
_PATIENCE = 64
"""Steps at most until more comes than had room when something had to leave, and steps after which that is forgotten."""


class RecordsOnDevice(RecordAccess):
    """See the module. Owned by the thread that drives the model (backward's during backward).

    nbytes   of device memory that records take; `peak_nbytes`: that they took at most
    """

    def __init__(self, tools: UpdateTools, gradients: ChunkGradients, units: Sequence[Unit]) -> None:
        """`units`: those that may have them there."""
        self._accelerator, self._records, self._gradients, self._pool = tools.accelerator, tools.records, gradients, tools.pool
        self._parameter_store, records = tools.parameter_store, tools.records
        self.values = ValuesInUnit()
        """Where their updates find values, and leave the new ones."""
        self._unit_of = {chunk: unit for unit in units for chunk in unit.trained_chunks}
        self._nbytes_of = {
            unit: sum(round_up(records.nbytes(chunk), _ALIGN_NBYTES) for chunk in unit.trained_chunks) for unit in units
        }
        self._here: dict[Unit, torch.Tensor] = {}
        """By unit whose records are here the memory that they lie in; the last that came, last."""
        self._moving: Unit | None = None
        """It comes or leaves: whoever asks for its records is told where their home is."""
        self._buffers: dict[ChunkStore, Lease] = {}
        """For what has its home in a file; kept as long as any records are here."""
        formats = {tools.records.format(chunk) for chunk in self._unit_of}
        self._are_ours = all(takes_one_pass(tools.accelerator.device, one) for one in formats)
        """Whether kernels of ours make the updates here, as far as is known: not an optimizer with its own arithmetic."""
        self._ceiling_nbytes = self._waiting_steps = self._calm_steps = 0
        """For so many steps no more come than had room when something had to leave: its way costs more than some updates."""
        self._patience = 1
        """For how many it will be the next time; twice as many each time that it was not enough."""
        self._has_left = False
        """In this step."""
        self._updated: dict[Unit, Pending] = {}
        """When the device has made the last update of a unit that is here, on whatever stream the step was."""
        self.leaving: Callable[[Sequence[Chunk]], object] = len
        """Told of chunks whose records leave: whoever knows where they were lets go of it."""
        self.nbytes = self.peak_nbytes = 0
        records.bring_home = lambda chunk: self.leave(self._unit_of[chunk])
        tools.parameter_store.bring_home = self._values_home

    # ---- coming and going ----------------------------------------------------------------------------------------

    def may_come(self, unit: Unit, spare_nbytes: int) -> bool:
        """Whether the unit's records are at home, and find room in so many bytes with all gradients that are to stay then.
        The unit is in use, so that its last update is over."""
        nbytes = self._nbytes_of.get(unit, 0)
        if not nbytes or unit in self._here or not self._are_ours or self.nbytes + nbytes > spare_nbytes:
            return False
        if (self._waiting_steps or self._has_left) and self.nbytes + nbytes > self._ceiling_nbytes:
            return False
        if unit.update is not None or not self._gradients.may_stay(unit.trained_chunks):
            return False
        return self.nbytes + nbytes + self._gradients.staying_nbytes([unit, *self._here]) <= spare_nbytes

    def come(self, unit: Unit) -> None:
        """Bring the unit's records, which `may_come`. Where there is no memory after all they stay at home."""
        try:
            if self._has_buffers(unit):
                self._bring(unit)
        finally:
            if not self._here:
                self._give_buffers_back()

    def _bring(self, unit: Unit) -> None:
        try:
            memory = self._accelerator.memory(self._nbytes_of[unit])
        except torch.OutOfMemoryError:
            self._give_up_room()
            return
        self._accelerator.copy_in_after_compute()  # which zeroed it
        places, start = list[tuple[Chunk, torch.Tensor]](), 0
        for chunk in unit.trained_chunks:
            nbytes = self._records.nbytes(chunk)
            places.append((chunk, memory[start : start + nbytes]))
            start += round_up(nbytes, _ALIGN_NBYTES)
        with self._moving_of(unit):
            AllOf([self._copied_in(*one) for one in places]).wait()
        self._here[unit] = memory
        for chunk, place in places:
            chunk.visiting, chunk.record.behind = place, True
        self._count()
        self._gradients.keep_on_device(unit.trained_chunks)

    def _count(self) -> None:
        self.nbytes = sum(map(torch.Tensor.numel, self._here.values()))
        self.peak_nbytes = max(self.peak_nbytes, self.nbytes)

    def _has_buffers(self, unit: Unit) -> bool:
        """Whether there are those that are needed where any home is a file."""
        purposes: dict[ChunkStore, str] = {self._records: RECORDS, self._parameter_store: UPDATED_PARAMETERS}
        for store, purpose in purposes.items():
            if store not in self._buffers and any(store.view(chunk) is None for chunk in unit.trained_chunks):
                lease = self._pool.try_lease(purpose)
                if lease is None:
                    return False
                self._buffers[store] = lease
        return True

    def _give_buffers_back(self) -> None:
        buffers, self._buffers = self._buffers, {}
        for lease in buffers.values():
            lease.release()

    @contextmanager
    def _moving_of(self, unit: Unit) -> Iterator[None]:
        """Inside, the unit's homes are asked for as such, and the device knows those that lie in memory: which it does not for
        good, since what no device copies need not be there before it is used."""
        undo: list[Callable[[], None] | None] = []
        self._moving = unit
        try:
            for home in _side_by_side([self._records.view(chunk) for chunk in unit.trained_chunks]):
                undo.append(self._accelerator.pin(*home, is_written=True))
            yield
        finally:
            self._moving = None
            for one in undo:
                if one is not None:
                    one()

    def _copied_in(self, chunk: Chunk, place: torch.Tensor) -> Pending:
        home = self._records.view(chunk)
        if home is not None:
            return self._accelerator.copy_in(place, home[: place.numel()])
        content = self._buffers[self._records].tensor[: place.numel()]
        self._records.read(chunk, content).wait()
        copied = self._accelerator.copy_in(place, content)
        copied.wait()
        return copied

    def _copied_out(self, store: ChunkStore, chunk: Chunk, place: torch.Tensor) -> Pending:
        """To the chunk's home in that store, from its place on the device."""
        home = store.view(chunk)
        if home is not None:
            return self._accelerator.copy_out(home[: place.numel()], place)
        content = self._buffers[store].tensor[: place.numel()]
        self._accelerator.copy_out(content, place).wait()
        written = store.write(chunk, content)
        written.wait()
        return written

    def leave(self, unit: Unit) -> None:
        """Have the unit's records at home, and its gradients where its route has them. What is cut short is done anew by
        whoever asks next."""
        if unit not in self._here or unit is self._moving:
            return
        self.leaving(unit.trained_chunks)
        self._after_update(unit)
        with self._moving_of(unit):
            AllOf([self._record_home(chunk) for chunk in unit.trained_chunks]).wait()
            self.settle_values(unit)
        for chunk in unit.trained_chunks:
            chunk.visiting, chunk.record.behind = None, False
        del self._here[unit]
        self._updated.pop(unit, None)
        self._count()
        if not self._here:
            self._give_buffers_back()
        self._gradients.leave_device(unit.trained_chunks)

    def _record_home(self, chunk: Chunk) -> Pending:
        assert chunk.visiting is not None, "all records of a unit visit together"
        return self._copied_out(self._records, chunk, chunk.visiting)

    def settle_values(self, unit: Unit) -> None:
        """Have at home what updates left in the unit's memory."""
        for chunk in unit.trained_chunks:
            self._parameter_store.settle_write(chunk)

    def _values_home(self, chunk: Chunk) -> None:
        self._after_update(self._unit_of[chunk])
        chunk.parameters.behind = False  # to be asked for its home
        try:
            self._parameter_store.settle_copies(chunk)
            self._copied_out(self._parameter_store, chunk, chunk.bytes).wait()
        except BaseException:
            chunk.parameters.behind = True
            raise

    def _after_update(self, unit: Unit) -> None:
        """Have what compute is given now run behind the unit's update: whoever asks may be on another stream than the step."""
        if unit in self._updated:
            self._accelerator.join(self._updated[unit])

    def limit(self, nbytes: int) -> None:
        """From now on so much may be taken. What is beyond it leaves, the last that came first; its memory is free then."""
        while self._here and self.nbytes > nbytes:
            self.make_room()

    def make_room(self) -> None:
        """The last that came leaves."""
        self.leave(next(reversed(self._here)))
        self._give_up_room()

    def _give_up_room(self) -> None:
        """More than are here now found no room."""
        self._ceiling_nbytes, self._has_left = self.nbytes, True

    def leave_all(self) -> None:
        """Somebody is about to ask for all of them."""
        for unit in list(self._here):
            self.leave(unit)

    def step_ends(self) -> None:
        """Time goes by, in steps."""
        if self._has_left:
            self._waiting_steps, self._patience = self._patience, min(2 * self._patience, _PATIENCE)
        self._waiting_steps -= self._waiting_steps > 0 and not self._has_left
        self._calm_steps = 0 if self._has_left or self._waiting_steps else self._calm_steps + 1
        if self._calm_steps > _PATIENCE:
            self._patience = 1
        self._has_left = False

    def close(self) -> None:
        """Give the device memory back, whoever still has the engine. What is here is lost."""
        for unit in self._here:
            for chunk in unit.trained_chunks:
                chunk.visiting, chunk.record.behind, chunk.parameters.behind = None, False, False
        self._here.clear()
        self._updated.clear()
        self._give_buffers_back()
        self.nbytes = 0

    # ---- updates -------------------------------------------------------------------------------------------------

    def takes(self, unit: Unit, updates: Sequence[ChunkUpdate]) -> bool:
        """Whether the device makes these updates of the unit, and has their gradients for it. Else all are the host's."""
        if unit not in self._here:
            return False
        is_there = unit.residency.state is UnitState.RESIDENT
        if any(piece.hyper.own is not None for one in updates for piece in one.pieces):
            self._are_ours = False
        if is_there and self._are_ours and self._gradients.hand_over([one.chunk for one in updates]):
            return True
        self.leave(unit)
        return False

    def was_given(self, unit: Unit, updated: Pending) -> None:
        """The device has the unit's update; `updated` when it is made."""
        self._updated[unit] = updated

    def begin(self, update: ChunkUpdate, *, sums: bool = False) -> torch.Tensor:
        assert update.chunk.visiting is not None
        return update.chunk.visiting


def _side_by_side(homes: Iterable[torch.Tensor | None]) -> list[tuple[int, int]]:
    """(address, bytes) of all that lie in memory, those that follow each other as one."""
    found: list[tuple[int, int]] = []
    for home in homes:
        if home is None or not home.numel():
            continue
        address, nbytes = home.data_ptr(), home.numel()
        if found and sum(found[-1]) == address:
            address, nbytes = found[-1][0], found.pop()[1] + nbytes
        found.append((address, nbytes))
    return found
