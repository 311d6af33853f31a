"""Giving freed memory back to the system where tensors come and go: initialisers, replays, gradients.

glibc takes blocks of up to 32 MiB from its heap. Each tensor that is computed and freed leaves a hole there, which the
next small object makes too small for the next tensor: the resident size would grow towards that of the whole model.
`malloc_trim` returns the pages of such holes. Other C libraries return large blocks by themselves.

Thread-safety: any thread; an update of the count that is lost to a race only moves the next trim.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from typing import Any

TRIM_NBYTES = 16 * 2**20


class FreedMemory:
    """Counts what was allocated for tensors that are freed soon, and trims when it is worth it."""

    def __init__(self) -> None:
        self._trim: Callable[[int], Any] | None = getattr(ctypes.CDLL(None), "malloc_trim", None)
        self._nbytes = 0

    def about_to_allocate(self, nbytes: int) -> None:
        """To be called before `nbytes` bytes of tensors are allocated."""
        if self._nbytes >= TRIM_NBYTES:
            self.give_back()
        self._nbytes += nbytes

    def give_back(self) -> None:
        """Return the pages of free memory now."""
        self._nbytes = 0
        if self._trim is not None:
            self._trim(0)


freed_memory = FreedMemory()
