# SPDX-License-Identifier: Apache-2.0
"""Bringing a model's initial values into the tiers, one unit at a time, one chunk at a time.

Values come from the parameter itself, from the replay of its recorded initialiser (`deferred_init`), or from a
safetensors file; records from the user's optimizer where that has state already. What the host cannot write to where it
lies is made in a registered buffer: one for files, two for the device, of which one is copied while the other is filled. They
lie in the memory of the buffers that training has, if that is as much: where something trained lies in a file it is. Peak
host memory beside the tiers and those is one unit's values, and what a file has of them in other pieces than the model.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass
from functools import partial
from types import MappingProxyType

import torch
from torch import nn

from offload.deferred_init.deferred_init import held_values, materialize, value_of
from offload.deferred_init.recording import Value
from offload.device.accelerator import Accelerator
from offload.device.arithmetic.records import Record
from offload.device.arithmetic.segment import MASTER, REMAINDER
from offload.device.pending import AllOf
from offload.model.chunk import Chunk
from offload.model.flat import ParameterInfo
from offload.model.optimizer_kinds import InitialState
from offload.model.unit import Unit
from offload.model.weight_names import persistent_buffers
from offload.model.weights import WeightSource
from offload.planning.route import Memory
from offload.progress import EVERY_NBYTES, Progress
from offload.ranks.all_or_none import checksum
from offload.step.chunk_stores import ParameterStore, RecordStore
from offload.tiers.memory import MemoryLedger
from offload.tiers.staging import StagingPool

_log = logging.getLogger(__name__)

_TO_FILE, _TO_DEVICE = "initial values for files", "initial values for the device"
_COUNTS = {_TO_FILE: 1, _TO_DEVICE: 2}
"""Buffers: to the device the last chunk is copied while the next is made."""
_SAID_EVERY_NBYTES = EVERY_NBYTES


def initial_buffers(
    model: nn.Module, source: WeightSource | None, names: Mapping[str, str], device: torch.device
) -> dict[int, torch.Tensor]:
    """What is to take the place of tensors that `model` holds besides parameters, by their ids: what `source` holds of
    buffers under `names`, what deferred ones are, and every buffer on the device that computes. The model stays as it is."""
    values = held_values(list(model.modules()))
    for fqn, buffer in persistent_buffers(model):
        if source is not None and fqn in names:
            values[id(buffer)] = source.load(names[fqn]).to(buffer.dtype)
    for buffer in model.buffers():
        value = values.get(id(buffer), buffer)
        if value.device != device:
            values[id(buffer)] = value.to(device)
    return values


class InitialValues:
    """Where each parameter's initial value comes from."""

    def __init__(
        self,
        source: WeightSource | None = None,
        names: Mapping[str, str] = MappingProxyType({}),
        parameters: Mapping[str, nn.Parameter] = MappingProxyType({}),
        *,
        keeps_checksums: bool = False,
        share: Callable[[torch.Tensor], torch.Tensor] | None = None,
        rounded_to: torch.dtype | None = None,
    ) -> None:
        """`names` in `source` and `parameters`: by fqn.

        keeps_checksums  so that ranks can tell whether they start from the same values
        share            what makes one rank's values everybody's; None: each takes its own
        rounded_to       what fp32 values are rounded to, and stay fp32; None: nothing
        """
        self._source, self._names, self._share, self._rounded_to = source, names, share, rounded_to
        self._loaded: dict[Value, Callable[[], torch.Tensor]] = {}
        """What is recorded of parameters that come from `source`: adapters are computed from what that holds."""
        if source is not None:
            for fqn, name in names.items():
                recorded = value_of(parameters[fqn]) if fqn in parameters else None
                if recorded is not None:
                    self._loaded[recorded] = partial(_loaded, source, name, parameters[fqn])
        self._checksums: dict[str, int] | None = {} if keeps_checksums else None

    def facts(self) -> dict[str, int]:
        """What must be equal on all ranks: the checksums of all values asked for so far."""
        return {f"the initial value of {fqn!r}": value for fqn, value in (self._checksums or {}).items()}

    def of(self, infos: Sequence[ParameterInfo]) -> dict[int, torch.Tensor]:
        """Values by parameter index: CPU (or the parameter's own device), [numel] in the order of the slot, the dtype they come
        in."""
        values: dict[int, torch.Tensor] = {}
        replayed: list[ParameterInfo] = []
        for info in infos:
            name = next((self._names[fqn] for fqn in info.fqns if fqn in self._names), None)
            if name is not None and self._source is not None:
                values[info.index] = self._source.load(name)
            elif info.parameter.is_meta:
                replayed.append(info)
            else:
                values[info.index] = info.parameter.detach()
        if replayed:
            tensors = [info.parameter for info in replayed]
            for info, value in zip(replayed, materialize(tensors, self._loaded), strict=True):
                values[info.index] = value
        if self._share is not None:
            values = {info.index: self._share(values[info.index]) for info in infos}
        if self._rounded_to is not None:
            values = {
                index: value.to(self._rounded_to).to(value.dtype) if value.dtype == torch.float32 else value
                for index, value in values.items()
            }
        if self._checksums is not None:
            self._checksums.update({info.fqn: checksum(values[info.index]) for info in infos})
        return {info.index: info.in_memory_order(values.pop(info.index)) for info in infos}


