# SPDX-License-Identifier: Apache-2.0
"""Updates that a save waits for, made on the save's thread while the thread that drives the model does nothing.

Who drives the model makes them under its next forward. In a notebook, or at the end of a script, none may come. Where it has
asked nothing of the engine for a while, is in no forward and holds no parameters, another thread may have an update made in
its place: each holds `FailureState.turn` while it works, so they never meet, and what it leaves is what the next forward would
have left there. Where that thread has ended there is nothing to wait for but the turn, which any other may have.
"""

from __future__ import annotations

import threading
import time

from offload.device.thread_end import has_ended, script_is_over
from offload.model.chunk import Chunk
from offload.step.components import Components
from offload.step.training import Training

QUIET_SECONDS = 1.0
"""Without a call. A loop that does other things for longer loses nothing but the overlap of one unit's update."""


class Idleness:
    """Of the thread that made this. `make_update` is for one other thread."""

    def __init__(self, parts: Components, training: Training) -> None:
        self._training, self._residency, self._units = training, parts.residency, parts.units
        self._driver: threading.Thread | None = threading.current_thread()
        if self._driver is threading.main_thread() and script_is_over():
            self._driver = None  # in an `atexit` function: how that ends nobody is told
        self._seen_count, self._seen_seconds = training.turn_count, time.monotonic()
        self._unit_index = 0
        self._accelerator = parts.accelerator
        self._finish_as_driver = parts.accelerator.on_compute(self._finish)

    def make_update(self, chunk: Chunk) -> bool:
        """Have the update of the chunk's unit made if the thread of the model is idle; whether it was.

        Raises the engine's failure, and `EngineFailedError` where the update will never be made."""
        training = self._training
        if training.closed:
            return False  # by `close`, which has it made
        training.check_not_failed()
        left = self._driver if self._driver is not None and has_ended(self._driver) else None
        if left is not None:
            training.turn.leave(left)
        elif not self._is_quiet():
            return False
        if not training.turn.acquire(self, blocking=False):
            return False
        try:
            if left is not None:
                training.uses.abandon()
            if training.uses.any:
                return False
            self._unit_index = chunk.flat.layout.unit_index
            with training.failures_beside():
                self._finish_as_driver()
        finally:
            training.turn.release(self)
        return True

    def _finish(self) -> None:
        self._residency.finish_update(self._units[self._unit_index])
        self._accelerator.mark().wait()  # the thread of the model does not know that there is something to wait for

    def _is_quiet(self) -> bool:
        now, count = time.monotonic(), self._training.turn_count
        if count != self._seen_count:
            self._seen_count, self._seen_seconds = count, now
        return now - self._seen_seconds >= QUIET_SECONDS
