# SPDX-License-Identifier: Apache-2.0
"""What the system says about this process's memory."""

from __future__ import annotations

import resource
from pathlib import Path

import psutil


def rss_nbytes() -> int:
    """Resident bytes now."""
    return int(psutil.Process().memory_info().rss)


def rss_peak_nbytes() -> int:
    """The most resident bytes so far. From /proc where there is one: getrusage counts the parent's before exec too."""
    try:
        for line in Path("/proc/self/status").read_text(encoding="ascii", errors="replace").splitlines():
            if line.startswith("VmHWM:"):
                return int(line.split()[1]) * 1024
    except OSError:
        pass  # not Linux, or no /proc: the next best
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
