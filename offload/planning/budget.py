"""What the engine will hold, and where, computed before anything is allocated. Pure arithmetic on the layout.

    device   parameters (all, or what is resident at once), states and gradients that stay there
    cpu      parameters, records and gradients placed there, staging buffers; where the device is the CPU its part too
    nvme     parameters, records, gradients that do not fit

What the budget leaves in host memory keeps a part of what is on NVMe (`Kept`).

Every line of a `MemoryPlan` is one consumer. The totals are what budgets are held against, and what `engine.stats()`
shows beside what was measured.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Literal

from offload.device.records import RecordFormat
from offload.layout import EXTENT_ALIGN, FlatLayout, Layout, round_up
from offload.planning.purposes import ACCUMULATED

Tier = Literal["device", "cpu", "nvme"]

MASTER_ITEMSIZE = 4
READ_AHEAD = 3
"""Records that are read before their turn."""
IN_WRITING = 2
"""Records that may still be in writing while the next is updated."""
SPILLING_BUFFERS = 2
"""Gradient buffers that may be in writing while the others are in use."""
SPARE_BUFFERS = 8
"""Gradient buffers that are kept free, or being freed, for what arrives next: the gradient of a large parameter comes all at
once, and backward would wait for the drive. Of a few buffers half."""
FETCH_BUFFERS = 3
"""Chunks of parameters on their way through host memory: one being read, one waiting, one being copied."""
LANDING_BUFFERS = 4
"""Chunks of gradients that came from the device and wait to be added to what the host has."""
SUM_BLOCK = 4096
"""Elements whose squares are added into one fp64 number."""


@dataclass(frozen=True, slots=True)
class MemoryLine:
    """One consumer of one tier."""

    tier: Tier
    purpose: str
    nbytes: int


@dataclass(frozen=True, slots=True)
class MemoryPlan:
    """Everything the engine will hold, line by line."""

    lines: tuple[MemoryLine, ...]

    def total_nbytes(self, tier: Tier) -> int:
        return sum(line.nbytes for line in self.lines if line.tier == tier)


@dataclass(frozen=True, slots=True)
class Kept:
    """The working set: what lies in host memory of states whose tier is NVMe, the first chunks in the order of the units.

    Bytes that one byte of memory saves in a step of n micro-batches, and of those while a forward and the updates run:

        parameters  2n + 1  n + 1   read for forward and backward, written once; whole units where the CPU computes
        records     2       2       read and written once
        gradients   2n      n       written under backward and read back; half as much where gradients are 16-bit, since
                                    a buffer has room for their sum in fp32

    Updates run under the forward, which is when the drive has most to do, so that column decides, and then the first:
    parameters before records before gradients.
    """

    unit_count: int = 0
    """Units that need no fetch, since the device computes where their parameters lie."""
    parameter_count: int = 0
    parameter_nbytes: int = 0
    record_count: int = 0
    record_nbytes: int = 0


NOTHING_KEPT = Kept()


@dataclass(frozen=True, slots=True)
class UndoRoom:
    """What a second place for all that an update of one unit writes takes on NVMe. `first_parameter`, `first_record`: the
    unit's first trained chunks, as `Kept` counts them."""

    unit_index: int
    nbytes: int
    first_parameter: int
    first_record: int

    def is_beside(self, kept: Kept) -> bool:
        """Whether nothing of the unit is kept in memory: what is written there is written in place."""
        return kept.parameter_count <= self.first_parameter and kept.record_count <= self.first_record

    @staticmethod
    def of(layout: Layout, record_chunks: Sequence[int]) -> tuple[UndoRoom, ...]:
        """Of every unit with trained parameters."""
        rooms: list[UndoRoom] = []
        parameter_count = record_count = 0
        for unit in layout.units:
            first_parameter, first_record, nbytes = None, record_count, 0
            for flat in unit.flats:
                if flat.trainable:
                    first_parameter = parameter_count if first_parameter is None else first_parameter
                    nbytes += sum(round_up(chunk.numel * flat.itemsize, EXTENT_ALIGN) for chunk in flat.chunks)
                    record_count += len(flat.chunks)
                parameter_count += len(flat.chunks)
            if first_parameter is not None:
                nbytes += sum(record_chunks[first_record:record_count])
                rooms.append(UndoRoom(unit.index, nbytes, first_parameter, first_record))
        return tuple(rooms)


