# SPDX-License-Identifier: Apache-2.0
"""What the engine will hold, line by line, and how many buffers of each kind it needs. Pure arithmetic.

    device   parameters (all, or what is resident at once), states and gradients that stay there
    cpu      parameters, records and gradients placed there, staging buffers; where the device is the CPU its part too
    nvme     parameters, records, gradients that do not fit

Every line of a `MemoryPlan` is one consumer. The totals are what budgets are held against, and what `engine.stats()`
shows beside what was measured.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal

Tier = Literal["device", "cpu", "nvme"]
TIERS: tuple[Tier, ...] = ("device", "cpu", "nvme")
"""The nearest first."""

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
LEAST_LANDING_BUFFERS, LANDING_BUFFERS, LANDING_NBYTES = 4, 16, 64 << 20
"""Chunks of gradients that came from the device and wait to be added to what the host has: at least; and where several
micro-batches are added up and there is memory for it, so many, or of small ones as many as have so many bytes."""
SUM_BLOCK = 4096
"""Elements whose squares are added into one fp64 number."""
UNREDUCED_UNITS = 2
"""Units, besides the root, whose unreduced gradients are there at once: one arriving, one being reduced."""


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


def spare_count(buffer_count: int, chunk_count: int) -> int:
    """How many of the buffers for gradients are kept free; none where there is one for each chunk."""
    return min(SPARE_BUFFERS, buffer_count // 2) if buffer_count < chunk_count else 0


def spilled_nbytes(chunk_nbytes: Iterable[int], buffer_count: int) -> int:
    """Gradients that leave for NVMe in one backward, with buffers for so many chunks: those of the largest, at most."""
    sizes = sorted(chunk_nbytes)
    return sum(sizes[buffer_count - spare_count(buffer_count, len(sizes)) :])
