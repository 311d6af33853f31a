# SPDX-License-Identifier: Apache-2.0
"""What an engine consists of otherwise on several ranks than on one: chosen once, when it is built.

meeting   where the ranks pass points of the program together
fetcher   units whose parameters are partitioned are gathered
updates   where parameters are whole on every rank, what each updates of them is spread to the others
intake    gradients are averaged
attend    what the other ranks are answered
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from offload.device.accelerator import Accelerator
from offload.layout import Layout
from offload.model.unit import Unit
from offload.ranks.attendance import Attendance
from offload.ranks.group import Group, Meeting, NoMeeting
from offload.ranks.rendezvous import Rendezvous
from offload.ranks.transport import Ranks
from offload.step.chunk_stores import ParameterStore
from offload.step.components import Closable
from offload.step.gradients.chunk_gradients import ChunkGradients
from offload.step.gradients.intake import Intake, OwnGradients
from offload.step.gradients.reduction import Reduction
from offload.step.residency.fetching import Fetcher, GatheredFetcher, StagedFetcher
from offload.step.residency.shard_exchange import ShardExchange
from offload.step.timeline import Timeline
from offload.step.updates.gather_after_update import SpreadUpdates
from offload.step.updates.update import Updates
from offload.tiers.memory import MemoryLedger


@dataclass(frozen=True, slots=True)
class Making:
    """What is there before the ranks come into it."""

    accelerator: Accelerator
    layout: Layout
    units: list[Unit]
    ledger: MemoryLedger
    timeline: Timeline


class OneRank:
    """On one rank: nothing. The methods are called in their order."""

    averages_gradients = False

    def __init__(self, making: Making) -> None:
        self._making = making
        self.meeting: Meeting = NoMeeting()

    def updates(self, *parts: Any) -> Updates:
        """`parts`: what `Updates` is made of."""
        return Updates(*parts)

    def fetcher(self, own: Fetcher) -> Fetcher:
        """`own`: what brings this rank's part of a unit."""
        return own

    def intake(self, gradients: ChunkGradients | None) -> Intake:
        return OwnGradients(gradients) if gradients is not None else Intake()

    def attend(self, parameter_store: ParameterStore, updates: Updates | None) -> Sequence[Closable]:
        """Everything is there now. Returns what is to be closed."""
        return ()


class SeveralRanks(OneRank):
    """See the module."""

    averages_gradients = True

    def __init__(self, making: Making, ranks: Ranks) -> None:
        super().__init__(making)
        self._ranks = ranks
        self.meeting = self._rendezvous = Rendezvous(ranks, [unit.name for unit in making.units])
        self._own_fetcher: StagedFetcher | None = None
        self._reduction: Reduction | None = None

    def updates(self, *parts: Any) -> Updates:
        spreads = self._making.layout.stage in (1, 2)
        return SpreadUpdates(self._rendezvous, *parts) if spreads else Updates(*parts)

    def fetcher(self, own: Fetcher) -> Fetcher:
        if not isinstance(own, StagedFetcher):
            return own
        self._own_fetcher = own
        if not self._making.layout.shards_parameters:
            return own
        return GatheredFetcher(self._making.accelerator, own, self._rendezvous)

    def intake(self, gradients: ChunkGradients | None) -> Intake:
        if gradients is None:
            return Intake()
        making = self._making
        self._reduction = Reduction(
            making.units, gradients, self._ranks, self._rendezvous, making.accelerator, making.ledger, making.timeline,
            stage=making.layout.stage,
        )  # fmt: skip
        return self._reduction

    def attend(self, parameter_store: ParameterStore, updates: Updates | None) -> Sequence[Closable]:
        making = self._making
        exchange = ShardExchange(
            self._ranks, making.accelerator, making.units, making.ledger,
            parameter_store=parameter_store, fetcher=self._own_fetcher, updates=updates, reduction=self._reduction,
        )  # fmt: skip
        return (Attendance(self._ranks, self._rendezvous, exchange),)


def rank_parts(ranks: Group, making: Making) -> OneRank:
    """As many as there are."""
    return SeveralRanks(making, ranks) if isinstance(ranks, Ranks) else OneRank(making)
