"""A machine in numbers: what its parts move and compute in a second."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Machine:
    """Rates are bytes or floating-point operations a second, sizes bytes, times seconds."""

    name: str
    device_nbytes: int
    cpu_nbytes: int
    nvme_nbytes: int
    flops: float
    device_bandwidth: float
    h2d: float
    d2h: float
    memory_bandwidth: float
    nvme_read: float
    nvme_write: float
    nvme_both: float
    launch_seconds: float
    """Of the host, to give the device one operation."""
    verb_seconds: float
    """Of the host, for each thing the engine asks of the device or the drive."""
