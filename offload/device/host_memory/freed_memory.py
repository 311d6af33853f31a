# SPDX-License-Identifier: Apache-2.0
"""Giving freed memory back to the system where tensors come and go: initialisers, replays, activations, gradients.

glibc takes blocks of up to 32 MiB from its heap. Each tensor that is computed and freed leaves a hole there, which the
next small object makes too small for the next tensor: the resident size would grow towards that of the whole model.
`malloc_trim` returns the pages of all holes, at a millisecond or more a call, and each page that is used again costs a fault.
So it is called where the process would otherwise grow beyond what it was seen to need, or beyond what it had reached when it
was seen to need that: between two looks, at the end of a forward, more may be in use than at either of them. Below that, holes
cost nobody anything. Other C libraries return large blocks by themselves.

Thread-safety: any thread; an update of the counts that is lost to a race only moves the next trim.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from typing import Any

import psutil

LOOK_NBYTES = 16 * 2**20
_REACHED = 8
"""What was reached counts up to this part more than what is needed: the rest is left from before, and nobody will need it."""


class FreedMemory:
    """Counts what was allocated for tensors that are freed soon, and trims where it is worth it."""

    def __init__(self) -> None:
        self._trim: Callable[[int], Any] | None = getattr(ctypes.CDLL(None), "malloc_trim", None)
        self._nbytes = 0
        self._needed_nbytes = 0
        """The largest resident size without holes that was seen."""
        self._allowed_nbytes = 0

    def about_to_allocate(self, nbytes: int) -> None:
        """To be called before `nbytes` bytes of tensors are allocated."""
        self._look(nbytes, coming_nbytes=nbytes)

    def about_to_free(self, nbytes: int) -> None:
        """To be called before `nbytes` bytes of tensors are freed."""
        self._look(nbytes, coming_nbytes=0)

    def give_back(self) -> None:
        """Return the pages of free memory now."""
        self._nbytes = 0
        if self._trim is not None:
            self._trim(0)

    def _look(self, nbytes: int, *, coming_nbytes: int) -> None:
        self._nbytes += nbytes
        if self._nbytes < LOOK_NBYTES or self._trim is None:
            return
        self._nbytes = 0
        resident_nbytes = _resident_nbytes()
        if resident_nbytes is None:
            self._trim(0)
        elif resident_nbytes + coming_nbytes > self._allowed_nbytes:
            self._trim(0)
            self._learn(resident_nbytes, (_resident_nbytes() or resident_nbytes) + coming_nbytes)

    def _learn(self, reached_nbytes: int, needed_nbytes: int) -> None:
        """`reached_nbytes` were resident before a trim; `needed_nbytes` are after it and what comes."""
        if needed_nbytes > self._needed_nbytes:
            self._needed_nbytes = needed_nbytes
            reached_nbytes = min(reached_nbytes, needed_nbytes + needed_nbytes // _REACHED)
            self._allowed_nbytes = max(self._allowed_nbytes, needed_nbytes, reached_nbytes)


def _resident_nbytes() -> int | None:
    """None where the process may open no file to see it: that is no reason for a step to fail."""
    try:
        return int(psutil.Process().memory_info().rss)
    except OSError:
        return None


freed_memory = FreedMemory()
