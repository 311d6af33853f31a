# SPDX-License-Identifier: Apache-2.0
"""States of schedulers and of scripts as JSON: keys that are no text, tuples, numbers that JSON has no words for, tensors."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch

_ITEMS, _FLOAT, _TENSOR, _TUPLE = _MARKS = ("__items__", "__float__", "__tensor__", "__tuple__")


def packed(value: Any) -> Any:
    """JSON values that `unpacked` gives back; tensors lie on the CPU then. What cannot be packed stays as it is."""
    if isinstance(value, Mapping):
        if all(isinstance(key, str) for key in value) and not (len(value) == 1 and next(iter(value)) in _MARKS):
            return {key: packed(item) for key, item in value.items()}
        return {_ITEMS: [[packed(key), packed(item)] for key, item in value.items()]}
    if isinstance(value, list):
        return [packed(item) for item in value]
    if isinstance(value, tuple):
        return {_TUPLE: [packed(item) for item in value]}
    if isinstance(value, float) and not math.isfinite(value):
        return {_FLOAT: str(value)}
    if isinstance(value, torch.Tensor) and value.layout is torch.strided and not (value.is_meta or value.is_quantized):
        shape = [] if value.numel() else [list(value.shape)]  # which lists without an element do not say
        return {_TENSOR: [str(value.dtype).removeprefix("torch."), packed(value.tolist()), *shape]}
    return value


def unpacked(value: Any) -> Any:
    """The inverse of `packed`."""
    if isinstance(value, dict):
        if set(value) == {_ITEMS}:
            return {unpacked(key): unpacked(item) for key, item in value[_ITEMS]}
        if set(value) == {_FLOAT}:
            return float(value[_FLOAT])
        if set(value) == {_TENSOR}:
            dtype, numbers, *shape = value[_TENSOR]
            tensor = torch.tensor(unpacked(numbers), dtype=getattr(torch, dtype), device="cpu")
            return tensor.reshape(*shape) if shape else tensor
        if set(value) == {_TUPLE}:
            return tuple(unpacked(item) for item in value[_TUPLE])
        return {key: unpacked(item) for key, item in value.items()}
    if isinstance(value, list):
        return [unpacked(item) for item in value]
    return value
