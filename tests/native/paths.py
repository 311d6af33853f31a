# SPDX-License-Identifier: Apache-2.0
"""The ways one computation can be done here: every SIMD level that this processor has, and the torch form."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import pytest

from offload import _native


def at_native_call(patch: pytest.MonkeyPatch, name: str, before: Callable[..., object]) -> None:
    """Of the native library: what it is called with goes to `before`."""
    call = getattr(_native, name)

    def watched(*given: Any, **named: Any) -> Any:
        before(*given, **named)
        return call(*given, **named)

    patch.setattr(_native, name, watched)


def simd_levels() -> list[str]:
    levels = []
    for name in _native.SIMD_LEVELS if _native.available() else ():
        try:
            _native.set_simd_level(name)
        except OSError:
            continue
        levels.append(name)
    if levels:
        _native.set_simd_level(None)
    return levels


@contextmanager
def torch_form() -> Iterator[None]:
    with mock.patch.object(_native, "available", lambda: False):
        yield
