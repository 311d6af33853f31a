# SPDX-License-Identifier: Apache-2.0
"""State dictionaries of schedulers as JSON: keys that are no text, numbers that JSON has no words for, and tensors."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch

_ITEMS, _FLOAT, _TENSOR = "__items__", "__float__", "__tensor__"


def packed(value: Any) -> Any:
    """JSON values that `unpacked` gives back; tuples become lists, tensors lie on the CPU."""
    if isinstance(value, Mapping):
        if all(isinstance(key, str) for key in value):
            return {key: packed(item) for key, item in value.items()}
        return {_ITEMS: [[packed(key), packed(item)] for key, item in value.items()]}
    if isinstance(value, (list, tuple)):
        return [packed(item) for item in value]
    if isinstance(value, float) and not math.isfinite(value):
        return {_FLOAT: str(value)}
    if isinstance(value, torch.Tensor):
        return {_TENSOR: [str(value.dtype).removeprefix("torch."), packed(value.tolist())]}
    return value


def unpacked(value: Any) -> Any:
    """The inverse of `packed`."""
    if isinstance(value, dict):
        if set(value) == {_ITEMS}:
            return {unpacked(key): unpacked(item) for key, item in value[_ITEMS]}
        if set(value) == {_FLOAT}:
            return float(value[_FLOAT])
        if set(value) == {_TENSOR}:
            dtype, numbers = value[_TENSOR]
            return torch.tensor(unpacked(numbers), dtype=getattr(torch, dtype), device="cpu")
        return {key: unpacked(item) for key, item in value.items()}
    if isinstance(value, list):
        return [unpacked(item) for item in value]
    return value
