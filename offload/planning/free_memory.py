# SPDX-License-Identifier: Apache-2.0
"""What memory there is now, whatever was planned."""

from __future__ import annotations

from offload.device.accelerator import Accelerator
from offload.device.host_room import host_room
from offload.planning.budget import MemoryLine, Tier


def missing_nbytes(line: MemoryLine, accelerator: Accelerator) -> int:
    """Of what the line takes, the bytes that are not free. What is to lie on a drive is asked for there."""
    if line.tier == "nvme":
        return 0
    free = host_room().free_nbytes if line.tier == "cpu" else accelerator.free_nbytes()
    return max(line.nbytes - free, 0) if free is not None else 0


def remedy(tier: Tier, missing: int) -> str:
    """What the user can do about bytes that are missing there."""
    if tier == "nvme":
        return "make room in the nvme folder"
    return f"raise {'device_memory' if tier == 'device' else 'cpu_memory'}, where it is set, by {missing} bytes"
