# SPDX-License-Identifier: Apache-2.0
"""Bytes that one half of a step moves over each link, and the seconds that they take (`offload.planning.cost`)."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass, field

from offload.device.rates import Rates
from offload.planning.route_bytes import Link, Moves


@dataclass(slots=True)
class Load:
    """Of one half of a step."""

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
    """Seconds that a step takes at least, besides what the model computes; `forward` and `backward`: by link."""

    forward: dict[str, float]
    backward: dict[str, float]

    @property
    def seconds(self) -> float:
        return max(self.forward.values()) + max(self.backward.values())

    @property
    def by_link(self) -> dict[str, float]:
        return {link: seconds + self.backward[link] for link, seconds in self.forward.items()}

    @property
    def bound_by(self) -> str:
        """The link that needs most."""
        return max(self.by_link, key=self.by_link.__getitem__)
