# SPDX-License-Identifier: Apache-2.0
"""The drive under an engine's files: which backend its stores are opened with, and in which stripes they lie."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from offload.tiers import NvmeStore, stores


def drive_is(patch: pytest.MonkeyPatch, backend: Any) -> None:
    """Stores that are opened from now on are on this one."""
    drives_from(patch, lambda: backend)


def drives_from(patch: pytest.MonkeyPatch, made: Callable[[], Any]) -> None:
    """The stores of each engine are on one that is made for it."""
    patch.setattr(stores, "open_backend", lambda **_: made())


def stripes_of(patch: pytest.MonkeyPatch, nbytes: int) -> None:
    """On several drives, where a tiny model would lie in one stripe."""
    patch.setitem(NvmeStore.__init__.__kwdefaults__, "stripe_nbytes", nbytes)
