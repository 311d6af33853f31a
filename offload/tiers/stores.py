# SPDX-License-Identifier: Apache-2.0
"""Which store holds a tier's extents on this machine."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path

from offload.device.accelerator import Accelerator
from offload.device.virtual.current import virtual_machine
from offload.layout import Extent
from offload.tiers.device import DeviceStore
from offload.tiers.io import IoBackend, open_backend
from offload.tiers.memory import MemoryLedger
from offload.tiers.nvme import NvmeStore
from offload.tiers.scratch import ScratchFolder
from offload.tiers.store import CpuStore, Store
from offload.tiers.virtual_nvme import VirtualBackend, VirtualStore


class Stores:
    """Makes them. `backend`: what moves the bytes of those on NVMe, for whoever registers memory with it and closes it."""

    backend: IoBackend | None = None

    def __init__(self, accelerator: Accelerator, ledger: MemoryLedger, nvme_paths: Sequence[Path], nvme_nbytes: int) -> None:
        """`nvme_nbytes`: what is to lie on NVMe in all; where nothing is, no file is opened. Raises `StorageError`."""
        self._accelerator, self._ledger = accelerator, ledger
        if not nvme_nbytes:
            return
        if (machine := virtual_machine()) is not None:
            self.backend = VirtualBackend(machine)
            return
        self._scratch = ScratchFolder(nvme_paths)
        # All of it, before the first file: what is made last would be missed when values have been written for an hour.
        count = self._scratch.path_count
        self._scratch.require_free([-(-nvme_nbytes // count)] * count)
        self.backend = open_backend(paths=self._scratch.paths)

    def make(self, tier: str, name: str, extents: Iterable[Extent], *, is_copied: bool) -> Store:
        """`is_copied`: whether the device copies to or from it. Other host memory stays unregistered, so that it need not be
        there before it is used."""
        accelerator = self._accelerator
        if tier == "device" and not accelerator.unified:
            return DeviceStore(name, extents, accelerator)
        if tier != "nvme":
            return CpuStore(name, extents, ledger=self._ledger, register=accelerator.pin if is_copied else None)
        if (machine := virtual_machine()) is not None:
            return VirtualStore(name, extents, machine, accelerator.recorder)
        assert self.backend is not None
        return NvmeStore(name.replace(" ", "-"), extents, self._scratch, self.backend, recorder=accelerator.recorder)
