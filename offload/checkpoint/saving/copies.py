# SPDX-License-Identifier: Apache-2.0
"""Which chunks of a save may be overwritten by now, and which is to be copied next.

A chunk's state of the save is at first where it lies. An update that is about to overwrite it comes here before it does:

    its update of the last step   is the one that the save waits for: it goes on at once
    its stores can keep it        they do, had by whoever comes first, the update or the lane of the save; it may be overwritten
    they cannot                   (memory, a drive without room:) it may when the lane has copied it, which it does next

The lane copies alone. A failure of anybody ends the save; nobody is kept waiting by what will not happen any more.

An interrupt (KeyboardInterrupt) may end any line that the thread of the model runs here, and so an update before it has
overwritten anything. So that thread waits on plain locks alone, which it either has or has not; the lane, which is never
interrupted, looks again every now and then.
"""

from __future__ import annotations

import queue
import threading
from collections import deque
from collections.abc import Callable, Iterable
from contextlib import suppress

from offload.device.pending import Bell, Latch
from offload.model.chunk import Chunk
from offload.step.updates.update import Updates

_LOOK_SECONDS = 0.2


class Copies:
    """Implements `Watcher`. On the lane of the save, but for `before_update`, `after_update`, `fail` and `is_coming`: from any
    thread."""

    def __init__(self, chunks: Iterable[Chunk], updates: Updates | None, take_snapshots: Callable[[Chunk], bool]) -> None:
        """`chunks`: in the order in which they are copied. The save is of the state after all updates that are enqueued now; no
        other is meanwhile. `take_snapshots`: has a chunk kept by its stores, and says whether they can."""
        self._take_snapshots = take_snapshots
        self._left = dict.fromkeys(chunks)
        self._coming = {one.chunk: one for one in updates.coming()} if updates is not None else {}
        self._safe = {chunk: Latch() for chunk in self._left}
        """Set when the chunk may be overwritten: kept, copied, or given up."""
        self._in_place: set[Chunk] = set()
        """Taken by the lane, which copies them where they lie."""
        self._wanted: deque[Chunk] = deque()
        """What updates wait for."""
        self._lock = threading.Lock()
        self._bell = Bell()
        self._failure: Exception | None = None
        self.run_lane: Callable[[], None] | None = None
        """Where the lane is no thread of its own: runs the save, as far as it is not."""

    # ---- by updates --------------------------------------------------------------------------------------------------

    def before_update(self, chunk: Chunk) -> None:
        """Return when the chunk may be overwritten where it lies. A failure is the save's, not the update's."""
        safe = self._safe.get(chunk)
        if safe is None or safe.is_set() or self._is_coming(chunk):
            return
        try:
            with self._lock:
                if self._may_overwrite(chunk):
                    return
        except Exception as error:
            self.fail(error)
        self._wanted.append(chunk)
        self._bell.put(None)
        (self.run_lane or safe.wait)()

    def after_update(self) -> None:
        """A chunk's update is over."""
        self._bell.put(None)

    @property
    def is_coming(self) -> bool:
        """Whether the save waits for an update that is still to be made; it waits for none once it failed."""
        return self._failure is None and any(map(self._is_coming, self._safe))

    def _is_coming(self, chunk: Chunk) -> bool:
        update = self._coming.get(chunk)
        return update is not None and not update.applied

    # ---- by the lane -------------------------------------------------------------------------------------------------

    def take(self) -> Chunk | None:
        """The chunk to be copied now, which nobody overwrites until it is `copied`; None where all left wait for their update.

        Raises the failure."""
        while self._wanted:
            chunk = self._wanted.popleft()
            if chunk in self._left:
                return self._take(chunk)
        return next((self._take(chunk) for chunk in self._left if not self._is_coming(chunk)), None)

    def await_update(self, make_update: Callable[[Chunk], bool]) -> bool:
        """Wait until there may be something to `take`; False where nothing is left. Raises the failure.

        `make_update`: has a chunk's update made, if this thread may. What is left waits for updates alone by now, so none of
        those that are on their way before it can be waiting for this thread."""
        self.require_no_failure()
        first = next(iter(self._left), None)
        if first is not None and not (self._is_coming(first) and make_update(first)):
            with suppress(queue.Empty):
                self._bell.get(timeout=_LOOK_SECONDS)
        return first is not None

    def copied(self, chunk: Chunk) -> None:
        """It is in its file."""
        with self._lock:
            self._in_place.discard(chunk)
            self._release(chunk)

    def abandon(self) -> None:
        """The lane copies nothing any more."""
        with self._lock:
            self._in_place.clear()
            if self._failure is not None:
                for chunk in self._safe:
                    self._release(chunk)

    def _take(self, chunk: Chunk) -> Chunk:
        del self._left[chunk]
        with self._lock:
            self.require_no_failure()
            if not self._may_overwrite(chunk):
                self._in_place.add(chunk)
        return chunk

    # ---- both --------------------------------------------------------------------------------------------------------

    def _may_overwrite(self, chunk: Chunk) -> bool:
        """Whether the chunk may be overwritten now, since its stores keep it if they can."""
        if not self._safe[chunk].is_set() and chunk not in self._in_place and self._take_snapshots(chunk):
            self._release(chunk)
        return self._safe[chunk].is_set()

    def fail(self, error: Exception) -> None:
        """The save fails; the first failure is the one that is raised."""
        with self._lock:
            self._failure = self._failure or error
            for chunk in self._safe.keys() - self._in_place:
                self._release(chunk)
        self._bell.put(None)

    def _release(self, chunk: Chunk) -> None:
        if not self._safe[chunk].is_set():
            self._safe[chunk].set()

    def require_no_failure(self) -> None:
        """Raise the failure, if there is one."""
        if self._failure is not None:
            raise self._failure
