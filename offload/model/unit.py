# SPDX-License-Identifier: Apache-2.0
"""One unit while the engine runs: what is fetched together, and where it is on its way between its home and device memory.

    Unit           a module's parameters: its flats, its chunks, its run-time state
    UnitUses       who uses it in device memory
    UnitUpdate     its update, in `offload.model.update`; all else that is remembered of it in `offload.model.unit_state`

The actors of `offload.step` do things to units and keep queues of them; what one of them has to remember of a unit lies here.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from operator import attrgetter

import torch
from torch import nn

from offload.errors import InitializerError
from offload.layout import UnitLayout
from offload.model.chunk import Chunk
from offload.model.flat import Flat, ParameterInfo
from offload.model.guard import GuardsTogether
from offload.model.partition import share_parameters
from offload.model.set_each import set_each
from offload.model.unit_state import Fetch, UnitGradient, UnitResidency, UnitShard, UnitState
from offload.model.update import EarlyUpdate, UnitUpdate
from offload.planning.route import Route, ValuePath


@dataclass(slots=True, eq=False)
class UnitUses:
    """Written by `Uses` alone, as `UnitResidency` is by its own.

    count         uses that have started and not ended; a unit in use is never evicted
    held_count    those of them that last until `Uses.release`, whatever forwards come and go: at most `count`
    called_count  those of them that are its own: neither held, nor of a unit whose companion it is
    companions    units that come and go with this one, beside their own uses: it computes with their parameters
    """

    count: int = 0
    held_count: int = 0
    called_count: int = 0
    companions: list[Unit] = field(default_factory=list)


def _recurrent(modules: Iterable[nn.Module]) -> list[nn.RNNBase]:
    return [child for module in modules for child in module.modules() if isinstance(child, nn.RNNBase)]


def refer_to_own_weights(modules: Iterable[nn.Module]) -> None:
    """Recurrent modules keep weak references to their own weights: as they are made with them. Can be done at any time."""
    for child in _recurrent(modules):
        child._flat_weight_refs = [None if weight is None else weakref.ref(weight) for weight in child._flat_weights]


@contextmanager
def _without_weak_references(modules: Sequence[nn.Module]) -> Iterator[None]:
    """`swap_tensors` refuses tensors with weak references."""
    try:
        for child in _recurrent(modules):
            child._flat_weight_refs = []
        yield
    finally:
        refer_to_own_weights(modules)


def _twin(parameter: nn.Parameter, value: torch.Tensor) -> nn.Parameter:
    """A Parameter of the same class and with the same attributes as another, over `value`."""
    twin: nn.Parameter = torch.Tensor._make_subclass(type(parameter), value, parameter.requires_grad)
    twin.__dict__.update(parameter.__dict__)
    return twin


def _swap(info: ParameterInfo, twin: nn.Parameter) -> None:
    try:
        torch.utils.swap_tensors(info.parameter, twin)
    except RuntimeError as error:
        raise InitializerError(
            f"parameter {info.fqn!r} is on the meta device and cannot be given memory, because something else refers to it: "
            f"{error}. Drop what refers to it (a weak reference, a graph of an earlier forward) before initialize."
        ) from error


_LENT_COUNT_OF, _VERSION_OF = attrgetter("lent_count"), attrgetter("_version")


@dataclass(slots=True, eq=False)
class Unit:
    """One unit at run time."""

    layout: UnitLayout
    modules: list[nn.Module]
    """Those whose forward uses the unit."""
    flats: list[Flat]
    parameters: list[ParameterInfo]
    route: Route
    residency: UnitResidency = field(default_factory=UnitResidency)
    uses: UnitUses = field(default_factory=UnitUses)
    shard: UnitShard = field(default_factory=UnitShard)
    version: int = 0
    """How often its values have changed since the engine was made. Written where they do, as `shard` is."""
    fetch: Fetch | None = None
    """Written by the fetcher, in the thread that drives the model; its copies are added by the fetcher's lane."""
    update: UnitUpdate | None = None
    """Enqueued and not finished: the parameters are not yet those of the last step. Written by `Updates`, in the thread whose
    turn it is; the others read it."""
    early: EarlyUpdate | None = None
    """While an update that began before the norm was known can be undone. Written by `Speculation`, in the thread that drives
    the model (and backward's)."""
    was_read: bool = False
    """Whether its values, which are there for good, were read outside of its uses since the last step. Written by `Uses`."""
    gradient: UnitGradient = field(default_factory=UnitGradient)
    """Of use where there are several ranks."""
    chunks: list[Chunk] = field(init=False)
    """What this rank keeps of it, in order; `trained_chunks`: what it updates of it."""
    trained_chunks: list[Chunk] = field(init=False)
    shares_parameters: bool = field(init=False)
    """Whether several of its modules use one of them."""
    _parts: dict[int, list[ParameterInfo]] = field(init=False)
    """By id of a module, where several have nothing in common: its parameters."""
    _open: dict[int, ParameterInfo] = field(init=False, default_factory=dict)
    """By index, where there are such parts: those that may not be guarded."""
    _guarded_readable: bool | None = field(init=False, default=None)
    """How the others are guarded; where there are no such parts how all are. None: not all of them, or not known."""
    _together: GuardsTogether = field(init=False)
    """The guards of all its parameters; until `join_guards` those that they have of an engine before, if any."""
    _tensors: list[nn.Parameter] = field(init=False)
    _versions: list[int] = field(init=False, default_factory=list)
    """PyTorch's counts of in-place writes when all were last opened together. No `seen_version` is behind them."""
    index: int = field(init=False)
    needs_residency: bool = field(init=False)
    """Whether it must be in device memory while it is updated."""
    largest_gradient_nbytes: int = field(init=False)
    """As autograd computes it: whole, in the parameter's dtype."""

    def __post_init__(self) -> None:
        self.index, self._tensors = self.layout.index, [info.parameter for info in self.parameters]
        self.needs_residency = self.route.value_path is ValuePath.RESIDENT
        trained_nbytes = (info.numel * info.dtype.itemsize for info in self.parameters if info.trainable)
        self.largest_gradient_nbytes = max(trained_nbytes, default=0)
        self.shares_parameters = share_parameters(self.modules)
        self._parts = self._split() if len(self.modules) > 1 and not self.shares_parameters else {}
        self.chunks = [chunk for flat in self.flats for chunk in flat.chunks]
        self.trained_chunks = [chunk for chunk in self.chunks if chunk.flat.layout.trainable]
        self.join_guards()

    def _split(self) -> dict[int, list[ParameterInfo]]:
        part_of = {id(parameter): id(module) for module in self.modules for parameter in module.parameters()}
        parts: dict[int, list[ParameterInfo]] = {id(module): [] for module in self.modules}
        for info in self.parameters:
            for part in parts.values() if id(info.parameter) not in part_of else [parts[part_of[id(info.parameter)]]]:
                part.append(info)
        return parts

    def part_of(self, module_id: int | None) -> list[ParameterInfo]:
        """What a call of the module uses: of blocks that were joined the block's own, else all."""
        return self._parts.get(module_id, self.parameters) if module_id is not None else self.parameters

    @property
    def has_parts(self) -> bool:
        """Whether it is of several modules that have nothing in common."""
        return bool(self._parts)

    @property
    def parts(self) -> list[list[ParameterInfo]]:
        """What calls of its modules use, apart where they have nothing in common."""
        return list(self._parts.values()) or [self.parameters]

    @property
    def open_parameters(self) -> Iterable[ParameterInfo]:
        """Those that were opened, of a unit in use."""
        return list(self._open.values()) if self._parts else self.parameters

    @property
    def written_parameters(self) -> list[ParameterInfo]:
        """Those of them that something wrote to in place since."""
        if not self._parts and list(map(_VERSION_OF, self._tensors)) == self._versions:
            return []
        return [info for info in self.open_parameters if info.was_written]

    @property
    def records_visit(self) -> bool:
        """Whether its records are on the device, their homes behind."""
        return bool(self.trained_chunks) and self.trained_chunks[0].visiting is not None

    @property
    def name(self) -> str:
        return self.layout.name or "(root)"

    def __repr__(self) -> str:
        return f"<Unit {self.name}>"

    def point_parameters_at_flats(self, held: dict[int, torch.Tensor]) -> None:
        """Make every parameter of the unit a view of its flat.

        `held` gets, by parameter index and before the parameter changes, what it held; of one on the meta device the
        Parameter that it is swapped with.
        """
        for flat in self.flats:
            for info in flat.parameters:
                view, info.lent_count = info.view, 0
                if info.parameter.is_meta:
                    # `.data` cannot change the kind of a tensor; swapping keeps the Parameter that the optimizer knows.
                    held[info.index] = twin = _twin(info.parameter, view)
                    with _without_weak_references(self.modules):
                        _swap(info, twin)
                else:
                    held[info.index] = info.parameter.data
                    info.parameter.data = view

    def fill(self) -> None:
        """Give its flats memory: all of them or, where that raises, none."""
        for position, flat in enumerate(self.flats):
            try:
                flat.memory.fill()
            except BaseException:
                for filled in self.flats[:position]:
                    filled.memory.empty()
                raise

    @property
    def homes(self) -> list[Chunk]:
        """What this rank keeps of its parameters: where they stay on the device that is all of them, on every rank."""
        return self.chunks if self.route.has_store else [chunk for flat in self.flats for chunk in flat.homes()]

    def open_up(self, module_id: int | None = None) -> None:
        """What a call of the module uses, or all."""
        if not self._parts:
            self._open_all()
            return
        for info in self.part_of(module_id):
            if info.index in self._open and info.guard is not None:
                continue
            self._open[info.index] = info
            if info.guard is not None:
                info.guard.open_up()
            info.seen_version = info.parameter._version  # now: to ask a guarded parameter takes longer than all else here

    def join_guards(self) -> None:
        """Each of its parameters has another guard now, for as long as the unit is an engine's."""
        self._together = GuardsTogether([info.guard for info in self.parameters if info.guard is not None])
        self._guarded_readable = None

    def _open_all(self) -> None:
        self._guarded_readable = None
        self._together.open_up()
        versions = list(map(_VERSION_OF, self._tensors))
        if versions != self._versions:
            set_each(self.parameters, "seen_version", versions)
            self._versions = versions

    def close_off(self) -> None:
        """Guard all but those that are gathered. What is there for good, with no update to come, may be read; where one may
        begin early, once that is known."""
        residency = self.residency
        is_there = not residency.nbytes or (residency.persistent and residency.state is UnitState.RESIDENT)
        readable = is_there and self.update is None and (self.was_read or not self.route.undoable)
        if not self._parts:
            if self._guarded_readable is not readable:
                self._guarded_readable = readable if self._close_all(readable) else None
            return
        closed = self._open.values() if self._guarded_readable is readable else self.parameters
        for info in closed:
            if info.guard is not None and not info.lent_count:
                info.guard.close_off(readable=readable)
        self._guarded_readable = readable
        self._open = {index: info for index, info in self._open.items() if info.lent_count}

    def _close_all(self, readable: bool) -> bool:
        """Guard what is not gathered; whether that is all."""
        if not any(map(_LENT_COUNT_OF, self.parameters)):
            self._together.close_off(readable=readable)
            return True
        for info in self.parameters:
            if info.guard is not None and not info.lent_count:
                info.guard.close_off(readable=readable)
        return False

    def leave(self) -> None:
        """The engine is closed: what lay in a tier has no value any more."""
        for info in self.parameters if self.route.has_store else ():
            if info.guard is not None and not info.lent_count:
                info.guard.leave()

    def lend(self, info: ParameterInfo) -> None:
        """Open one of its parameters, which stays open until its `lent_count` is 0 again."""
        assert info.guard is not None
        info.guard.open_up()
        if self._parts:
            self._open[info.index] = info
        else:
            self._guarded_readable = None
