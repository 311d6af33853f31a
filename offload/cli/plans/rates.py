# SPDX-License-Identifier: Apache-2.0
"""Measures the rates of this machine that bound a training step: memory, drive, device links."""

from __future__ import annotations

import os
import time
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from statistics import median_high
from types import TracebackType
from typing import Literal

import torch

from offload import _native
from offload.device.pending import Pending
from offload.layout import CHUNK_NUMEL
from offload.tiers.io import IoBackend, Priority
from offload.tiers.memory import HostMemory
from offload.tiers.scratch import ScratchFolder

STREAM_NUMEL = 16 * 1024 * 1024
_TRANSFER_NBYTES = CHUNK_NUMEL * 4
_TRANSFERS_IN_FLIGHT = 8

Direction = Literal["read", "write", "both"]
DIRECTIONS: tuple[Direction, ...] = ("read", "write", "both")


def seconds_per_call(call: Callable[[], object], budget_seconds: float) -> float:
    """The median time of a call, over as many as fit into the budget (at least three, after one to warm up)."""
    call()
    times: list[float] = []
    end = time.perf_counter() + budget_seconds
    while len(times) < 3 or time.perf_counter() < end:
        start = time.perf_counter()
        call()
        times.append(time.perf_counter() - start)
    return median_high(times)


def in_turns(calls: Sequence[Callable[[], None]], budget_seconds: float) -> list[float]:
    """The shortest time of each call. They are made in turns, so that what else the machine does meets all of them."""
    for call in calls:
        call()
    times: list[float] = [float("inf")] * len(calls)
    turn_count, end = 0, time.perf_counter() + budget_seconds
    while turn_count < 3 or time.perf_counter() < end:
        turn_count += 1
        for index, call in enumerate(calls):
            start = time.perf_counter()
            call()
            times[index] = min(times[index], time.perf_counter() - start)
    return times


def stream_bytes_per_second(budget_seconds: float) -> float:
    """Memory traffic of four arrays read and three written, as Adam's: the native stream, or torch where it is missing."""
    arrays = [HostMemory(STREAM_NUMEL * 4, "probe", prefault=True) for _ in range(4)]
    tensors = [memory.tensor.view(torch.float32) for memory in arrays]
    if _native.available():
        arrays_of_floats = [(tensor.data_ptr(), 4) for tensor in tensors]
        seconds = seconds_per_call(lambda: _native.stream(arrays_of_floats, arrays_of_floats[1:], STREAM_NUMEL), budget_seconds)
        return 7 * STREAM_NUMEL * 4 / seconds
    seconds = seconds_per_call(lambda: torch.add(tensors[0], tensors[1], out=tensors[2]), budget_seconds)
    return 3 * STREAM_NUMEL * 4 / seconds


@dataclass(frozen=True, slots=True)
class LinkRates:
    """Bytes per second between pinned host memory and a device."""

    to_device: float
    from_device: float


def link_rates(device: torch.device, budget_seconds: float) -> LinkRates:
    """Copies of 256 MiB, pinned, one at a time."""
    host = torch.empty(256 * 1024 * 1024, dtype=torch.uint8, device="cpu").pin_memory()
    there = torch.empty_like(host, device=device)

    def copy(destination: torch.Tensor, source: torch.Tensor) -> None:
        destination.copy_(source, non_blocking=True)
        torch.cuda.synchronize(device)

    into = seconds_per_call(lambda: copy(there, host), budget_seconds)
    out = seconds_per_call(lambda: copy(host, there), budget_seconds)
    return LinkRates(host.nbytes / into, host.nbytes / out)


