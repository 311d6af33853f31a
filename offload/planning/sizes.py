# SPDX-License-Identifier: Apache-2.0
"""The sizes of a model's states under one layout, in bytes, unit by unit."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable
from dataclasses import dataclass, replace

from offload.device.arithmetic.records import RecordFormat
from offload.layout import EXTENT_ALIGN, FlatLayout, Layout, UnitLayout, round_up
from offload.planning.budget import MASTER_ITEMSIZE, SPILLING_BUFFERS, SUM_BLOCK, UNREDUCED_UNITS

_NARROW_ITEMSIZE = 2
FormatOf = Callable[[str, bool], RecordFormat]
"""What the records of trained parameters consist of, by their dtype and whether updates cross from one memory to another."""


@dataclass(frozen=True, slots=True)
class RecordSizes:
    """`chunks`: of each trained chunk's record. `read_nbytes`: of the parameters that updates read, because they are the
    master or a part of it."""

    chunks: tuple[int, ...]
    nbytes: int
    read: tuple[int, ...]
    """Of each trained chunk."""

    @staticmethod
    def of(flats: Iterable[FlatLayout], format_of: FormatOf, *, crosses: bool) -> RecordSizes:
        sizes, read = [], []
        for flat in flats:
            one = format_of(flat.dtype, crosses)
            sizes += [round_up(one.nbytes(chunk.numel), EXTENT_ALIGN) for chunk in flat.chunks]
            read += [chunk.numel * flat.itemsize if one.needs_values else 0 for chunk in flat.chunks]
        return RecordSizes(tuple(sizes), sum(sizes), tuple(read))


@dataclass(frozen=True, slots=True)
class UnitSizes:
    """One unit.

    whole      its parameters where the model computes with them
    home       what this rank keeps of them
    chunks     the parameters of each chunk of this rank's, and of each trained one (`trained`)
    gradients  of each trained chunk, as one backward leaves it, `gradients_nbytes` in all; `gradients_wide` in fp32;
               `gradients_kept`: what is reserved for them; `sums`: what fp32 sums of several micro-batches take besides
    """

    index: int
    whole: int
    home: int
    chunks: tuple[int, ...]
    trained: tuple[int, ...]
    trained_positions: tuple[int, ...]
    """Of the trained chunks among all of the unit."""
    beside: RecordSizes
    across: RecordSizes
    gradients: tuple[int, ...]
    gradients_wide: tuple[int, ...]
    gradients_nbytes: int
    gradients_kept: int
    sums: int
    open_chunk_count: int

    def records(self, crosses: bool) -> RecordSizes:
        """Where updates compute where the parameters lie, or not."""
        return self.across if crosses else self.beside

    @staticmethod
    def of(unit: UnitLayout, layout: Layout, format_of: FormatOf, *, wide_gradients: bool, narrow_sums: bool) -> UnitSizes:
        """See `Footprint.of`."""
        trained = [flat for flat in unit.flats if flat.trainable]
        # Averages over ranks are kept in fp32.
        sizes = [flat.itemsize if layout.world_size == 1 else MASTER_ITEMSIZE for flat in trained]
        gradients = [chunk.numel * size for flat, size in zip(trained, sizes, strict=True) for chunk in flat.chunks]
        narrow = [flat for flat, size in zip(trained, sizes, strict=True) if size != MASTER_ITEMSIZE]
        flat_of_chunk = [flat for flat in unit.flats for _ in flat.chunks]
        wide = tuple(chunk.numel * MASTER_ITEMSIZE for flat in trained for chunk in flat.chunks)
        beside = RecordSizes.of(trained, format_of, crosses=False)
        across = RecordSizes.of(trained, format_of, crosses=True)
        return UnitSizes(
            index=unit.index,
            whole=unit.nbytes,
            home=unit.nbytes // (layout.world_size if layout.shards_parameters else 1),
            chunks=tuple(chunk.numel * flat.itemsize for flat in unit.flats for chunk in flat.chunks),
            trained=tuple(chunk.numel * flat.itemsize for flat in trained for chunk in flat.chunks),
            trained_positions=tuple(position for position, flat in enumerate(flat_of_chunk) if flat.trainable),
            beside=beside,
            across=beside if across == beside else across,
            gradients=tuple(gradients),
            gradients_wide=wide,
            gradients_nbytes=sum(gradients),
            gradients_kept=sum(wide if wide_gradients else gradients),
            sums=0 if wide_gradients or narrow_sums else sum(flat.updated_numel * MASTER_ITEMSIZE for flat in narrow),
            open_chunk_count=sum(flat.open_chunk_count for flat in trained),
        )

    @property
    def numel(self) -> int:
        """About how many parameters the model computes with: all are taken to be of the dtype of the trained ones."""
        trained = sum(self.gradients_wide) // MASTER_ITEMSIZE
        return self.whole * trained // sum(self.trained) if trained else self.whole // _NARROW_ITEMSIZE

    @property
    def trained_share(self) -> float:
        """Of its parameters."""
        return sum(self.trained) / self.home if self.home else 0.0


@dataclass(frozen=True, slots=True)
class Footprint:
    """The whole model's."""

    units: tuple[UnitSizes, ...]
    kinds: tuple[int, ...]
    """Of each unit, the index of the first that is like it."""
    parameter_buffer: int
    """Bytes of a buffer that holds any chunk's parameters, frozen ones included."""
    square_sums: int
    """Bytes of the sums of squares of all gradients."""
    unreduced_gradients: int
    """Bytes of the gradients of whole units before they are reduced over the ranks; 0 on one rank."""
    exchange: int
    """Bytes of host buffers for what comes from other ranks while gradients are reduced."""

    @staticmethod
    def of(layout: Layout, format_of: FormatOf, *, wide_gradients: bool = False, narrow_sums: bool = False) -> Footprint:
        """`wide_gradients`: gradients have room for fp32 alone. `narrow_sums`: those of several micro-batches are summed in the
        parameters' dtype, where the first one's lie."""
        flats = list(layout.flats)
        alone = layout.world_size == 1
        alike: dict[Hashable, tuple[UnitSizes, int]] = {}  # the blocks of a model
        units, kinds, square_sums = [], [], 0
        for unit in layout.units:
            shape = tuple(
                (flat.dtype, flat.trainable, tuple((slot.start, slot.numel) for slot in flat.slots)) for flat in unit.flats
            )
            if shape not in alike:
                sums = sum(_square_sum_count(flat) for flat in unit.flats if flat.trainable)
                sizes = UnitSizes.of(unit, layout, format_of, wide_gradients=wide_gradients, narrow_sums=narrow_sums)
                alike[shape] = sizes, sums
            first, sums = alike[shape]
            units.append(replace(first, index=unit.index))
            kinds.append(first.index)
            square_sums += sums
        return Footprint(
            units=tuple(units),
            kinds=tuple(kinds),
            parameter_buffer=max((chunk.numel * flat.itemsize for flat in flats for chunk in flat.chunks), default=0),
            square_sums=8 * square_sums,
            unreduced_gradients=0 if alone else _unreduced_nbytes(layout),
            exchange=0 if alone else _exchange_nbytes(layout),
        )

    @property
    def is_trained(self) -> bool:
        return any(unit.trained for unit in self.units)


