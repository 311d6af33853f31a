# SPDX-License-Identifier: Apache-2.0
"""One completion type for everything asynchronous: a device event, an I/O ticket, a host job.

A `Pending` settles once, either well or with a failure. Whoever depends on it calls `wait()`; a failure is raised
at every wait, so the first caller that looks cannot hide it from the next. A failure that nobody looks at is
raised at the end of the step: the owner of the operation keeps the `Pending` until then and waits for it.
"""

from __future__ import annotations

import queue
import threading
from abc import ABC, abstractmethod
from collections.abc import Iterable
from contextlib import suppress

from torch import Tensor


class Pending(ABC):
    """The completion of one asynchronous operation.

    Thread-safety: `wait` and `done` may be called from any thread, any number of times.
    """

    @abstractmethod
    def wait(self) -> None:
        """Block the calling host thread until the operation settled; raise its failure if it failed."""

    @abstractmethod
    def done(self) -> bool:
        """Whether it settled (well or not). Never blocks."""

    def arrive(self) -> bool:
        """`wait`, but leave it to `compare` to look whether what came is what was written: for whoever passes over it anyway.
        False: there is nothing to compare any more."""
        self.wait()
        return False

    def compare(self, sums: Tensor) -> None:  # noqa: B027 - most compare nothing, or when they are waited for
        """After `arrive`: raise the failure where what came, the checksums of whose blocks are `sums`, int64, is not what was
        written."""

    def keep_times(self) -> None:  # noqa: B027 - most have none
        """`times_ns` will be asked for. To be called before anybody waits."""

    def times_ns(self) -> tuple[int, int] | None:
        """When what moves its bytes began and ended; None while it is not over, zeros where that was not kept."""
        return 0, 0


class Settled(Pending):
    """An operation that was over before it could be waited for."""

    def wait(self) -> None:
        return None

    def done(self) -> bool:
        return True


class AllOf(Pending):
    """Settles when every part did; the first failure in order is the failure of the whole."""

    def __init__(self, parts: Iterable[Pending]) -> None:
        self._parts = tuple(parts)

    def wait(self) -> None:
        # Every part is waited for before a failure is raised, so that no transfer is still
        # writing into a buffer that the failing caller is about to give back.
        failure: BaseException | None = None
        for part in self._parts:
            try:
                part.wait()
            except Exception as error:
                failure = failure or error
        if failure is not None:
            raise failure

    def done(self) -> bool:
        return all(part.done() for part in self._parts)


class Latch:
    """Set once, by one thread; waited for by any number.

    Unlike in `threading.Event` every step is one of a lock in C: what a signal raises in a thread that waits leaves no lock
    held, on which the thread that sets it would wait for ever.
    """

    def __init__(self) -> None:
        self._is_set = False
        self._lock = threading.Lock()
        self._lock.acquire()

    def set(self) -> None:
        self._is_set = True
        self._lock.release()

    def wait(self) -> None:
        if not self._is_set:
            with self._lock:  # each who waits lets the next one in
                pass

    def is_set(self) -> bool:
        return self._is_set


class Bell(queue.SimpleQueue[None]):
    """Rung by any thread; one waits for it. A queue of nothing, whose `get` ends when its time is over.

    That of `queue.SimpleQueue` may not, up to Python 3.12: where the queue was filled and emptied before, and the thread is
    not run for longer than `timeout` just as it begins to wait, it takes what is left of the time, less than nothing, for no
    end. A look that does not wait first leaves the queue's lock held, as it is where nothing has been put since.
    """

    def get(self, block: bool = True, timeout: float | None = None) -> None:
        if timeout is not None:
            with suppress(queue.Empty):
                return super().get(block=False)
        return super().get(block, timeout)
