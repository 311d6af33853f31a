"""File I/O by the native engine: io_uring, or a pool of threads that call pread and pwrite."""

from __future__ import annotations

import logging
import os
import threading
import weakref
from collections.abc import Callable
from functools import partial
from typing import Literal

from torch import Tensor

from offload import _native
from offload.device.pending import Pending
from offload.tiers.io.backend import IoStats, OpenFile, Priority
from offload.tiers.io.failure import transfer_error

_InFlight = set["_NativePending"]

_log = logging.getLogger(__name__)


class _NativePending(Pending):
    """One ticket. Its result can be had from the engine once, so the first to see it keeps it for the others."""

    def __init__(self, engine: _native.IoEngine, file: OpenFile, tensor: Tensor, offset_nbytes: int, *, is_write: bool) -> None:
        self._engine = engine
        self._file = file
        self._tensor: Tensor | None = tensor
        self._offset_nbytes = offset_nbytes
        self._nbytes = tensor.numel()
        self._is_write = is_write
        self._ticket = 0
        self._in_flight: _InFlight | None = None
        self._result: _native.IoResult | None = None
        self._lock = threading.Lock()  # held while the result is being fetched

    def submit(self, in_flight: _InFlight, priority: Priority) -> None:
        assert self._tensor is not None
        self._in_flight = in_flight
        in_flight.add(self)
        try:
            self._ticket = self._engine.submit(
                "write" if self._is_write else "read",
                self._file.fileno(),
                self._tensor.data_ptr(),
                self._nbytes,
                self._offset_nbytes,
                int(priority),
            )
        except BaseException:
            in_flight.discard(self)
            raise

    def wait(self) -> None:
        if self._result is None:
            with self._lock:
                if self._result is None:
                    self._settle(self._engine.wait(self._ticket, None))
        assert self._result is not None
        if self._result.status != 0:
            raise transfer_error(
                is_write=self._is_write,
                path=self._file.path,
                offset_nbytes=self._result.failed_offset,
                nbytes=self._nbytes,
                done_nbytes=self._result.transferred_nbytes,
                code=-self._result.status,
            )

    def done(self) -> bool:
        # Somebody who holds the lock is blocked in the engine, or about to settle: not done as far as is known.
        if self._result is None and self._lock.acquire(blocking=False):
            try:
                if self._result is None:
                    result = self._engine.poll(self._ticket)
                    if result is not None:
                        self._settle(result)
            finally:
                self._lock.release()
        return self._result is not None

    def _settle(self, result: _native.IoResult) -> None:
        self._result = result
        self._tensor = None
        if self._in_flight is not None:
            self._in_flight.discard(self)


class NativeBackend:
    """The native engine. Its threads belong to the library and run no Python; submission and waits release the GIL."""

    def __init__(self, kind: Literal["io_uring", "threads"], queue_depth: int = 32, block_nbytes: int = 1024 * 1024) -> None:
        """Raises `OSError` where the system has no such engine or forbids it."""
        self.name: str = kind
        self._engine = _native.IoEngine(kind, queue_depth, block_nbytes)
        self._in_flight: _InFlight = set()
        self._closed = False
        self._final_stats: IoStats | None = None
        self._finalizer = weakref.finalize(self, _drain, self._engine, self._in_flight, os.getpid())

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
        if not self._closed:
            self._closed = True
            _settle_all(self._in_flight)
            self._final_stats = self.stats()
        self._finalizer()

    def _submit(self, pending: _NativePending, priority: Priority) -> Pending:
        if self._closed:
            raise AssertionError(f"a transfer was submitted to a closed {self.name} backend")
        pending.submit(self._in_flight, priority)
        return pending


def _drain(engine: _native.IoEngine, in_flight: _InFlight, process_id: int) -> None:
    if os.getpid() != process_id:
        return  # the threads and the ring stayed with the parent
    _settle_all(in_flight)
    engine.close()


def _settle_all(in_flight: _InFlight) -> None:
    """Wait for everything in flight, so that tensors and files are held until the kernel let go of them."""
    for pending in tuple(in_flight):
        try:
            pending.wait()
        except OSError:
            continue  # stays in the Pending, for whoever holds it
