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
        self._before = signal.signal(signal.SIGTERM, self._arrived)

    def close(self) -> None:
        """Put back the handler that was there before. Idempotent."""
        before, self._before = self._before, None
        if before is not None and signal.getsignal(signal.SIGTERM) == self._arrived:
            signal.signal(signal.SIGTERM, before)

    def _arrived(self, number: int, frame: FrameType | None) -> None:
        del frame
        if self.requested or os.getpid() != self._process_id:
            # Asked twice; or a forked worker of a DataLoader, which has nothing to save and ends as it would have.
            self.close()
            os.kill(os.getpid(), number)
            return
        self.requested = True
        os.write(2, b"offload: SIGTERM: saving after this step, then exiting\n")  # print is not safe in a handler
