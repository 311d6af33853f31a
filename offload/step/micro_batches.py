# SPDX-License-Identifier: Apache-2.0
"""The room that sums of several micro-batches take: fp32, beside the 16-bit gradients of one. Taken when it is first needed.
The parts of one gradient that a single backward brings need none: they are added as PyTorch adds them.

A loop with one micro-batch never needs it. One that says that there will be more (`engine.no_sync()`) finds out then whether
there is room, any other when the second one's first gradient comes; that one is then as if it had never been.
"""

from __future__ import annotations

from collections.abc import Mapping

from offload.errors import BudgetError, StorageError
from offload.model.flat import ParameterInfo
from offload.planning.free_memory import missing_nbytes, remedy
from offload.planning.placement import Placement
from offload.step.components import Components
from offload.step.gradients.sums_on_device import SumsOnDevice


class MicroBatches:
    """Owned by the thread that drives the model (backward's during backward)."""

    def __init__(self, parts: Components, said_count: int, *, narrow: bool) -> None:
        """`said_count`: of a step, as far as the loop said. `narrow`: there are no fp32 sums (`Config.sums_are_narrow`); the
        gradient of a later one is added as a part is."""
        self._parts, self._narrow = parts, narrow
        self._begun: dict[int, ParameterInfo] = {}
        """By index, the parameters of which this backward brought the first gradient of the step."""
        self._count, self._is_further = 1, False
        """Of the step so far; whether the backward that runs is one of those after the first."""
        self.of_last_step = 1
        """How many the last step had."""
        self._last_count = said_count
        """With how many the step is probably over: as many as the loop said, or the last two steps had. 0: not known."""
        self._expect(said_count > 1)

    def micro_batch_begins(self, left_out: int) -> None:
        """See `Residency.micro_batch_begins`."""
        self._counted(self._count + left_out)

    def backward_begins(self) -> None:
        self._begun.clear()
        self._is_further = False

    def step_ends(self) -> None:
        """The gradients belong to updates: the next step is expected to have as many."""
        self._last_count = self._count if self._count in (self._last_count, self.of_last_step) else 0
        self.of_last_step = self._count
        self.step_begins_anew()
        self._expect(self.of_last_step > 1)

    def step_begins_anew(self) -> None:
        """All gradients were dropped."""
        self._is_further = False
        self._counted(1)

    @property
    def _sums(self) -> SumsOnDevice | None:
        return self._parts.gradients.sums_on_device if self._parts.gradients is not None else None

    def _expect(self, several: bool) -> None:
        if self._sums is not None:
            self._sums.expects_several = several

    def _counted(self, count: int) -> None:
        self._count = count
        if self._sums is not None:
            self._sums.in_last = 1 < self._last_count <= count

    def first_gradients_coming(self, coming: Mapping[int, ParameterInfo]) -> None:
        """`gradient_coming` of parameters that have none yet, by index."""
        self._begun.update(coming)

    def gradient_coming(self, info: ParameterInfo, *, is_second: bool) -> None:
        """A gradient is about to be taken over. Raises as `take_room` does; what the backward brought is dropped then."""
        if not is_second:
            self._begun[info.index] = info
        if info.index in self._begun:
            return
        try:
            self.take_room()
        except BudgetError:
            assert self._parts.gradients is not None
            for begun in self._begun.values():
                self._parts.gradients.drop(begun)
                begun.parameter.grad = None
            raise
        if not self._is_further:
            self._is_further = True
            self._counted(self._count + 1)

    def adds_part(self, info: ParameterInfo) -> bool:
        """Whether what comes is added as a part of one gradient is: all that there is of it is of this backward."""
        return self._narrow or info.index in self._begun

    def take_room(self) -> None:
        """Have the room. Raises `BudgetError` where there is none: nothing has changed then."""
        placement, gradients = self._parts.placement, self._parts.gradients
        if gradients is not None and placement.sums:
            missing, cause = placement.sums_missing_nbytes, None
            if not missing:
                missing = sum(missing_nbytes(line, self._parts.accelerator) for line in placement.sums)
            if not missing:
                try:
                    gradients.take_room_for_sums()
                except (BudgetError, StorageError) as error:
                    missing, cause = placement.sums_nbytes, error
            if missing:
                raise _no_room(placement, missing) from cause
            self._parts.placement = placement.with_sums()
        self._expect(True)


def _no_room(placement: Placement, missing: int) -> BudgetError:
    needed = " and ".join(f"{line.nbytes} bytes in {line.tier} memory" for line in placement.sums)
    if placement.sums_missing_in:
        remedies = f"raise {placement.sums_missing_in} by {missing} bytes"
    else:
        remedies = " and ".join(dict.fromkeys(remedy(line.tier, missing) for line in placement.sums))
    refusal = BudgetError(
        f"a second micro-batch needs {needed} for the fp32 sums of gradients, of which {missing} are missing. The "
        f"first one's gradients are there: step with them and go on with one micro-batch a step, or {remedies}."
    )
    refusal.changed_nothing = True
    return refusal
