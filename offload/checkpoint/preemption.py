# SPDX-License-Identifier: Apache-2.0
"""SIGTERM on a preemptible machine: noticed, and acted on where the loop says that a step is over.

Only the loop knows where that is: after `optimizer.step()` it steps its scheduler, drops gradients, evaluates perhaps, and
counts; before the next forward it draws a batch, and random numbers for it. A resume is bit-exact only from the point at
which the loop would start over.
"""

from __future__ import annotations

import os
import signal
import threading
from types import FrameType

from offload.errors import UsageError
from offload.progress import say_in_handler


class Preemption:
    """Catches SIGTERM from construction until `close`: the first sets `requested`, the second does what it did before.

    For the main thread, which Python runs signal handlers in.
    """

    def __init__(self) -> None:
        """Raises `UsageError` in another thread."""
        if threading.current_thread() is not threading.main_thread():
            raise UsageError("catch_sigterm=True needs the main thread: Python delivers signals to no other.")
        self._process_id = os.getpid()
        self.requested = False
        self._closed = False
        self._before = signal.getsignal(signal.SIGTERM)
        """None: a handler that is not Python's."""
        signal.signal(signal.SIGTERM, self._arrived)

    def close(self) -> None:
        """Put back the handler that was there before. Idempotent."""
        if not self._closed and self._before is not None and signal.getsignal(signal.SIGTERM) == self._arrived:
            signal.signal(signal.SIGTERM, self._before)
        self._closed = True

    def _arrived(self, number: int, frame: FrameType | None) -> None:
        if self.requested or self._closed or os.getpid() != self._process_id:
            # Asked twice; or a forked worker of a DataLoader, which has nothing to save and ends as it would have.
            self._pass_on(number, frame)
            return
        self.requested = True
        earlier = getattr(self._before, "__self__", None)
        if isinstance(earlier, Preemption) and not earlier._closed:  # another engine's, which is asked as well
            earlier._arrived(number, frame)
        else:
            say_in_handler(b"offload: SIGTERM: saving after this step, then exiting\n")

    def _pass_on(self, number: int, frame: FrameType | None) -> None:
        """Do what would have been done. Whoever has set a handler since, and calls this one from it, goes on calling it."""
        self.close()
        if callable(self._before):
            self._before(number, frame)
        elif self._before is not signal.SIG_IGN:
            signal.signal(number, signal.SIG_DFL)
            os.kill(os.getpid(), number)
