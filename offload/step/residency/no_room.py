# SPDX-License-Identifier: Apache-2.0
"""What is said where a budget holds no more units. Nothing was done then, and training may go on."""

from __future__ import annotations

from collections.abc import Sequence

from offload.errors import BudgetError
from offload.model.unit import Unit


def no_room(used: Sequence[Unit], needed_nbytes: int, capacity_nbytes: int) -> BudgetError:
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
