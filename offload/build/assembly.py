# SPDX-License-Identifier: Apache-2.0
"""Building the engine's parts for one model: everything that can be wrong is looked at before anything is allocated."""

from __future__ import annotations

import logging
import math
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache

import torch
from torch import nn

from offload import _native
from offload.build.building import Building, by_unit
from offload.build.materialize import InitialValues, initial_buffers
from offload.build.rank_facts import Least, agree_on_least, config_facts, parameter_facts
from offload.config import Config
from offload.deferred_init.deferred_init import name_parameters
from offload.deferred_init.held_tensors import Slot, replacing_held_tensors
from offload.device.accelerator import Accelerator
from offload.device.cpu import CpuAccelerator
from offload.device.cuda import CudaAccelerator
from offload.device.deferred import DeferredAccelerator
from offload.device.host_memory.memory_limits import host_memory_limit
from offload.device.virtual.accelerator import accelerator_on
from offload.device.virtual.current import virtual_machine
from offload.errors import BudgetError, ConfigError
from offload.layout import CHUNK_NUMELS, Layout, ParameterSpec, build_layout, large_chunk_numels
from offload.model.description import (
    check_buffers,
    check_renormalized,
    check_state_format,
    check_values,
    describe_parameters,
    parameter_specs,
)
from offload.model.flat import ParameterInfo
from offload.model.optimizer_kinds import InitialState, check_optimizer, initial_state, moments_of
from offload.model.partition import MayHold, ModuleUnit, fold_for_ranks, join_neighbours, partition, uses_of
from offload.model.quantized import PackedWeights
from offload.model.weights import WeightSource
from offload.planning.deciding import Decision
from offload.planning.free_memory import FreeMemory
from offload.planning.placement import ALONE, Placement, RankGroup, states_nbytes
from offload.planning.placement_summary import summary_of
from offload.planning.use_trace import Expected
from offload.planning.weighing import Weight, largest_that_pays
from offload.ranks.all_or_none import Facts, together
from offload.ranks.group import Group
from offload.step.components import Closable, Components, give_back
from offload.step.gradients.reduction import AVERAGE_VARIABLE, average_dtype

_log = logging.getLogger(__name__)
_JOINED_SHARE = 1 / 16
"""Of each budget: joined blocks take no more, with all their states. Device memory is spent on whole units; of host memory
buffers take several times as much as the largest chunk, and what the CPU computes with is kept by whole units."""

DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}
LEAST_UNIT_NUMEL = 64 * 1024
"""Elements that are worth a message of their own between ranks."""

ACCELERATOR_VARIABLE = "OFFLOAD_ACCELERATOR"
DEVICE_NBYTES_VARIABLE, SEED_VARIABLE = "OFFLOAD_DEVICE_NBYTES", "OFFLOAD_SEED"
"""The memory that the deferred accelerator says it has, for tests of what follows from it."""


def choose_accelerator() -> Accelerator:
    """CUDA where torch finds a device, else the CPU; the environment variable OFFLOAD_ACCELERATOR overrides it.

    On a machine that exists only in numbers: its own."""
    if (machine := virtual_machine()) is not None:
        return accelerator_on(machine)
    name = accelerator_name()
    if name == "cuda":
        return CudaAccelerator()
    if name == "cpu":
        return CpuAccelerator()
    if name == "deferred":
        return DeferredAccelerator(_count_in(SEED_VARIABLE) or 0, _count_in(DEVICE_NBYTES_VARIABLE))
    raise ConfigError(f"{ACCELERATOR_VARIABLE}={name!r} is unknown: expected cuda, cpu or deferred.")


def accelerator_name() -> str:
    """Of that on the machine that exists."""
    return os.environ.get(ACCELERATOR_VARIABLE, "") or ("cuda" if torch.cuda.is_available() else "cpu")


def _count_in(variable: str) -> int | None:
    text = os.environ.get(variable, "")
    if text and not text.isdecimal():
        raise ConfigError(f"{variable}={text!r} is not a count: expected 0, 1, 2, ...")
    return int(text) if text else None


def open_accelerator(made: list[Closable]) -> Accelerator:
    """The chosen one, which is closed with what else is `made`."""
    made.append(accelerator := choose_accelerator())
    return accelerator


