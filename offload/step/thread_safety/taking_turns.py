# SPDX-License-Identifier: Apache-2.0
"""One thread at a time goes through the model: an evaluation in a second thread and a training take turns.

A forward, a backward, and each piece of the engine's own work between them are a turn. Whoever comes meanwhile waits, and has
the next one. A turn lasts until its forward or backward is over, and is not kept by a thread that ended, nor by what an
exception cut short at whatever place: who has a turn or waits for one is known by weak references alone.
"""

from __future__ import annotations

import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Hashable

import torch

from offload.errors import UsageError

PATIENCE_SECONDS = 600.0
"""Beyond them the other thread is taken to have stopped in the middle."""
_LOOK_SECONDS = 0.5


class _Ticket:
    """Of a thread that waits: its lock is locked, and opened when that is to look."""

    __slots__ = ("__weakref__", "lock", "thread")

    def __init__(self) -> None:
        self.thread, self.lock = threading.get_ident(), threading.Lock()
        self.lock.acquire()


class Turn:
    """See the module. Its owner may take it again, and keeps it by `begin` until `end`."""

    def __init__(self, *, backward_elsewhere: bool) -> None:
        """`backward_elsewhere`: autograd runs backward in threads of its own, where nothing says who called it."""
        self._backward_elsewhere = backward_elsewhere
        self._lock = threading.RLock()
        self._owner: int | None = None
        self._holders: dict[int, weakref.ref[object]] = {}
        """By id, the outermost first."""
        self._lasting: dict[Hashable, Callable[[], object]] = {}
        """What has begun and not ended; with what is false, or None, when it is over nevertheless."""
        self._queue: deque[weakref.ref[_Ticket]] = deque()
        """Who waits, the longest first."""
        self._driver = threading.get_ident()
        """Who ran the last forward that was recorded: backward is its."""

    def acquire(self, holder: object, blocking: bool = True) -> bool:
        """Whether it is the calling thread's turn now: after a wait, unless `blocking` is False. It is until `release`, or
        until nobody has `holder`."""
        with self._lock:
            if self._owner == (self._who() if self._backward_elsewhere else threading.get_ident()):  # as most often
                self._hold(holder)
                return True
        if self._take(holder, None):
            return True
        if not blocking:
            return False
        ticket, began = _Ticket(), time.monotonic()
        reference = weakref.ref(ticket)
        try:
            self._queue.append(reference)
            while not self._take(holder, ticket):
                if time.monotonic() - began > PATIENCE_SECONDS:
                    raise UsageError(
                        f"another thread has been inside this engine's model for {PATIENCE_SECONDS:g} seconds: threads take "
                        "turns in it. End what that thread does, or evaluate between the steps of the training loop."
                    )
                ticket.lock.acquire(timeout=_LOOK_SECONDS)
        finally:  # an interrupt that is being handled keeps the ticket alive
            with self._lock:
                if reference in self._queue:
                    self._queue.remove(reference)
        return True

    def release(self, holder: object) -> None:
        """The calling thread's turn is over, unless it has others."""
        key = id(holder)
        with self._lock:
            while key in self._holders:
                self._holders.popitem()  # with what began inside and was cut short
            if self._queue:
                self._pass_on()

    def begin(self, what: Hashable, goes_on: Callable[[], object]) -> None:
        """The calling thread, whose turn it is, keeps it until the `end` of `what`, or until `goes_on()` is false."""
        with self._lock:
            self._lasting[what] = goes_on
            if torch.is_grad_enabled() and torch._C._current_graph_task_id() == -1:
                self._driver = threading.get_ident()

    def leave(self, thread: threading.Thread) -> None:
        """The thread has ended: what it was in the middle of is over."""
        with self._lock:
            successors = (one for one in threading.enumerate() if one is not thread)
            if self._owner == thread.ident and all(one.ident != self._owner for one in successors):
                self._holders.clear()
                self._lasting.clear()
                self._pass_on()

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

    def _hold(self, holder: object) -> None:
        holders, key = self._holders, id(holder)
        if key in holders:
            del holders[key]  # of one that is gone
        holders[key] = weakref.ref(holder)

    def _take(self, holder: object, ticket: _Ticket | None) -> bool:
        with self._lock:
            me = self._who()
            if self._owner != me:
                is_free = self._is_free() or (ticket is not None and self._owner_ended())
                if not is_free or self._first(ticket) is not ticket:
                    return False
                self._holders.clear()
                self._lasting.clear()
                self._owner = me
            self._hold(holder)
        return True

    def _who(self) -> int:
        if self._backward_elsewhere and torch._C._current_graph_task_id() != -1:
            return self._driver
        return threading.get_ident()

    def _first(self, own: _Ticket | None = None) -> _Ticket | None:
        """The ticket of who has waited longest. `own`: the calling thread's, if that waits."""
        here = threading.get_ident()
        while self._queue:
            ticket = self._queue[0]()
            if ticket is not None and (ticket is own or ticket.thread != here):
                return ticket
            self._queue.popleft()  # its wait is over
        return None

    def _is_free(self) -> bool:
        if self._owner is None:
            return True
        held = any(holder() is not None for holder in self._holders.values())
        return not held and not any(goes_on() for goes_on in self._lasting.values())

    def _owner_ended(self) -> bool:
        return all(thread.ident != self._owner for thread in threading.enumerate())

    def _pass_on(self) -> None:
        if self._queue and self._is_free():  # else who comes next finds out: to look takes longer than what most turns do
            self._owner = None
            first = self._first()
            if first is not None and first.lock.locked():
                first.lock.release()


class Turned:
    """A turn for the length of a block."""

    __slots__ = ("__weakref__", "_turn")

    def __init__(self, turn: Turn) -> None:
        self._turn = turn

    def __enter__(self) -> None:
        try:
            self._turn.acquire(self)
        except BaseException:
            self._turn.release(self)
            raise

    def __exit__(self, *_: object) -> None:
        self._turn.release(self)