def _loaded(source: WeightSource, name: str, parameter: nn.Parameter) -> torch.Tensor:
    """What `source` holds, as the parameter has it."""
    return torch.empty_like(parameter, device="cpu", requires_grad=False).copy_(source.load(name))


class NoValues(InitialValues):
    """Zeros: a load is about to bring the values."""

    def of(self, infos: Sequence[ParameterInfo]) -> dict[int, torch.Tensor]:
        return {info.index: torch.zeros((), dtype=info.dtype, device="cpu").expand(info.numel) for info in infos}


@dataclass(frozen=True, slots=True)
class _Content:
    """What a unit begins with: values, and moments by name, both by parameter index and as [numel] in the order of the slot."""

    values: Mapping[int, torch.Tensor]
    moments: Mapping[int, Mapping[str, torch.Tensor]]
    """Of what is trained."""

    def given(self, chunk: Chunk) -> set[str]:
        """The moments that there are of any of the chunk."""
        return {name for info in chunk.infos for name in self.moments.get(info.index, {})}


class Materializer:
    """Fills the tiers unit by unit. Used once, by `initialize`."""

    def __init__(
        self,
        accelerator: Accelerator,
        parameter_store: ParameterStore,
        records: RecordStore | None,
        values: InitialValues,
        state_of: Callable[[ParameterInfo], InitialState],
        ledger: MemoryLedger,
        pool: StagingPool,
    ) -> None:
        """`pool`: that of training, whose memory serves as long as nobody trains."""
        self._accelerator, self._parameter_store, self._records = accelerator, parameter_store, records
        self._values, self._state_of = values, state_of
        self._pool = StagingPool(ledger=ledger, register=accelerator.pin, purpose="initial values", within=pool)
        self._in_use: list[str] = []

    def run(self, units: Sequence[Unit]) -> None:
        """Bring every unit's values and records into their tiers, and let go of what its parameters held before."""
        for purpose, count in _COUNTS.items():
            nbytes = max(nbytes for unit in units for nbytes in (0, *self._staged_nbytes(unit, purpose)))
            if nbytes:
                self._pool.reserve(purpose, count, nbytes)
                self._in_use.append(purpose)
        self._pool.freeze()
        try:
            self._accelerator.copy_in_after_compute()  # which zeroed the memory that is copied into
            total_nbytes = sum(unit.layout.nbytes for unit in units)
            progress = Progress(
                _log, "initialize: %.1f of %.1f GiB of parameters are in place", total_nbytes, _SAID_EVERY_NBYTES
            )
            for unit in units:
                self._unit(unit)
                self._parameter_store.settle_writes()
                if self._records is not None:
                    self._records.settle_writes()
                progress.add(unit.layout.nbytes)
            for purpose in self._in_use:
                for _ in range(_COUNTS[purpose]):
                    self._pool.lease(purpose)  # waits for its last use
        finally:
            self._pool.close()

    def _unit(self, unit: Unit) -> None:
        moments = {info.index: self._initial_moments(info) for info in unit.parameters if info.trainable}
        content = _Content(self._values.of(unit.parameters), moments)
        for chunk in unit.homes:
            self._chunk_parameters(chunk, content)
        for records, chunk in self._record_chunks(unit):
            self._chunk_record(records, chunk, content)

    def _record_chunks(self, unit: Unit) -> list[tuple[RecordStore, Chunk]]:
        records = self._records
        return [(records, one) for one in unit.trained_chunks] if records is not None else []

    def _initial_moments(self, info: ParameterInfo) -> dict[str, torch.Tensor]:
        """What the user's optimizer holds for this parameter already, in slot order; takes over its step count."""
        state = self._state_of(info)
        info.step = state.step
        return {name: info.in_memory_order(moment) for name, moment in state.moments.items()}

    # ---- where a chunk's home lies ---------------------------------------------------------------------------------

    def _home(self, chunk: Chunk) -> torch.Tensor | None:
        """The memory in which its parameters lie for good, uint8; None: a file."""
        stored = self._parameter_store.view(chunk)
        return stored[: chunk.nbytes] if stored is not None else None

    def _staged_nbytes(self, unit: Unit, purpose: str) -> Iterator[int]:
        """The sizes of what of the unit is made in a buffer for `purpose`."""
        for chunk in unit.homes:
            home = self._home(chunk)
            if home is None and purpose == _TO_FILE:
                yield self._parameter_store.nbytes(chunk)
            elif home is not None and purpose == _TO_DEVICE and chunk.route.home_in is Memory.DEVICE:
                yield chunk.nbytes
        for records, chunk in self._record_chunks(unit):
            home = records.view(chunk)
            if home is None and purpose == _TO_FILE:
                yield records.nbytes(chunk)
            elif home is not None and purpose == _TO_DEVICE and chunk.route.records_in is Memory.DEVICE:
                given = {name for info in chunk.infos for name in self._state_of(info).moments}
                yield sum(count * dtype.itemsize for _, dtype, count in _written(records, chunk, given))

    # ---- chunks ----------------------------------------------------------------------------------------------------

    def _chunk_parameters(self, chunk: Chunk, content: _Content) -> None:
        home = self._home(chunk)
        if home is None:
            lease = self._pool.lease(_TO_FILE)
            made = lease.tensor[: self._parameter_store.nbytes(chunk)].zero_()
            self._put_values(chunk, made[: chunk.nbytes], content)
            lease.release(after=self._parameter_store.write(chunk, made))
        elif chunk.route.home_in is Memory.HOST:
            self._put_values(chunk, home, content)
        else:
            lease = self._pool.lease(_TO_DEVICE)
            made = lease.tensor[: chunk.nbytes].zero_()
            self._put_values(chunk, made, content)
            lease.release(after=self._accelerator.copy_in(home, made))

    def _put_values(self, chunk: Chunk, target: torch.Tensor, content: _Content) -> None:
        typed = target.view(chunk.flat.dtype)
        for info, piece in chunk.pieces:
            part = content.values[info.index][piece.in_parameter]
            goal = typed[piece.start - chunk.start : piece.stop - chunk.start]
            if self._records is not None and info.trainable and self._records.format(chunk).state_format.is_split:
                self._records.format(chunk).round_values(goal, part.float())
            else:
                goal.copy_(part)

    def _chunk_record(self, records: RecordStore, chunk: Chunk, content: _Content) -> None:
        if not (records.format(chunk).own_master or content.given(chunk)) or not records.nbytes(chunk):
            return  # a store reads as zeros where nothing was written, and zero is what moments start from
        home = records.view(chunk)
        if home is None:
            lease = self._pool.lease(_TO_FILE)
            made = lease.tensor[: records.nbytes(chunk)].zero_()
            self._put_record(chunk, records.over(chunk, made), content)
            lease.release(after=records.write(chunk, made))
        elif chunk.route.records_in is Memory.HOST:
            self._put_record(chunk, records.over(chunk, home), content)
        else:
            self._copy_record(records, chunk, home, content)

    def _copy_record(self, records: RecordStore, chunk: Chunk, home: torch.Tensor, content: _Content) -> None:
        """To the device, those arrays that are not zeros there already."""
        lease = self._pool.lease(_TO_DEVICE)
        arrays, start = {}, 0
        for name, dtype, count in _written(records, chunk, content.given(chunk)):
            stop = start + count * dtype.itemsize
            arrays[name], start = lease.tensor[start:stop].zero_().view(dtype), stop
        self._put_record(chunk, Record(records.format(chunk), arrays), content)
        targets = records.over(chunk, home).arrays
        lease.release(after=AllOf([self._accelerator.copy_in(targets[name], array) for name, array in arrays.items()]))

    @staticmethod
    def _put_record(chunk: Chunk, record: Record, content: _Content) -> None:
        for info, piece in chunk.pieces:
            low, high, part = piece.start - chunk.start, piece.stop - chunk.start, piece.in_parameter
            record.put_master(low, high, content.values[info.index][part])
            for name, moment in content.moments.get(info.index, {}).items():
                if name in record.arrays:
                    record.put_moment(name, low, high, moment[part])


def _written(records: RecordStore, chunk: Chunk, given: Set[str]) -> list[tuple[str, torch.dtype, int]]:
    """The arrays (as `RecordFormat.arrays`) of a chunk's record that do not start from zeros. `given`: moments there are."""
    arrays = records.format(chunk).arrays(chunk.numel)
    return [array for array in arrays if array[0] in (MASTER, REMAINDER) or array[0].removesuffix("_scale") in given]
