# SPDX-License-Identifier: Apache-2.0
"""The values of those tensors on the meta device that follow from positions alone (`torch.arange`): they are the same whatever
data come, and what a model finds out by them need not be assumed. Whether a mask is a causal one is asked so."""

from __future__ import annotations

import weakref
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

_LARGEST_NUMEL = 1 << 20
"""Of a tensor whose values are kept."""
_aten = torch.ops.aten
_UNWRITTEN = frozenset({_aten.empty_like, _aten.new_empty, _aten.new_empty_strided})
"""Operations that give memory as it is."""


class Positions:
    """Of each storage that is known the same one in host memory, as long as it is there."""

    def __init__(self) -> None:
        self._flats: dict[int, Tensor] = {}

    def made(self, function: Any, args: Any, given: Mapping[str, Any], result: Any) -> None:
        """An operation without tensors made `result`."""
        if function._overloadpacket is _aten.arange and result.is_meta and result.numel() <= _LARGEST_NUMEL:
            self._keep(result, function(*args, **{**given, "device": "cpu"}))

    def followed(self, function: Any, args: Any, given: Mapping[str, Any], result: Any) -> None:
        """An operation that wrote none of its inputs made `result` of them."""
        if not self._flats or not isinstance(result, Tensor) or not result.is_meta or result.numel() > _LARGEST_NUMEL:
            return
        if function._overloadpacket in _UNWRITTEN or torch.Tag.nondeterministic_seeded in function.tags:
            return
        try:
            known = [self._known(one) for one in args]
            named = {name: "cpu" if name == "device" else self._known(one) for name, one in given.items()}
        except _UnknownError:
            return
        self._keep(result, function(*known, **named))

    def value_of(self, tensor: Tensor) -> bool | int | float | None:
        """That of one element; None where it is not known."""
        try:
            known: bool | int | float = self._known(tensor).item()
        except _UnknownError:
            return None
        return known

    def wrote(self, tensor: Tensor) -> None:
        """`tensor` was written: what is known of it is so no longer."""
        self._flats.pop(tensor.untyped_storage()._cdata, None)

    def _keep(self, tensor: Tensor, value: Tensor) -> None:
        storage = tensor.untyped_storage()
        flat = torch.zeros(storage.nbytes() // tensor.element_size(), dtype=tensor.dtype, device="cpu")
        flat.as_strided(tensor.size(), tensor.stride(), tensor.storage_offset()).copy_(value)
        self._flats[storage._cdata] = flat
        weakref.finalize(storage, self._flats.pop, storage._cdata, None).atexit = False

    def _known(self, value: Any) -> Any:
        """The same argument with tensors in host memory."""
        if isinstance(value, (list, tuple)):
            return [self._known(one) for one in value]
        if not isinstance(value, Tensor) or not value.is_meta:
            return value
        flat = self._flats.get(value.untyped_storage()._cdata)
        if flat is None or flat.dtype is not value.dtype:
            raise _UnknownError
        return flat.as_strided(value.size(), value.stride(), value.storage_offset())


class _UnknownError(Exception):
    """Of a tensor whose values nobody knows."""
