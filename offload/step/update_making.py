# SPDX-License-Identifier: Apache-2.0
"""From gradients to updates: from here on nothing of what an update does can change."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import fields
from itertools import repeat
from operator import add, attrgetter

from offload.device.arithmetic.rules import Hyper
from offload.model.flat import ParameterInfo
from offload.model.set_each import set_each
from offload.model.unit import Unit
from offload.model.unit_state import ShardState
from offload.model.update import ChunkUpdate, chunk_updates
from offload.step.components import Components

_INDEX_OF, _UNIT_INDEX_OF, _GROUP_INDEX_OF = attrgetter("index"), attrgetter("unit_index"), attrgetter("group_index")
_STEP_OF = attrgetter("step")
_NUMBERS = tuple(one.name for one in fields(Hyper) if one.name != "own")

HyperOf = Callable[[int], Hyper]
"""The numbers of one parameter group, as they stand now."""


class UpdateMaker:
    """Owned by the thread that drives the model, and backward's, never both at once."""

    def __init__(self, parts: Components, hyper_of: HyperOf) -> None:
        self._gradient_sync, self._residency = parts.gradient_sync, parts.residency
        self.hyper_of = hyper_of
        self._group_indices = sorted({info.group_index for info in parts.parameters if info.group_index is not None})

    def check_groups(self) -> None:
        """Raises where the numbers of a group make no sense."""
        for group_index in self._group_indices:
            self.hyper_of(group_index)

    def numbers(self) -> list[tuple[object, ...]]:
        """Of each group; what an optimizer of its own has of them is its own."""
        hypers = map(self.hyper_of, self._group_indices)
        return [tuple(getattr(hyper, one) for one in _NUMBERS) for hyper in hypers]

    def make(self, live: Sequence[ParameterInfo], factor: float) -> Iterator[tuple[Unit, list[ChunkUpdate]]]:
        """The updates of these parameters, by unit in the order of the next forward: to be enqueued, whatever comes. `factor`:
        what multiplies their gradients."""
        hypers = {index: self.hyper_of(index) for index in set(map(_GROUP_INDEX_OF, live))}
        set_each(live, "step", map(add, map(_STEP_OF, live), repeat(1)))
        self._gradient_sync.forget(live)
        touched, updated = set(map(_UNIT_INDEX_OF, live)), set(map(_INDEX_OF, live))
        for unit in self._residency.next_order():
            if unit.index in touched:
                unit.version += 1
                unit.shard.become(ShardState.REDUCING)
                unit.shard.become(ShardState.UPDATING)
                yield unit, chunk_updates(unit.trained_chunks, updated, hypers, factor)
