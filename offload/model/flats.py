"""The engine's side of a model: its parameters as places in flat buffers, and the buffers as views in the model.

    ParameterInfo   one parameter: names, shape, strides, optimizer group, slot; its guard
    Flat            one flat buffer: device memory, typed views of it, one per parameter
    Unit            what is fetched together: a module, its flats, its parameters

A flat's views are made once, through `.data` of the flat, so that they stay valid (and their version counters stay 0)
when the memory behind the flat goes and comes back.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

import torch
from torch import nn

from offload.device.accelerator import UnitMemory
from offload.layout import Chunk, FlatLayout, Slot, UnitLayout
from offload.model.chunk import ChunkOf
from offload.model.guard import ParameterGuard


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
    guard: ParameterGuard | None = None
    step: int = 0

    @property
    def fqn(self) -> str:
        return self.fqns[0]

    @property
    def numel(self) -> int:
        return self.shape.numel()

    def in_memory_order(self, tensor: torch.Tensor) -> torch.Tensor:
        """`tensor` of this parameter's shape as [numel], contiguous, in the order of the slot. A copy only if needed."""
        if tuple(tensor.stride()) == self.stride and tensor.layout is torch.strided:
            return tensor.detach().as_strided((self.numel,), (1,), tensor.storage_offset())
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

    def __init__(self, layout: FlatLayout, memory: UnitMemory, dtype: torch.dtype, parameters: list[ParameterInfo]) -> None:
        self.layout = layout
        self.memory = memory
        self.dtype = dtype
        self.parameters = parameters
        self._info_of = {info.index: info for info in parameters}
        self._slot_of = {slot.parameter_index: slot for slot in layout.slots}
        self.chunks = tuple(self._chunk(chunk) for chunk in layout.chunks)
        """What this rank updates of it, in order."""
        self._chunks_of: dict[int, list[ChunkOf]] = {info.index: [] for info in parameters}
        for chunk_of in self.chunks:
            for info, _ in chunk_of.pieces:
                self._chunks_of[info.index].append(chunk_of)
        # Each view is made from a fresh `.data` alias, so none shares a version counter with another.
        self.values = memory.flat.data.view(dtype)
        self.views = [
            info.shaped(self.values.data[slot.start : slot.stop]).data
            for info, slot in zip(parameters, layout.slots, strict=True)
        ]

    def slice(self, start: int, stop: int) -> torch.Tensor:
        """Elements [start, stop) of the flat, typed."""
        return self.values[start:stop]

    def chunk_bytes(self, chunk: Chunk) -> torch.Tensor:
        """The chunk's bytes, uint8."""
        itemsize = self.layout.itemsize
        return self.memory.flat[chunk.start * itemsize : chunk.stop * itemsize]

    def chunk_values(self, chunk: Chunk) -> torch.Tensor:
        return self.values[chunk.start : chunk.stop]

    def homes(self) -> list[ChunkOf]:
        """The whole flat in chunks: where parameters stay on the device they do so on every rank."""
        return [self._chunk(chunk) for chunk in self.layout.cut(0, self.layout.numel)]

    def chunks_of(self, info: ParameterInfo) -> Sequence[ChunkOf]:
        """This rank's chunks that hold a part of the parameter, in order."""
        return self._chunks_of[info.index]

    def slot_of(self, info: ParameterInfo) -> Slot:
        return self._slot_of[info.index]

    def _chunk(self, chunk: Chunk) -> ChunkOf:
        pieces = tuple((self._info_of[piece.slot.parameter_index], piece) for piece in self.layout.pieces(chunk))
        return ChunkOf(self, chunk, pieces)


@contextmanager
def _without_weak_references(modules: Iterable[nn.Module]) -> Iterator[None]:
    """`swap_tensors` refuses tensors with weak references; recurrent modules keep such references to their own weights."""
    recurrent = [child for module in modules for child in module.modules() if isinstance(child, nn.RNNBase)]
    for child in recurrent:
        child._flat_weight_refs = []
    try:
        yield
    finally:
        for child in recurrent:
            child._flat_weight_refs = [None if weight is None else weakref.ref(weight) for weight in child._flat_weights]


@dataclass(slots=True)
class Unit:
    """One unit at run time."""

    layout: UnitLayout
    modules: list[nn.Module]
    """Those whose forward uses the unit; more than one where they share its parameters."""
    flats: list[Flat]
    parameters: list[ParameterInfo] = field(default_factory=list)

    @property
    def index(self) -> int:
        return self.layout.index

    @property
    def name(self) -> str:
        return self.layout.name or "(root)"

    @property
    def largest_gradient_nbytes(self) -> int:
        """As autograd computes it: whole, in the parameter's dtype."""
        return max((info.numel * info.dtype.itemsize for info in self.parameters if info.trainable), default=0)

    def point_parameters_at_flats(self) -> None:
        """Make every parameter of the unit a view of its flat."""
        for flat in self.flats:
            for info, view in zip(flat.parameters, flat.views, strict=True):
                if info.parameter.is_meta:
                    # `.data` cannot change the kind of a tensor; swapping keeps the Parameter that the optimizer knows.
                    swapped = nn.Parameter(view, requires_grad=info.parameter.requires_grad)
                    with _without_weak_references(self.modules):
                        torch.utils.swap_tensors(info.parameter, swapped)
                else:
                    info.parameter.data = view

    @property
    def chunks(self) -> list[ChunkOf]:
        """What this rank updates of it, in order."""
        return [chunk_of for flat in self.flats for chunk_of in flat.chunks]

    @property
    def homes(self) -> list[ChunkOf]:
        """See `Flat.homes`."""
        return [chunk_of for flat in self.flats for chunk_of in flat.homes()]

    def open_up(self) -> None:
        for info in self.parameters:
            if info.guard is not None:
                info.guard.open_up()

    def close_off(self, *, readable: bool) -> None:
        for info in self.parameters:
            if info.guard is not None:
                info.guard.close_off(readable=readable)
