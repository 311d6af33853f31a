# SPDX-License-Identifier: Apache-2.0
"""Making the engine's parts for one decided placement: the one place that knows which goes with which."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

from torch import nn

from offload.build.allocation import Allocation
from offload.build.materialize import InitialValues, Materializer
from offload.build.rank_parts import rank_parts
from offload.config import Config
from offload.device.accelerator import Accelerator, UnitMemory
from offload.device.arithmetic.records import RecordFormat
from offload.device.virtual.current import virtual_machine
from offload.layout import Layout, UnitLayout
from offload.model.chunk import Chunk
from offload.model.flat import Flat, ParameterInfo
from offload.model.optimizer_kinds import InitialState
from offload.model.unit import Unit
from offload.planning.cost import computing_seconds
from offload.planning.placement import Placement, format_of
from offload.planning.route import FetchPath, Memory, Route
from offload.planning.use_trace import Expected
from offload.ranks.group import Group
from offload.step.chunk_stores import ParameterStore, RecordStore
from offload.step.components import Closable, Components
from offload.step.foundation import Foundation
from offload.step.gradients.arrival import GradientArrival
from offload.step.gradients.chunk_gradients import ChunkGradients
from offload.step.gradients.extents import GradientExtents
from offload.step.residency.activation_memory import ActivationMemory
from offload.step.residency.fetching import DirectFetcher, Fetcher, StagedFetcher
from offload.step.residency.residency import Residency
from offload.step.residency.room import Room
from offload.step.timeline import Timeline
from offload.step.updates.records_on_device import RecordsOnDevice
from offload.step.updates.tools import UpdateTools
from offload.step.updates.update import Updates
from offload.tiers.memory import MemoryLedger
from offload.tiers.staging import StagingPool


def by_unit(infos: Sequence[ParameterInfo], unit_count: int) -> list[list[ParameterInfo]]:
    """Each unit's own."""
    found: list[list[ParameterInfo]] = [[] for _ in range(unit_count)]
    for info in infos:
        found[info.unit_index].append(info)
    return found


