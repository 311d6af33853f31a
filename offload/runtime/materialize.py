"""Bringing a model's initial values into the tiers, one unit at a time, one chunk at a time.

Values come from the parameter itself, from the replay of its recorded initialiser (`deferred_init`), or from a
safetensors file; records from the user's optimizer where that has state already. Peak host memory beside the tiers is
one unit's values and one chunk's record.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import torch

from offload.device.accelerator import Accelerator
from offload.errors import ConfigError
from offload.runtime.deferred_init import materialize
from offload.runtime.fetching import chunks_of
from offload.runtime.flats import ChunkOf, ParameterInfo, Unit
from offload.runtime.places import ParameterPlaces, RecordPlaces
from offload.runtime.weights import WeightSource
from offload.tiers.memory import HostMemory, MemoryLedger

MOMENTS = ("exp_avg", "exp_avg_sq")
OptimizerState = Mapping[str, torch.Tensor]


class InitialValues:
    """Where each parameter's initial value comes from."""

    def __init__(self, source: WeightSource | None, names: Mapping[str, str]) -> None:
        self._source, self._names = source, names

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
        return values


def _initial_state(info: ParameterInfo, state: OptimizerState) -> dict[str, torch.Tensor]:
    """The moments that the user's optimizer holds for this parameter already, in slot order; takes over its step count."""
    if not state:
        return {}
    missing = [name for name in (*MOMENTS, "step") if name not in state]
    if missing:
        raise ConfigError(
            f"the optimizer's state of {info.fqn!r} has no {', '.join(missing)}: expected exp_avg, exp_avg_sq and step."
        )
    info.step = int(state["step"])
    return {name: info.in_memory_order(state[name]) for name in MOMENTS}


class Materializer:
    """Fills the tiers unit by unit. Used once, by `initialize`."""

    def __init__(
        self,
        accelerator: Accelerator,
        places: ParameterPlaces | None,
        records: RecordPlaces | None,
        values: InitialValues,
        state_of: Callable[[ParameterInfo], OptimizerState],
        ledger: MemoryLedger,
    ) -> None:
        self._accelerator, self._places, self._records = accelerator, places, records
        self._values, self._state_of, self._ledger = values, state_of, ledger

    def unit(self, unit: Unit) -> None:
        """Bring one unit's values and records into their tiers, and let go of what its parameters held before."""
        values = self._values.of(unit.parameters)
        states = {info.index: _initial_state(info, self._state_of(info)) for info in unit.parameters if info.trainable}
        for chunk_of in chunks_of(unit):
            self._chunk_parameters(chunk_of, values)
            if self._records is not None and chunk_of.flat.layout.trainable:
                self._chunk_record(self._records, chunk_of, values, states)

    def _chunk_parameters(self, chunk_of: ChunkOf, values: Mapping[int, torch.Tensor]) -> None:
        nbytes = chunk_of.chunk.numel * chunk_of.flat.layout.itemsize
        in_place = self._places is None and self._accelerator.unified
        stored = self._places.view(chunk_of) if self._places is not None else None
        if in_place:
            target = chunk_of.flat.chunk_bytes(chunk_of.chunk)
        elif stored is not None:
            target = stored[:nbytes]
        else:
            target = HostMemory(nbytes, "initial values", ledger=self._ledger).tensor
        typed = target.view(chunk_of.flat.dtype)
        for info, piece in chunk_of.pieces():
            low, high = piece.start - chunk_of.chunk.start, piece.stop - chunk_of.chunk.start
            ordered = info.in_memory_order(values[info.index])
            typed[low:high].copy_(ordered[piece.start - piece.slot.start : piece.stop - piece.slot.start])
        if self._places is None and not in_place:
            self._accelerator.copy_in(chunk_of.flat.chunk_bytes(chunk_of.chunk), target).wait()
        elif self._places is not None and stored is None:
            self._places.write(chunk_of, target).wait()

    def _chunk_record(
        self,
        records: RecordPlaces,
        chunk_of: ChunkOf,
        values: Mapping[int, torch.Tensor],
        states: Mapping[int, Mapping[str, torch.Tensor]],
    ) -> None:
        pieces = chunk_of.pieces()
        if not records.has_master(chunk_of) and not any(states.get(info.index) for info, _ in pieces):
            return  # a store reads as zeros where nothing was written, and zero is what moments start from
        buffer = records.view(chunk_of)
        home = buffer is not None
        if buffer is None:
            buffer = HostMemory(records.nbytes(chunk_of), "initial records", ledger=self._ledger).tensor
        record = records.over(chunk_of, buffer)
        for info, piece in pieces:
            low, high = piece.start - chunk_of.chunk.start, piece.stop - chunk_of.chunk.start
            part = slice(piece.start - piece.slot.start, piece.stop - piece.slot.start)
            if record.master is not None:
                record.master[low:high].copy_(info.in_memory_order(values[info.index])[part])
            for name, array in zip(MOMENTS, (record.exp_avg, record.exp_avg_sq), strict=True):
                if name in states.get(info.index, {}):
                    array[low:high].copy_(states[info.index][name][part])
        if not home:
            records.write(chunk_of, buffer).wait()
