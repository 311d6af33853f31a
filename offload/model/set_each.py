# SPDX-License-Identifier: Apache-2.0
"""One attribute of many objects, set by a few calls of C, however many they are."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from itertools import repeat

_exhaust = deque[object](maxlen=0).extend


def set_each(objects: Iterable[object], name: str, values: Iterable[object]) -> None:
    """Of each object the value in its place; `values` may be longer, as `itertools.repeat` is."""
    _exhaust(map(setattr, objects, repeat(name), values))
