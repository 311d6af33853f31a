# SPDX-License-Identifier: Apache-2.0
"""What memory there is now, whatever was planned."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from offload.device.accelerator import Accelerator
from offload.device.host_memory.memory_limits import MemoryLimit, host_memory_limit, host_memory_limits
from offload.planning.budget import MemoryLine, Tier
from offload.tiers import scratch


@dataclass(frozen=True, slots=True)
class FreeMemory:
    """What was free at one moment: in host memory, by what bounds it; on the device, if it says so; on the drives."""

    host: tuple[MemoryLimit, ...]
    device_nbytes: int | None
    drive_nbytes: int

    @staticmethod
    def now(accelerator: Accelerator, folders: Sequence[Path]) -> FreeMemory:
        """`folders`: on the drives."""
        return FreeMemory(tuple(host_memory_limits()), accelerator.free_nbytes(), scratch.free_nbytes(folders))


def missing_nbytes(line: MemoryLine, accelerator: Accelerator) -> int:
    """Of what the line takes, the bytes that are not free. What is to lie on a drive is asked for there."""
    if line.tier == "nvme":
        return 0
    free = host_memory_limit().free_nbytes if line.tier == "cpu" else accelerator.free_nbytes()
    return max(line.nbytes - free, 0) if free is not None else 0


def remedy(tier: Tier, missing: int) -> str:
    """What the user can do about bytes that are missing there."""
    if tier == "nvme":
        return "make room in the nvme folder"
    return f"raise {'device_memory' if tier == 'device' else 'cpu_memory'}, where it is set, by {missing} bytes"
