# SPDX-License-Identifier: Apache-2.0
"""What the file of a unit consists of: the tensors, and where each chunk's bytes lie among them.

A flat has one array for its values (`VALUE`) and one for each moment, which has its name. An array is what this rank owns
of the flat, in the order of the flat's elements, a tensor for each parameter and one for each gap between two: just as the
chunks' arrays lie in stores. Boundaries of chunks are multiples of `offload.layout.BLOCK` elements, so in the file too every
chunk's array begins and ends at a multiple of 4096 bytes, where blocks can be shared with a scratch file.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import torch

from offload.checkpoint.format.consistency import row_major
from offload.checkpoint.format.manifest import VALUE
from offload.checkpoint.format.tensor_file import TensorSpec, known_dtype
from offload.model.chunk import Chunk
from offload.model.flat import Flat, ParameterInfo
from offload.model.unit import Unit


@dataclass(slots=True)
class _Array:
    """`first`: the tensor that it begins with, at the flat's element `start`. `gaps`: elements of the flat, and tensors."""

    start: int
    first: str
    itemsize: int
    gaps: list[tuple[range, str]] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class GapPart:
    """Padding in one chunk: elements [low, high) of it, and the place in the tensor `name`, in bytes."""

    name: str
    start_nbytes: int
    nbytes: int
    low: int
    high: int


class UnitTensors:
    """See the module."""

    def __init__(self, unit: Unit, moments: Sequence[str], *, trained_only: bool = False) -> None:
        """`moments`: what the optimizer keeps of a trained parameter. `trained_only`: nothing of others."""
        self.owned = {info.index: owned for info, owned in owned_elements(unit, trained_only=trained_only)}
        self.infos = [info for info in unit.parameters if info.index in self.owned]
        self.specs: dict[str, TensorSpec] = {}
        self.padding: list[TensorSpec] = []
        self.moments = moments
        self._arrays: dict[tuple[int, str], _Array] = {}
        for flat in unit.flats:
            for kind in self._kinds(flat):
                self._lay_out(flat, kind)

    def arrays_of(self, chunk: Chunk) -> list[str]:
        """The arrays that the file holds a part of the chunk in; none where the chunk's flat is padding alone."""
        return [kind for kind in self._kinds(chunk.flat) if (id(chunk.flat), kind) in self._arrays]

    def place(self, chunk: Chunk, kind: str) -> tuple[str, int]:
        """Where the chunk's array begins: so many bytes behind the begin of a tensor."""
        array = self._arrays[id(chunk.flat), kind]
        return array.first, (chunk.start - array.start) * array.itemsize

    def gaps(self, chunk: Chunk, kind: str) -> Iterator[GapPart]:
        """The padding in the chunk's array, in order."""
        array = self._arrays[id(chunk.flat), kind]
        for gap, name in array.gaps:
            start, stop = max(gap.start, chunk.start), min(gap.stop, chunk.stop)
            if start < stop:
                nbytes, place = (stop - start) * array.itemsize, (start - gap.start) * array.itemsize
                yield GapPart(name, place, nbytes, start - chunk.start, stop - chunk.start)

    def _kinds(self, flat: Flat) -> tuple[str, ...]:
        return (VALUE, *self.moments) if flat.layout.trainable else (VALUE,)

    def _lay_out(self, flat: Flat, kind: str) -> None:
        first, last = flat.layout.chunks[0].start, flat.layout.chunks[-1].stop
        tensors = [
            (min(max(slot.start, first), last), _spec(info, self.owned[info.index], kind))
            for info, slot in zip(flat.parameters, flat.layout.slots, strict=True)
            if info.index in self.owned
        ]
        if not tensors:
            return
        dtype = tensors[0][1].dtype
        gaps = []
        for gap in flat.layout.gaps(first, last):
            padding = TensorSpec(f"padding/{len(self.padding)}", dtype, (len(gap),))
            self.padding.append(padding)
            tensors.append((gap.start, padding))
            gaps.append((gap, padding.name))
        tensors.sort(key=lambda one: (one[0], one[1].nbytes))  # one without elements lies before what begins there
        self.specs.update({spec.name: spec for _, spec in tensors})
        self._arrays[id(flat), kind] = _Array(first, tensors[0][1].name, dtype.itemsize, gaps)


def owned_elements(unit: Unit, *, trained_only: bool = False) -> Iterator[tuple[ParameterInfo, range]]:
    """Of each parameter of which this rank's chunks hold any: the elements, in slot order. On one rank all of each."""
    for flat in unit.flats:
        if trained_only and not flat.layout.trainable:
            continue
        first, last = flat.layout.chunks[0].start, flat.layout.chunks[-1].stop
        for info, slot in zip(flat.parameters, flat.layout.slots, strict=True):
            start, stop = max(slot.start, first), min(slot.stop, last)
            if start < stop or slot.numel == 0:
                yield info, range(start - slot.start, max(stop, start) - slot.start)


def tensor_name(info: ParameterInfo, kind: str) -> str:
    return info.fqn if kind == VALUE else f"{kind}/{info.fqn}"


def _spec(info: ParameterInfo, owned: range, kind: str) -> TensorSpec:
    """In the parameter's own shape where it is all of it and lies row by row, else 1-D."""
    whole = len(owned) == info.numel and row_major(info.shape) == info.stride
    shape = tuple(info.shape) if whole else (len(owned),)
    return TensorSpec(tensor_name(info, kind), torch.float32 if info.trainable else known_dtype(info.fqn, info.dtype), shape)
