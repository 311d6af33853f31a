"""Bringing a model's initial values into the tiers, one unit at a time, one chunk at a time.

Values come from the parameter itself, from the replay of its recorded initialiser (`deferred_init`), or from a
safetensors file; records from the user's optimizer where that has state already. Peak host memory beside the tiers is
one unit's values and one chunk's record.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import torch
from torch import nn

from offload.deferred_init.deferred_init import held_values, materialize
from offload.device.accelerator import Accelerator
from offload.model.chunk import Chunk
from offload.model.flat import ParameterInfo
from offload.model.optimizer_kinds import InitialState
from offload.model.unit import Unit
from offload.model.weight_names import persistent_buffers
from offload.model.weights import WeightSource
from offload.ranks.consensus import checksum
from offload.step.chunk_stores import ParameterStore, RecordStore
from offload.tiers.memory import HostMemory, MemoryLedger


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

    def __init__(self, source: WeightSource | None, names: Mapping[str, str], *, keeps_checksums: bool = False) -> None:
        """`keeps_checksums`: so that ranks can tell whether they start from the same values."""
        self._source, self._names = source, names
        self._checksums: dict[str, int] | None = {} if keeps_checksums else None

    def facts(self) -> dict[str, int]:
        """What must be equal on all ranks: the checksums of all values asked for so far."""
        return {f"the initial value of {fqn!r}": value for fqn, value in (self._checksums or {}).items()}

    def of(self, infos: Sequence[ParameterInfo]) -> dict[int, torch.Tensor]:
        """Values by parameter index: CPU (or the parameter's own device), the parameter's shape, the dtype they come in."""
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
        for info, value in zip(replayed, materialize([info.parameter for info in replayed]), strict=True):
            values[info.index] = value
        if self._checksums is not None:
            self._checksums.update({info.fqn: checksum(values[info.index]) for info in infos})
        return values


class NoValues(InitialValues):
    """Zeros: a load is about to bring the values."""

    def __init__(self) -> None:
        super().__init__(None, {})

    def of(self, infos: Sequence[ParameterInfo]) -> dict[int, torch.Tensor]:
        return {info.index: torch.zeros((), dtype=info.dtype).expand(info.shape) for info in infos}


class Materializer:
    """Fills the tiers unit by unit. Used once, by `initialize`."""

    def __init__(
        self,
        accelerator: Accelerator,
        places: ParameterStore | None,
        records: RecordStore | None,
        values: InitialValues,
        state_of: Callable[[ParameterInfo], InitialState],
        ledger: MemoryLedger,
    ) -> None:
        self._accelerator, self._places, self._records = accelerator, places, records
        self._values, self._state_of, self._ledger = values, state_of, ledger

    def unit(self, unit: Unit) -> None:
        """Bring one unit's values and records into their tiers, and let go of what its parameters held before."""
        values = self._values.of(unit.parameters)
        states = {info.index: self._initial_moments(info) for info in unit.parameters if info.trainable}
        for chunk in unit.homes if self._places is None else unit.chunks:
            self._chunk_parameters(chunk, values)
        for chunk in unit.chunks:
            if self._records is not None and chunk.flat.layout.trainable:
                self._chunk_record(self._records, chunk, values, states)

    def _initial_moments(self, info: ParameterInfo) -> dict[str, torch.Tensor]:
        """What the user's optimizer holds for this parameter already, in slot order; takes over its step count."""
        state = self._state_of(info)
        info.step = state.step
        return {name: info.in_memory_order(moment) for name, moment in state.moments.items()}

    def _chunk_parameters(self, chunk: Chunk, values: Mapping[int, torch.Tensor]) -> None:
        nbytes = chunk.nbytes
        in_place = self._places is None and self._accelerator.unified
        stored = self._places.view(chunk) if self._places is not None else None
        if in_place:
            target = chunk.bytes
        elif stored is not None:
            target = stored[:nbytes]
        else:
            target = HostMemory(nbytes, "initial values", ledger=self._ledger).tensor
        typed = target.view(chunk.flat.dtype)
        for info, piece in chunk.pieces:
            low, high = piece.start - chunk.start, piece.stop - chunk.start
            ordered = info.in_memory_order(values[info.index])
            part = ordered[piece.start - piece.slot.start : piece.stop - piece.slot.start]
            if self._records is not None and info.trainable and self._records.format(chunk).state_format.is_split:
                self._records.format(chunk).round_values(typed[low:high], part.float())
            else:
                typed[low:high].copy_(part)
        if self._places is None and not in_place:
            self._accelerator.copy_in(chunk.bytes, target).wait()
        elif self._places is not None and stored is None:
            self._places.write(chunk, target).wait()

    def _chunk_record(
        self,
        records: RecordStore,
        chunk: Chunk,
        values: Mapping[int, torch.Tensor],
        states: Mapping[int, Mapping[str, torch.Tensor]],
    ) -> None:
        pieces = chunk.pieces
        has_master = records.format(chunk).own_master
        if not has_master and not any(states.get(info.index) for info, _ in pieces):
            return  # a store reads as zeros where nothing was written, and zero is what moments start from
        buffer = records.view(chunk)
        home = buffer is not None
        if buffer is None:
            buffer = HostMemory(records.nbytes(chunk), "initial records", ledger=self._ledger).tensor
        record = records.over(chunk, buffer)
        for info, piece in pieces:
            low, high = piece.start - chunk.start, piece.stop - chunk.start
            part = slice(piece.start - piece.slot.start, piece.stop - piece.slot.start)
            record.put_master(low, high, info.in_memory_order(values[info.index])[part])
            for name, moment in states.get(info.index, {}).items():
                if name in record.arrays:
                    record.put_moment(name, low, high, moment[part])
        if not home:
            records.write(chunk, buffer).wait()