@dataclass(frozen=True, slots=True)
class Placement:
    """The decision. `staging`: purpose -> (count, nbytes) of host buffers. `unit_capacity_nbytes`: None if all stay."""

    parameters: Tier
    optimizer_states: Tier
    gradients: Tier
    retained_gradient_buffers: int
    staging: dict[str, tuple[int, int]]
    unit_capacity_nbytes: int | None
    prefetch: int
    plan: MemoryPlan
    sums_nbytes: int = 0
    """What fp32 sums of several micro-batches take besides, where the gradients lie; taken when a second one comes."""
    sums_missing_nbytes: int = 0
    """Of those what the budget does not leave."""
    transit_buffer_count: int = 0
    """Chunks of gradients that may be on the device on their way to the host."""
    kept: Kept = NOTHING_KEPT
    undoable_units: frozenset[int] = frozenset()
    """Those whose updates may begin before the norm is known (`offload.step.speculation`): there is a second place for what
    they write."""

    def with_sums(self) -> Placement:
        """The same with room for the sums of micro-batches."""
        line = MemoryLine(self.gradients, ACCUMULATED, self.sums_nbytes)
        return replace(self, plan=MemoryPlan((*self.plan.lines, line)), sums_nbytes=0, sums_missing_nbytes=0)

    @property
    def uses_nvme(self) -> bool:
        return any(line.tier == "nvme" for line in self.plan.lines)


@dataclass(frozen=True, slots=True)
class Footprint:
    """The sizes of a model's states under one layout, in bytes."""

    parameters: int
    records: int
    gradients: int
    gradients_wide: int
    largest_chunk_numel: int
    record_buffer: int
    """Bytes of a buffer that holds any chunk's record."""
    reads_parameters: bool
    """Whether updates read the old parameters: they are the master, or a part of it."""
    parameter_buffer: int
    """Bytes of a buffer that holds any chunk's parameters, frozen ones included."""
    chunk_count: int
    open_chunk_count: int
    unit_chunk_count: int
    """Of the unit with the most trainable chunks."""
    sums: int
    """Bytes of the sums of squares of all gradients."""
    parameter_chunks: tuple[tuple[int, ...], ...]
    """For each unit, the bytes of each chunk's parameters."""
    record_chunks: tuple[int, ...]
    """The bytes of each trainable chunk's record, in the order of the units."""
    gradient_chunks: tuple[int, ...]
    has_whole_units: bool
    """Whether this rank's chunks are all of each unit, so that a device can compute where they lie."""
    unreduced_gradients: int = 0
    """Bytes of the gradients of whole units before they are reduced over the ranks; 0 on one rank."""
    exchange: int = 0
    """Bytes of host buffers for what comes from other ranks while gradients are reduced."""
    undo_rooms: tuple[UndoRoom, ...] = ()

    @staticmethod
    def of(layout: Layout, formats: Sequence[RecordFormat]) -> Footprint:
        """`formats[i]`: of the records of the layout's i-th flat, if it is trainable."""
        flats = list(layout.flats)
        trainable = [flat for flat in flats if flat.trainable]
        used = [one for flat, one in zip(flats, formats, strict=True) if flat.trainable]
        record_chunks = tuple(
            round_up(one.nbytes(chunk.numel), EXTENT_ALIGN)
            for flat, one in zip(trainable, used, strict=True)
            for chunk in flat.chunks
        )
        gradients_wide = sum(flat.updated_numel * MASTER_ITEMSIZE for flat in trainable)
        alone = layout.world_size == 1
        return Footprint(
            parameters=sum(flat.nbytes for flat in flats) // (layout.world_size if layout.shards_parameters else 1),
            records=sum(record_chunks),
            # Averages over ranks are kept in fp32.
            gradients=sum(flat.updated_numel * flat.itemsize for flat in trainable) if alone else gradients_wide,
            gradients_wide=gradients_wide,
            largest_chunk_numel=_largest_chunk(trainable),
            record_buffer=max(record_chunks, default=0),
            reads_parameters=any(one.needs_values for one in used),
            parameter_buffer=max((chunk.numel * flat.itemsize for flat in flats for chunk in flat.chunks), default=0),
            chunk_count=sum(len(flat.chunks) for flat in trainable),
            open_chunk_count=max((_open_chunks(unit.flats) for unit in layout.units), default=0),
            unit_chunk_count=max(
                (sum(len(flat.chunks) for flat in unit.flats if flat.trainable) for unit in layout.units), default=0
            ),
            sums=8 * sum(_sum_count(flat) for flat in trainable),
            parameter_chunks=tuple(
                tuple(chunk.numel * flat.itemsize for flat in unit.flats for chunk in flat.chunks) for unit in layout.units
            ),
            record_chunks=record_chunks,
            gradient_chunks=tuple(
                chunk.numel * (flat.itemsize if alone else MASTER_ITEMSIZE) for flat in trainable for chunk in flat.chunks
            ),
            has_whole_units=all(flat.shard.numel == flat.numel for flat in flats),
            unreduced_gradients=0 if alone else _unreduced_nbytes(layout),
            exchange=0 if alone else _exchange_nbytes(layout),
            undo_rooms=UndoRoom.of(layout, record_chunks),
        )

    @property
    def gradient_buffer(self) -> int:
        """Bytes of a buffer that holds any chunk's gradient, accumulated in fp32."""
        return self.largest_chunk_numel * MASTER_ITEMSIZE

    @property
    def least_gradient_buffers(self) -> int:
        """With fewer, gradients of one unit could not arrive side by side.

        Two units' shared chunks (backward leaves one while the next begins), two for a slot that streams through, and
        those that are being spilled meanwhile. A chunk that is the only one has a second, to be widened into.
        """
        return min(2 * self.open_chunk_count + 2 + SPILLING_BUFFERS, max(self.chunk_count, 2))


