# SPDX-License-Identifier: Apache-2.0
"""Ctrl-C while the engine does its own work: held until that is done, so that it finds nothing half done.

A second one is not held: what it cuts short is then in an undefined state, as after any failure. Only the handler of SIGINT
is exchanged, for as long as the work takes, and only where Python has one; what other signals raise is a failure too. Where
that comes just as a span ends, nobody ends it any more: the next one sees that its object is gone.
"""

from __future__ import annotations

import itertools
import os
import threading
import weakref

# The functions behind those of `signal`, which make enums of what they return: that takes longer than most of the spans here.
from _signal import getsignal, signal  # type: ignore[import-not-found, unused-ignore]
from collections.abc import Callable
from signal import SIGINT
from types import FrameType
from typing import Any

now: Callable[[], int] = itertools.count().__next__
"""A number that grows from call to call, and from hold to hold."""


_main = threading.main_thread().ident


def _forked() -> None:
    global _main
    _main = threading.get_ident()  # which forked is the main one there


os.register_at_fork(after_in_child=_forked)


def _on_main_thread() -> bool:
    return _main == threading.get_ident()


def end_since(begin: int) -> None:
    """At the end of what began at `begin = now()`: a hold that began inside of it is over, whatever keeps its span alive."""
    hold = getsignal(SIGINT)
    if isinstance(hold, _Hold) and hold.number > begin and _on_main_thread():
        hold.let_go()


class _Hold:
    """The handler of SIGINT during a span; `before` is the one that it stands for."""

    __slots__ = ("_span", "before", "came", "number")

    def __init__(self, span: HeldInterrupt, before: Callable[[int, FrameType | None], Any]) -> None:
        self._span = weakref.ref(span)
        self.before = before
        self.came = False
        self.number = now()

    @property
    def is_over(self) -> bool:
        return self._span() is None

    def __call__(self, number: int, frame: FrameType | None) -> None:
        if not self.came and not self.is_over:
            self.came = True
            return
        signal(SIGINT, self.before)
        self.before(number, frame)

    def let_go(self) -> None:
        """What came is handled now, as it would have been without this: so it may raise `KeyboardInterrupt`."""
        if getsignal(SIGINT) is self:
            signal(SIGINT, self.before)
            if self.came:
                self.before(SIGINT, None)


class HeldInterrupt:
    """One span of work; inside another one, or on another thread than the main one, it does nothing."""

    __slots__ = ("__weakref__", "_hold")

    def __init__(self) -> None:
        self._hold: _Hold | None = None

    def begin(self) -> None:
        """From now on it is held."""
        if _main == threading.get_ident():
            before = getsignal(SIGINT)
            is_held = type(before) is _Hold
            if is_held and before.is_over:
                before.let_go()
                before, is_held = before.before, False
            if not is_held and callable(before):
                self._hold = _Hold(self, before)
                signal(SIGINT, self._hold)

    def end(self) -> None:
        """No more; see `_Hold.let_go`."""
        hold, self._hold = self._hold, None
        if hold is not None:
            hold.let_go()
