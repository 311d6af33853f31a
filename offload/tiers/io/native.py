# SPDX-License-Identifier: Apache-2.0
"""File I/O by the native engine: io_uring, or a pool of threads that call pread and pwrite."""

from __future__ import annotations

import logging
import os
import weakref
from collections.abc import Callable
from functools import partial
from typing import Literal

from torch import Tensor

from offload._native_io import IoEngine, Ticket
from offload.device.pending import Pending
from offload.tiers.io.backend import IoStats, OpenFile, Priority
from offload.tiers.io.failure import transfer_error

_log = logging.getLogger(__name__)


class _NativePending(Pending):
    """One ticket. From before it is submitted until its end is known it is in `_in_flight`, which holds its memory and file
    under the kernel's hands, whatever becomes of those who wait for it."""

    def __init__(self, engine: IoEngine, file: OpenFile, tensor: Tensor, offset_nbytes: int, *, is_write: bool) -> None:
        self.engine = engine
        self._file = file
        self._tensor: Tensor | None = tensor
        self._offset_nbytes = offset_nbytes
        self._nbytes = tensor.numel()
        self._is_write = is_write
        self._ticket = Ticket()

    def submit(self, priority: Priority) -> None:
        assert self._tensor is not None
        _in_flight.add(self)
        try:
            self.engine.submit(
                "write" if self._is_write else "read",
                self._file.fileno(),
                self._tensor.data_ptr(),
                self._nbytes,
                self._offset_nbytes,
                int(priority),
                self._ticket,
            )
        except BaseException:
            if not self._ticket.is_submitted:
                _in_flight.discard(self)
            raise

    def wait(self) -> None:
        result = self.engine.wait(self._ticket)
        self._let_go()
        if result.status != 0:
            raise transfer_error(
                is_write=self._is_write,
                path=self._file.path,
                offset_nbytes=result.failed_offset,
                nbytes=self._nbytes,
                done_nbytes=result.transferred_nbytes,
                code=-result.status,
            )

    def done(self) -> bool:
        if self.engine.poll(self._ticket) is None:
            return False
        self._let_go()
        return True

    def keep_times(self) -> None:
        self._ticket.keep_times()

    def times_ns(self) -> tuple[int, int] | None:
        return self._ticket.times or (0, 0) if self.done() else None

    def _let_go(self) -> None:
        self._tensor = None
        _in_flight.discard(self)


_in_flight: set[_NativePending] = set()
"""Of all engines of this process."""

os.register_at_fork(after_in_child=_in_flight.clear)  # they are the parent's


class NativeBackend:
    """The native engine. Its threads belong to the library and run no Python; submission and waits release the GIL."""

    def __init__(self, kind: Literal["io_uring", "threads"], queue_depth: int = 32, block_nbytes: int = 1024 * 1024) -> None:
        """Raises `OSError` where the system has no such engine or forbids it."""
        self.name: str = kind
        self._engine = IoEngine(kind, queue_depth, block_nbytes)
        self._closed = False
        self._final_stats: IoStats | None = None
        self._finalizer = weakref.finalize(self, _drain, self._engine, os.getpid())

    def read(self, file: OpenFile, into: Tensor, offset_nbytes: int, *, priority: Priority) -> Pending:
        return self._submit(_NativePending(self._engine, file, into, offset_nbytes, is_write=False), priority)

    def write(self, file: OpenFile, source: Tensor, offset_nbytes: int, *, priority: Priority) -> Pending:
        return self._submit(_NativePending(self._engine, file, source, offset_nbytes, is_write=True), priority)

    def register_memory(self, address: int, nbytes: int) -> Callable[[], None]:
        try:
            self._engine.register(address, nbytes)
        except OSError as error:
            _log.info("%d bytes of memory are not registered for I/O (%s): transfers cost more", nbytes, error.strerror)
            return lambda: None
        return partial(self._engine.unregister, address)

    def stats(self) -> IoStats:
        if self._final_stats is not None:
            return self._final_stats
        totals = self._engine.stats()
        return IoStats(
            totals.read_nbytes,
            totals.written_nbytes,
            totals.read_busy_ns,
            totals.write_busy_ns,
            totals.registered_nbytes,
        )

    def close(self) -> None:
        self._closed = True
        if self._final_stats is None:  # an interrupt may have ended a first call
            _settle_all(self._engine)
            self._final_stats = self.stats()
        self._finalizer()

    def _submit(self, pending: _NativePending, priority: Priority) -> Pending:
        if self._closed:
            raise AssertionError(f"a transfer was submitted to a closed {self.name} backend")
        pending.submit(priority)
        return pending


def _drain(engine: IoEngine, process_id: int) -> None:
    if os.getpid() != process_id:
        return  # the threads and the ring stayed with the parent
    _settle_all(engine)
    engine.close()


def _settle_all(engine: IoEngine) -> None:
    """Wait for everything of the engine's in flight, so that tensors and files are held until the kernel let go of them."""
    for pending in _in_flight.copy():
        if pending.engine is engine:
            try:
                pending.wait()
            except OSError:
                continue  # stays in the Pending, for whoever holds it
