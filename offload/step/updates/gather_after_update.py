# SPDX-License-Identifier: Apache-2.0
"""Updates where parameters are whole on every rank and each updates its shard of them (ZeRO stages 1 and 2).

A unit is gathered right after its update, and the next one's update and gather are begun with it: its shards travel under the
forward of this one.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from offload.model.unit import Unit
from offload.model.update import ChunkUpdate, UnitUpdate
from offload.planning.route import Route
from offload.ranks.rendezvous import Rendezvous, Request
from offload.step.gradients.chunk_gradients import ChunkGradients
from offload.step.updates.tools import UpdateTools
from offload.step.updates.update import Updates


class SpreadUpdates(Updates):
    """See the module."""

    def __init__(self, rendezvous: Rendezvous, tools: UpdateTools, gradients: ChunkGradients, routes: Iterable[Route]) -> None:
        super().__init__(tools, gradients, routes)
        self._rendezvous = rendezvous

    def enqueue(self, unit: Unit, chunks: list[ChunkUpdate]) -> None:
        super().enqueue(unit, chunks)
        assert unit.update is not None
        # What compute has read so far the gather overwrites, also where no part of it is updated here.
        unit.update.published.append(self._accelerator.mark())

    def finish(self, unit: Unit) -> None:
        update = unit.update
        if update is None:
            return
        asked = self._spread(unit, update)
        following = next(((other, one) for other, one in self._queue.items() if one.spreading is None), None)
        if following is not None:
            self._spread(*following)
        with self._timeline.waiting("gather", unit):
            asked.wait()
        if asked.result is not None:
            self._accelerator.join(asked.result)
        self._leave_queue(unit)

    def await_launched(self, units: Sequence[Unit]) -> None:
        """Not at once: each is gathered as soon as it is over."""

    def _spread(self, unit: Unit, update: UnitUpdate) -> Request:
        if update.spreading is None:
            with self._timeline.waiting("update", unit):
                self.apply(unit)
            update.spreading = self._rendezvous.ask_gather(unit.index)
        return update.spreading
