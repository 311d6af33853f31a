# SPDX-License-Identifier: Apache-2.0
"""The arithmetic of where everything lies: units, flats, slots, chunks, shards, extents. Integers only.

Derivation, from the model inwards:

    unit      the parameters that are fetched together, usually one transformer block
    flat      a unit's parameters of one dtype, all trainable or all frozen, laid end to end: [padded_numel]
    slot      one parameter's place in a flat: [start, start + numel), start a multiple of SLOT_ALIGN
    shard     one rank's equal part of a flat: padded_numel / world_size elements
    chunk     the granule of I/O and of the optimizer step, a piece of what this rank updates: of its shard, or (ZeRO
              stage 0) of the whole flat; it may split a slot and may hold many
    extent    where a chunk (its parameters, its gradient, or its optimizer record) lies in a tier, in bytes
    record    the optimizer state of one chunk, contiguous: [master |] exp_avg | exp_avg_sq, each fp32 [chunk.numel]

What always holds: slots of a flat are disjoint and in order; slots of one optimizer group are contiguous, in each part of a
unit that others were joined to, which begins at a multiple of BLOCK (so that joining changes no block of a sum); every
chunk boundary is a multiple of BLOCK (so that a block of the sum of squares never straddles two chunks, and every
extent is a multiple of EXTENT_ALIGN bytes at an offset that is one); shards partition the padded flat.
"""

from __future__ import annotations

import bisect
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from typing import NamedTuple

SLOT_ALIGN = 64
"""Elements. 256 bytes of fp32: a slot never shares a cache line or a SIMD lane pattern with its neighbour."""

BLOCK = 4096
"""Elements. The granule of the sum of squares (see `offload.device.arithmetic.kernels.ingest_async`) and of every boundary."""

EXTENT_ALIGN = 4096
"""Bytes. What direct I/O asks of offsets and lengths on every common file system."""

CHUNK_NUMEL = 2 * 1024 * 1024
"""Elements. 8 MiB of fp32: large enough for full device bandwidth, small enough that a pipeline of them is small."""


CHUNK_NUMELS = tuple(CHUNK_NUMEL >> shift for shift in range(4))
"""Elements. What is tried, largest first, until every buffer that holds a chunk fits into the budgets."""

LARGEST_CHUNK_NUMEL = 8 * CHUNK_NUMEL
"""Elements. Of models so large that their chunks are many: each costs the thread that gives a device its work the same,
whatever its size."""

MANY_CHUNKS = 1024


def large_chunk_numels(numel: int) -> tuple[int, ...]:
    """What to try before the usual for so many elements: sizes that leave few chunks, the largest first."""
    found: list[int] = []
    while (largest := found[0] if found else CHUNK_NUMEL) < LARGEST_CHUNK_NUMEL and numel > MANY_CHUNKS * largest:
        found.insert(0, 2 * largest)
    return tuple(found)


