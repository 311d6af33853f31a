# SPDX-License-Identifier: Apache-2.0
"""The native engine of file transfers (`native/include/offload.h`, `offload_io_*`): what was submitted, and how it ended."""

from __future__ import annotations

import errno
import sys
import threading
from ctypes import byref, c_uint64, c_void_p

from offload import _native
from offload._native_library import (
    IoResult,
    IoResultStructure,
    IoStatistics,
    IoStatisticsStructure,
    IoTimes,
    IoTimesStructure,
)

IO_KINDS = {"io_uring": 0, "threads": 1}
IO_OPERATIONS = {"read": 0, "write": 1, "fdatasync": 2}
PRIORITY_HIGH, PRIORITY_LOW, PRIORITY_BACKGROUND = 0, 1, 2

# A wait on the main thread returns this often to let Python see Ctrl-C.
_INTERRUPTIBLE_NS = 100_000_000

_NOT_ENDED = -1  # no transfer moved fewer than 0 bytes


class Ticket:
    """One transfer, as the library writes of it: its name when it is submitted, its end when somebody waits for that.

    Both are in memory of this object before the library's call returns, and before the library forgets them: so an exception
    that a signal raises in Python between two of its steps loses neither.
    """

    __slots__ = ("ended", "kept_times", "name")

    def __init__(self) -> None:
        self.name = c_uint64(0)
        self.ended = IoResultStructure(transferred_nbytes=_NOT_ENDED)
        self.kept_times: IoTimesStructure | None = None

    def keep_times(self) -> None:
        """Have whoever sees its end keep the times too. To be called before anybody waits; a library that was built before it
        could do that keeps none."""
        if hasattr(_native.loaded(), "offload_io_wait_timed"):
            self.kept_times = IoTimesStructure()

    @property
    def times(self) -> IoTimes | None:
        """When it began and ended, if that was to be kept and it is over."""
        times = self.kept_times
        return IoTimes(times.began_ns, times.ended_ns) if times is not None and times.ended_ns else None

    @property
    def is_submitted(self) -> bool:
        return bool(self.name.value)

    @property
    def result(self) -> IoResult | None:
        """How it ended, once a `wait` or `poll` found that."""
        ended = self.ended
        if ended.transferred_nbytes == _NOT_ENDED:
            return None
        return IoResult(ended.status, ended.transferred_nbytes, ended.failed_offset)


class IoEngine(_native.Owner):
    """Reads and writes in flight on file descriptors, by "io_uring" or by "threads".

    `OSError` ENOSYS or EPERM: there is no io_uring here. All methods but `close` may be called from any thread. A
    buffer belongs to the engine from `submit` until the ticket is settled.
    """

    _destroy = "offload_io_destroy"

    def __init__(self, kind: str, queue_depth: int, block_nbytes: int) -> None:
        pointer = c_void_p()
        status = _native.loaded().offload_io_create(IO_KINDS[kind], queue_depth, block_nbytes, byref(pointer))
        _native.check(status, f"IoEngine({kind!r}, queue_depth={queue_depth}, block_nbytes={block_nbytes})")
        self.pointer = pointer

    def register(self, address: int, nbytes: int) -> None:
        """Make memory known to the kernel, which makes its transfers cheaper (`offload_io_register`).

        It must stay mapped until `unregister` or `close`. `OSError`: EOPNOTSUPP; ENOMEM beyond the limit of locked memory."""
        status = _native.loaded().offload_io_register(self.pointer, address, nbytes)
        _native.check(status, f"register {nbytes} bytes of memory for I/O")

    def unregister(self, address: int) -> None:
        """Take back what `register` did for the memory that begins there. Nothing may be in flight in it."""
        if self.pointer is not None:  # else: closing took back everything
            _native.check(_native.loaded().offload_io_unregister(self.pointer, address), "unregister memory for I/O")

    def submit(
        self,
        operation: str,
        fd: int,
        address: int,
        nbytes: int,
        offset: int,
        priority: int = PRIORITY_HIGH,
        ticket: Ticket | None = None,
    ) -> Ticket:
        """Queue a "read", "write", or "fdatasync" of what was written and waited for. Returns the ticket at once.

        `ticket`: a new one of the caller's, which then knows whether it was submitted whatever is raised here."""
        ticket = ticket or Ticket()
        status = _native.loaded().offload_io_submit(
            self.pointer, IO_OPERATIONS[operation], fd, address, nbytes, offset, priority, byref(ticket.name)
        )
        _native.check(status, f"submit a {operation} of {nbytes} bytes at offset {offset}")
        return ticket

    def wait(self, ticket: Ticket, timeout_ns: int | None = None) -> IoResult:
        """How it ended (a failed transfer does not raise here), as often as it is asked for.

        `TimeoutError`: not settled within timeout_ns (None: without limit), the ticket stays; `OSError` ENOENT: not one of
        this engine's."""
        remaining_ns = -1 if timeout_ns is None else timeout_ns
        longest_ns = _INTERRUPTIBLE_NS if threading.current_thread() is threading.main_thread() else sys.maxsize
        while (result := ticket.result) is None:
            slice_ns = longest_ns if remaining_ns < 0 else min(remaining_ns, longest_ns)
            if ticket.kept_times is None:
                status = _native.loaded().offload_io_wait(self.pointer, ticket.name, slice_ns, byref(ticket.ended))
            else:
                status = self._wait_timed(ticket, ticket.kept_times, slice_ns)
            if status == -errno.ETIMEDOUT and remaining_ns != slice_ns:
                remaining_ns -= slice_ns if remaining_ns > 0 else 0
            elif ticket.result is None:  # else: settled, if by another thread's wait
                _native.check(status, f"wait for ticket {ticket.name.value}")
        return result

    def poll(self, ticket: Ticket) -> IoResult | None:
        """As `wait`, but None at once where it is not settled."""
        if ticket.result is None:
            if ticket.kept_times is None:
                status = _native.loaded().offload_io_poll(self.pointer, ticket.name, byref(ticket.ended))
            else:
                status = self._wait_timed(ticket, ticket.kept_times, 0)
            if status not in (-errno.EAGAIN, -errno.ETIMEDOUT) and ticket.result is None:
                _native.check(status, f"poll ticket {ticket.name.value}")
        return ticket.result

    def _wait_timed(self, ticket: Ticket, times: IoTimesStructure, timeout_ns: int) -> int:
        return int(
            _native.loaded().offload_io_wait_timed(self.pointer, ticket.name, timeout_ns, byref(ticket.ended), byref(times))
        )

    def stats(self) -> IoStatistics:
        """Totals since the engine was made."""
        raw = IoStatisticsStructure()
        _native.check(_native.loaded().offload_io_stats(self.pointer, byref(raw)), "stats")
        return IoStatistics(*(getattr(raw, name) for name in IoStatistics._fields))
