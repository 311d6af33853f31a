# SPDX-License-Identifier: Apache-2.0
"""What an engine consists of otherwise on several ranks than on one: chosen once, when it is built.

meeting        where the ranks pass points of the program together
fetcher        units whose parameters are partitioned are gathered
updates        where parameters are whole on every rank, what each updates of them is spread to the others
gradient_sync  gradients are averaged
attend         what the other ranks are answered
"""

from __future__ import annotations

from collections.abc import Sequence

from offload.planning.route import Route
from offload.ranks.communication_thread import CommunicationThread
from offload.ranks.group import Group, Meeting, NoMeeting
from offload.ranks.rendezvous import Rendezvous
from offload.ranks.transport import Ranks
from offload.step.chunk_stores import ParameterStore
from offload.step.components import Closable
from offload.step.foundation import Foundation
from offload.step.gradients.chunk_gradients import ChunkGradients
from offload.step.gradients.gradient_sync import GradientSync, OwnGradients
from offload.step.gradients.reduction import Reduction
from offload.step.residency.fetching import Fetcher, GatheredFetcher, StagedFetcher
from offload.step.residency.shard_exchange import ShardExchange
from offload.step.updates.gather_after_update import SpreadUpdates
from offload.step.updates.tools import UpdateTools
from offload.step.updates.update import Updates


class OneRank:
    """On one rank: nothing. The methods are called in their order."""

    averages_gradients = False

    def __init__(self, foundation: Foundation) -> None:
        self._foundation = foundation
        self.meeting: Meeting = NoMeeting()

    def updates(self, tools: UpdateTools, gradients: ChunkGradients, routes: Sequence[Route]) -> Updates:
        return Updates(tools, gradients, routes)

    def fetcher(self, own: Fetcher) -> Fetcher:
        """`own`: what brings this rank's part of a unit."""
        return own

    def gradient_sync(self, gradients: ChunkGradients | None) -> GradientSync:
        return OwnGradients(gradients) if gradients is not None else GradientSync()

    def attend(self, parameter_store: ParameterStore, updates: Updates | None) -> Sequence[Closable]:
        """Everything is there now. Returns what is to be closed."""
        return ()


class SeveralRanks(OneRank):
    """See the module."""

    averages_gradients = True

    def __init__(self, foundation: Foundation, ranks: Ranks) -> None:
        super().__init__(foundation)
        self._ranks = ranks
        self.meeting = self._rendezvous = Rendezvous(ranks, [unit.name for unit in foundation.units])
        self._own_fetcher: StagedFetcher | None = None
        self._reduction: Reduction | None = None

    def updates(self, tools: UpdateTools, gradients: ChunkGradients, routes: Sequence[Route]) -> Updates:
        if self._foundation.layout.stage in (1, 2):
            return SpreadUpdates(self._rendezvous, tools, gradients, routes)
        return super().updates(tools, gradients, routes)

    def fetcher(self, own: Fetcher) -> Fetcher:
        if not isinstance(own, StagedFetcher):
            return own
        self._own_fetcher = own
        if not self._foundation.layout.shards_parameters:
            return own
        return GatheredFetcher(self._foundation.accelerator, own, self._rendezvous)

    def gradient_sync(self, gradients: ChunkGradients | None) -> GradientSync:
        if gradients is None:
            return GradientSync()
        self._reduction = Reduction(self._foundation, gradients, self._ranks, self._rendezvous)
        return self._reduction

    def attend(self, parameter_store: ParameterStore, updates: Updates | None) -> Sequence[Closable]:
        exchange = ShardExchange(
            self._foundation, self._ranks,
            parameter_store=parameter_store, fetcher=self._own_fetcher, updates=updates, reduction=self._reduction,
        )  # fmt: skip
        return (CommunicationThread(self._ranks, self._rendezvous, exchange),)


def rank_parts(ranks: Group, foundation: Foundation) -> OneRank:
    """As many as there are."""
    return SeveralRanks(foundation, ranks) if isinstance(ranks, Ranks) else OneRank(foundation)
