# SPDX-License-Identifier: Apache-2.0
"""Updates that begin before `step()`: as if it were certain to come and the norm changed nothing, and undone where not.

But with update="step" a unit is updated as soon as backward has left it, while the drive has little else to do. Clipping and
loss scaling need the norm of all gradients for that, and whatever runs before `step()` is to find the old weights. Mostly the
norm changes nothing and nothing runs, so where that was so lately (`ClipHistory`) it is taken for granted, and what is needed
to undo is kept. A loop of several backwards is expected to have as many of them in the next step, and in the first one as many
as it said (`Config.expecting`): updates begin in the last.

    records              written to a second place, so that the first is still there (`ChunkStore.undo_write`)
    parameters           likewise on NVMe; where they lie in memory they are made of the former record's masters, or kept where
                         they are a part of these
    gradients            kept, in their buffers or on NVMe; read again only if the update is undone
    device memory        holds new values: undone, it is emptied, and fetched again when it is used
    step counts          counted back

`step` knows the norm: if it changes nothing, gradients are dropped and the rest of the parameters is updated. Else, and
wherever anything would see that an update came too early (a forward before `step`, a further gradient, `zero_grad`, a learning
rate that changed), all of it is undone, and everything goes on as if it never was.

A unit is updated early only if there is a second place for its records, on NVMe or in host memory beside a device of its own,
and for its parameters too, unless they are rounded masters. Where the device is the CPU, what lies in memory is updated fast
enough at `step`. Parameters that stay where the model computes may be read at any time, and a graph may keep what was read: a
unit of which any were read waits for `step` (`Unit.was_read`).
"""

from __future__ import annotations

from offload.device.arithmetic.rules import Hyper
from offload.model.taken_gradient import TakenGradient
from offload.model.unit import Unit
from offload.model.unit_state import ShardState
from offload.model.update import ChunkUpdate, EarlyUpdate
from offload.step.clip_history import ClipHistory
from offload.step.components import Components
from offload.step.homes import Homes
from offload.step.update_making import UpdateMaker


