"""Building the engine's parts for one model: everything that can be wrong is looked at before anything is allocated."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Protocol

import torch
from torch import nn

from offload import _native
from offload.config import Config
from offload.device.accelerator import Accelerator, HomeMemory, UnitMemory
from offload.device.cpu import CpuAccelerator
from offload.device.cuda import CudaAccelerator
from offload.device.deferred import DeferredAccelerator
from offload.errors import BudgetError, ConfigError, InitializerError
from offload.layout import CHUNK_NUMELS, Extent, Layout, ParameterSpec, UnitLayout, build_layout
from offload.runtime.deferred_init import is_deferred, materialize_buffers, name_parameters
from offload.runtime.fetching import DirectFetcher, Fetcher, HomeFetcher, StagedFetcher, chunks_of
from offload.runtime.flats import ChunkOf, Flat, ParameterInfo, Unit, dense_strides
from offload.runtime.gradients import Gradients
from offload.runtime.materialize import InitialValues, Materializer, OptimizerState
from offload.runtime.optimizer import check_optimizer
from offload.runtime.placement import Placement, decide, own_master
from offload.runtime.places import ParameterPlaces, RecordPlaces
from offload.runtime.residency import Residency
from offload.runtime.sinks import CopyInSink, CopyOutSink, InPlaceSink, ParameterSink, ResidentSink, StoreSink
from offload.runtime.timeline import Timeline
from offload.runtime.units import ModuleUnit, partition
from offload.runtime.update import Updates
from offload.runtime.weights import WeightSource, load_buffers
from offload.schedule.budget import Footprint, Tier
from offload.schedule.plan import required_nbytes
from offload.schedule.trace import Trace, guess
from offload.tiers.device import DeviceStore
from offload.tiers.io import IoBackend, open_backend
from offload.tiers.memory import HostMemory, MemoryLedger
from offload.tiers.nvme import NvmeStore
from offload.tiers.scratch import ScratchFolder
from offload.tiers.staging import StagingPool
from offload.tiers.store import CpuStore, Store

DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}
_TRAINABLE_DTYPES = (torch.float32, torch.bfloat16, torch.float16)
ACCELERATOR_VARIABLE = "OFFLOAD_ACCELERATOR"


def choose_accelerator() -> Accelerator:
    """CUDA where torch finds a device, else the CPU; the environment variable OFFLOAD_ACCELERATOR overrides it."""
    name = os.environ.get(ACCELERATOR_VARIABLE, "") or ("cuda" if torch.cuda.is_available() else "cpu")
    if name == "cuda":
        return CudaAccelerator()
    if name == "cpu":
        return CpuAccelerator()
    if name == "deferred":
        return DeferredAccelerator(seed=int(os.environ.get("OFFLOAD_SEED", "0")))
    raise ConfigError(f"{ACCELERATOR_VARIABLE}={name!r} is unknown: expected cuda, cpu or deferred.")


class Closable(Protocol):
    """What holds something that must be given back."""

    def close(self) -> None: ...


def close_all(made: list[Closable]) -> None:
    """Close what was made, last first, emptying the list. One failure does not keep the rest open; the first is raised."""
    failure: Exception | None = None
    while made:
        try:
            made.pop().close()
        except Exception as error:
            failure = failure or error
    if failure is not None:
        raise failure


@dataclass(slots=True)
class Parts:
    """What an engine is made of. Closed in the reverse of the order in which it was made."""

    accelerator: Accelerator
    layout: Layout
    placement: Placement
    units: list[Unit]
    parameters: list[ParameterInfo]
    pool: StagingPool
    ledger: MemoryLedger
    timeline: Timeline
    fetcher: Fetcher
    residency: Residency
    places: ParameterPlaces | None = None
    records: RecordPlaces | None = None
    gradients: Gradients | None = None
    updates: Updates | None = None
    backend: IoBackend | None = None
    made: list[Closable] = field(default_factory=list)

    def close(self) -> None:
        """Stop and give back everything, last made first. Idempotent. Raises the first failure, after all of it."""
        close_all(self.made)


def describe_parameters(
    model: nn.Module, module_units: list[ModuleUnit], optimizer: torch.optim.Optimizer | None, dtype: torch.dtype | None
) -> list[ParameterInfo]:
    """Every parameter of the model, in the units' order. Raises `ConfigError` where the optimizer does not match it."""
    names: dict[int, list[str]] = {}
    for fqn, parameter in model.named_parameters(remove_duplicate=False):
        names.setdefault(id(parameter), []).append(fqn)
    groups = _group_indices(optimizer, names)
    infos: list[ParameterInfo] = []
    for unit_index, unit in enumerate(module_units):
        for fqn, parameter in unit.parameters:
            group_index = groups.get(id(parameter))
            # A parameter that requires a gradient but is in no group is autograd's and the user's: its `grad` is
            # ordinary.
            trainable = parameter.requires_grad and group_index is not None
            run_dtype = dtype if dtype is not None and parameter.is_floating_point() else parameter.dtype
            if trainable and run_dtype not in _TRAINABLE_DTYPES:
                raise ConfigError(f"parameter {fqn!r} is of dtype {run_dtype}: a trained parameter must be fp32, bf16 or fp16.")
            infos.append(
                ParameterInfo(
                    index=len(infos),
                    fqns=tuple(names[id(parameter)]),
                    parameter=parameter,
                    shape=parameter.shape,
                    stride=dense_strides(parameter),
                    dtype=run_dtype,
                    trainable=trainable,
                    group_index=group_index if trainable else None,
                    unit_index=unit_index,
                )
            )
    return infos