def round_up(value: int, multiple: int) -> int:
    """The smallest multiple of `multiple` that is >= `value`."""
    return -(-value // multiple) * multiple


class Extent(NamedTuple):
    """A byte range in a tier. Both numbers are multiples of EXTENT_ALIGN."""

    offset_nbytes: int
    nbytes: int


class ExtentAllocator:
    """Hands out consecutive extents; `total_nbytes` is the size of the store that holds them."""

    def __init__(self) -> None:
        self.extents: list[Extent] = []
        self.total_nbytes = 0

    def take(self, nbytes: int) -> Extent:
        extent = Extent(self.total_nbytes, round_up(nbytes, EXTENT_ALIGN))
        self.total_nbytes += extent.nbytes
        self.extents.append(extent)
        return extent


@dataclass(frozen=True, slots=True)
class ParameterSpec:
    """What the layout needs to know of a parameter. `index` is its place in the engine's list of parameters; `part_index`: the
    part of its unit, in one of several that were joined, that it is of."""

    index: int
    numel: int
    dtype: str
    itemsize: int
    trainable: bool
    group_index: int = 0
    part_index: int = 0


@dataclass(frozen=True, slots=True)
class Slot:
    """One parameter's place in a flat, in elements."""

    parameter_index: int
    start: int
    numel: int

    @property
    def stop(self) -> int:
        return self.start + self.numel


@dataclass(frozen=True, slots=True)
class Shard:
    """One rank's part of a flat, in elements of the flat."""

    rank: int
    start: int
    numel: int

    @property
    def stop(self) -> int:
        return self.start + self.numel


@dataclass(frozen=True, slots=True)
class ChunkLayout:
    """A piece of what this rank updates, in elements of the flat."""

    index: int
    start: int
    numel: int

    @property
    def stop(self) -> int:
        return self.start + self.numel


@dataclass(frozen=True, slots=True)
class Piece:
    """The part of a slot that lies in a chunk: [start, stop) in elements of the flat."""

    slot: Slot
    start: int
    stop: int

    @property
    def numel(self) -> int:
        return self.stop - self.start

    @property
    def in_parameter(self) -> slice:
        """Its elements among those of the parameter."""
        return slice(self.start - self.slot.start, self.stop - self.slot.start)


@dataclass(frozen=True, slots=True)
class FlatLayout:
    """One flat buffer of one unit."""

    unit_index: int
    dtype: str
    itemsize: int
    trainable: bool
    slots: tuple[Slot, ...]
    numel: int
    shard: Shard
    chunks: tuple[ChunkLayout, ...]
    _starts: tuple[int, ...] = field(repr=False, compare=False)

    @property
    def nbytes(self) -> int:
        """Bytes of the whole (unsharded) flat, padding included."""
        return self.numel * self.itemsize

    @property
    def updated_numel(self) -> int:
        """Elements that this rank updates: those of its chunks."""
        return sum(chunk.numel for chunk in self.chunks)

    def cut(self, start: int, stop: int) -> tuple[ChunkLayout, ...]:
        """[start, stop) of the flat in pieces of the size of this rank's chunks."""
        return _cut(start, stop, self.chunks[0].numel)

    def pieces(self, chunk: ChunkLayout) -> Iterator[Piece]:
        """The slots that lie in `chunk`, cut to it, in order."""
        first = bisect.bisect_right(self._starts, chunk.start) - 1
        for index in range(max(first, 0), len(self.slots)):
            slot = self.slots[index]
            if slot.start >= chunk.stop:
                return
            start, stop = max(slot.start, chunk.start), min(slot.stop, chunk.stop)
            if start < stop:
                yield Piece(slot, start, stop)

    def gaps(self, start: int, stop: int) -> Iterator[range]:
        """The padding in elements [start, stop): what belongs to no slot, in order."""
        position = start
        for piece in self.pieces(ChunkLayout(0, start, stop - start)):
            if piece.start > position:
                yield range(position, piece.start)
            position = piece.stop
        if position < stop:
            yield range(position, stop)

    @property
    def open_chunk_count(self) -> int:
        """How many chunks can hold an incomplete gradient at once: those that more than one slot shares. Of the rank that has
        the most of them, so that all ranks need the same.

        A chunk that lies wholly inside one slot is filled and finished by that slot's gradient alone.
        """
        numel = self.updated_numel
        parts = (
            [self.chunks] if numel == self.numel else [self.cut(start, start + numel) for start in range(0, self.numel, numel)]
        )
        return max(sum(1 for chunk in chunks if sum(1 for _ in self.pieces(chunk)) > 1) for chunks in parts)


@dataclass(frozen=True, slots=True)
class UnitLayout:
    """One unit: its flats, at most one per (dtype, trainable)."""

    index: int
    name: str
    flats: tuple[FlatLayout, ...]

    @property
    def nbytes(self) -> int:
        """Bytes of the unsharded parameters, padding included."""
        return sum(flat.nbytes for flat in self.flats)


@dataclass(frozen=True, slots=True)
class Layout:
    """The whole model on one rank of `world_size`, the ranks that share its shards.

    `stage` (ZeRO): 0 nothing is partitioned, 1 optimizer states, 2 gradients too, 3 parameters too.
    """

    units: tuple[UnitLayout, ...]
    world_size: int
    rank: int
    chunk_numel: int
    stage: int

    @property
    def shards_parameters(self) -> bool:
        """Whether this rank keeps only its shard of the parameters between uses."""
        return self.stage == 3 and self.world_size > 1

    @property
    def flats(self) -> Iterator[FlatLayout]:
        return (flat for unit in self.units for flat in unit.flats)


@lru_cache(maxsize=256)  # the blocks of a model are cut alike
def _cut(start: int, stop: int, numel: int) -> tuple[ChunkLayout, ...]:
    return tuple(ChunkLayout(index, begin, min(numel, stop - begin)) for index, begin in enumerate(range(start, stop, numel)))


@dataclass(frozen=True, slots=True)
class _Ranks:
    world_size: int
    rank: int
    stage: int


def _flat_layout(unit_index: int, specs: Sequence[ParameterSpec], ranks: _Ranks, chunk_numel: int) -> FlatLayout:
    slots: list[Slot] = []
    start, part_index = 0, specs[0].part_index
    # A stable sort by group keeps the slots of one optimizer group contiguous and, within it, in model order.
    for spec in sorted(specs, key=lambda spec: (spec.part_index, spec.group_index)):
        if spec.part_index != part_index:
            start, part_index = round_up(start, BLOCK), spec.part_index
        slots.append(Slot(spec.index, start, spec.numel))
        start = round_up(start + spec.numel, SLOT_ALIGN)
    numel = round_up(max(start, 1), BLOCK * ranks.world_size)
    shard_numel = numel // ranks.world_size
    shard = Shard(ranks.rank, ranks.rank * shard_numel, shard_numel)
    updated = shard if ranks.stage > 0 else Shard(0, 0, numel)
    chunks = _cut(updated.start, updated.stop, chunk_numel)
    first = specs[0]
    starts = tuple(slot.start for slot in slots)
    return FlatLayout(unit_index, first.dtype, first.itemsize, first.trainable, tuple(slots), numel, shard, chunks, starts)


def build_layout(
    units: Iterable[tuple[str, Sequence[ParameterSpec]]],
    *,
    world_size: int = 1,
    rank: int = 0,
    stage: int = 3,
    chunk_numel: int = CHUNK_NUMEL,
) -> Layout:
    """Lay out units, given as (name, parameters) in the order in which the model holds them.

    `chunk_numel` must be a multiple of BLOCK. A unit without parameters has no flats and is kept, so that
    unit indices are those of the caller.
    """
    if chunk_numel <= 0 or chunk_numel % BLOCK:
        raise AssertionError(f"chunk_numel {chunk_numel} is not a positive multiple of {BLOCK}")
    if not 0 <= rank < world_size:
        raise AssertionError(f"rank {rank} is not within world size {world_size}")
    ranks = _Ranks(world_size, rank, stage)
    laid_out: list[UnitLayout] = []
    for unit_index, (name, specs) in enumerate(units):
        by_kind: dict[tuple[str, bool], list[ParameterSpec]] = {}
        for spec in specs:
            by_kind.setdefault((spec.dtype, spec.trainable), []).append(spec)
        flats = tuple(_flat_layout(unit_index, kind, ranks, chunk_numel) for kind in by_kind.values())
        laid_out.append(UnitLayout(unit_index, name, flats))
    return Layout(tuple(laid_out), world_size, rank, chunk_numel, stage)
