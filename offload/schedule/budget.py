"""What the engine will hold, and where, computed before anything is allocated. Pure arithmetic on the layout.

    device   parameters (all, or what is resident at once), states and gradients that stay there
    cpu      parameters, records and gradients placed there, staging buffers; where the device is the CPU its part too
    nvme     parameters, records, gradients that do not fit

Every line of a `MemoryPlan` is one consumer. The totals are what budgets are held against, and what `engine.stats()`
shows beside what was measured.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Literal

from offload.layout import FlatLayout, Layout

Tier = Literal["device", "cpu", "nvme"]

MASTER_ITEMSIZE = 4
READ_AHEAD = 3
"""Records that are read before their turn."""
IN_WRITING = 2
"""Records that may still be in writing while the next is updated."""
SPARE_BUFFERS = 2
"""Gradient buffers that are kept free, or being freed, for the gradients that arrive next."""
FETCH_BUFFERS = 3
"""Chunks of parameters on their way through host memory: one being read, one waiting, one being copied."""


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
class Footprint:
    """The sizes of a model's states under one layout, in bytes."""

    parameters: int
    records: int
    gradients: int
    gradients_wide: int
    largest_chunk_numel: int
    record_arrays: int
    parameter_buffer: int
    """Bytes of a buffer that holds any chunk's parameters, frozen ones included."""
    chunk_count: int
    open_chunk_count: int

    @staticmethod
    def of(layout: Layout, has_master: Sequence[bool]) -> Footprint:
        """`has_master[i]`: whether the records of the layout's i-th flat hold a master of their own."""
        flats = list(layout.flats)
        trainable = [flat for flat in flats if flat.trainable]
        arrays = [3 if own else 2 for flat, own in zip(flats, has_master, strict=True) if flat.trainable]
        return Footprint(
            parameters=sum(flat.nbytes for flat in flats),
            records=sum(flat.shard.numel * count * MASTER_ITEMSIZE for flat, count in zip(trainable, arrays, strict=True)),
            gradients=sum(flat.shard.numel * flat.itemsize for flat in trainable),
            gradients_wide=sum(flat.shard.numel * MASTER_ITEMSIZE for flat in trainable),
            largest_chunk_numel=_largest_chunk(trainable),
            record_arrays=max(arrays, default=2),
            parameter_buffer=max((chunk.numel * flat.itemsize for flat in flats for chunk in flat.chunks), default=0),
            chunk_count=sum(len(flat.chunks) for flat in trainable),
            open_chunk_count=max((_open_chunks(unit.flats) for unit in layout.units), default=0),
        )

    @property
    def record_buffer(self) -> int:
        """Bytes of a buffer that holds any chunk's record."""
        return self.largest_chunk_numel * self.record_arrays * MASTER_ITEMSIZE

    @property
    def gradient_buffer(self) -> int:
        """Bytes of a buffer that holds any chunk's gradient, accumulated in fp32."""
        return self.largest_chunk_numel * MASTER_ITEMSIZE

    @property
    def least_gradient_buffers(self) -> int:
        """With fewer, gradients of one unit could not arrive side by side.

        Two units' shared chunks (backward leaves one while the next begins), two for a slot that streams through, and
        those that are being spilled meanwhile.
        """
        return min(2 * self.open_chunk_count + 2 + SPARE_BUFFERS, self.chunk_count)


def _largest_chunk(flats: Iterable[FlatLayout]) -> int:
    return max((chunk.numel for flat in flats for chunk in flat.chunks), default=0)


def _open_chunks(flats: Iterable[FlatLayout]) -> int:
    return sum(flat.open_chunk_count for flat in flats if flat.trainable)
