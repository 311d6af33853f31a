# SPDX-License-Identifier: Apache-2.0
"""What a device's allocator counts, and what it would where this project plays the device."""

from __future__ import annotations

import weakref
from dataclasses import dataclass

import torch


@dataclass(frozen=True, slots=True)
class MemoryUse:
    """Of device memory, as its allocator counts: bytes that this process may have in all, that are in use `now`, and that were
    at most since `Accelerator.begin_peak`."""

    total: int
    now: int
    peak: int


class DeviceMemory:
    """Bytes in use: now, at most, and at most since somebody began to look. `limit_nbytes`: all that there are."""

    def __init__(self, limit_nbytes: int | None = None) -> None:
        self.limit_nbytes = limit_nbytes
        self.nbytes = self.peak_nbytes = self.late_peak_nbytes = 0

    def occupy(self, nbytes: int) -> None:
        """So many more are in use; fewer where negative. Raises `torch.OutOfMemoryError`."""
        if nbytes > 0 and self.limit_nbytes is not None and self.nbytes + nbytes > self.limit_nbytes:
            raise torch.OutOfMemoryError(
                f"the deferred device has {self.limit_nbytes} bytes, {self.nbytes} are in use, and {nbytes} more do not fit."
            )
        self.nbytes += nbytes
        self.peak_nbytes = max(self.peak_nbytes, self.nbytes)
        self.late_peak_nbytes = max(self.late_peak_nbytes, self.nbytes)

    def hold(self, tensor: torch.Tensor) -> None:
        """The tensor's storage is in use until nothing refers to it."""
        storage = tensor.untyped_storage()
        self.occupy(storage.nbytes())
        weakref.finalize(storage, self.occupy, -storage.nbytes()).atexit = False

    def begin_peak(self) -> None:
        """Somebody begins to look."""
        self.late_peak_nbytes = self.nbytes

    def use(self, total_nbytes: int) -> MemoryUse:
        return MemoryUse(total_nbytes, self.nbytes, self.late_peak_nbytes)
