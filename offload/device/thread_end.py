# SPDX-License-Identifier: Apache-2.0
"""Begin and end of threads, where an interrupt may come as somebody starts them or asks.

`Thread.is_alive` and `Thread.join` are not for that: until Python 3.13 an interrupt inside of them has the thread that they are
asked about taken for ended, at once and for ever, by everybody who asks (what mends Python's issue 45274 takes its lock for the
caller's). A save that was told so of the main thread took the updates out of its hands. In `Thread.start` one may leave a lock
locked that the thread then waits for, and with it the end of the interpreter.
"""

from __future__ import annotations

import _thread
import threading
from collections.abc import Callable, Iterable
from typing import Any

from offload.device.pending import Latch

_is_ending = False


def _end() -> None:
    global _is_ending
    _is_ending = True


try:
    # Called when the main thread is through with its script, before the other threads are waited for; `atexit` comes after.
    threading._register_atexit(_end)  # type: ignore[attr-defined]
except RuntimeError:  # it is
    _end()


def script_is_over() -> bool:
    """Whether the main thread has come to the end of its script. What it may run after that are `atexit` functions."""
    return _is_ending


def has_ended(thread: threading.Thread) -> bool:
    """Whether the thread, which was started, runs nothing any more; the main thread: nothing of its script."""
    if thread is threading.main_thread():
        return _is_ending
    return thread not in threading.enumerate()


def start_uninterrupted(thread: threading.Thread) -> None:
    """`thread.start()`, on a thread of its own: signals are handled on the main thread alone. Where an interrupt ends the wait
    for it, the thread is started all the same."""
    failures: list[BaseException] = []
    is_over = Latch()

    def start() -> None:
        try:
            thread.start()
        except BaseException as error:
            failures.append(error)
        finally:
            is_over.set()

    _thread.start_new_thread(start, ())
    is_over.wait()
    if failures:
        raise failures[0]


class AwaitedThread(threading.Thread):
    """One whose `join` may be called again where an interrupt ended it."""

    def __init__(self, target: Callable[..., None], args: Iterable[Any], name: str) -> None:
        """A daemon."""
        super().__init__(target=target, args=args, name=name, daemon=True)
        self._ended = Latch()

    def run(self) -> None:
        try:
            super().run()
        finally:
            self._ended.set()

    def join(self, timeout: float | None = None) -> None:
        if timeout is None and threading.current_thread() is not self and not has_ended(self):  # it has in a forked child
            self._ended.wait()
        super().join(timeout)
