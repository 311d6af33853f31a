"""How far each chunk of a save is, and who may do what with it. One lock, and nobody holds it while anything moves.

    COMING   its update of the last step before the save is still to be made; the chunk is then WAITING
    WAITING  as it is to be saved, where it lies
    HELD     somebody works on it where it lies: everybody else waits
    KEPT     its store keeps what is to be saved, whatever is written from now on
    COPIED   in its file

A failure of anybody ends the save; nobody is kept waiting by what will not happen any more.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable
from enum import Enum

from offload.model.chunk import ChunkOf

_LOOK_SECONDS = 0.5


class Copy(Enum):
    """See the module."""

    COMING = "coming"
    WAITING = "waiting"
    HELD = "held"
    KEPT = "kept"
    COPIED = "copied"


class Copies:
    """See the module. Every method may be called from any thread."""

    def __init__(self, chunks: Iterable[ChunkOf]) -> None:
        self._changed = threading.Condition()
        self._copies = dict.fromkeys(chunks, Copy.WAITING)
        self._updated: set[ChunkOf] | None = set()
        """While it is being found out what is coming: the chunks that were updated meanwhile."""
        self._failure: Exception | None = None

    # ---- updates of the last step -------------------------------------------------------------------------------------

    def expect(self, coming: Iterable[ChunkOf]) -> None:
        """These are to be updated before they are saved, but for those whose update was told since construction. Once."""
        with self._changed:
            updated, self._updated = self._updated, None
            assert updated is not None
            for chunk_of in coming:
                if chunk_of in self._copies and chunk_of not in updated:
                    self._copies[chunk_of] = Copy.COMING

    def updated(self, chunk_of: ChunkOf) -> None:
        """The chunk's update is over."""
        with self._changed:
            if self._updated is not None:
                self._updated.add(chunk_of)
            elif self._copies.get(chunk_of) is Copy.COMING:
                self._become(chunk_of, Copy.WAITING)

    @property
    def is_coming(self) -> bool:
        """Whether the save waits for an update that is still to be made; it waits for none once it failed."""
        with self._changed:
            return self._failure is None and Copy.COMING in self._copies.values()

    # ---- who works on what ---------------------------------------------------------------------------------------------

    def hold_for_update(self, chunk_of: ChunkOf) -> bool:
        """Whether the caller, who is about to overwrite the chunk where it lies, is to see to it first; it is HELD then.
        Waits while somebody else holds it."""
        with self._changed:
            if self._updated is not None or chunk_of not in self._copies:
                return False  # an update of the last step; or not of this save
            self._changed.wait_for(lambda: self._copies[chunk_of] is not Copy.HELD)
            if self._failure is not None or self._copies[chunk_of] is not Copy.WAITING:
                return False
            self._become(chunk_of, Copy.HELD)
            return True

    def hold_as_updated(self, chunk_of: ChunkOf) -> bool:
        """Whether the caller, who has the chunk at hand as its last update leaves it, may save it; it is HELD then."""
        with self._changed:
            wanted = self._failure is None and self._updated is None and self._copies.get(chunk_of) is Copy.COMING
            if wanted:
                self._become(chunk_of, Copy.HELD)
            return wanted

    def hold_for_copy(self, chunk_of: ChunkOf, may_go_on: Callable[[], None]) -> Copy:
        """What is to be copied, when its time has come: HELD by the caller, or KEPT; COPIED if it is. Raises the failure.

        `may_go_on` is called every now and then while an update is waited for, and raises if it will never come."""
        with self._changed:
            key = chunk_of
            while not self._changed.wait_for(
                lambda: self._failure is not None or self._copies[key] not in (Copy.COMING, Copy.HELD), _LOOK_SECONDS
            ):
                if self._copies[key] is Copy.COMING:
                    may_go_on()
            if self._failure is not None:
                raise self._failure
            if self._copies[key] is Copy.WAITING:
                self._become(chunk_of, Copy.HELD)
            return self._copies[key]

    def become(self, chunk_of: ChunkOf, state: Copy) -> None:
        """KEPT or COPIED now; of who holds it."""
        with self._changed:
            self._become(chunk_of, state)

    # ---- the end ---------------------------------------------------------------------------------------------------------

    def fail(self, error: Exception) -> None:
        """The save fails; the first failure is the one that is raised."""
        with self._changed:
            self._failure = self._failure or error
            self._changed.notify_all()

    def require_copied(self, chunks: Iterable[ChunkOf]) -> None:
        """Wait until all of these are; raise the failure."""
        wanted = list(chunks)
        with self._changed:
            self._changed.wait_for(lambda: self._failure is not None or all(self._copies[one] is Copy.COPIED for one in wanted))
            if self._failure is not None:
                raise self._failure

    def await_holders(self) -> None:
        """Wait until nobody holds anything: after a failure nobody begins to."""
        with self._changed:
            self._changed.wait_for(lambda: Copy.HELD not in self._copies.values())

    def _become(self, chunk_of: ChunkOf, state: Copy) -> None:
        self._copies[chunk_of] = state
        self._changed.notify_all()
