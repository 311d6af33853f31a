# SPDX-License-Identifier: Apache-2.0
"""NVMe that exists only in numbers: its transfers take virtual time and move nothing."""

from __future__ import annotations

from collections.abc import Callable, Iterable

from torch import Tensor

from offload.device.pending import Pending
from offload.device.recording import NVME_READ, NVME_WRITE, OpRecorder
from offload.device.virtual.machine import VirtualMachine
from offload.layout import Extent
from offload.tiers.extent_guard import ExtentGuard
from offload.tiers.io.backend import IoStats, OpenFile, Priority, not_registered
from offload.tiers.store import KeepsNothing


class VirtualStore(KeepsNothing):
    """Extents of which only the sizes are known."""

    def __init__(self, name: str, extents: Iterable[Extent], machine: VirtualMachine, recorder: OpRecorder) -> None:
        """`recorder`: is told of transfers."""
        self.name, self._machine, self._recorder = name, machine, recorder
        self._guard = ExtentGuard(name, extents)
        self.nbytes = self._guard.nbytes

    def read(self, extent: Extent, into: Tensor, *, priority: Priority = Priority.PARAMETER) -> Pending:
        return self._transfer(NVME_READ, extent, priority)

    def write(
        self, extent: Extent, source: Tensor, *, priority: Priority = Priority.STATE, sums: Tensor | None = None
    ) -> Pending:
        return self._transfer(NVME_WRITE, extent, priority)

    def _transfer(self, row: str, extent: Extent, priority: Priority) -> Pending:
        moving = self._machine.transfer(extent.nbytes, is_write=row == NVME_WRITE, priority=priority)
        recording = self._recorder.to
        if recording is not None:
            recording.transfer(row, self.name, extent.nbytes, moving, place=(self, extent))
        return moving

    def view(self, extent: Extent) -> Tensor | None:
        return None

    def flush(self) -> None:
        """Nothing can have failed."""

    def close(self) -> None:
        """Nothing is held."""


class VirtualBackend:
    """The `IoBackend` beside it, for what it counts."""

    name = "virtual"

    def __init__(self, machine: VirtualMachine) -> None:
        self._machine = machine

    def read(self, file: OpenFile, into: Tensor, offset_nbytes: int, *, priority: Priority) -> Pending:
        return self._machine.transfer(into.nbytes, is_write=False, priority=priority)

    def write(self, file: OpenFile, source: Tensor, offset_nbytes: int, *, priority: Priority) -> Pending:
        return self._machine.transfer(source.nbytes, is_write=True, priority=priority)

    def register_memory(self, address: int, nbytes: int) -> Callable[[], None]:
        return not_registered(address, nbytes)

    def stats(self) -> IoStats:
        read, written, read_seconds, write_seconds = self._machine.transferred()
        return IoStats(round(read), round(written), round(read_seconds * 1e9), round(write_seconds * 1e9))

    def close(self) -> None:
        """Nothing is held."""
