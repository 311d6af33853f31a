"""The deferred accelerator: a device on which every missing wait fails, on a laptop.

Device memory is CPU memory of its own. A copy or a host job does nothing when it is issued: it is put in the queue of
its stream and runs only when somebody waits for it (what was queued on the same stream before it runs first, as on a
real stream), or at a moment that the seed picks. Memory that was evicted, and memory that was filled but not yet
written, holds NaN (all bits set). So work that forgot to wait computes with NaN, and says so in the loss.
"""

from __future__ import annotations

import random
import threading
from collections import deque
from collections.abc import Callable

import torch

from offload.device.accelerator import Accelerator, UnitMemory
from offload.device.lane import HostLane
from offload.device.pending import Pending

_POISON = 0xFF


class _PoisonedMemory(UnitMemory):
    """Emptied memory is kept, and poisoned: reading it gives NaN in a loss instead of a crash without a word."""

    def __init__(self, nbytes: int) -> None:
        self.flat = torch.full((nbytes,), _POISON, dtype=torch.uint8)
        self.nbytes = nbytes
        self.filled = True

    def fill(self) -> None:
        if self.filled:
            raise AssertionError("fill of a filled flat")
        self.filled = True

    def empty(self) -> None:
        if not self.filled:
            raise AssertionError("empty of an empty flat")
        self.flat.fill_(_POISON)
        self.filled = False


class _Deferred(Pending):
    def __init__(self, stream: _Stream, work: Callable[[], None]) -> None:
        self._stream = stream
        self._work: Callable[[], None] | None = work
        self._failure: BaseException | None = None

    def run(self) -> None:
        work, self._work = self._work, None
        if work is None:
            raise AssertionError("deferred work runs once")
        try:
            work()
        except Exception as error:
            self._failure = error

    def wait(self) -> None:
        self._stream.run_until(self)
        if self._failure is not None:
            raise self._failure

    def done(self) -> bool:
        return self._work is None


class _Stream(HostLane):
    """A queue of work. Serves as a device stream and, with the same laziness, as a host lane."""

    def __init__(self, name: str) -> None:
        self.name = name
        self._queue: deque[_Deferred] = deque()
        self._lock = threading.RLock()

    def submit(self, job: Callable[[], None]) -> Pending:
        pending = _Deferred(self, job)
        with self._lock:
            self._queue.append(pending)
        return pending

    def run_until(self, last: _Deferred) -> None:
        with self._lock:
            while not last.done():
                self._queue.popleft().run()

    def run_one(self) -> None:
        with self._lock:
            if self._queue:
                self._queue.popleft().run()

    def close(self) -> None:
        with self._lock:
            while self._queue:
                self._queue.popleft().run()


class DeferredAccelerator(Accelerator):
    """See the module. `seed` decides which streams run ahead of the waits, and when."""

    name = "deferred"
    unified = False

    def __init__(self, seed: int = 0) -> None:
        self.device = torch.device("cpu")
        self._random = random.Random(seed)
        self._fetch = _Stream("fetch")
        self._drain = _Stream("drain")
        self._streams = [self._fetch, self._drain]

    def _run_something(self) -> None:
        # Only the device's own streams run ahead: a host lane's job may wait for a stream, never the reverse.
        if self._random.random() < 0.25:
            self._random.choice(self._streams).run_one()

    def unit_memory(self, nbytes: int) -> UnitMemory:
        return _PoisonedMemory(nbytes)

    def copy_in(self, destination: torch.Tensor, source: torch.Tensor) -> Pending:
        self._run_something()
        return self._fetch.submit(lambda: _copy(destination, source))

    def copy_out(self, destination: torch.Tensor, source: torch.Tensor) -> Pending:
        self._run_something()
        return self._drain.submit(lambda: _copy(destination, source))

    def join(self, pending: Pending) -> None:
        pending.wait()

    def host_lane(self, name: str, *, waits_for_io: bool) -> HostLane:
        del waits_for_io
        return _Stream(name)

    def close(self) -> None:
        for stream in self._streams:
            stream.close()


def _copy(destination: torch.Tensor, source: torch.Tensor) -> None:
    with torch.no_grad():
        destination.detach().copy_(source.detach())