class Drive:
    """A scratch file in a folder and buffers for it, as a run has them. A context manager: leaving it gives the file back.

    `direct`: the file bypasses the page cache. `huge`: the buffers lie on huge pages.
    """

    def __init__(self, path: str | os.PathLike[str], budget_nbytes: int) -> None:
        """A file of about `budget_nbytes`, at least 128 MiB and at most half of what is free.

        Raises `ConfigError` or `StorageError` where the path cannot be used."""
        self._made = not Path(path).exists()
        scratch = ScratchFolder([path])
        self._folder = Path(scratch.paths[0])
        status = os.statvfs(scratch.paths[0])
        free_nbytes = status.f_bavail * status.f_frsize
        least_nbytes = 2 * _TRANSFERS_IN_FLIGHT * _TRANSFER_NBYTES
        # With less than the least, making the file says what is missing.
        nbytes = max(min(budget_nbytes, free_nbytes // 2), least_nbytes)
        self._transfer_count = nbytes // _TRANSFER_NBYTES
        (self._file,) = scratch.create("probe", [self._transfer_count * _TRANSFER_NBYTES])
        self._buffers = [
            HostMemory(_TRANSFER_NBYTES, "probe", prefault=True, direct_io=True) for _ in range(2 * _TRANSFERS_IN_FLIGHT)
        ]
        self.direct = scratch.direct[0]
        self.huge = _on_huge_pages(self._buffers[0].tensor)
        self._written = False
        self._registered: IoBackend | None = None

    def __enter__(self) -> Drive:
        return self

    def __exit__(self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None) -> None:
        self._file.close()
        if self._made:  # a mistyped path is not to stay as a folder
            with suppress(OSError):
                self._folder.rmdir()

    def bytes_per_second(self, backend: IoBackend, direction: Direction, budget_seconds: float) -> float:
        """Sequential transfers of a chunk each, several at once. "both": reads and writes side by side, their sum."""
        self._register(backend)
        if not self._written:
            # Blocks that were never written are not read from the drive.
            self._transfer(backend, "write")
            self._written = True
        return self._transfer(backend, direction, budget_seconds)

    def _register(self, backend: IoBackend) -> None:
        """Register the buffers with the backend, as a run does; that ends when it closes."""
        if backend is not self._registered:
            self._registered = backend
            for buffer in self._buffers:
                backend.register_memory(buffer.tensor.data_ptr(), buffer.nbytes)

    def _transfer(self, backend: IoBackend, direction: Direction, budget_seconds: float | None = None) -> float:
        """Bytes per second; without a budget of the whole file, once."""
        in_flight: deque[Pending] = deque()
        start, count = time.perf_counter(), 0
        while count < self._transfer_count if budget_seconds is None else time.perf_counter() - start < budget_seconds:
            if len(in_flight) == _TRANSFERS_IN_FLIGHT:
                in_flight.popleft().wait()
            in_flight.append(self._submit(backend, direction, count))
            count += 1
        while in_flight:
            in_flight.popleft().wait()
        return count * _TRANSFER_NBYTES / (time.perf_counter() - start)

    def _submit(self, backend: IoBackend, direction: Direction, count: int) -> Pending:
        buffer = self._buffers[count % len(self._buffers)].tensor
        if direction == "both":
            # Even ones read the first half of the file, odd ones write the second.
            half, is_write = self._transfer_count // 2, count % 2 == 1
            index = (count // 2) % half + (half if is_write else 0)
        else:
            index, is_write = count % self._transfer_count, direction == "write"
        transfer = backend.write if is_write else backend.read
        return transfer(self._file, buffer, index * _TRANSFER_NBYTES, priority=Priority.STATE)


def _on_huge_pages(tensor: torch.Tensor) -> bool | None:
    """Whether the memory lies mostly on huge pages; None where the system does not say."""
    address = tensor.data_ptr()
    inside = False
    try:
        lines = Path("/proc/self/smaps").read_text(encoding="ascii", errors="replace").splitlines()
    except OSError:
        return None
    for line in lines:
        first = line.split(maxsplit=1)[0]
        if "-" in first and not first.endswith(":"):
            low, high = (int(part, 16) for part in first.split("-"))
            inside = low <= address < high
        elif inside and first == "AnonHugePages:":
            return int(line.split()[1]) * 1024 >= tensor.nbytes // 2
    return None
