# SPDX-License-Identifier: Apache-2.0
"""Device memory for units: how many bytes there are for them, and how many of those they take.

A budget is fixed. Without one there is as much as steps were seen to need, or as the model leaves
(`offload.step.residency.activation_memory`). Sums of micro-batches and records of whole units, which are updated there then,
have what all units would leave of that.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from offload.errors import BudgetError
from offload.model.unit import Unit
from offload.step.gradients.sums_on_device import SumsOnDevice
from offload.step.residency.activation_memory import ActivationMemory
from offload.step.updates.records_on_device import RecordsOnDevice


class Room:
    """See the module. Written by `Residency`, in its thread.

    is_fixed               whether a budget says how much there is
    follows_activations    whether it is as large as the model's activations leave it
    capacity_nbytes        bytes for units that are in use or on their way
    resident_nbytes        those that are taken; `peak_resident_nbytes`: the most so far
    """

    def __init__(
        self,
        nbytes: int,
        activations: ActivationMemory | None,
        sums: SumsOnDevice | None,
        records: RecordsOnDevice | None,
        *,
        is_fixed: bool,
    ) -> None:
        self.is_fixed = is_fixed
        self._activations, self._sums, self._records = activations, sums, records
        self._for_states_nbytes = 0
        """Of what the device has left, what all units would leave to sums and records."""
        self.follows_activations = activations is not None
        self.capacity_nbytes = self._least_nbytes = nbytes
        self.resident_nbytes = self.peak_resident_nbytes = 0

    def widen(self, nbytes: int, least_nbytes: int) -> None:
        """Before anything is taken: by what is always taken. `least_nbytes`: for the other units, where the model's activations
        may have the rest."""
        self.capacity_nbytes += nbytes
        self._least_nbytes = self.capacity_nbytes if self._activations is None else least_nbytes + nbytes

    # ---- what units take -----------------------------------------------------------------------------------------

    def has(self, nbytes: int) -> bool:
        """Whether so many more find room."""
        return self.resident_nbytes + nbytes <= self.capacity_nbytes

    def take(self, nbytes: int) -> None:
        """For a unit that comes."""
        self.resident_nbytes += nbytes
        if self.resident_nbytes > self.peak_resident_nbytes:
            self.peak_resident_nbytes = self.resident_nbytes

    def give_back(self, nbytes: int) -> None:
        """A unit has left."""
        self.resident_nbytes -= nbytes

    def lacking_nbytes(self, nbytes: int) -> int:
        """What a budget lacks of so many in all; 0: nothing."""
        return max(nbytes - self.capacity_nbytes, 0) if self.is_fixed else 0

    # ---- how much there is ---------------------------------------------------------------------------------------

    def outgrow(self, nbytes: int, used: Sequence[Unit]) -> None:
        """So many more are needed, and nothing may leave: there is room for them then. `used`: the units in use. Raises
        `BudgetError` where there is a budget; nothing was done then, and training may go on."""
        needed_nbytes = self.resident_nbytes + nbytes
        if self.is_fixed:
            raise _no_room(used, needed_nbytes, self.capacity_nbytes)
        self.capacity_nbytes = needed_nbytes

    def reach(self, needed_nbytes: int) -> bool:
        """A step was seen to need so many: whether there is room for them, after that."""
        if not self.is_fixed:
            self._least_nbytes = max(self._least_nbytes, needed_nbytes)
            self.capacity_nbytes = max(self.capacity_nbytes, needed_nbytes)
        return needed_nbytes <= self.capacity_nbytes

    def spread(self, spare_nbytes: int) -> None:
        """Units may take `spare_nbytes` beyond what they take now, where no budget says how much."""
        if not self.is_fixed:
            self.capacity_nbytes = max(self.capacity_nbytes, self.resident_nbytes + spare_nbytes)

    # ---- beside the model's activations, and sums ----------------------------------------------------------------

    def forward_begins(self, which: int, inputs: Any, *, recorded: bool) -> None:
        """See `ActivationMemory.forward_begins`."""
        if self._activations is not None:
            self._activations.forward_begins(which, inputs, recorded=recorded, units_nbytes=self._taken_nbytes)

    def step_ends(self) -> None:
        """Nothing more comes of the last forward and its backward."""
        if self._activations is not None:
            self._activations.ends(self._taken_nbytes)
        if self._records is not None:
            self._records.step_ends()

    def follow_activations(self, all_units_nbytes: int) -> None:
        """Have as much as the device leaves now, or at least what is needed. What is too much goes: here records, then sums of
        micro-batches, which take what all units would leave; units are the caller's."""
        if self._activations is None:
            return
        left, records_nbytes = self._activations.left(self._taken_nbytes), 0
        if self._records is not None:
            for_states_nbytes = self._activations.left_for_states()
            self._for_states_nbytes = max(for_states_nbytes - all_units_nbytes, 0)
            self._records.limit(self._for_states_nbytes - (self._sums.nbytes if self._sums is not None else 0))
            records_nbytes = self._records.nbytes
            if records_nbytes:  # the units stay with them, and gradients for their updates
                left = for_states_nbytes
        self.capacity_nbytes = max(left, self._least_nbytes)
        if self._sums is not None:
            self._sums.limit(max(left - all_units_nbytes - records_nbytes, 0))

    def bring_records(self, unit: Unit, all_units_nbytes: int) -> None:
        """Of a unit in use, if all units and what sums take leave room for them."""
        if self._records is None or self._activations is None or not self._records.may_come(unit, self._for_states_nbytes):
            return
        self.follow_activations(all_units_nbytes)
        if self._records.may_come(unit, self._for_states_nbytes):
            self._records.come(unit)
            self._activations.took(self._taken_nbytes)

    def have_states_leave(self) -> bool:
        """Records of a unit, else all sums of micro-batches; whether there were any that could."""
        if self._records is not None and self._records.nbytes:
            self._records.make_room()
            return True
        if self._sums is None:
            return False
        before = self._sums.nbytes
        if before:
            self._sums.limit(0)
        return self._sums.nbytes < before

    @property
    def _taken_nbytes(self) -> int:
        """Of device memory, by units, by sums of micro-batches and by records."""
        return self.resident_nbytes + sum(one.nbytes for one in (self._sums, self._records) if one is not None)


def _no_room(used: Sequence[Unit], needed_nbytes: int, capacity_nbytes: int) -> BudgetError:
    """`used`: the units in use, which leave no room for one more."""
    lacking_nbytes = needed_nbytes - capacity_nbytes
    held = [unit.name for unit in used if unit.uses.held_count]
    less = f"Leave engine.gathered ({', '.join(held)}) first, or raise it" if held else "Raise it"
    error = BudgetError(
        f"the units in use at once ({', '.join(unit.name for unit in used)} and one more) take {needed_nbytes} bytes of device "
        f"memory, more than the {capacity_nbytes} that the budget leaves for parameters. {less} by at least {lacking_nbytes} "
        "bytes."
    )
    error.changed_nothing = True
    return error