class Building:
    """The parts while they are made. The model stays as it is."""

    def __init__(
        self,
        made: list[Closable],
        accelerator: Accelerator,
        layout: Layout,
        placement: Placement,
        config: Config,
        ranks: Group,
        moments: tuple[str, ...],
    ) -> None:
        """`made`: what is made is added to it, so that a failure, also one of another rank, can take it down. `moments`: what
        the optimizer keeps (`offload.device.arithmetic.rules.MOMENTS`)."""
        self._accelerator, self._layout, self._placement, self._config = accelerator, layout, placement, config
        self._ranks, self._moments = ranks, moments
        self._routes = placement.routes
        self.value_facts: dict[str, int] = {}
        self._ledger = MemoryLedger()
        self._made = made

    def finish(
        self,
        modules: Sequence[list[nn.Module]],
        infos: Sequence[ParameterInfo],
        expected: Expected,
        values: InitialValues,
        state_of: Callable[[ParameterInfo], InitialState],
    ) -> Components:
        """`modules`: of each unit those whose forward uses it. `infos`: the parameters of all of them."""
        accelerator, placement = self._accelerator, self._placement
        self._storage = storage = Allocation(self._config, accelerator, self._layout, placement, self._ledger, self._made)
        members = by_unit(infos, len(modules))
        units = [
            self._unit(own, layout, infos) for own, layout, infos in zip(modules, self._layout.units, members, strict=True)
        ]
        parameter_store = ParameterStore(
            (pair for unit in units for pair in zip(unit.chunks, unit.route.parameter_tiers(), strict=False)),
            storage.parameters,
        )
        homes = (pair for unit in units for pair in zip(unit.trained_chunks, unit.route.record_homes(), strict=False))
        trained = [(chunk, tier, path) for chunk, (tier, path) in homes]
        records = RecordStore(trained, storage.records, self._format_of) if trained else None
        pool = storage.staging_pool()
        timeline = Timeline(accelerator.clock_ns, accelerator.recorder)
        if virtual_machine() is None:
            Materializer(accelerator, parameter_store, records, values, state_of, self._ledger, pool).run(units)
        self.value_facts = values.facts()
        of_ranks = rank_parts(self._ranks, Foundation(accelerator, self._layout, units, self._ledger, timeline))
        gradients = updates = None
        if records is not None:
            chunks = [chunk for chunk, _, _ in trained]
            gradients = self._gradients(chunks, pool, timeline, expected, averaged=of_ranks.averages_gradients)
            tools = UpdateTools(accelerator, pool, records, parameter_store, timeline)
            tools = replace(tools, visiting=self._visiting(tools, gradients, units))
            updates = of_ranks.updates(tools, gradients, self._routes)
            self._made.extend((gradients, updates))
        own_fetcher = self._fetcher(parameter_store, pool, updates)
        self._made.append(own_fetcher)
        fetcher, gradient_sync = of_ranks.fetcher(own_fetcher), of_ranks.gradient_sync(gradients)
        self._made.extend(of_ranks.attend(parameter_store, updates))
        sums = gradients.sums_on_device if gradients is not None else None
        nbytes, activations = placement.unit_capacity_nbytes or 0, self._activation_memory()
        visiting = updates.visiting if updates is not None else None
        room = Room(nbytes, activations, sums, visiting, is_fixed=placement.bounds_units)
        residency = Residency(
            units, fetcher, updates,
            trace=expected.trace, room=room, prefetch=placement.prefetch,
            persistent_numel=self._config.persistent_numel, timeline=timeline,
        )  # fmt: skip
        return Components(
            accelerator=accelerator, layout=self._layout, placement=placement, units=units,
            parameters=list(infos), pool=pool, ledger=self._ledger, timeline=timeline,
            fetcher=fetcher, residency=residency, expected=expected, ranks=self._ranks, meeting=of_ranks.meeting,
            gradient_sync=gradient_sync, parameter_store=parameter_store, records=records, gradients=gradients, updates=updates,
            backend=storage.backend, made=self._made,
        )  # fmt: skip

    # ---- units ---------------------------------------------------------------------------------------------------

    @property
    def _follows_activations(self) -> bool:
        """Whether what the device has left is followed, as no budget bounds it. Several ranks, which fetch together, stay with
        the least."""
        is_open = not self._placement.bounds_units and self._ranks.world_size == 1
        return self._accelerator.memory_use() is not None and is_open

    def _activation_memory(self) -> ActivationMemory | None:
        might_come = any(route.has_store or route.update_in is Memory.HOST for route in self._routes)
        return ActivationMemory(self._accelerator) if self._follows_activations and might_come else None

    def _visiting(self, tools: UpdateTools, gradients: ChunkGradients, units: Sequence[Unit]) -> RecordsOnDevice | None:
        """For units whose updates the host makes."""
        own = [unit for unit in units if unit.trained_chunks and unit.route.update_in is Memory.HOST]
        if not self._follows_activations or gradients.sums_on_device is None or not own:
            return None
        return RecordsOnDevice(tools, gradients, own)

    def _unit(self, modules: list[nn.Module], layout: UnitLayout, infos: list[ParameterInfo]) -> Unit:
        by_index, route = {info.index: info for info in infos}, self._routes[layout.index]
        flats = []
        for flat_layout in layout.flats:
            members = [by_index[slot.parameter_index] for slot in flat_layout.slots]
            memory = self._memory(route, flat_layout.nbytes)
            flats.append(Flat(flat_layout, memory, members[0].dtype, members, route))
            if memory.filled and not memory.stays:
                memory.empty()
        return Unit(layout, modules, flats, infos, route)

    def _memory(self, route: Route, nbytes: int) -> UnitMemory:
        return self._accelerator.unit_memory(nbytes) if route.has_store else self._storage.home(route, nbytes)

    def _gradients(
        self, chunks: list[Chunk], pool: StagingPool, timeline: Timeline, expected: Expected, *, averaged: bool
    ) -> ChunkGradients:
        placement = self._placement
        make_sums = None if self._config.keeps_wide_gradients else self._storage.sums
        extents = GradientExtents(chunks, self._storage.gradients, make_sums, reduced=averaged)
        arrival = GradientArrival(
            chunks, pool, self._accelerator, timeline,
            transit_buffer_count=placement.transit_buffer_count, narrow_sums=self._config.sums_are_narrow,
        )  # fmt: skip
        made = ChunkGradients(chunks, extents, arrival)
        if (sums := arrival.sums_on_device) is not None:
            budget_nbytes = self._config.device_memory
            # Without a budget what the device has left is followed (`_activation_memory`).
            sums.limit(placement.left_on_device(int(budget_nbytes)) if budget_nbytes is not None else 0)
            if self._config.tokens:
                sums.expect_in_time(self._accelerator.rates().d2h * self._backward_seconds(expected))
        if not placement.sums and not self._config.sums_are_narrow:
            made.take_room_for_sums()  # they are in the plan
        return made

    def _backward_seconds(self, expected: Expected) -> float:
        """What one computes, where the tokens are known."""
        tokens, rates, seconds = self._config.tokens, self._accelerator.rates(), 0.0
        for unit in self._layout.units:
            trained = sum(flat.numel for flat in unit.flats if flat.trainable)
            numel = sum(flat.numel for flat in unit.flats)
            seconds += computing_seconds(tokens, rates, expected, unit.index, numel, trained / max(numel, 1))[1]
        return seconds

    # ---- ways ----------------------------------------------------------------------------------------------------

    def _format_of(self, flat: Flat) -> RecordFormat:
        return format_of(self._config, self._moments, flat.layout.dtype, flat.route.crosses)

    def _fetcher(self, parameter_store: ParameterStore, pool: StagingPool, updates: Updates | None) -> Fetcher:
        if any(route.fetch_path is FetchPath.COPIED for route in self._routes):
            reads_directly = all(route.model_in is Memory.HOST for route in self._routes)
            return StagedFetcher(self._accelerator, parameter_store, None if reads_directly else pool, updates)
        return DirectFetcher(parameter_store)
