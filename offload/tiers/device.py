# SPDX-License-Identifier: Apache-2.0
"""Extents in device memory: the store of optimizer states and gradients that stay on a GPU."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor

from offload.device.accelerator import Accelerator
from offload.device.pending import Pending, Settled
from offload.layout import Extent
from offload.tiers.extent_guard import ExtentGuard
from offload.tiers.io.backend import Priority
from offload.tiers.store import KeepsNothing


class DeviceStore(KeepsNothing):
    """One device tensor, zeroed, cut into extents. Everything is in the order of the compute stream."""

    def __init__(self, name: str, extents: Iterable[Extent], accelerator: Accelerator) -> None:
        self.name = name
        self._guard = ExtentGuard(name, extents)
        self.nbytes = self._guard.nbytes
        self._memory = accelerator.memory(self.nbytes)

    def view(self, extent: Extent) -> Tensor:
        """The extent's own memory, uint8 [extent.nbytes], on the device."""
        self._guard.check_extent(extent, "a view")
        return self._memory[extent.offset_nbytes : extent.offset_nbytes + extent.nbytes]

    def read(self, extent: Extent, into: Tensor, *, priority: Priority = Priority.PARAMETER) -> Pending:
        into.copy_(self.view(extent))
        return Settled()

    def write(
        self, extent: Extent, source: Tensor, *, priority: Priority = Priority.STATE, sums: Tensor | None = None
    ) -> Pending:
        self.view(extent).copy_(source)
        return Settled()

    def flush(self) -> None:
        """Nothing is ever in flight that the compute stream does not order."""

    def close(self) -> None:
        self._guard.close()
        self._memory = torch.empty(0, dtype=torch.uint8, device="cpu")
