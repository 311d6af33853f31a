# SPDX-License-Identifier: Apache-2.0
"""Threads that do not start."""

from __future__ import annotations

import threading
from collections.abc import Callable

import pytest


def starting_threads(patch: pytest.MonkeyPatch, instead: Callable[[threading.Thread], object]) -> None:
    """What is done in place of it, from now on."""
    patch.setattr(threading.Thread, "start", instead)


def no_more_threads(patch: pytest.MonkeyPatch, said: str = "can't start new thread") -> None:
    """As Python says it where the system refuses one."""

    def refuse(_: threading.Thread) -> None:
        raise RuntimeError(said)

    starting_threads(patch, refuse)