def _group_indices(optimizer: torch.optim.Optimizer | None, names: Mapping[int, list[str]]) -> dict[int, int]:
    groups: dict[int, int] = {}
    for group_index, group in enumerate(optimizer.param_groups if optimizer is not None else ()):
        for position, parameter in enumerate(group["params"]):
            if id(parameter) not in names:
                raise ConfigError(
                    f"parameter {position} of the optimizer's group {group_index} (shape {tuple(parameter.shape)}) "
                    "is not in the model: "
                    "build the optimizer from the parameters of the model that is passed to initialize."
                )
            groups[id(parameter)] = group_index
    return groups


def parameter_specs(infos: Iterable[ParameterInfo]) -> list[ParameterSpec]:
    """What the layout needs to know of the parameters."""
    return [
        ParameterSpec(
            index=info.index,
            numel=info.numel,
            dtype=str(info.dtype).removeprefix("torch."),
            itemsize=info.dtype.itemsize,
            trainable=info.trainable,
            group_index=info.group_index or 0,
        )
        for info in infos
    ]


def _check_values(infos: Iterable[ParameterInfo], covered: Mapping[str, str]) -> None:
    for info in infos:
        has_value = not info.parameter.is_meta or is_deferred(info.parameter) or any(fqn in covered for fqn in info.fqns)
        if not has_value:
            raise InitializerError(
                f"parameter {info.fqn!r} is on the meta device and nothing says what its value is: build the model "
                "inside "
                "`with offload.deferred_init():`, or pass weights= to initialize."
            )


class Assembly:
    """Builds `Parts`; if anything fails on the way, what was made is closed again."""

    def __init__(
        self, model: nn.Module, optimizer: torch.optim.Optimizer | None, config: Config, weights: WeightSource | None
    ) -> None:
        self._model, self._optimizer, self._config, self._source = model, optimizer, config, weights

    def build(self) -> Parts:
        config, model = self._config, self._model
        if self._optimizer is not None:
            check_optimizer(self._optimizer)
        module_units = partition(model)
        dtype = DTYPES[config.dtype] if config.dtype is not None else None
        infos = describe_parameters(model, module_units, self._optimizer, dtype)
        if not infos:
            raise ConfigError(f"{type(model).__name__} has no parameters.")
        name_parameters(model)
        covered = self._source.match(model) if self._source is not None else {}
        _check_values(infos, covered)
        by_unit = [[info for info in infos if info.unit_index == index] for index in range(len(module_units))]
        accelerator = choose_accelerator()
        _native.warn_if_missing()
        trace = guess(0, range(1, len(module_units)))
        specs = [(unit.name, parameter_specs(members)) for unit, members in zip(module_units, by_unit, strict=True)]
        layout, placement = lay_out(config, accelerator, specs, trace)
        building = _Building(accelerator, layout, placement, config)
        try:
            if self._source is not None:
                load_buffers(model, self._source, covered)
            return building.finish(module_units, by_unit, trace, InitialValues(self._source, covered), self._state_of)
        except BaseException:
            building.close()
            raise

    def _state_of(self, info: ParameterInfo) -> OptimizerState:
        state: Mapping[torch.Tensor, OptimizerState] = self._optimizer.state if self._optimizer is not None else {}
        return state.get(info.parameter, {})