class Speculation:
    """See the module. Owned by the thread that drives the model (and backward's, never both at once).

    It hears of each unit that backward left, of each that is about to be used, and of the step and what that does.
    """

    def __init__(
        self, parts: Components, maker: UpdateMaker | None, *, begins_early: bool, norm_counts: bool, micro_batches: int
    ) -> None:
        """`maker`: None where nothing is trained. `norm_counts`: whether the norm may change what a step does. `micro_batches`:
        of a step, as far as the loop said."""
        self._parameter_store, self._records = parts.parameter_store, parts.records
        self._gradients, self._updates, self._residency = parts.gradients, parts.updates, parts.residency
        self._units, self._accelerator, self._late = parts.units, parts.accelerator, parts.expected.late_units
        self._maker, self._homes = maker, Homes(parts)
        self._begins_early = begins_early and maker is not None
        self._norm_counts, self._said_count = norm_counts, micro_batches
        self._history = ClipHistory.before_the_first(norm_counts)
        self.begun_units: list[Unit] = []
        """Those that have an `early` update, in the order in which these began."""
        self._hypers: set[tuple[int, Hyper]] = set()
        """What they go by: (group, numbers)."""
        self._gave_up = False
        """Until the end of the step: something was undone."""
        self._backward_count, self._expected_count = 0, micro_batches
        """Outermost backwards of this step so far, and of the last one in all."""
        self._left, self._left_before = dict[int, int](), dict[int, int]()
        """By unit, how often this backward and the one before left it: of modules that are one unit each is left by itself, and
        from the second backward of a step on all of them have gradients before the first is."""
        self._saw_a_step = False
        """The loop is known as far as a step shows it."""
        self.speculated_step_count = 0
        """Steps that began updates before the norm was known."""
        self.undone_step_count = 0
        """Those that had to undo them."""

    # ---- before the step -----------------------------------------------------------------------------------------

    def micro_batch_begins(self, left_out: int) -> None:
        """See `Residency.micro_batch_begins`."""
        self._backward_count += left_out

    def backward_begins(self) -> None:
        """An outermost one."""
        self._left, self._left_before = {}, self._left if self._backward_count else {}
        self._backward_count += 1

    def backward_left(self, unit: Unit, factor: float) -> None:
        """Begin the unit's update if that can be undone and will probably not have to be. `factor` multiplies gradients."""
        if not self._begins_early:
            return
        left = self._left[unit.index] = self._left.get(unit.index, 0) + 1
        # Late units wait for the end of backward: what modules share gets more after one of them is done, and in the root a
        # reentrant checkpoint's backward inside this one may accumulate a second time.
        if unit.index in self._late or left < self._left_before.get(unit.index, 0) or not self._may_begin(unit):
            return
        assert self._gradients is not None and self._updates is not None and self._maker is not None
        # Before they are counted: a hook of the user's may have taken one out of `p.grad`, which is dropped now.
        live = [info for info in unit.parameters if info.trainable and self._gradients.is_live(info)]
        if not all(self._gradients.is_complete(chunk) for chunk in unit.trained_chunks):
            return
        if any(one.uses.held_count for one in self._units):
            return  # its values are lent
        if live and not self.begun_units:
            self.speculated_step_count += 1
        self._accelerator.copy_in_after_compute()  # the lane may bring what it needs as soon as it is enqueued
        for _, updates in self._maker.make(live, factor):
            self.begun_units.append(unit)
            unit.early = EarlyUpdate(live, updates)
            self._hypers.update((one.info.group_index or 0, one.hyper) for update in updates for one in update.pieces)
            for one in updates:
                one.early = True
            self._gradients.hold(unit.early.chunks)
            self._updates.enqueue(unit, updates)
        self._residency.launch_resident()

    def _may_begin(self, unit: Unit) -> bool:
        is_the_last = self._backward_count >= self._expected_count
        is_free = unit.route.undoable and not unit.was_read and not unit.records_visit
        return is_free and is_the_last and self._history.expects_none and not self._gave_up

    def before_use(self, unit: Unit) -> None:
        """The unit is about to be used: by anything but the next step, if its update may still be undone."""
        if unit.early is not None:
            self.undo()

    # ---- at the step ---------------------------------------------------------------------------------------------

    def undo_if_changed(self) -> None:
        """Undo it if the step is to do something else now, the norm aside: other gradients, other numbers of groups."""
        if self.begun_units and not self._is_as_begun():
            self.undo()

    def _is_as_begun(self) -> bool:
        for unit, early in self._early_updates():
            updated = {info.index for info in early.updated}
            for info in unit.parameters:
                gradient = info.parameter.grad
                if info.trainable and (
                    not isinstance(gradient, TakenGradient) if info.index in updated else gradient is not None
                ):
                    return False
        return self._maker is not None and all(self._maker.hyper_of(index) == hyper for index, hyper in self._hypers)

    def norm_is_known(self, *, changes: bool) -> None:
        """`changes`: the step clips, or is left out."""
        self._judge(steps=True)
        self._history.record(changes)
        self._expected_count, self._saw_a_step = self._backward_count, True
        if changes:
            self.undo()

    def confirm(self) -> tuple[set[int], dict[Unit, list[ChunkUpdate]]]:
        """The step goes on from what was begun. Returns the indices of the parameters whose gradients that took, and what is
        not under way yet: backward went from the last unit to the first, and the next forward waits for the first."""
        recalled = self._updates.recall(self.begun_units) if self._updates is not None else {}
        begun = [early for _, early in self._early_updates()]
        updated = [info for early in begun for info in early.updated]
        if begun:
            assert self._gradients is not None
            self._gradients.consume(updated)
            for early in begun:
                self._gradients.drop_held(early.chunks)
        for unit in [unit for unit in self._units if unit.was_read]:
            unit.was_read = False
            if not unit.uses.count:
                unit.close_off()
        self._end_step()
        return {info.index for info in updated}, recalled

    def drop(self) -> None:
        """There will be no step of what came so far."""
        self.undo()
        self._judge(steps=False)
        self._end_step()

    def _judge(self, *, steps: bool) -> None:
        """Whether it is a strike if something was undone: whatever the reason, in this loop the next step may have it too. Of a
        first step nothing was known: there it is one if the loop `steps` after no backward more than it said."""
        tells = self._saw_a_step or (steps and self._backward_count <= self._expected_count)
        if self._gave_up and tells:
            self._history.record(True)

    def _end_step(self) -> None:
        """The next one may begin updates again."""
        self._forget()
        self._gave_up, self._backward_count = False, 0

    # ---- undoing -------------------------------------------------------------------------------------------------

    def undo(self) -> None:
        """Everything is as before the first update of the step, and none begins before its end."""
        if not self.begun_units:
            return
        assert self._updates is not None
        undone = self._early_updates()
        self._forget()
        self._gave_up = True
        self.undone_step_count += 1
        for _, early in undone:
            for update in early.updates:
                update.cancelled = True
        for unit, _ in undone:
            self._updates.cancel(unit)
        for unit, early in undone:
            self._residency.forget(unit)  # before the writes are undone: it may be reading what they wrote
            self._take_back(unit, early)

    def _take_back(self, unit: Unit, early: EarlyUpdate) -> None:
        assert self._gradients is not None and self._records is not None
        for update in early.updates:
            if not update.applied:
                continue
            self._records.undo_write(update.chunk)
            if update.chunk.parameters.other is not None:
                self._parameter_store.undo_write(update.chunk)
            elif not self._parameter_store.restore_former(update.chunk):
                self._homes.refresh_from_masters(update.chunk, update.only_pieces)
        self._gradients.take_back(early.chunks)
        for info in early.updated:
            info.step -= 1
        unit.version -= 1
        unit.shard.become(ShardState.REDUCING)

    def restart(self) -> None:
        """Nothing is known of the coming steps."""
        self._history, self._saw_a_step = ClipHistory.before_the_first(self._norm_counts), False
        self._expected_count = self._said_count

    def _early_updates(self) -> list[tuple[Unit, EarlyUpdate]]:
        return [(unit, unit.early) for unit in self.begun_units if unit.early is not None]

    def _forget(self) -> None:
        for unit in self.begun_units:
            unit.early = None
        self.begun_units = []
        self._hypers.clear()
