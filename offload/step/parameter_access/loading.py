# SPDX-License-Identifier: Apache-2.0
"""Setting a model's values from a state_dict, unit by unit: `engine.load_state_dict`."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor, nn

from offload.errors import UsageError
from offload.model.chunk import Chunk
from offload.model.file_dtypes import converts
from offload.model.unit import Unit
from offload.model.weight_names import Differences, persistent_buffers, set_buffer
from offload.ranks.group import Group
from offload.ranks.next_transfers import MeetingPoint
from offload.step.calls import in_backward
from offload.step.components import Components
from offload.step.homes import Homes
from offload.step.training import Training
from offload.tiers.memory import HostMemory


class ValueLoading:
    """One call of `load_state_dict`. Owned by the thread that drives the model."""

    def __init__(self, parts: Components, training: Training, model: nn.Module, state: Mapping[str, Tensor]) -> None:
        self._parts, self._training, self._state = parts, training, state
        self._buffers, self._homes = dict(persistent_buffers(model)), Homes(parts)

    def run(self) -> None:
        """See `Engine.load_state_dict`."""
        self._training.check()
        if self._training.is_within_step:
            raise UsageError("load_state_dict was called while gradients wait for a step: call it after optimizer.step().")
        if self._training.lender.lends_any:
            raise UsageError("load_state_dict was called inside `with engine.gathered(...)`: call it after the block.")
        if self._training.uses.in_forward or in_backward():
            raise UsageError("load_state_dict was called inside a forward or backward of the model: call it between steps.")
        owners = self._owners()
        with self._training.failures():
            self._training.uses.abandon()  # of a backward that an exception cut short: its units are to go, too
            self._training.settle()
            self._training.values_changed()
            self._parts.residency.evict_all()
            for unit in self._parts.units:
                self._set_unit(unit, {info.index: self._value(info.fqns, info.shape, owners) for info in unit.parameters})
            for fqn, buffer in self._buffers.items():
                set_buffer(buffer, self._value((fqn,), buffer.shape, owners))
            self._parts.residency.bring_persistent()

    def _owners(self) -> dict[str, tuple[int, torch.dtype]]:
        """The first rank that has each name, and the dtype it has it in. Checks names and shapes."""
        own = {name: (list(value.shape), str(value.dtype).removeprefix("torch.")) for name, value in self._state.items()}
        ranks = self._parts.ranks
        with self._training.failures():
            data = self._parts.meeting.meet(
                MeetingPoint.LOADING_STATE_DICT, lambda: ranks.exchange_bytes(json.dumps(own).encode())
            )
        said: list[dict[str, tuple[list[int], str]]] = [json.loads(one) for one in data]
        found: dict[str, tuple[int, torch.dtype]] = {}
        shapes: dict[str, list[int]] = {}
        for index in reversed(range(len(said))):
            for name, (shape, dtype) in said[index].items():
                found[name], shapes[name] = (index, getattr(torch, dtype)), shape
        self._require_fit(shapes, {name: dtype for name, (_, dtype) in found.items()})
        return found

    def _require_fit(self, shapes: Mapping[str, Sequence[int]], dtypes: Mapping[str, torch.dtype]) -> None:
        wanted = [(info.fqns, list(info.shape), info.dtype) for info in self._parts.parameters]
        wanted += [((fqn,), list(buffer.shape), buffer.dtype) for fqn, buffer in self._buffers.items()]
        differences = Differences()
        for fqns, shape, dtype in wanted:
            given = [name for name in fqns if name in shapes]
            if not given:
                differences.missing.append(f"{fqns[0]} {shape}")
            differences.misshapen += [
                f"{name} (model: {shape}, given: {shapes[name]})" for name in given if list(shapes[name]) != shape
            ]
            differences.of_other_kinds += [
                f"{name} (model: {dtype}, given: {dtypes[name]})" for name in given if not converts(dtypes[name], dtype)
            ]
        known = {name for fqns, _, _ in wanted for name in fqns}
        differences.unexpected = [f"{name} {shape}" for name, shape in shapes.items() if name not in known]
        if differences:
            raise UsageError(
                f"load_state_dict was given names, shapes or dtypes that are not the model's: {differences}. Nothing changed."
            )

    def _value(self, fqns: Sequence[str], shape: torch.Size, owners: Mapping[str, tuple[int, torch.dtype]]) -> Tensor:
        """The value on the host, on whichever rank it is."""
        name = next(name for name in fqns if name in owners)
        owner, dtype = owners[name]
        ranks = self._parts.ranks
        value = (
            self._state[name].detach().cpu().contiguous()
            if ranks.index == owner
            else torch.empty(shape, dtype=dtype, device="cpu")
        )
        self._parts.meeting.meet(MeetingPoint.LOADING_STATE_DICT, lambda: _share(ranks, value, owner))
        return value

    # ---- into the tiers ------------------------------------------------------------------------------------------

    def _set_unit(self, unit: Unit, values: Mapping[int, Tensor]) -> None:
        ordered = {info.index: info.in_memory_order(values[info.index]) for info in unit.parameters}
        for chunk in unit.chunks:
            self._set_master(chunk, ordered)
        for chunk in unit.homes:
            self._set_home(chunk, ordered)

    def _set_master(self, chunk: Chunk, ordered: Mapping[int, Tensor]) -> None:
        if not self._homes.has_master(chunk.flat):
            return
        with self._homes.changing(chunk) as record:
            for info, piece in chunk.pieces:
                part = chunk.part(piece)
                record.put_master(part.start, part.stop, ordered[info.index][piece.in_parameter].to(record.device))

    def _set_home(self, chunk: Chunk, ordered: Mapping[int, Tensor]) -> None:
        parameter_store = self._parts.parameter_store
        stored = parameter_store.view(chunk)
        content = stored
        if content is None:
            content = HostMemory(parameter_store.nbytes(chunk), "loaded parameters", ledger=self._parts.ledger).tensor
        values = chunk.values_in(content)
        for info, piece in chunk.pieces:
            values[chunk.part(piece)].copy_(self._homes.rounded(chunk.flat, ordered[info.index][piece.in_parameter]))
        if stored is None:
            parameter_store.write(chunk, content).wait()


def _share(ranks: Group, value: Tensor, owner: int) -> None:
    if value.numel():
        ranks.broadcast(value.view(-1).view(torch.uint8), owner)
