# SPDX-License-Identifier: Apache-2.0
"""How fast bytes move on a machine, and how fast it computes: by which the planner weighs placements against each other.

Only what is faster than what matters, and by how much: a rate that is off by a third changes few decisions.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Rates:
    """Bytes a second. `nvme_both`: reads and writes at once, together, as `memory` is what all have together that read or
    write host memory. `source`: where they come from."""

    h2d: float
    d2h: float
    memory: float
    device_memory: float
    nvme_read: float
    nvme_write: float
    nvme_both: float
    flops: float
    """Floating-point operations a second, as training in 16 bits reaches them."""
    chunk_seconds: float
    """Of the lane that updates on the host, for each chunk beside its bytes: calls, and their hand-over."""
    launch_seconds: float
    """Of the host, which launches the operations of a unit's forward; those of its backward take it twice as long. A forward on
    no more than a few tokens takes as long as that. 0: the host computes itself."""
    source: str


GPU = Rates(
    h2d=20e9,
    d2h=20e9,
    memory=50e9,
    device_memory=800e9,
    nvme_read=5e9,
    nvme_write=4e9,
    nvme_both=6e9,
    flops=80e12,
    chunk_seconds=75e-6,
    launch_seconds=0.5e-3,
    source="usual for a GPU on 16 lanes of PCIe 4, two channels of DDR5 and one NVMe drive",
)
HOST = Rates(
    h2d=20e9,
    d2h=20e9,
    memory=30e9,
    device_memory=30e9,
    nvme_read=3e9,
    nvme_write=2.5e9,
    nvme_both=4e9,
    flops=0.5e12,
    chunk_seconds=150e-6,
    launch_seconds=0.0,
    source="usual for a processor with two channels of memory and one NVMe drive",
)
"""Where a model computes on host memory."""
