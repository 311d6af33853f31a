# SPDX-License-Identifier: Apache-2.0
"""One backend for each device: a ring and a queue of its own, so that no drive waits behind another, and each is asked in
the block size and depth that it was measured to want."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping

from torch import Tensor

from offload.device.pending import Pending
from offload.tiers.io.backend import IoBackend, IoStats, OpenFile, Priority


class DeviceBackends:
    """Implements `IoBackend` over several, by the device (`st_dev`) that a file lies on. Owns them."""

    def __init__(self, by_device: Mapping[int, IoBackend]) -> None:
        """At least one. A file on none of the devices goes to the first."""
        self._by_device = dict(by_device)
        self._first = next(iter(self._by_device.values()))
        self.name = self._first.name

    def read(self, file: OpenFile, into: Tensor, offset_nbytes: int, *, priority: Priority) -> Pending:
        return self._of(file).read(file, into, offset_nbytes, priority=priority)

    def write(self, file: OpenFile, source: Tensor, offset_nbytes: int, *, priority: Priority) -> Pending:
        return self._of(file).write(file, source, offset_nbytes, priority=priority)

    def register_memory(self, address: int, nbytes: int) -> Callable[[], None]:
        undone = [backend.register_memory(address, nbytes) for backend in self._by_device.values()]

        def undo() -> None:
            for one in undone:
                one()

        return undo

    def stats(self) -> IoStats:
        all_stats = [backend.stats() for backend in self._by_device.values()]
        return IoStats(
            read_nbytes=sum(stats.read_nbytes for stats in all_stats),
            written_nbytes=sum(stats.written_nbytes for stats in all_stats),
            read_busy_ns=max(stats.read_busy_ns for stats in all_stats),
            write_busy_ns=max(stats.write_busy_ns for stats in all_stats),
            registered_nbytes=min(stats.registered_nbytes for stats in all_stats),
        )

    def close(self) -> None:
        """Close them all, whatever one of them raises; the first failure is raised."""
        failure: Exception | None = None
        for backend in self._by_device.values():
            try:
                backend.close()
            except Exception as error:
                failure = failure or error
        if failure is not None:
            raise failure

    def _of(self, file: OpenFile) -> IoBackend:
        return self._by_device.get(os.fstat(file.fileno()).st_dev, self._first)
