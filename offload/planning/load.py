"""Bytes that one half of a step moves over each link, and the seconds that they take (`offload.planning.cost`)."""

from __future__ import annotations

from dataclasses import dataclass

from offload.device.rates import Rates


@dataclass(slots=True)
class Load:
    """Bytes of one half of a step. `memory`: of host memory beyond what the links pass through it."""

    to_device: float = 0.0
    from_device: float = 0.0
    read: float = 0.0
    written: float = 0.0
    memory: float = 0.0
    device_memory: float = 0.0
    chunk_count: int = 0
    """Updated on the host, one after the other."""

    def seconds_by(self, rates: Rates) -> dict[str, float]:
        """What each link takes."""
        beside = self.chunk_count * rates.chunk_seconds
        through = self.to_device + self.from_device + self.read + self.written
        return {
            "host to device": self.to_device / rates.h2d,
            "device to host": self.from_device / rates.d2h,
            "NVMe": beside
            + max(self.read / rates.nvme_read, self.written / rates.nvme_write, (self.read + self.written) / rates.nvme_both),
            "host memory": beside + (self.memory + through) / rates.memory,
            "device memory": self.device_memory / rates.device_memory,
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
