# SPDX-License-Identifier: Apache-2.0
"""Parameters as ordinary tensors between steps: `engine.gathered` and `engine.state_dict`."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import nn

from offload.device.arithmetic.segment import MASTER
from offload.model.chunk import Chunk
from offload.model.flat import Flat, ParameterInfo
from offload.model.unit import Unit
from offload.model.weight_names import persistent_buffers
from offload.ranks.next_transfers import MeetingPoint
from offload.step.components import Components
from offload.step.gathered_blocks import Lending
from offload.step.homes import Homes
from offload.step.training import Training


class Gathering:
    """See the module. Owned by the thread that drives the model."""

    def __init__(self, parts: Components, training: Training) -> None:
        self._parts, self._training, self._homes = parts, training, Homes(parts)

    def gathered(self, infos: Sequence[ParameterInfo], *, first: Callable[[], None]) -> Lending:
        """See `Engine.gathered`. `first` is called when the block begins."""
        return Lending(self._training.lender, infos, first)

    def meet(self, point: MeetingPoint, action: Callable[[], Any] | None = None, *, argument: int = 0) -> Any:
        """Wait until all ranks are here. So a call begins, and so it ends where it brought units in: some ranks may have had
        them, and would be in a collective of the loop's own while the others ask for them."""
        return self._training.meet(point, action, argument=argument)

    def state_dict(self, model: nn.Module, keeps: Callable[[int], bool]) -> dict[str, torch.Tensor]:
        """See `Engine.state_dict`. `keeps(position)`: whether this rank returns the parameter, or buffer, of that number."""
        self.meet(MeetingPoint.STATE_DICT)
        values: dict[int, torch.Tensor] = {}
        with self._training.failures():
            self._training.settle()
            for unit in self._parts.units:
                self._unit_values(unit, values)
                for info in unit.parameters:
                    if not keeps(info.index):
                        del values[info.index]
        self.meet(MeetingPoint.STATE_DICT)
        named = {fqn: values[info.index] for info in self._parts.parameters if info.index in values for fqn in info.fqns}
        for position, (fqn, buffer) in enumerate(persistent_buffers(model)):
            if keeps(position):
                named[fqn] = buffer.detach().to("cpu", copy=True)
        return named

    def value_of(self, info: ParameterInfo) -> torch.Tensor:
        """One parameter's value as `state_dict` has it, fp32; collective."""
        self.meet(MeetingPoint.STATE_DICT, argument=info.index)
        values: dict[int, torch.Tensor] = {}
        with self._training.failures():
            self._training.settle()
            self._unit_values(self._parts.units[info.unit_index], values)
        self.meet(MeetingPoint.STATE_DICT, argument=info.index)
        return values[info.index].float()

    def values_by_unit(self, point: MeetingPoint) -> Iterator[tuple[ParameterInfo, torch.Tensor]]:
        """Every parameter's value as `state_dict` has it, [numel] in slot order; collective, one unit after the other."""
        self.meet(point)
        with self._training.failures():
            self._training.settle()
        for unit in self._parts.units:
            values: dict[int, torch.Tensor] = {}
            with self._training.failures():
                self._unit_values(unit, values)
            for info in unit.parameters:
                yield info, info.in_memory_order(values[info.index])

    def _unit_values(self, unit: Unit, values: dict[int, torch.Tensor]) -> None:
        uses = self._training.uses
        uses.hold(unit)
        for info in unit.parameters:
            value = info.parameter if info.lent_count else info.view
            values[info.index] = value.detach().to("cpu", copy=True)
        uses.release(unit)
        for flat in unit.flats:
            if self._homes.has_master(flat):
                self._overlay_masters(flat, values)

    def _overlay_masters(self, flat: Flat, values: dict[int, torch.Tensor]) -> None:
        """Replace the values of a flat's parameters by their fp32 masters, those of other ranks' shards too."""
        narrow = {info.index: values[info.index] for info in flat.parameters}
        for info in flat.parameters:
            if values[info.index].dtype != torch.float32:
                values[info.index] = torch.empty_strided(info.shape, info.stride, dtype=torch.float32, device="cpu")
        ranks = self._parts.ranks
        if ranks.world_size == 1 or self._parts.layout.stage == 0:
            for chunk in flat.chunks:
                self._put_master(chunk, self._master(chunk, narrow), values)
            return
        shard = flat.layout.shard
        whole = torch.empty(flat.layout.numel, dtype=torch.float32, device="cpu")
        for chunk in flat.chunks:
            whole[chunk.start : chunk.stop].copy_(self._master(chunk, narrow))
        own, everybody = whole[shard.start : shard.stop].view(torch.uint8), frozenset(range(ranks.world_size))
        self.meet(MeetingPoint.STATE_DICT, lambda: ranks.gather(own, whole.view(torch.uint8), everybody, whole.nbytes))
        for chunk in flat.homes():
            self._put_master(chunk, whole[chunk.start : chunk.stop], values)

    def _master(self, chunk: Chunk, values: dict[int, torch.Tensor]) -> torch.Tensor:
        """The chunk's fp32 masters [chunk.numel]; `values`: those of the flat's parameters, by parameter index."""
        record = self._homes.record(chunk)
        if MASTER in record.arrays:
            return record.arrays[MASTER]
        master = torch.zeros(chunk.numel, dtype=torch.float32, device="cpu")
        for info, piece in chunk.pieces:
            part = chunk.part(piece)
            narrow = info.in_memory_order(values[info.index])[piece.in_parameter]
            master[part].copy_(record.master(part.start, part.stop, narrow.to(record.device)))
        return master

    def _put_master(self, chunk: Chunk, master: torch.Tensor, values: dict[int, torch.Tensor]) -> None:
        for info, piece in chunk.pieces:
            info.in_memory_order(values[info.index])[piece.in_parameter].copy_(master[chunk.part(piece)])
