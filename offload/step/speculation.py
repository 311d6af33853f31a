"""Updates that begin before `step()`: as if it were certain to come and the norm changed nothing, and undone where not.

With update="backward" a unit is updated as soon as backward has left it, while the drive has little else to do. Clipping and
loss scaling need the norm of all gradients for that, and whatever runs before `step()` is to find the old weights. Mostly the
norm changes nothing and nothing runs, so where that was so lately (`ClipHistory`) it is taken for granted, and what is needed
to undo is kept:

    records, parameters  written to a second place in the store, so that the first is still there (`ChunkStore.undo_write`)
    gradients            kept, in their buffers or on NVMe; read again only if the update is undone
    device memory        holds new values: undone, it is emptied, and fetched again when it is used
    step counts          counted back

`step` knows the norm: if it changes nothing, gradients are dropped and the rest of the parameters is updated. Else, and
wherever anything would see that an update came too early (a forward before `step`, a further gradient, `zero_grad`, a learning
rate that changed), all of it is undone, and everything goes on as if it never was.

Only units are updated so whose parameters and records lie on NVMe altogether: what lies in memory is updated fast enough at
`step`, and a copy of it to undo with would take memory.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from offload.device.rules import Hyper
from offload.model.flat import ParameterInfo
from offload.model.taken_gradient import TakenGradient
from offload.model.unit import Unit
from offload.model.update import ChunkUpdate, EarlyUpdate
from offload.step.clip_history import ClipHistory
from offload.step.components import Components


class Speculation:
    """See the module. Owned by the thread that drives the model (and backward's, never both at once)."""

    def __init__(self, parts: Components, *, norm_counts: bool) -> None:
        """`norm_counts`: whether the norm may change what a step does."""
        self._places, self._records = parts.parameter_store, parts.records
        self._gradients, self._updates, self._residency = parts.gradients, parts.updates, parts.residency
        self._begun: list[Unit] = []
        """The units that have an `early` update, in the order in which those began."""
        self._hypers: set[tuple[int, Hyper]] = set()
        self._gave_up = False
        self._norm_counts = norm_counts
        self.strikes = ClipHistory.before_the_first(norm_counts)
        self.speculated_step_count = 0
        """Steps that began updates before the norm was known."""
        self.undone_step_count = 0
        """Those that had to undo them."""

    @property
    def units(self) -> Sequence[Unit]:
        """Whose update has begun."""
        return self._begun

    @property
    def has_begun(self) -> bool:
        """Whether updates of a step that is not over have begun."""
        return bool(self._begun)

    def may_begin(self, unit: Unit) -> bool:
        """Whether the unit's update may begin now, if all its gradients are there."""
        return unit.route.undoable and self.strikes.expects_none and not self._gave_up

    def begin(self, unit: Unit, updated: list[ParameterInfo], updates: list[ChunkUpdate], hypers: Mapping[int, Hyper]) -> None:
        """These updates are about to be enqueued. `hypers`: by group, what they go by."""
        assert self._gradients is not None
        if not self._begun:
            self.speculated_step_count += 1
        self._begun.append(unit)
        unit.early = EarlyUpdate(updated, updates)
        self._hypers.update(hypers.items())
        self._gradients.hold(unit.early.chunks)

    def holds(self, hyper_of: Callable[[int], Hyper]) -> bool:
        """Whether what was begun is what `step` would do now, the norm aside: same gradients, same numbers of groups."""
        for unit, early in self._early_updates():
            updated = {info.index for info in early.updated}
            for info in unit.parameters:
                gradient = info.parameter.grad
                if info.trainable and (
                    not isinstance(gradient, TakenGradient) if info.index in updated else gradient is not None
                ):
                    return False
        return all(hyper_of(index) == hyper for index, hyper in self._hypers)

    def confirm(self) -> set[int]:
        """The step goes on from what was begun. Returns the indices of the parameters whose gradients that took."""
        assert self._gradients is not None
        updated: set[int] = set()
        for _, early in self._early_updates():
            for info in early.updated:
                self._gradients.consume(info)
                updated.add(info.index)
            self._gradients.drop_held(early.chunks)
        self.end_step()
        return updated

    def undo(self) -> list[Unit]:
        """Everything is as before the first update of the step, and none begins before its end. Returns the units."""
        if not self._begun:
            return []
        assert self._gradients is not None and self._updates is not None
        assert self._places is not None and self._records is not None
        undone = self._early_updates()
        self._forget()
        self._gave_up = True
        self.strikes.record(True)  # whatever the reason: in this loop the next step may have it too
        self.undone_step_count += 1
        for _, early in undone:
            for update in early.updates:
                update.cancelled = True
        for unit, _ in undone:
            self._updates.cancel(unit)
        for unit, early in undone:
            self._residency.forget(unit)  # before the writes are undone: it may be reading what they wrote
            for update in early.updates:
                if update.applied:
                    self._places.undo_write(update.chunk)
                    self._records.undo_write(update.chunk)
            self._gradients.take_back(early.chunks)
            for info in early.updated:
                info.step -= 1
        return [unit for unit, _ in undone]

    def _early_updates(self) -> list[tuple[Unit, EarlyUpdate]]:
        return [(unit, unit.early) for unit in self._begun if unit.early is not None]

    def _forget(self) -> None:
        for unit in self._begun:
            unit.early = None
        self._begun = []
        self._hypers.clear()

    def restart(self) -> None:
        """Nothing is known of the coming steps."""
        self.strikes = ClipHistory.before_the_first(self._norm_counts)

    def end_step(self) -> None:
        """The next step may begin updates again."""
        self._forget()
        self._gave_up = False
