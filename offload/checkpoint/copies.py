"""How far each chunk of a save is, and who may do what with it. One lock, and nobody holds it while anything moves.

    WAITING  as it is to be saved, where it lies, once its update of the last step before the save is made: until then it is
             said to be coming
    HELD     somebody works on it where it lies: everybody else waits
    KEPT     its store keeps what is to be saved, whatever is written from now on
    COPIED   in its file

A chunk becomes KEPT or COPIED only if no later update has begun to overwrite it, whether the save was told of that update or
not. So a save that an interrupt has cut off from the updates fails, and never holds two states. A failure of anybody ends the
save; nobody is kept waiting by what will not happen any more.

An interrupt (KeyboardInterrupt) may end any line that the thread of the model runs here. So that thread waits on plain locks
alone, which it either has or has not; the thread of the save, which is never interrupted, looks again every now and then.
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Iterable
from contextlib import suppress
from enum import Enum

from offload.errors import CheckpointError
from offload.model.chunk import Chunk
from offload.step.update import Updates

_LOOK_SECONDS = 0.2


class Copy(Enum):
    """See the module."""

    WAITING = "waiting"
    HELD = "held"
    KEPT = "kept"
    COPIED = "copied"


class Copies:
    """See the module. Every method may be called from any thread, but what says otherwise."""

    def __init__(self, chunks: Iterable[Chunk], updates: Updates | None) -> None:
        """The save is of the state after all updates that are enqueued now. On the thread of the model, or while it waits."""
        self._lock = threading.Lock()
        self._bell: queue.SimpleQueue[None] = queue.SimpleQueue()
        self._copies = dict.fromkeys(chunks, Copy.WAITING)
        self._held: dict[Chunk, tuple[int, threading.Lock]] = {}
        """By whom, and what he lets go of when he is done with it."""
        self._enqueued_count = updates.enqueued_count if updates is not None else 0
        self._coming = {one.chunk: one for one in updates.coming()} if updates is not None else {}
        self._failure: Exception | None = None

    # ---- updates of the last step -------------------------------------------------------------------------------------

    def updated(self) -> None:
        """An update is over."""
        self._bell.put(None)

    @property
    def is_coming(self) -> bool:
        """Whether the save waits for an update that is still to be made; it waits for none once it failed."""
        return self._failure is None and any(self._is_coming(chunk) for chunk in self._copies)

    def _is_coming(self, chunk: Chunk) -> bool:
        update = self._coming.get(chunk)
        return update is not None and not update.applied

    # ---- who works on what ---------------------------------------------------------------------------------------------

    def hold_for_update(self, chunk: Chunk) -> bool:
        """Whether the caller, who is about to overwrite the chunk where it lies, is to see to it first; it is HELD then.
        Waits while somebody else holds it."""
        while chunk in self._copies and not self._is_coming(chunk):
            with self._lock:
                state = self._copies[chunk]
                if state is Copy.WAITING and self._failure is None:
                    self._hold(chunk)
                    return True
                if state is not Copy.HELD:
                    return False
                _, released = self._held[chunk]
            with released:
                pass
        return False  # not of this save; or an update of the last step

    def hold_as_updated(self, chunk: Chunk) -> bool:
        """Whether the caller, who has the chunk at hand as its last update leaves it, may save it; it is HELD then."""
        with self._lock:
            wanted = self._failure is None and self._is_coming(chunk) and self._copies.get(chunk) is Copy.WAITING
            if wanted:
                self._hold(chunk)
            return wanted

    def hold_for_copy(self, chunk: Chunk, make_update: Callable[[Chunk], bool]) -> Copy:
        """What is to be copied, when its time has come: HELD by the caller, or KEPT; COPIED if it is. Raises the failure.

        On the thread of the save. `make_update` has the update made that is waited for, if this thread may."""
        while True:
            with self._lock:
                self._require_no_failure()
                state, coming = self._copies[chunk], self._is_coming(chunk)
                if state is Copy.WAITING and not coming:
                    self._hold(chunk)
                    return Copy.HELD
                if state is not Copy.HELD and not coming:
                    return state
            if not (coming and make_update(chunk)):
                self._listen()

    def become(self, chunk: Chunk, state: Copy) -> None:
        """KEPT or COPIED now; of who holds it, or COPIED of what was KEPT. Raises the failure."""
        with self._lock:
            held = self._copies[chunk] is Copy.HELD
            if held and chunk.overwritten_by >= self._enqueued_count:
                self._failure = self._failure or CheckpointError(
                    "the save was cut off from training by an interrupt, and its state is overwritten: save again."
                )
            self._copies[chunk] = state
            if held:
                self._held.pop(chunk)[1].release()
            self._bell.put(None)
            self._require_no_failure()

    def _hold(self, chunk: Chunk) -> None:
        released = threading.Lock()
        released.acquire()
        self._held[chunk] = (threading.get_ident(), released)
        self._copies[chunk] = Copy.HELD

    # ---- the end ---------------------------------------------------------------------------------------------------------

    def fail(self, error: Exception) -> None:
        """The save fails; the first failure is the one that is raised."""
        self._failure = self._failure or error
        self._bell.put(None)

    def give_up_held(self) -> None:
        """The calling thread works on no chunk, whatever it held when an interrupt came. The save fails if it held any."""
        own = threading.get_ident()
        for chunk, (holder, released) in list(self._held.items()):
            if holder == own:
                self.fail(CheckpointError("the save was interrupted while an update wrote a part of it: save again."))
                self._copies[chunk] = Copy.WAITING
                self._held.pop(chunk)
                released.release()

    def require_copied(self, chunks: Iterable[Chunk]) -> None:
        """Wait until all of these are; raise the failure. On the thread of the save."""
        for chunk in chunks:
            while self._copies[chunk] is not Copy.COPIED:
                self._require_no_failure()
                self._listen()
        self._require_no_failure()

    def await_holders(self) -> None:
        """Wait until nobody holds anything: after a failure nobody begins to. On the thread of the save."""
        while self._held:
            self._listen()

    def _require_no_failure(self) -> None:
        if self._failure is not None:
            raise self._failure

    def _listen(self) -> None:
        with suppress(queue.Empty):
            self._bell.get(timeout=_LOOK_SECONDS)
