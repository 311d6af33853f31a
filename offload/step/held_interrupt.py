"""Ctrl-C while the engine does its own work: held until that is done, so that it finds nothing half done.

A second one is not held: what it cuts short is then in an undefined state, as after any failure. Only the handler of SIGINT
is exchanged, for as long as the work takes, and only where Python has one; what other signals raise is a failure too.
"""

from __future__ import annotations

import threading

# The functions behind those of `signal`, which make enums of what they return: that takes longer than most of the spans here.
from _signal import getsignal, signal  # type: ignore[import-not-found, unused-ignore]
from signal import SIGINT
from types import FrameType
from typing import Any


class HeldInterrupt:
    """One span of work; inside another one, or on another thread than the main one, it does nothing."""

    __slots__ = ("_before", "_came")

    def __init__(self) -> None:
        self._before: Any = None
        self._came = False

    def begin(self) -> None:
        """From now on it is held."""
        if threading.current_thread() is threading.main_thread():
            before = getsignal(SIGINT)
            if callable(before) and not isinstance(getattr(before, "__self__", None), HeldInterrupt):
                self._before = before
                signal(SIGINT, self._take)

    def end(self) -> None:
        """No more; what came is handled now, as it would have been without this: so it may raise `KeyboardInterrupt`."""
        if self._before is not None:
            before, self._before = self._before, None
            signal(SIGINT, before)
            if self._came:
                before(SIGINT, None)

    def _take(self, number: int, frame: FrameType | None) -> None:
        if not self._came:
            self._came = True
            return
        before, self._before = self._before, None
        signal(SIGINT, before)
        before(number, frame)
