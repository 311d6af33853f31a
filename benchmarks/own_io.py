# SPDX-License-Identifier: Apache-2.0
"""This package's I/O engine under a benchmark: transfers as a training step has them, buffers as a run has them."""

from __future__ import annotations

import os
import resource
import time
from collections import deque
from pathlib import Path

from offload.device.pending import Pending
from offload.tiers.io import IoBackend, Priority, open_backend
from offload.tiers.memory import HostMemory


class BenchFile:
    """An open file, for direct I/O."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.nbytes = path.stat().st_size
        self._fileno = os.open(path, os.O_RDWR | os.O_DIRECT)

    def fileno(self) -> int:
        return self._fileno

    def close(self) -> None:
        os.close(self._fileno)


class OwnEngine:
    """Turns of reading and writing by an engine that is opened anew for each."""

    def __init__(self, transfer_nbytes: int, in_flight: int) -> None:
        """`in_flight` transfers of so many bytes are under way at once, each from memory of its own."""
        self._transfer_nbytes, self._in_flight = transfer_nbytes, in_flight
        self._memory = HostMemory(in_flight * transfer_nbytes, "benchmark", prefault=True, direct_io=True)

    def turn(self, column: str, paths: list[Path], setting: tuple[int, int], seconds: float) -> tuple[int, float, float]:
        """(bytes moved, seconds, processor seconds)."""
        block_nbytes, queue_depth = setting
        backend = open_backend(queue_depth=queue_depth, block_nbytes=block_nbytes)
        files = [BenchFile(path) for path in paths]
        try:
            undo = backend.register_memory(self._memory.tensor.data_ptr(), self._memory.nbytes)
            before, start = _cpu_seconds(), time.perf_counter()
            count = self._move(backend, files, column, start + seconds)
            taken = time.perf_counter() - start
            cpu_seconds = _cpu_seconds() - before
            undo()
        finally:
            backend.close()
            for file in files:
                file.close()
        return count * self._transfer_nbytes, taken, cpu_seconds

    def _move(self, backend: IoBackend, files: list[BenchFile], column: str, end: float) -> int:
        buffers = self._memory.tensor.split(self._transfer_nbytes)
        pending: deque[Pending] = deque()
        count = 0
        while time.perf_counter() < end:
            if len(pending) == self._in_flight:
                pending.popleft().wait()
            file = files[count // 2 % len(files) if column == "both" else count % len(files)]
            is_write = column == "write" or (column == "both" and count % 2 == 1)
            position = count // len(files) % (file.nbytes // self._transfer_nbytes) * self._transfer_nbytes
            transfer = backend.write if is_write else backend.read
            pending.append(transfer(file, buffers[count % self._in_flight], position, priority=Priority.STATE))
            count += 1
        for one in pending:
            one.wait()
        return count


def _cpu_seconds() -> float:
    usage = resource.getrusage(resource.RUSAGE_SELF)
    return usage.ru_utime + usage.ru_stime