@dataclass(frozen=True, slots=True)
class Described:
    """A model as it is divided into units, and what its parameters are."""

    module_units: list[ModuleUnit]
    infos: list[ParameterInfo]
    packed: PackedWeights

    @staticmethod
    def of(
        model: nn.Module, optimizer: torch.optim.Optimizer | None, config: Config, rank_count: int, *, joins: bool = True
    ) -> Described:
        """`joins`: small neighbours are one unit, if there is one rank. Raises `ConfigError`."""
        module_units, packed = partition(model), PackedWeights(model)
        packed.complete(module_units)
        if rank_count > 1:
            module_units = fold_for_ranks(module_units, LEAST_UNIT_NUMEL)
        dtype = DTYPES[config.dtype] if config.dtype is not None else None
        infos = describe_parameters(model, module_units, packed, optimizer, dtype)
        if not infos:
            raise ConfigError(f"{type(model).__name__} has no parameters: there is nothing that the engine could hold.")
        check_state_format(config, infos)
        if joins and rank_count == 1:
            module_units = join_neighbours(module_units, _within_share(config, moments_of(optimizer), infos))
            places = [(index, part) for index, unit in enumerate(module_units) for part in unit.part_indices]
            infos = [replace(info, unit_index=unit, part_index=part) for info, (unit, part) in zip(infos, places, strict=True)]
        return Described(module_units, infos, packed)

    @property
    def has_joined(self) -> bool:
        """Whether some are joined: apart they take less, with the same bits."""
        return any(unit.part_lengths for unit in self.module_units)

    def known(self, accelerator: Accelerator, moments: tuple[str, ...], sharing: RankGroup = ALONE) -> Known:
        """What it is laid out for."""
        specs = specs_of([unit.name for unit in self.module_units], self.infos)
        return Known(accelerator, specs, Expected.of(0, uses_of(self.module_units)), moments, sharing)


def _within_share(config: Config, moments: tuple[str, ...], infos: Sequence[ParameterInfo]) -> MayHold:
    """By what the states of these parameters take of what is granted."""
    granted = [int(nbytes) for nbytes in (config.device_memory, config.cpu_memory) if nbytes is not None]
    most = min(granted, default=math.inf) * _JOINED_SHARE
    specs = zip(infos, parameter_specs(infos), strict=True)
    nbytes = {id(info.parameter): states_nbytes(config, moments, spec) for info, spec in specs}
    return lambda parameters: sum(nbytes[id(one)] for one in parameters) <= most


