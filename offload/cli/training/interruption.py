# SPDX-License-Identifier: Apache-2.0
"""Ctrl-C (SIGINT) and SIGTERM: the first ends the run after the current step, the second at once."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

from offload.progress import say_in_handler

_STEP_ENDS = b"\noffload: ending after this step; once more to end at once\n"
_SIGNALS = (signal.SIGINT, signal.SIGTERM)


class Interruption:
    """`requested`: a signal came. Outside of `between_steps` a signal raises KeyboardInterrupt; inside, a second one.

    For the main thread, which Python runs signal handlers in.
    """

    def __init__(self) -> None:
        self.requested = False
        self._deferring = False

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Handle the signals inside; restore what was there before."""
        before = {number: signal.signal(number, self._arrived) for number in _SIGNALS}
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)

    @contextmanager
    def between_steps(self) -> Iterator[None]:
        """Inside, the first signal only sets `requested`: the loop looks at it after every step."""
        self.raise_if_requested()
        self._deferring = True
        try:
            yield
        finally:
            self._deferring = False

    def raise_if_requested(self) -> None:
        """A signal whose KeyboardInterrupt was swallowed (Python does so in finalizers) counts all the same."""
        if self.requested:
            raise KeyboardInterrupt

    def _arrived(self, number: int, frame: FrameType | None) -> None:
        del number, frame
        first, self.requested = not self.requested, True
        if not (self._deferring and first):
            raise KeyboardInterrupt
        say_in_handler(_STEP_ENDS)
