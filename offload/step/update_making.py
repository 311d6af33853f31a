# SPDX-License-Identifier: Apache-2.0
"""From gradients to updates: from here on nothing of what an update does can change."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

from offload.device.rules import Hyper
from offload.model.flat import ParameterInfo
from offload.model.unit import ShardState, Unit
from offload.model.update import ChunkUpdate, chunk_updates
from offload.step.components import Components

HyperOf = Callable[[int], Hyper]
"""The numbers of one parameter group, as they stand now."""


class UpdateMaker:
    """Owned by the thread that drives the model, and backward's, never both at once."""

    def __init__(self, parts: Components, hyper_of: HyperOf) -> None:
        self._intake, self._residency = parts.intake, parts.residency
        self.hyper_of = hyper_of
        self._group_indices = sorted({info.group_index for info in parts.parameters if info.group_index is not None})

    def check_groups(self) -> None:
        """Raises where the numbers of a group make no sense."""
        for group_index in self._group_indices:
            self.hyper_of(group_index)

    def make(self, live: Sequence[ParameterInfo], factor: float) -> Iterator[tuple[Unit, list[ChunkUpdate]]]:
        """The updates of these parameters, by unit in the order of the next forward: to be enqueued, whatever comes. `factor`:
        what multiplies their gradients."""
        hypers = {index: self.hyper_of(index) for index in {info.group_index for info in live if info.group_index is not None}}
        steps: dict[int, tuple[Hyper, int]] = {}
        for info in live:
            assert info.group_index is not None
            info.step += 1
            steps[info.index] = (hypers[info.group_index], info.step)
        self._intake.forget(live)
        touched = {info.unit_index for info in live}
        for unit in self._residency.next_order():
            if unit.index in touched:
                unit.version += 1
                unit.shard.become(ShardState.REDUCING)
                unit.shard.become(ShardState.UPDATING)
                yield unit, chunk_updates(unit.trained_chunks, steps, factor)