def least_gradient_buffers(units: Iterable[UnitSizes]) -> int:
    """With fewer, gradients of one unit could not arrive side by side.

    Two units' shared chunks (backward leaves one while the next begins), two for a slot that streams through, and
    those that are being spilled meanwhile. A chunk that is the only one has a second, to be widened into.
    """
    known = [unit for unit in units if unit.trained]
    if not known:
        return 0
    open_chunk_count = max(unit.open_chunk_count for unit in known)
    return min(2 * open_chunk_count + 2 + SPILLING_BUFFERS, max(sum(len(unit.trained) for unit in known), 2))


def buffers_for_a_sum(units: Iterable[UnitSizes]) -> int:
    """How many buffers for gradients of one backward lie where one for fp32 sums would."""
    known = [unit for unit in units if unit.trained]
    wide = max((max(unit.gradients_wide) for unit in known), default=0)
    narrow = max((max(unit.gradients) for unit in known), default=0)
    count = wide // narrow if narrow else 1
    return count if wide % (count * EXTENT_ALIGN) == 0 else 1


def _unreduced_nbytes(layout: Layout) -> int:
    """Stages 2 and 3: the root's gradients (it is in use throughout) and those of the largest units. Below: all."""
    sizes = [sum(flat.nbytes for flat in unit.flats if flat.trainable) for unit in layout.units]
    if layout.stage < 2:
        return sum(sizes)
    return sizes[0] + sum(sorted(sizes[1:])[-UNREDUCED_UNITS:])


def _exchange_nbytes(layout: Layout) -> int:
    """Two sets of segments from the other ranks (one being added up, one arriving), their sum; in stage 0 a whole flat."""
    trainable = [flat for flat in layout.flats if flat.trainable]
    segment_numel = max((min(flat.shard.numel, max(chunk.numel for chunk in flat.chunks)) for flat in trainable), default=0)
    whole_numel = max((flat.numel for flat in trainable), default=0) if layout.stage == 0 else 0
    itemsize = max((flat.itemsize for flat in trainable), default=0)
    return 2 * (layout.world_size - 1) * segment_numel * itemsize + (segment_numel + whole_numel) * MASTER_ITEMSIZE


def _square_sum_count(flat: FlatLayout) -> int:
    """One for each block that a piece touches."""
    pieces = [piece for chunk in flat.chunks for piece in flat.pieces(chunk)]
    return sum(-(-piece.stop // SUM_BLOCK) - piece.start // SUM_BLOCK for piece in pieces)
