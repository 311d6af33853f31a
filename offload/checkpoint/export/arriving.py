# SPDX-License-Identifier: Apache-2.0
"""Tensors whose elements come in parts, put together in host memory."""

from __future__ import annotations

from collections.abc import Hashable, Mapping
from typing import Generic, TypeVar

import torch

from offload.device.arithmetic.rounding import round_into

K = TypeVar("K", bound=Hashable)


class Arriving(Generic[K]):
    """Several that are needed together. `values`: of those that came, [numel]; memory is taken when the first part comes."""

    def __init__(self, sizes: Mapping[K, tuple[int, torch.dtype]]) -> None:
        """`sizes`: the number of elements of each, and the dtype that they are to have."""
        self._sizes, self._ends = sizes, dict.fromkeys(sizes, 0)
        self._missing_numel = sum(numel for numel, _ in sizes.values())
        self.values = {key: torch.empty(0, dtype=dtype, device="cpu") for key, (numel, dtype) in sizes.items() if not numel}

    def take(self, key: K, part: torch.Tensor) -> bool:
        """The next elements of one. Whether all of all are there now."""
        if key not in self.values:
            numel, dtype = self._sizes[key]
            self.values[key] = torch.empty(numel, dtype=dtype, device="cpu")
        start = self._ends[key]
        stop = self._ends[key] = start + part.numel()
        into = self.values[key][start:stop]
        if into.dtype == part.dtype:
            into.copy_(part)
        else:
            round_into(into, part)
        self._missing_numel -= part.numel()
        return not self._missing_numel
