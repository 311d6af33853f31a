"""One thread at a time goes through the model: an evaluation in a second thread and a training take turns.

A forward, a backward, and each piece of the engine's own work between them are a turn. Whoever comes meanwhile waits, and has
the next one. A turn lasts until its forward or backward is over, and is not kept by a thread that ended.
"""

from __future__ import annotations

import threading
import time
import weakref
from collections import deque
from collections.abc import Hashable

import torch

from offload.errors import UsageError

PATIENCE_SECONDS = 600.0
"""Beyond them the other thread is taken to have stopped in the middle."""
_LOOK_SECONDS = 0.5


class Turn:
    """See the module. A lock that its owner may take again, and that outlasts a call of it by `begin` until `end`."""

    def __init__(self, *, backward_elsewhere: bool) -> None:
        """`backward_elsewhere`: autograd runs backward in threads of its own, where nothing says who called it."""
        self._backward_elsewhere = backward_elsewhere
        self._lock = threading.RLock()
        self._condition = threading.Condition(self._lock)
        self._owner: int | None = None
        self._count = 0
        self._lasting: dict[Hashable, weakref.ref[object] | None] = {}
        """What has begun and not ended; with what must be alive for that."""
        self._queue: deque[object] = deque()
        self._driver = threading.get_ident()
        """Who ran the last forward that was recorded: backward is its."""

    def acquire(self, blocking: bool = True) -> bool:
        """Whether it is the calling thread's turn now: after a wait, unless `blocking` is False."""
        with self._lock:
            me = self._who()
            if self._owner != me:
                if not blocking and (self._queue or not self._is_free()):
                    return False
                self._wait()
                self._owner, self._count = me, 0
                self._lasting.clear()
            self._count += 1
        return True

    def release(self) -> None:
        """As often as it was acquired."""
        with self._lock:
            self._count -= 1
            self._pass_on()

    __enter__ = acquire

    def __exit__(self, *_: object) -> None:
        self.release()

    def begin(self, what: Hashable, as_long_as: object | None = None) -> None:
        """The calling thread, whose turn it is, keeps it until the `end` of `what`, or until nobody has `as_long_as`."""
        with self._lock:
            self._lasting[what] = weakref.ref(as_long_as) if as_long_as is not None else None
            if torch.is_grad_enabled() and torch._C._current_graph_task_id() == -1:
                self._driver = threading.get_ident()

    def begin_anew(self) -> None:
        """Nothing that the calling thread has begun in its turn is still going on."""
        with self._lock:
            if self._owner == self._who():
                self._lasting.clear()
                self._pass_on()

    def end(self, what: Hashable) -> None:
        """From any thread."""
        with self._lock:
            if what in self._lasting:
                del self._lasting[what]
                self._pass_on()

    def _who(self) -> int:
        in_backward = torch._C._current_graph_task_id() != -1
        return self._driver if in_backward and self._backward_elsewhere else threading.get_ident()

    def _wait(self) -> None:
        ticket, began = object(), time.monotonic()
        self._queue.append(ticket)
        try:
            while self._queue[0] is not ticket or not (self._is_free() or self._owner_ended()):
                if time.monotonic() - began > PATIENCE_SECONDS:
                    raise UsageError(
                        f"another thread has been inside this engine's model for {PATIENCE_SECONDS:g} seconds: threads take "
                        "turns in it. End what that thread does, or evaluate between the steps of the training loop."
                    )
                self._condition.wait(_LOOK_SECONDS)
        finally:
            self._queue.remove(ticket)
            self._condition.notify_all()

    def _is_free(self) -> bool:
        lasting = any(alive is None or alive() is not None for alive in self._lasting.values())
        return self._owner is None or not (self._count or lasting)

    def _owner_ended(self) -> bool:
        return all(thread.ident != self._owner for thread in threading.enumerate())

    def _pass_on(self) -> None:
        if self._is_free():
            self._owner = None
            if self._queue:
                self._condition.notify_all()
