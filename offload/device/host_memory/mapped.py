# SPDX-License-Identifier: Apache-2.0
"""Unit memory on the CPU where pages cannot be moved: a mapping of its own for each flat, given back while it is empty."""

from __future__ import annotations

import mmap

import torch

from offload.device.accelerator import UnitMemory
from offload.device.host_memory.memory_limits import refused_memory

_PAGE_NBYTES = 4096


class MappedMemory(UnitMemory):
    """One flat at a fixed, page-aligned address (direct I/O reads into it). Emptying it returns its pages; starts empty."""

    def __init__(self, nbytes: int) -> None:
        self.nbytes = nbytes
        self.filled = False
        try:
            self._mapping = mmap.mmap(
                -1, -(-nbytes // _PAGE_NBYTES) * _PAGE_NBYTES, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS
            )
        except OSError as error:
            raise refused_memory(nbytes, "parameters in use", error) from error
        self.flat = torch.frombuffer(self._mapping, dtype=torch.uint8, count=nbytes)

    def _gain(self) -> None:
        """The system gives pages as they are written to."""

    def _lose(self) -> None:
        self._mapping.madvise(mmap.MADV_DONTNEED)
