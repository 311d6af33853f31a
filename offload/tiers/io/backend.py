# SPDX-License-Identifier: Apache-2.0
"""What every I/O backend is: whole transfers between tensors and files, each with one `Pending`.

Ownership: from submission until it settled, a transfer holds its file and its tensor, so neither a closed descriptor
nor freed memory can be under the kernel's hands, whatever the caller drops. `close()` waits for everything.

A transfer either moves every byte or fails with a `StorageError`: a short one is continued, and one that ends before
its last byte (the file is shorter than asked for) fails with ENODATA.
"""

from __future__ import annotations

import errno
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from enum import IntEnum
from pathlib import Path
from typing import Protocol

from torch import Tensor

from offload.device.pending import Pending
from offload.layout import EXTENT_ALIGN


class Priority(IntEnum):
    """Who goes first when transfers queue up. Within a class: in order of submission."""

    PARAMETER = 0
    """The next forward waits for it."""
    STATE = 1
    """Optimizer records and whatever else has a whole step's time."""
    BACKGROUND = 2
    """What no step waits for: saves beside training. It takes what the others leave, and never stands in their way for long."""


class OpenFile(Protocol):
    """An open file as the backends see it (`offload.tiers.scratch_file.ScratchFile` is one)."""

    @property
    def path(self) -> Path: ...

    def fileno(self) -> int:
        """The descriptor; raises where the file is closed or belongs to the process that this one was forked from."""
        ...


@dataclass(frozen=True, slots=True)
class IoStats:
    """Totals since the backend was opened. Busy: the time in which at least one transfer of the kind was in flight, on the
    busiest device. `registered_nbytes`: memory that is registered with the kernel now (see `register_memory`)."""

    read_nbytes: int = 0
    written_nbytes: int = 0
    read_busy_ns: int = 0
    write_busy_ns: int = 0
    registered_nbytes: int = 0


class IoBackend(Protocol):
    """Asynchronous transfers between uint8 tensors and files. Every method may be called from any thread."""

    @property
    def name(self) -> str: ...

    def read(self, file: OpenFile, into: Tensor, offset_nbytes: int, *, priority: Priority) -> Pending:
        """Fill `into` (uint8, 1-D, contiguous; aligned as the file asks) from `offset_nbytes` of `file`.

        Returns at once; the `Pending` raises `StorageError` if not every byte arrived."""
        ...

    def write(self, file: OpenFile, source: Tensor, offset_nbytes: int, *, priority: Priority) -> Pending:
        """Write all of `source` at `offset_nbytes`. It may not change until the `Pending` settled."""
        ...

    def register_memory(self, address: int, nbytes: int) -> Callable[[], None]:
        """Make memory that many transfers use known to the kernel, which makes them cheaper; returns what undoes that.

        Where that is not to be had (the limit of locked memory, another backend) nothing happens: it is an optimisation.
        Undo it before the memory is unmapped, with nothing in flight there; after `close` that does nothing."""
        ...

    def stats(self) -> IoStats: ...

    def close(self) -> None:
        """Wait for every transfer, then end the threads. Failures stay in the `Pending`s. May be called again."""
        ...


class Transfer:
    """How far one block of a transfer got; decides what each result of pread or pwrite means.

    `fileno`, `view[done_nbytes:]` and `offset_nbytes + done_nbytes` are the next call's arguments. Not thread-safe: one
    thread owns a block."""

    __slots__ = ("done_nbytes", "fileno", "is_write", "offset_nbytes", "stall_count", "view")

    STALL_LIMIT = 64
    """Calls in a row that may end without progress (EINTR, EAGAIN, less than an aligned block) before it fails."""

    def __init__(self, fileno: int, view: memoryview, offset_nbytes: int, *, is_write: bool) -> None:
        self.fileno = fileno
        self.view = view
        self.offset_nbytes = offset_nbytes
        self.is_write = is_write
        self.done_nbytes = 0
        self.stall_count = 0

    def advance(self, result: int) -> int:
        """Take in one call's result (bytes, or a negated errno). Returns 0 while the transfer is on course, else the
        errno it fails with."""
        if result in (-errno.EINTR, -errno.EAGAIN):
            return self._stall(-result)
        if result < 0:
            return -result
        if result == 0:
            # A file that ended, or a device that accepts nothing and gives no reason.
            return errno.EIO if self.is_write else errno.ENODATA
        remaining_nbytes = len(self.view) - self.done_nbytes
        if result < remaining_nbytes:
            # Direct I/O can only go on at an aligned place: a tail below that is transferred once more.
            result -= result % EXTENT_ALIGN
            if result == 0:
                return self._stall(errno.EIO)
        self.done_nbytes += result
        self.stall_count = 0
        return 0

    @property
    def finished(self) -> bool:
        return self.done_nbytes == len(self.view)

    def _stall(self, code: int) -> int:
        self.stall_count += 1
        return code if self.stall_count > self.STALL_LIMIT else 0


def not_registered(address: int, nbytes: int) -> Callable[[], None]:
    """`register_memory` of a backend that has no such thing."""
    del address, nbytes
    return lambda: None


class IoMeter:
    """Counts bytes and busy time for `IoStats`. Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._nbytes = [0, 0]
        self._busy_ns = [0, 0]
        self._in_flight = [0, 0]
        self._since_ns = [0, 0]

    def begin(self, *, is_write: bool) -> None:
        with self._lock:
            if self._in_flight[is_write] == 0:
                self._since_ns[is_write] = time.monotonic_ns()
            self._in_flight[is_write] += 1

    def end(self, nbytes: int, *, is_write: bool) -> None:
        with self._lock:
            self._nbytes[is_write] += nbytes
            self._in_flight[is_write] -= 1
            if self._in_flight[is_write] == 0:
                self._busy_ns[is_write] += time.monotonic_ns() - self._since_ns[is_write]

    def stats(self) -> IoStats:
        with self._lock:
            now_ns = time.monotonic_ns()
            busy = [
                total + (now_ns - since if in_flight else 0)
                for total, since, in_flight in zip(self._busy_ns, self._since_ns, self._in_flight, strict=True)
            ]
            return IoStats(self._nbytes[0], self._nbytes[1], busy[0], busy[1])
