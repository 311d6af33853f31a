# SPDX-License-Identifier: Apache-2.0
"""Exports of weights that bitsandbytes has packed: as the numbers that they stand for, which every loader and runtime reads."""

from __future__ import annotations

import copy
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from offload.checkpoint.export.arriving import Arriving
from offload.model.flat import ParameterInfo
from offload.model.quantized import is_packed


@dataclass(slots=True)
class _Packed:
    """One packed weight, and what it is made of, by index. `places`: (holder, attribute) of each tensor beside it in a copy of
    its state."""

    unpacked: ParameterInfo
    state: Any
    weight: ParameterInfo
    places: dict[int, tuple[Any, str]]
    arriving: Arriving[int]


class Unpacking:
    """`infos`: the parameters of an export. Packed weights have the shape and dtype that they were packed from, and what lies
    beside them is none."""

    def __init__(self, infos: Sequence[ParameterInfo]) -> None:
        self.infos: list[ParameterInfo] = []
        self._packed_of: dict[int, _Packed] = {}
        """By index of a weight, and of what lies beside it."""
        by_id = {id(info.parameter): info for info in infos}
        for info in infos:
            if is_packed(info.parameter):
                packed = self._begin(info, by_id)
                self._packed_of.update(dict.fromkeys((info.index, *packed.places), packed))
        for info in infos:
            found = self._packed_of.get(info.index)
            if found is None or found.weight is info:
                self.infos.append(info if found is None else found.unpacked)

    @property
    def any(self) -> bool:
        """Whether something is packed."""
        return bool(self._packed_of)

    @staticmethod
    def _begin(info: ParameterInfo, by_id: dict[int, ParameterInfo]) -> _Packed:
        state = copy.copy(vars(info.parameter)["quant_state"])
        state.state2 = copy.copy(state.state2)
        places, sizes = {}, {info.index: (info.numel, info.dtype)}
        for holder in (state, state.state2):
            for attribute, tensor in (vars(holder) if holder is not None else {}).items():
                beside = by_id.get(id(tensor))
                if beside is not None:
                    places[beside.index] = (holder, attribute)
                    sizes[beside.index] = (beside.numel, beside.dtype)
        stride = torch.empty(state.shape, device="meta").stride()
        unpacked = replace(info, shape=torch.Size(state.shape), stride=stride, dtype=state.dtype)
        return _Packed(unpacked, state, info, places, Arriving(sizes))

    def unpacked(self, pieces: Iterable[tuple[ParameterInfo, torch.Tensor]]) -> Iterator[tuple[ParameterInfo, torch.Tensor]]:
        """`pieces`, each the next elements of a parameter in slot order; of a packed weight all at once, when all is there."""
        for info, part in pieces:
            packed = self._packed_of.get(info.index)
            if packed is None:
                yield info, part
            elif packed.arriving.take(info.index, part):
                yield packed.unpacked, self._values(packed)

    @staticmethod
    def _values(packed: _Packed) -> torch.Tensor:
        from bitsandbytes.functional import dequantize_4bit

        arrived = packed.arriving.values
        for index, (holder, attribute) in packed.places.items():
            shape = vars(holder)[attribute].shape
            setattr(holder, attribute, arrived[index].reshape(shape))
        values: torch.Tensor = dequantize_4bit(packed.weight.shaped(arrived[packed.weight.index]), packed.state)
        arrived.clear()
        return values.contiguous().reshape(-1)
