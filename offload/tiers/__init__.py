# SPDX-License-Identifier: Apache-2.0
"""Where bytes lie: device memory, host memory, NVMe, and the staging buffers between them."""

from offload.tiers.io import IoBackend, IoStats, Priority, open_backend
from offload.tiers.memory import HostMemory, MemoryLedger
from offload.tiers.nvme import NvmeStore, striped_nbytes
from offload.tiers.scratch import ScratchFolder
from offload.tiers.staging import Lease, StagingPool
from offload.tiers.store import CpuStore, Store

__all__ = [
    "CpuStore",
    "HostMemory",
    "IoBackend",
    "IoStats",
    "Lease",
    "MemoryLedger",
    "NvmeStore",
    "Priority",
    "ScratchFolder",
    "StagingPool",
    "Store",
    "open_backend",
    "striped_nbytes",
]