def spare_count(buffer_count: int, chunk_count: int) -> int:
    """How many of the buffers for gradients are kept free; none where there is one for each chunk."""
    return min(SPARE_BUFFERS, buffer_count // 2) if buffer_count < chunk_count else 0


def spilled_nbytes(chunk_nbytes: Iterable[int], buffer_count: int) -> int:
    """Gradients that leave for NVMe in one backward, with buffers for so many chunks: those of the largest, at most."""
    sizes = sorted(chunk_nbytes)
    return sum(sizes[buffer_count - spare_count(buffer_count, len(sizes)) :])


def _largest_chunk(flats: Iterable[FlatLayout]) -> int:
    return max((chunk.numel for flat in flats for chunk in flat.chunks), default=0)


def _open_chunks(flats: Iterable[FlatLayout]) -> int:
    return sum(flat.open_chunk_count for flat in flats if flat.trainable)


UNREDUCED_UNITS = 2
"""Units, besides the root, whose unreduced gradients are there at once: one arriving, one being reduced."""


def _unreduced_nbytes(layout: Layout) -> int:
    """Stages 2 and 3: the root's gradients (it is in use throughout) and those of the largest units. Below: all."""
    sizes = [sum(flat.nbytes for flat in unit.flats if flat.trainable) for unit in layout.units]
    if layout.stage < 2:
        return sum(sizes)
    return sizes[0] + sum(sorted(sizes[1:])[-UNREDUCED_UNITS:])


def _exchange_nbytes(layout: Layout) -> int:
    """Two sets of segments from the other ranks (one being added up, one arriving), their sum; in stage 0 a whole flat."""
    trainable = [flat for flat in layout.flats if flat.trainable]
    segment_numel = max((min(flat.shard.numel, _largest_chunk([flat])) for flat in trainable), default=0)
    whole_numel = max((flat.numel for flat in trainable), default=0) if layout.stage == 0 else 0
    itemsize = max((flat.itemsize for flat in trainable), default=0)
    return 2 * (layout.world_size - 1) * segment_numel * itemsize + (segment_numel + whole_numel) * MASTER_ITEMSIZE


def _sum_count(flat: FlatLayout) -> int:
    """One for each block that a piece touches."""
    pieces = [piece for chunk in flat.chunks for piece in flat.pieces(chunk)]
    return sum(-(-piece.stop // SUM_BLOCK) - piece.start // SUM_BLOCK for piece in pieces)
