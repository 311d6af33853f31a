# SPDX-License-Identifier: Apache-2.0
"""File I/O in pure Python: aiofiles on an event loop of its own, for where the native library cannot be had.

A transfer is cut into blocks; `queue_depth` coroutines take blocks from one priority queue and run `preadv` or
`pwritev` on aiofiles' executor. Positional calls, because several transfers share a descriptor and its file position.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import errno
import itertools
import os
import threading
import time
import weakref
from collections.abc import Awaitable, Callable

from aiofiles.os import wrap
from torch import Tensor

from offload.device.lane import start_thread
from offload.device.pending import Latch, Pending
from offload.device.thread_end import has_ended
from offload.tiers.io.backend import IoMeter, IoStats, OpenFile, Priority, Transfer, not_registered
from offload.tiers.io.failure import transfer_error

_Vectored = Callable[..., Awaitable[int]]
_preadv: _Vectored = wrap(os.preadv)
_pwritev: _Vectored = wrap(os.pwritev)


class _AioPending(Pending):
    """One transfer: settles when its last block did. Owned by the event loop until then."""

    def __init__(self, file: OpenFile, tensor: Tensor, offset_nbytes: int, *, is_write: bool) -> None:
        self.file = file
        self.tensor: Tensor | None = tensor
        self.offset_nbytes = offset_nbytes
        self.nbytes = tensor.numel()
        self.is_write = is_write
        self.open_block_count = 0  # the three below belong to the event loop's thread
        self.done_nbytes = 0
        self.failed: tuple[int, int] | None = None  # lowest failed offset, errno
        self._times_ns = [0, 0]
        self._settled = Latch()

    def block_ended(self, block: Transfer, code: int) -> bool:
        """Take in a finished or failed block; whether it was the last. (Event loop's thread.)"""
        self.done_nbytes += block.done_nbytes
        if code:
            failed = (block.offset_nbytes + block.done_nbytes, code)
            self.failed = failed if self.failed is None else min(self.failed, failed)
        self.open_block_count -= 1
        if self.open_block_count == 0:
            self.tensor = None
            return True
        return False

    def block_begins(self) -> None:
        """(Event loop's thread.)"""
        self._times_ns[0] = self._times_ns[0] or time.monotonic_ns()

    def settle(self) -> None:
        self._times_ns[1] = time.monotonic_ns()
        self._settled.set()

    def times_ns(self) -> tuple[int, int] | None:
        began_ns, ended_ns = self._times_ns
        return (began_ns, ended_ns) if self.done() else None

    def wait(self) -> None:
        self._settled.wait()
        if self.failed is not None:
            raise transfer_error(
                is_write=self.is_write,
                path=self.file.path,
                offset_nbytes=self.failed[0],
                nbytes=self.nbytes,
                done_nbytes=self.done_nbytes,
                code=self.failed[1],
            )

    def done(self) -> bool:
        return self._settled.is_set()


class AioBackend:
    """The aiofiles backend. Threads: one for the event loop, and `queue_depth` that block in the kernel."""

    name = "aiofiles"

    def __init__(self, queue_depth: int = 8, block_nbytes: int = 4 * 1024 * 1024) -> None:
        self._block_nbytes = block_nbytes
        self._meter = IoMeter()
        self._serial = itertools.count()
        self._lock = threading.Lock()
        self._closed = False
        self._service = _Service(queue_depth, self._meter)
        self._finalizer = weakref.finalize(self, self._service.stop)

    def read(self, file: OpenFile, into: Tensor, offset_nbytes: int, *, priority: Priority) -> Pending:
        return self._submit(_AioPending(file, into, offset_nbytes, is_write=False), into, priority)

    def write(self, file: OpenFile, source: Tensor, offset_nbytes: int, *, priority: Priority) -> Pending:
        return self._submit(_AioPending(file, source, offset_nbytes, is_write=True), source, priority)

    def register_memory(self, address: int, nbytes: int) -> Callable[[], None]:
        return not_registered(address, nbytes)

    def stats(self) -> IoStats:
        return self._meter.stats()

    def close(self) -> None:
        with self._lock:
            self._closed = True
        self._finalizer()
        self._service.join()

    def _submit(self, pending: _AioPending, tensor: Tensor, priority: Priority) -> Pending:
        fileno = pending.file.fileno()
        view = tensor.numpy().data
        blocks = [
            Transfer(
                fileno,
                view[start : start + self._block_nbytes],
                pending.offset_nbytes + start,
                is_write=pending.is_write,
            )
            for start in range(0, len(view) or 1, self._block_nbytes)  # one where there is nothing: it says when that is over
        ]
        pending.open_block_count = len(blocks)
        with self._lock:
            if self._closed or not self._service.is_ours():
                raise AssertionError("a transfer was submitted to an aiofiles backend that is closed or of another process")
            self._meter.begin(is_write=pending.is_write)
            entries: list[_Entry] = [(int(priority), next(self._serial), (pending, block)) for block in blocks]
            self._service.take(entries)
        return pending


_Entry = tuple[int, int, "tuple[_AioPending, Transfer] | None"]
_Queue = asyncio.PriorityQueue[_Entry]
_STOP_PRIORITY = max(Priority) + 1  # behind everything that was submitted


class _Service:
    """The event loop, and its thread. Refers to nothing of the backend that made it, and ends where that is dropped."""

    def __init__(self, queue_depth: int, meter: IoMeter) -> None:
        self._process_id = os.getpid()
        self._loop = asyncio.new_event_loop()
        self._queue: _Queue = asyncio.PriorityQueue()
        executor = concurrent.futures.ThreadPoolExecutor(queue_depth, thread_name_prefix="offload-aiofiles")
        self._thread = threading.Thread(
            target=self._serve, args=(executor, queue_depth, meter), name="offload-aiofiles-loop", daemon=True
        )
        start_thread(self._thread)

    def is_ours(self) -> bool:
        """Not in a forked child, which has no such thread."""
        return os.getpid() == self._process_id

    def take(self, entries: list[_Entry]) -> None:
        self._loop.call_soon_threadsafe(self._enqueue, entries)

    def stop(self) -> None:
        """Have the thread end after what it was given. Does not wait: the garbage collector comes here on any thread, also on
        one that the event loop is waiting for."""
        if self.is_ours() and not has_ended(self._thread):
            self.take([(_STOP_PRIORITY, 0, None)])

    def join(self) -> None:
        """Wait until the thread has ended; it was told to."""
        if self.is_ours():
            self._thread.join()

    def _enqueue(self, entries: list[_Entry]) -> None:
        for entry in entries:
            self._queue.put_nowait(entry)

    def _serve(self, executor: concurrent.futures.ThreadPoolExecutor, queue_depth: int, meter: IoMeter) -> None:
        """The event loop's thread: ends when every worker took its stop entry."""
        _services.add(self)
        asyncio.set_event_loop(self._loop)
        try:
            self._loop.run_until_complete(_run_workers(self._queue, executor, queue_depth, meter))
        finally:
            executor.shutdown()
            self._loop.close()
            _services.discard(self)


_services: set[_Service] = set()
"""Whose threads run."""


def _join_all() -> None:
    for service in [*_services]:
        service.join()


# At exit finalizers are called in the reverse order of their making: this one after those that stop the services.
weakref.finalize(AioBackend, _join_all)


async def _run_workers(
    queue: _Queue, executor: concurrent.futures.ThreadPoolExecutor, queue_depth: int, meter: IoMeter
) -> None:
    await asyncio.gather(*(_work(queue, executor, meter) for _ in range(queue_depth)))


async def _work(queue: _Queue, executor: concurrent.futures.ThreadPoolExecutor, meter: IoMeter) -> None:
    while True:
        _, _, item = await queue.get()
        if item is None:
            queue.put_nowait((_STOP_PRIORITY, 0, None))  # for the next worker
            return
        pending, block = item
        pending.block_begins()
        code = await _move(block, executor)
        last = pending.block_ended(block, code)
        block.view.release()
        if last:
            meter.end(pending.done_nbytes, is_write=pending.is_write)
            pending.settle()


async def _move(block: Transfer, executor: concurrent.futures.ThreadPoolExecutor) -> int:
    """Run one block to its end; the errno that it failed with, or 0."""
    call = _pwritev if block.is_write else _preadv
    code = 0
    while code == 0 and not block.finished:
        with block.view[block.done_nbytes :] as rest:
            try:
                result = await call(block.fileno, [rest], block.offset_nbytes + block.done_nbytes, executor=executor)
            except OSError as error:
                result = -(error.errno or errno.EIO)
            except RuntimeError:  # the interpreter is shutting down: its executors take no more work
                result = -errno.ECANCELED
        code = block.advance(result)
    return code
