# SPDX-License-Identifier: Apache-2.0
"""The drive under an engine's files: which backend its stores are opened with."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from offload.device.pending import Pending
from offload.tiers import open_backend, stores
from offload.tiers.io.backend import IoBackend, OpenFile, Priority


class Told:
    """A real drive. `writes` is told of each write before it begins, on the thread that begins it: of the file, of how many
    bytes and where."""

    def __init__(self, writes: Callable[[Path, int, int], object]) -> None:
        self._drive: IoBackend = open_backend()
        self._writes = writes

    def write(self, file: OpenFile, source: torch.Tensor, offset_nbytes: int, *, priority: Priority) -> Pending:
        self._writes(file.path, source.nbytes, offset_nbytes)
        return self._drive.write(file, source, offset_nbytes, priority=priority)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._drive, name)


def drive_is(patch: pytest.MonkeyPatch, backend: Any) -> None:
    """Stores that are opened from now on are on this one."""
    drives_from(patch, lambda: backend)


def drives_from(patch: pytest.MonkeyPatch, made: Callable[[], Any]) -> None:
    """The stores of each engine are on one that is made for it."""
    patch.setattr(stores, "open_backend", lambda **_: made())
