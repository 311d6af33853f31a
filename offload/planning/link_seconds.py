# SPDX-License-Identifier: Apache-2.0
"""Bytes that one part of a step moves over each link, and the seconds that they take (`offload.planning.cost`)."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass, field

from offload.device.rates import Rates
from offload.planning.route_bytes import Link, Moves


@dataclass(slots=True)
class Load:
    """Of one part of a step."""

    nbytes: defaultdict[Link, float] = field(default_factory=lambda: defaultdict(float))
    chunk_count: int = 0
    """Updated on the host, one after the other."""

    def add(self, moves: Moves, times: float = 1) -> None:
        for link, nbytes in moves:
            self.nbytes[link] += times * nbytes

    def seconds_by(self, rates: Rates) -> dict[str, float]:
        """What each link takes."""
        moved, beside = self.nbytes, self.chunk_count * rates.chunk_seconds
        read, written = moved[Link.READ], moved[Link.WRITTEN]
        through = moved[Link.TO_DEVICE] + moved[Link.FROM_DEVICE] + read + written
        return {
            Link.TO_DEVICE.value: moved[Link.TO_DEVICE] / rates.h2d,
            Link.FROM_DEVICE.value: moved[Link.FROM_DEVICE] / rates.d2h,
            "NVMe": beside + max(read / rates.nvme_read, written / rates.nvme_write, (read + written) / rates.nvme_both),
            Link.HOST_MEMORY.value: beside + (moved[Link.HOST_MEMORY] + through) / rates.memory,
            Link.DEVICE_MEMORY.value: moved[Link.DEVICE_MEMORY] / rates.device_memory,
        }


@dataclass(frozen=True, slots=True)
class Cost:
    """Seconds that a step takes at least, besides what the model computes; of each part of it by link."""

    forward: dict[str, float]
    """The first micro-batch's."""
    between: dict[str, float]
    """All from then to the last forward's end; nothing of a single micro-batch."""
    backward: dict[str, float]
    """The last micro-batch's."""
    spilled_between: float
    """Of NVMe's: gradients that spill. `spilled_last`: those of the last backward."""
    spilled_last: float

    @property
    def parts(self) -> tuple[dict[str, float], ...]:
        return self.forward, self.between, self.backward

    @property
    def seconds(self) -> float:
        return sum(max(part.values()) for part in self.parts)

    @property
    def by_link(self) -> dict[str, float]:
        return {link: sum(part[link] for part in self.parts) for link in self.forward}

    @property
    def bound_by(self) -> str:
        """The link that needs most."""
        return max(self.by_link, key=self.by_link.__getitem__)