class Assembly:
    """Builds `Components`; if anything fails on the way, what was made is closed again."""

    def __init__(
        self,
        model: nn.Module,
        optimizer: torch.optim.Optimizer | None,
        config: Config,
        weights: WeightSource | None,
        ranks: Group,
        *,
        sync_module_states: bool = False,
    ) -> None:
        self._model, self._optimizer, self._config, self._source = model, optimizer, config, weights
        self._ranks, self._shares = ranks, sync_module_states and ranks.world_size > 1
        self._covered: Mapping[str, str] = {}
        """Names in `weights` by fqn, once the model is described."""
        self.slots: list[Slot] = []
        """After `build`: what is to be set in what the model holds besides its parameters."""

    def build(self) -> Components:
        """The parts; the model stays as it is. On several ranks collective: what fails on one fails on all."""
        ranks, config = self._ranks, self._config
        described = together(ranks, self._described, self._facts)
        made: list[Closable] = []
        try:
            accelerator = together(ranks, lambda: open_accelerator(made), lambda one: {"accelerator": one.name})
            ranks.use_devices(accelerator.device)
            _native.warn_if_missing()
            known = described.known(accelerator, moments_of(self._optimizer))
            try:
                layout, placement = lay_out_together(ranks, config, known)
            except BudgetError:
                if not described.has_joined:
                    raise
                described = Described.of(self._model, self._optimizer, config, ranks.world_size, joins=False)
                known = described.known(accelerator, known.moments)
                layout, placement = lay_out_together(ranks, config, known)
            if ranks.index == 0:
                for line in summary_of(placement):
                    _log.info("%s", line)
            together(ranks, lambda: self._require_room(placement, described))
            building = Building(made, accelerator, layout, placement, config, ranks, known.moments)
            return together(
                ranks,
                lambda: self._finish(building, described, known.expected, accelerator.device),
                lambda _: building.value_facts,
            )
        except BaseException:
            give_back(made)
            raise

    def _facts(self, described: Described) -> Facts:
        return config_facts(self._config) | parameter_facts(described.infos) | {AVERAGE_VARIABLE: average_dtype()}

    def _described(self) -> Described:
        """The model, with everything that can be wrong looked at."""
        config, model, optimizer = self._config, self._model, self._optimizer
        if optimizer is not None:
            check_optimizer(optimizer, config.state_format)
        described = Described.of(model, optimizer, config, self._ranks.world_size)
        check_renormalized(model, described.infos, self._ranks.world_size)
        name_parameters(model)
        if self._source is not None:
            self._source = self._source.converted_for(model)
            self._covered = self._source.match(model)
        if virtual_machine() is None:
            check_values(described.infos, self._covered)
            check_buffers(model, self._covered)
        if optimizer is not None:
            for info in described.infos:
                self._state_of(info)  # raises what the materializer would, before anything is read
        return described

    def _require_room(self, placement: Placement, described: Described) -> None:
        """Raise `BudgetError` where what "auto" chose cannot be there, even once the model's own memory is given back: the
        system would end the process without a word. It is given back before moments and gradients, which take more than
        it, need theirs; without an optimizer nothing waits for it."""
        config = self._config
        if config.cpu_memory is not None or "auto" not in (config.parameters, config.optimizer_states):
            return
        rank_count = self._ranks.local_world_size
        own = [info.parameter.nbytes for info in described.infos if info.trainable and info.parameter.device.type == "cpu"]
        needed, limit = rank_count * placement.plan.total_nbytes("cpu"), host_memory_limit()
        if needed > limit.free_nbytes + rank_count * sum(own):
            advice = "" if config.nvme_paths else " Set nvme='/path/on/the/drive', so that less of it lies in memory."
            refusal = BudgetError(
                f"parameters={placement.parameters!r} and optimizer_states={placement.optimizer_states!r}, the least that "
                f"'auto' finds, take {needed} bytes of host memory, and {limit.free_nbytes} are left of the "
                f"{limit.total_nbytes} of {limit.name}.{advice} Where there is more than that, say so: cpu_memory={needed}."
            )
            refusal.smallest_nbytes = needed
            raise refusal

    def _finish(self, building: Building, described: Described, expected: Expected, device: torch.device) -> Components:
        buffers = initial_buffers(self._model, self._source, self._covered, device)
        if self._shares:
            held = {id(buffer): buffers.get(id(buffer), buffer) for buffer in self._model.buffers()}
            buffers |= {key: self._of_first_rank(buffer) for key, buffer in held.items()}
        self.slots = [*replacing_held_tensors(self._model.modules(), buffers), *described.packed.slots]
        parameters = {fqn: info.parameter for info in described.infos for fqn in info.fqns}
        share = self._of_first_rank if self._shares else None
        values = InitialValues(
            self._source,
            self._covered,
            parameters,
            keeps_checksums=self._ranks.world_size > 1,
            share=share,
            rounded_to=DTYPES[self._config.dtype] if self._config.masters_begin_rounded and self._config.dtype else None,
        )
        modules = [unit.modules for unit in described.module_units]
        return building.finish(modules, described.infos, expected, values, self._state_of)

    def _of_first_rank(self, value: torch.Tensor) -> torch.Tensor:
        """Rank 0's, on every rank; the tensor given stays as it is. Collective."""
        shared = value.detach().to("cpu", memory_format=torch.contiguous_format, copy=True)
        self._ranks.broadcast(shared.reshape(-1), 0)
        return shared.to(value.device)

    def _state_of(self, info: ParameterInfo) -> InitialState:
        assert self._optimizer is not None
        return initial_state(self._optimizer, info.parameter, info.fqn)


