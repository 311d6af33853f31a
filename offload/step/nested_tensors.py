# SPDX-License-Identifier: Apache-2.0
"""Tensors in what a module is called with, however they are nested."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import torch


def tensors_in(value: Any) -> Iterator[torch.Tensor]:
    """Every tensor in nested tuples, lists, mappings and dataclasses."""
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, Mapping):
        for item in value.values():
            yield from tensors_in(item)
    elif isinstance(value, (tuple, list)):
        for item in value:
            yield from tensors_in(item)
    elif dataclasses.is_dataclass(value) and not isinstance(value, type):
        for field in dataclasses.fields(value):
            yield from tensors_in(getattr(value, field.name, None))


def tensors_in_call(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Iterable[torch.Tensor]:
    """Every tensor in the arguments of a call."""
    if not kwargs and set(map(type, args)) == _TENSOR:
        return args
    return tensors_in((args, kwargs))


_TENSOR = {torch.Tensor}


def cast_floating(args: Any, kwargs: Mapping[str, Any], dtype: torch.dtype) -> tuple[Any, Any]:
    """The arguments, with every floating-point tensor in them in `dtype`."""

    def cast(value: Any) -> Any:
        return value.to(dtype) if isinstance(value, torch.Tensor) and value.is_floating_point() else value

    cast_args, cast_kwargs = torch.utils._pytree.tree_map(cast, (args, dict(kwargs)))
    return cast_args, cast_kwargs
