# SPDX-License-Identifier: Apache-2.0
"""What a result file says of the machine that it was measured on."""

from __future__ import annotations

import os
import platform
from pathlib import Path
from typing import Any


def describe_machine() -> dict[str, Any]:
    """Processor, cores, memory, versions."""
    import torch

    from offload.device.host_memory.memory_limits import host_memory_limits

    model = next(
        (
            line.split(":")[1].strip()
            for line in Path("/proc/cpuinfo").read_text().splitlines()
            if line.startswith("model name")
        ),
        "unknown",
    )
    memory = min(limit.total_nbytes for limit in host_memory_limits())
    return {
        "cpu": model,
        "cores": os.cpu_count(),
        "memory_nbytes": memory,
        "python": platform.python_version(),
        "torch": torch.__version__,
        "kernel": platform.release().split("-")[0],
    }


def status_nbytes(field: str) -> int:
    """A field of /proc/self/status in bytes."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(field + ":"):
            return int(line.split()[1]) * 1024
    raise RuntimeError(f"/proc/self/status has no {field}")