def lay_out_together(ranks: Group, config: Config, known: Known) -> tuple[Layout, Placement]:
    """The same on all ranks: the most that every one of them can do. Collective. `known`: but for the ranks."""
    if ranks.world_size > 1:
        sharing = RankGroup(config.stage, ranks.shard_count, ranks.local_world_size)
        known = replace(known, sharing=sharing, rank=ranks.shard_index)
    layout, placement = together(ranks, lambda: lay_out(config, known))
    own = Least.of(layout, placement)
    least = agree_on_least(ranks, own)

    def agreed() -> tuple[Layout, Placement]:
        if least == own:
            return layout, placement
        fixed = replace(config, parameters=least.parameters, optimizer_states=least.optimizer_states, prefetch=least.prefetch)
        return lay_out(fixed, known, (least.chunk_numel,))

    return together(ranks, agreed, lambda made: {"placement": [made[1].parameters, made[1].optimizer_states]})


@dataclass(frozen=True, slots=True)
class Known:
    """What a model is laid out for, whatever the configuration. `specs`: of each unit's parameters, with its name. `moments`:
    what the optimizer keeps. `rank`: this one's index among those that share the shards. `free`: the memory to go by, where it
    is not that of now."""

    accelerator: Accelerator
    specs: list[tuple[str, list[ParameterSpec]]]
    expected: Expected
    moments: tuple[str, ...]
    sharing: RankGroup = ALONE
    rank: int = 0
    free: FreeMemory | None = None

    def decision(self, config: Config, layout: Layout, free: FreeMemory | None = None) -> Decision:
        """Where things lie in this layout. `free`: where it is not that of now."""
        return Decision(config, self.accelerator, layout, self.expected, self.moments, self.sharing, free)


def specs_of(unit_names: Sequence[str], infos: Sequence[ParameterInfo]) -> list[tuple[str, list[ParameterSpec]]]:
    """What units are laid out by. `infos`: the parameters of all of them."""
    return [(name, parameter_specs(own)) for name, own in zip(unit_names, by_unit(infos, len(unit_names)), strict=True)]


def lay_out(config: Config, known: Known, chunk_numels: Sequence[int] = ()) -> tuple[Layout, Placement]:
    """The layout with the largest chunks with which the placement fits the budgets, and where it is for the engine to choose
    the memory that is free, if any does; where buffers for large ones take a part of the budget smaller chunks are weighed, and
    are taken where the step is shorter with them. Where the host computes the model no device waits for what chunks cost its
    thread, and none are larger than usual: buffers for them would take memory and save no time.

    Raises `BudgetError` if none fits the budgets. `chunk_numels`: what to try instead of the usual.
    """
    specs, sharing = known.specs, known.sharing
    failure: BudgetError | None = None
    found: list[tuple[Layout, Placement]] = []
    weights: list[Weight] = []
    rank_numel = sum(spec.numel for _, unit_specs in specs for spec in unit_specs) // sharing.world_size
    large = large_chunk_numels(rank_numel) if known.accelerator.rates().launch_seconds else ()
    free = known.free or FreeMemory.now(known.accelerator, config.nvme_paths)

    @cache
    def cut(chunk_numel: int) -> tuple[Layout, Decision]:
        layout = build_layout(
            specs, chunk_numel=chunk_numel, world_size=sharing.world_size, rank=known.rank, stage=sharing.stage
        )
        return layout, known.decision(config, layout, free)

    for within_room in (True, False):
        for chunk_numel in chunk_numels or (*large, *CHUNK_NUMELS):
            layout, decision = cut(chunk_numel)
            if chunk_numel in large and decision.always_crowds:
                continue
            try:
                placement = decision.decide(within_room=within_room)
            except BudgetError as error:
                failure = error
                continue
            crowded = decision.buffers_crowd(placement)
            if crowded and chunk_numel in large:
                continue
            found.append((layout, placement))
            weights.append(decision.weight(placement))
            if not crowded:
                break
        if found:
            return found[largest_that_pays(weights)]
    assert failure is not None
    largest = max(layout.units, key=lambda unit: unit.nbytes)
    refusal = BudgetError(f"{failure} The largest unit is {largest.name or '(root)'} with {largest.nbytes} bytes.")
    refusal.smallest_nbytes = failure.smallest_nbytes
    raise refusal from failure
