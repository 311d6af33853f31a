# SPDX-License-Identifier: Apache-2.0
"""How far a long piece of work is, said in the log now and then: whoever shows progress listens there. And what is said in the
handler of a signal."""

from __future__ import annotations

import contextlib
import logging
import os

EVERY_NBYTES = 256 << 20
"""A tenth of a second of a fast drive: less is over before it is read."""


class Progress:
    """For one thread. Each record's `args` are the GiB that are done and those in all."""

    def __init__(self, log: logging.Logger, what: str, total_nbytes: int, every_nbytes: int = EVERY_NBYTES) -> None:
        """`what` is done, as in "save: %.1f of %.1f GiB are written": it takes two numbers."""
        self._log, self._what = log, what
        self._nbytes = self._said_nbytes = 0
        self._total_nbytes, self._every_nbytes = total_nbytes, every_nbytes

    def add(self, nbytes: int) -> None:
        """So many bytes more are done."""
        self._nbytes += nbytes
        if self._nbytes - self._said_nbytes >= self._every_nbytes:
            self._said_nbytes = self._nbytes
            self._log.info(self._what, self._nbytes / 2**30, self._total_nbytes / 2**30)


def say_in_handler(line: bytes) -> None:
    """On standard error, from a signal's handler: print is not safe there, which it may have interrupted. An error would come
    out of whatever the signal interrupted, so where nobody reads any more nothing is said."""
    with contextlib.suppress(OSError):
        os.write(2, line)
