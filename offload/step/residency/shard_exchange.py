# SPDX-License-Identifier: Apache-2.0
"""Moves what the ranks agreed on at the rendezvous: shards of parameters into units, gradients of units into shards."""

from __future__ import annotations

from torch import Tensor

from offload.device.pending import Pending
from offload.model.flat import Flat
from offload.model.unit import Unit
from offload.ranks.transport import Ranks
from offload.step.chunk_stores import ParameterStore
from offload.step.foundation import Foundation
from offload.step.gradients.reduction import Reduction
from offload.step.residency.fetching import StagedFetcher
from offload.step.updates.update import Updates
from offload.tiers.memory import HostMemory


class ShardExchange:
    """The communication thread's `Service`. Runs in its thread; a rank that only lends its shard is blocked meanwhile."""

    def __init__(
        self,
        foundation: Foundation,
        ranks: Ranks,
        *,
        parameter_store: ParameterStore,
        fetcher: StagedFetcher | None,
        updates: Updates | None,
        reduction: Reduction | None,
    ) -> None:
        """`fetcher` where parameters are partitioned, `updates` and `reduction` where something is trained."""
        self._accelerator, self._units, self._ledger = foundation.accelerator, foundation.units, foundation.ledger
        self._ranks, self._parameter_store, self._fetcher = ranks, parameter_store, fetcher
        self._updates, self._reduction = updates, reduction

    def gather(self, unit_index: int, wanters: frozenset[int]) -> Pending | None:
        unit = self._units[unit_index]
        wanted_here = self._ranks.index in wanters
        with self._accelerator.communicating("gather", unit, unit.layout.nbytes):
            if self._ranks.has_devices and len(wanters) == self._ranks.world_size:
                for flat, own in self._own_shards(unit, wanted_here, on_host=False):
                    self._ranks.gather_on_device(flat.memory.flat, own)
            else:
                for flat, own in self._own_shards(unit, wanted_here, on_host=True):
                    self._gather_over_host(flat, own, wanters, wanted_here)
            return self._accelerator.mark() if wanted_here else None

    def _gather_over_host(self, flat: Flat, own: Tensor, wanters: frozenset[int], wanted_here: bool) -> None:
        memory = flat.memory.flat
        into = self._accelerator.host_twin(memory) if wanted_here else None
        self._ranks.gather(own, into, wanters, flat.layout.nbytes)
        if into is not None and into is not memory:
            memory.copy_(into)

    def reduce(self, unit_index: int, contributors: frozenset[int]) -> None:
        assert self._reduction is not None
        self._reduction.reduce(unit_index, contributors)

    def _own_shards(self, unit: Unit, wanted_here: bool, *, on_host: bool) -> list[tuple[Flat, Tensor]]:
        """Of each flat that is gathered, this rank's shard in its current version, uint8; where it lies, or on the host."""
        if not unit.route.has_store:
            if self._updates is not None:
                self._updates.apply(unit)
            return [(flat, self._in_memory(flat, on_host)) for flat in unit.flats if flat.layout.trainable]
        if wanted_here:
            assert self._fetcher is not None
            self._fetcher.arrive(unit)
            return [(flat, self._in_memory(flat, on_host)) for flat in unit.flats]
        if self._updates is not None:
            self._updates.apply(unit)
        return [(flat, self._from_home(self._parameter_store, flat)) for flat in unit.flats]

    def _in_memory(self, flat: Flat, on_host: bool) -> Tensor:
        shard, itemsize = flat.layout.shard, flat.layout.itemsize
        own = flat.memory.flat[shard.start * itemsize : shard.stop * itemsize]
        return self._accelerator.on_host(own) if on_host else own

    def _from_home(self, parameter_store: ParameterStore, flat: Flat) -> Tensor:
        shard, itemsize = flat.layout.shard, flat.layout.itemsize
        whole = HostMemory(shard.numel * itemsize, "lent parameters", ledger=self._ledger).tensor
        for chunk in flat.chunks:
            start = (chunk.start - shard.start) * itemsize
            part = whole[start : start + chunk.nbytes]
            stored = parameter_store.view(chunk)
            if stored is None:
                parameter_store.read(chunk, part).wait()
            else:
                part.copy_(stored[: part.numel()])
        return whole