def lay_out(
    config: Config, accelerator: Accelerator, specs: list[tuple[str, list[ParameterSpec]]], trace: Trace
) -> tuple[Layout, Placement]:
    """The layout with the largest chunks with which the placement fits the budgets. Raises `BudgetError` if none does."""
    failure: BudgetError | None = None
    for chunk_numel in CHUNK_NUMELS:
        layout = build_layout(specs, chunk_numel=chunk_numel)
        try:
            return layout, _decide(config, accelerator, layout, trace)
        except BudgetError as error:
            failure = error
    assert failure is not None
    largest = max(layout.units, key=lambda unit: unit.nbytes)
    refusal = BudgetError(f"{failure} The largest unit is {largest.name or '(root)'} with {largest.nbytes} bytes.")
    refusal.smallest_nbytes = failure.smallest_nbytes
    raise refusal from failure


def _decide(config: Config, accelerator: Accelerator, layout: Layout, trace: Trace) -> Placement:
    def footprint_of(parameters: Tier, states: Tier) -> Footprint:
        return _footprint(accelerator, layout, parameters, states)

    return decide(config, accelerator, footprint_of, lambda prefetch: _capacity(layout, trace, prefetch))


def _footprint(accelerator: Accelerator, layout: Layout, parameters: Tier, states: Tier) -> Footprint:
    return Footprint.of(layout, [own_master(accelerator, parameters, states, flat.dtype) for flat in layout.flats])


def _capacity(layout: Layout, trace: Trace, prefetch: int) -> int:
    return required_nbytes(trace, [unit.nbytes for unit in layout.units], prefetch)


