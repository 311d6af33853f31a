# SPDX-License-Identifier: Apache-2.0
"""The engine's side of a model: its parameters as places in flat buffers, and the buffers as views in the model.

    ParameterInfo   one parameter: names, shape, strides, optimizer group, slot; its guard
    Flat            one flat buffer: device memory, typed views of it, one per parameter

A flat's views are made once, through `.data` of the flat, so that they stay valid (and their version counters stay 0)
when the memory behind the flat goes and comes back. Where it stays each view has a storage of its own; where it does not,
parameters are lent while they are gathered: they are tensors of their own then.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import nn

from offload.device.accelerator import UnitMemory, with_own_storage
from offload.layout import ChunkLayout, FlatLayout, Piece, Slot
from offload.model.chunk import Chunk
from offload.model.guard import ParameterGuard
from offload.planning.route import Route


@dataclass(slots=True)
class ParameterInfo:
    """One parameter of the model, under all its names.

    `stride`: the parameter's own strides where its elements fill memory without gaps, else those of a contiguous
    tensor; a slot holds the elements in the order in which they lie in memory.
    """

    index: int
    fqns: tuple[str, ...]
    parameter: nn.Parameter
    shape: torch.Size
    stride: tuple[int, ...]
    dtype: torch.dtype
    trainable: bool
    group_index: int | None
    unit_index: int
    part_index: int = 0
    """As of `ParameterSpec`."""
    guard: ParameterGuard | None = None
    step: int = 0
    lent_count: int = 0
    """How many `engine.gathered` that are open were given it."""
    seen_version: int = 0
    """PyTorch's count of in-place writes to it, when it was last looked at."""
    numel: int = field(init=False)
    flat: Flat = field(init=False, repr=False, compare=False)
    """Where it lies. Written once, by the flat, as `pieces` is."""
    pieces: tuple[tuple[Chunk, Piece], ...] = field(init=False, repr=False, compare=False)
    """What of it lies in each of this rank's chunks, in order."""

    def __post_init__(self) -> None:
        self.numel = self.shape.numel()

    @property
    def fqn(self) -> str:
        return self.fqns[0]

    @property
    def view(self) -> torch.Tensor:
        """Its values in device memory, whatever the parameter itself is made to point at."""
        return self.flat.view_of(self)

    def note_version(self) -> None:
        self.seen_version = self.parameter._version

    @property
    def was_written(self) -> bool:
        """Whether something wrote to it in place since `note_version`."""
        return self.parameter._version != self.seen_version

    def in_memory_order(self, tensor: torch.Tensor) -> torch.Tensor:
        """`tensor` of this parameter's shape as [numel], contiguous, in the order of the slot. A copy only if needed."""
        if tensor.stride() == self.stride and tensor.layout is torch.strided:
            dense = tensor.detach() if tensor.requires_grad else tensor
            if self.stride == (1,):
                return dense
            return dense.as_strided((self.numel,), (1,), tensor.storage_offset())
        ordered = torch.empty_strided(self.shape, self.stride, dtype=tensor.dtype, device=tensor.device)
        dense = tensor.detach()
        ordered.copy_(dense.to_dense() if dense.layout is not torch.strided else dense)
        return ordered.as_strided((self.numel,), (1,))

    def shaped(self, flat: torch.Tensor) -> torch.Tensor:
        """[numel] in slot order as a view of this parameter's shape."""
        return flat.as_strided(self.shape, self.stride, flat.storage_offset())


def some_of(names: Sequence[str], count: int) -> str:
    """The first `count` names, and how many more there are; "" of none."""
    return ", ".join(names[:count]) + (f" and {len(names) - count} more" if len(names) > count else "")


def dense_strides(tensor: torch.Tensor) -> tuple[int, ...]:
    """`tensor`'s strides if its elements fill memory without gaps or overlaps, else contiguous ones."""
    expected = 1
    for size, stride in sorted(zip(tensor.shape, tensor.stride(), strict=True), key=lambda pair: (pair[1], pair[0])):
        if size != 1 and stride != expected:
            return torch.empty(tensor.shape, device="meta").stride()
        expected *= size
    return tensor.stride()


class Flat:
    """One flat buffer of one unit on the device."""

    def __init__(
        self, layout: FlatLayout, memory: UnitMemory, dtype: torch.dtype, parameters: list[ParameterInfo], route: Route
    ) -> None:
        self.layout = layout
        self.route = route
        """Of its unit."""
        self.memory = memory
        self.dtype = dtype
        self.parameters = parameters
        self._info_of = {info.index: info for info in parameters}
        self._slot_of = {slot.parameter_index: slot for slot in layout.slots}
        self.chunks = tuple(self._chunk(chunk) for chunk in layout.chunks)
        """What this rank updates of it, in order."""
        pieces: dict[int, list[tuple[Chunk, Piece]]] = {info.index: [] for info in parameters}
        for chunk in self.chunks:
            for info, piece in chunk.pieces:
                pieces[info.index].append((chunk, piece))
        # Each view is made from a fresh `.data` alias, so none shares a version counter with another.
        self.values = memory.flat.data.view(dtype)
        self._view_of = {info.index: self._laid_out(info) for info in parameters}
        for info in parameters:
            info.flat, info.pieces = self, tuple(pieces[info.index])

    def _laid_out(self, info: ParameterInfo) -> torch.Tensor:
        """A view of the parameter's place."""
        slot, itemsize = self._slot_of[info.index], self.layout.itemsize
        if self.memory.stays:
            part = with_own_storage(self.memory.flat[slot.start * itemsize : slot.stop * itemsize]).view(self.dtype)
        else:
            part = self.values.data[slot.start : slot.stop]
        return info.shaped(part).data

    def homes(self) -> list[Chunk]:
        """The whole flat in chunks: where parameters stay on the device they do so on every rank."""
        return [self._chunk(chunk) for chunk in self.layout.cut(0, self.layout.numel)]

    def lay_back(self, info: ParameterInfo) -> None:
        """After its storage was exchanged for another: the parameter lies in its place again, with the values there."""
        self._view_of[info.index] = view = self._laid_out(info)
        with torch._C.DisableTorchFunctionSubclass():  # it may be guarded
            info.parameter.data = view
            info.note_version()

    def view_of(self, info: ParameterInfo) -> torch.Tensor:
        return self._view_of[info.index]

    def slot_of(self, info: ParameterInfo) -> Slot:
        return self._slot_of[info.index]

    def _chunk(self, chunk: ChunkLayout) -> Chunk:
        pieces = tuple((self._info_of[piece.slot.parameter_index], piece) for piece in self.layout.pieces(chunk))
        return Chunk(self, chunk, pieces)
