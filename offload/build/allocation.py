"""The memory and files of one engine: stores for each kind of state, staging buffers, homes of units that stay."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

from offload.config import Config
from offload.device.accelerator import Accelerator, HomeMemory
from offload.layout import Extent, UnitLayout
from offload.planning.budget import Tier
from offload.planning.placement import KEPT_PARAMETERS, KEPT_RECORDS, Placement
from offload.planning.purposes import ACCUMULATED
from offload.step.chunk_stores import OPTIMIZER_STATES, StoreFactory
from offload.step.components import Closable
from offload.tiers.device import DeviceStore
from offload.tiers.io import IoBackend, open_backend
from offload.tiers.memory import HostMemory, MemoryLedger
from offload.tiers.nvme import NvmeStore
from offload.tiers.scratch import ScratchFolder
from offload.tiers.split import SplitStore
from offload.tiers.staging import StagingPool
from offload.tiers.store import CpuStore, Store

_HOST_ONLY = frozenset({OPTIMIZER_STATES, KEPT_RECORDS, ACCUMULATED})


class Allocation:
    """Makes what the placement decided; whatever it makes is added to `made`, to be closed in reverse order."""

    def __init__(
        self, config: Config, accelerator: Accelerator, placement: Placement, ledger: MemoryLedger, made: list[Closable]
    ) -> None:
        self._accelerator, self._placement, self._ledger, self._made = accelerator, placement, ledger, made
        self._scratch: ScratchFolder | None = None
        self.backend: IoBackend | None = None
        self._homes: dict[str, HostMemory] = {}
        self._home_offset_nbytes = 0
        if placement.uses_nvme:
            self._scratch = ScratchFolder(config.nvme_paths)
            self.backend = open_backend(paths=self._scratch.paths)
            made.append(self.backend)

    def stores(self, tier: Tier, kept_count: int = 0, kept_purpose: str = "") -> StoreFactory:
        """Makes stores in `tier`, their first `kept_count` extents in host memory under the name `kept_purpose`."""

        def make(name: str, extents: Iterable[Extent]) -> Store:
            store: Store
            if kept_count:
                store = SplitStore(
                    name,
                    extents,
                    kept_count,
                    lambda part: self._host_store(kept_purpose, part, self._homes.get(kept_purpose)),
                    lambda part: self._store(tier, name, part),
                )
            else:
                store = self._store(tier, name, extents)
            self._made.append(store)
            return store

        return make

    def staging_pool(self) -> StagingPool:
        """Every staging buffer of the placement, allocated."""
        pool = StagingPool(ledger=self._ledger, register=self._register_staging)
        for purpose, (count, nbytes) in self._placement.staging.items():
            pool.reserve(purpose, count, nbytes)
        pool.freeze()
        self._made.append(pool)
        return pool

    def home(self, units: Sequence[UnitLayout], nbytes: int, purpose: str = "parameters") -> HomeMemory:
        """The next `nbytes` of one memory for all of `units`, to be asked for in their order and in that of their flats."""
        if purpose not in self._homes:
            self._homes[purpose] = HostMemory(sum(unit.nbytes for unit in units), purpose, ledger=self._ledger)
            self._made.append(self._homes[purpose])
        offset, self._home_offset_nbytes = self._home_offset_nbytes, self._home_offset_nbytes + nbytes
        return HomeMemory(self._homes[purpose].tensor[offset : offset + nbytes])

    def kept_home(self, units: Sequence[UnitLayout], nbytes: int) -> HomeMemory:
        """As `home`, for units whose parameters are kept in memory: the store of the parameters gets it for its own, so
        that what is written home lies there already."""
        return self.home(units, nbytes, KEPT_PARAMETERS)

    def _store(self, tier: Tier, name: str, extents: Iterable[Extent]) -> Store:
        if tier == "nvme":
            assert self._scratch is not None and self.backend is not None
            return NvmeStore(name.replace(" ", "-"), extents, self._scratch, self.backend)
        if tier == "device" and not self._accelerator.unified:
            return DeviceStore(name, extents, self._accelerator.device)
        return self._host_store(name, extents, None)

    def _host_store(self, name: str, extents: Iterable[Extent], memory: HostMemory | None) -> Store:
        # What no copy to or from the device touches stays unregistered, so that it need not be in memory before it is used.
        register = None if name in _HOST_ONLY else self._accelerator.pin
        return CpuStore(name, extents, ledger=self._ledger, register=register, memory=memory)

    def _register_staging(self, address: int, nbytes: int) -> Callable[[], None]:
        """Staging memory is pinned for the device and registered for file I/O."""
        undo_pin = self._accelerator.pin(address, nbytes)
        undo_registration = self.backend.register_memory(address, nbytes) if self.backend is not None else None

        def undo() -> None:
            if undo_registration is not None:
                undo_registration()
            if undo_pin is not None:
                undo_pin()

        return undo