class _Building:
    """The parts while they are made, so that a failure can take them down."""

    def __init__(self, accelerator: Accelerator, layout: Layout, placement: Placement, config: Config) -> None:
        self._accelerator, self._layout, self._placement, self._config = accelerator, layout, placement, config
        self._ledger = MemoryLedger()
        self._made: list[Closable] = [accelerator]
        self._backend: IoBackend | None = None
        self._scratch: ScratchFolder | None = None
        self._home: torch.Tensor | None = None
        self._home_offset_nbytes = 0

    def close(self) -> None:
        """Take down what was made, last first."""
        close_all(self._made)

    def finish(
        self,
        module_units: list[ModuleUnit],
        by_unit: list[list[ParameterInfo]],
        trace: Trace,
        values: InitialValues,
        state_of: Callable[[ParameterInfo], OptimizerState],
    ) -> Parts:
        accelerator, placement = self._accelerator, self._placement
        self._open_storage()
        units = [
            self._unit(unit, layout, infos)
            for unit, layout, infos in zip(module_units, self._layout.units, by_unit, strict=True)
        ]
        chunks = [chunk_of for unit in units for chunk_of in chunks_of(unit)]
        trainable = [chunk_of for chunk_of in chunks if chunk_of.flat.layout.trainable]
        places = ParameterPlaces(chunks, self._store_factory(placement.parameters)) if self._fetches_or_stores else None
        records = (
            RecordPlaces(trainable, self._store_factory(placement.optimizer_states), self._has_master) if trainable else None
        )
        pool = self._staging_pool()
        timeline = Timeline()
        materializer = Materializer(accelerator, places, records, values, state_of, self._ledger)
        for unit in units:
            materializer.unit(unit)
            unit.point_parameters_at_flats()
        materialize_buffers(module_units[0].module)
        gradients = updates = None
        if records is not None:
            on_device = placement.gradients == "device"
            make_gradients = self._store_factory(placement.gradients)
            gradients = Gradients(trainable, make_gradients, pool, accelerator, on_device=on_device)
            updates = Updates(records, gradients, self._sink(places, pool), pool, accelerator, timeline)
            self._made.extend((gradients, updates))
        fetcher = self._fetcher(places, pool, updates)
        self._made.append(fetcher)
        residency = Residency(
            units,
            fetcher,
            updates,
            trace=trace,
            capacity_nbytes=placement.unit_capacity_nbytes if self._has_unit_budget else None,
            prefetch=placement.prefetch,
            timeline=timeline,
        )
        parameters = [info for infos in by_unit for info in infos]
        made, self._made = self._made, []
        return Parts(
            accelerator=accelerator, layout=self._layout, placement=placement, units=units, parameters=parameters, pool=pool,
            ledger=self._ledger, timeline=timeline, fetcher=fetcher, residency=residency, places=places, records=records,
            gradients=gradients, updates=updates, backend=self._backend, made=made,
        )  # fmt: skip

    # ---- tiers ---------------------------------------------------------------------------------------------------

    def _open_storage(self) -> None:
        if self._placement.uses_nvme:
            self._backend = open_backend()
            self._made.append(self._backend)
            self._scratch = ScratchFolder(self._config.nvme_paths)
            self._made.append(self._scratch)

    def _store_factory(self, tier: Tier) -> Callable[[str, Iterable[Extent]], Store]:
        def make(name: str, extents: Iterable[Extent]) -> Store:
            store: Store
            if tier == "nvme":
                assert self._scratch is not None and self._backend is not None
                store = NvmeStore(name.replace(" ", "-"), extents, self._scratch, self._backend)
            elif tier == "device" and not self._accelerator.unified:
                store = DeviceStore(name, extents, self._accelerator.device)
            else:
                store = CpuStore(name, extents, ledger=self._ledger, register=self._accelerator.pin)
            self._made.append(store)
            return store

        return make

    def _staging_pool(self) -> StagingPool:
        pool = StagingPool(ledger=self._ledger, register=self._accelerator.pin)
        for purpose, (count, nbytes) in self._placement.staging.items():
            pool.reserve(purpose, count, nbytes)
        pool.freeze()
        self._made.append(pool)
        return pool

    # ---- units ---------------------------------------------------------------------------------------------------

    @property
    def _fetches_or_stores(self) -> bool:
        """Whether parameters have a home in a store, rather than for good in memory that the device computes on."""
        return self._placement.unit_capacity_nbytes is not None

    @property
    def _has_unit_budget(self) -> bool:
        limits = [self._config.device_memory, self._config.cpu_memory if self._accelerator.unified else None]
        return any(limit is not None for limit in limits)

    def _unit(self, module_unit: ModuleUnit, layout: UnitLayout, infos: list[ParameterInfo]) -> Unit:
        by_index = {info.index: info for info in infos}
        flats = []
        for flat_layout in layout.flats:
            members = [by_index[slot.parameter_index] for slot in flat_layout.slots]
            memory = self._memory(flat_layout.nbytes)
            flats.append(Flat(flat_layout, memory, members[0].dtype, members))
            if self._fetches_or_stores and memory.filled:
                memory.empty()
        return Unit(layout, module_unit.module, flats, infos)

    def _memory(self, nbytes: int) -> UnitMemory:
        if self._fetches_or_stores or not self._accelerator.unified:
            return self._accelerator.unit_memory(nbytes)
        if self._home is None:
            total_nbytes = sum(flat.nbytes for flat in self._layout.flats)
            memory = HostMemory(total_nbytes, "parameters", ledger=self._ledger)
            self._made.append(memory)
            self._home = memory.tensor
        offset, self._home_offset_nbytes = self._home_offset_nbytes, self._home_offset_nbytes + nbytes
        return HomeMemory(self._home[offset : offset + nbytes])

    # ---- ways ----------------------------------------------------------------------------------------------------

    def _has_master(self, chunk_of: ChunkOf) -> bool:
        placement = self._placement
        return own_master(self._accelerator, placement.parameters, placement.optimizer_states, chunk_of.flat.layout.dtype)

    def _sink(self, places: ParameterPlaces | None, pool: StagingPool) -> ParameterSink:
        accelerator, on_device = self._accelerator, self._placement.optimizer_states == "device"
        if accelerator.unified:
            return InPlaceSink() if places is None else ResidentSink(places)
        if places is None:
            return InPlaceSink() if on_device else CopyInSink(accelerator, pool)
        return CopyOutSink(accelerator, places, pool) if on_device else StoreSink(places, pool)

    def _fetcher(self, places: ParameterPlaces | None, pool: StagingPool, updates: Updates | None) -> Fetcher:
        if places is None:
            return HomeFetcher()
        if self._accelerator.unified:
            return DirectFetcher(places)
        return StagedFetcher(self._accelerator, places, pool, updates)
