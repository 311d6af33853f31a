# SPDX-License-Identifier: Apache-2.0
"""The CPU as the device: computes on host memory, so nothing is copied that already lies there."""

from __future__ import annotations

import torch

from offload.device.accelerator import Accelerator, UnitMemory
from offload.device.host_memory.freed_memory import freed_memory
from offload.device.host_memory.mapped import MappedMemory
from offload.device.host_memory.pages import PagePool, pages_supported
from offload.device.lane import HostLane, InlineLane, LaneRow, ThreadLane
from offload.device.pending import Pending, Settled
from offload.device.recording import D2H, H2D, TRANSFER


class CpuAccelerator(Accelerator):
    """Unit memory is built from a pool of 2 MiB pages that move between units without being copied or zeroed.

    Where the kernel or the native library cannot move pages, each unit has a mapping of its own.
    """

    name = "cpu"
    unified = True

    def __init__(self) -> None:
        super().__init__()
        self.device = torch.device("cpu")
        self._pages = PagePool() if pages_supported() else None

    def unit_memory(self, nbytes: int) -> UnitMemory:
        return self._pages.unit_memory(nbytes) if self._pages is not None else MappedMemory(nbytes)

    def copy_in(self, destination: torch.Tensor, source: torch.Tensor) -> Pending:
        return self._copy(H2D, destination, source)

    def copy_out(self, destination: torch.Tensor, source: torch.Tensor) -> Pending:
        return self._copy(D2H, destination, source)

    def _copy(self, row: str, destination: torch.Tensor, source: torch.Tensor) -> Pending:
        recording = self.recorder.to
        if recording is None:
            destination.copy_(source)
        else:
            with recording.span(row, TRANSFER, "copy", nbytes=source.nbytes):
                destination.copy_(source)
        return Settled()

    def join(self, pending: Pending) -> None:
        pending.wait()

    def host_lane(self, name: str, *, waits_for_io: bool, waits_for_ranks: bool = False) -> HostLane:
        # Work that waits for files overlaps with the model; work that only computes would compete with it.
        told = LaneRow(name, self.recorder)
        return ThreadLane(name, told=told) if waits_for_io or waits_for_ranks else InlineLane(told=told)

    def about_to_allocate(self, nbytes: int) -> None:
        freed_memory.about_to_allocate(nbytes)

    def about_to_free(self, nbytes: int) -> None:
        freed_memory.about_to_free(nbytes)

    def close(self) -> None:
        if self._pages is not None:
            self._pages.close()
