# SPDX-License-Identifier: Apache-2.0
"""State dictionaries of schedulers as JSON: keys that are no text, and numbers that JSON has no words for."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

_ITEMS, _FLOAT = "__items__", "__float__"


def packed(value: Any) -> Any:
    """JSON values that `unpacked` gives back; tuples become lists."""
    if isinstance(value, Mapping):
        if all(isinstance(key, str) for key in value):
            return {key: packed(item) for key, item in value.items()}
        return {_ITEMS: [[packed(key), packed(item)] for key, item in value.items()]}
    if isinstance(value, (list, tuple)):
        return [packed(item) for item in value]
    if isinstance(value, float) and not math.isfinite(value):
        return {_FLOAT: str(value)}
    return value


def unpacked(value: Any) -> Any:
    """The inverse of `packed`."""
    if isinstance(value, dict):
        if set(value) == {_ITEMS}:
            return {unpacked(key): unpacked(item) for key, item in value[_ITEMS]}
        if set(value) == {_FLOAT}:
            return float(value[_FLOAT])
        return {key: unpacked(item) for key, item in value.items()}
    if isinstance(value, list):
        return [unpacked(item) for item in value]
    return value
