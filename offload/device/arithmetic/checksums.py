# SPDX-License-Identifier: Apache-2.0
"""Checksums of memory that comes from a drive or goes to one, taken by what passes over it anyway: an update, or a gradient's
arrival. Else they would take passes of their own.

They are kept by blocks of `CHECKSUM_BLOCK_NBYTES`, int64 [blocks], 0 where one is not known (`offload_checksum`).
"""

from __future__ import annotations

import torch
from torch import Tensor

from offload._native import CHECKSUM_BLOCK_NBYTES, SummedMemory as Arguments
from offload.device.pending import Pending


def unknown_sums(nbytes: int) -> Tensor:
    """Of memory of which nothing is known yet."""
    return torch.zeros(-(-nbytes // CHECKSUM_BLOCK_NBYTES), dtype=torch.int64, device="cpu")


class SummedMemory:
    """What an update takes the sums of. `after`, once it is over: of what it left; None: not taken."""

    def __init__(self, memory: Tensor, reading: Pending | None, *, stored: bool = False) -> None:
        """`memory`: uint8, on the host. `reading`: what fills it, waited for here; `compare` looks at what came. `stored`: what
        the update leaves in it goes to a store that takes `after`."""
        self._memory = memory
        self._reading = reading if reading is not None and reading.arrive() else None
        self._before = unknown_sums(memory.numel()) if self._reading is not None else None
        self.after = unknown_sums(memory.numel()) if stored else None

    @property
    def arguments(self) -> Arguments:
        """For the native library."""
        before, after = (sums.data_ptr() if sums is not None else 0 for sums in (self._before, self.after))
        return Arguments(self._memory.data_ptr(), self._memory.numel(), before, after)

    def compare(self) -> None:
        """Once the update is over: raise the failure where what it found is not what was written."""
        if self._reading is not None:
            assert self._before is not None
            self._reading.compare(self._before)
