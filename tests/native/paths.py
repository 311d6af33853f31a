# SPDX-License-Identifier: Apache-2.0
"""The ways one computation can be done here: every SIMD level that this processor has, and the torch form."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from types import MappingProxyType
from typing import Any
from unittest import mock

import pytest

from offload import _native


def at_library_call(
    patch: pytest.MonkeyPatch,
    before: Mapping[str, Callable[..., object]] = MappingProxyType({}),
    after: Mapping[str, Callable[..., object]] = MappingProxyType({}),
) -> None:
    """Of the functions of the library itself, by their names in C: what they are called with, and with the result in front."""
    library = _native.loaded()

    class Watched:
        def __getattr__(self, name: str) -> Any:
            function = getattr(library, name)
            if name not in before and name not in after:
                return function

            def call(*given: Any) -> Any:
                before.get(name, _nothing)(*given)
                result = function(*given)
                after.get(name, _nothing)(result, *given)
                return result

            return call

    watched: Any = Watched()
    patch.setattr(_native, "loaded", lambda: watched)


def _nothing(*_: object) -> None:
    pass


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
