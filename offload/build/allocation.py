# SPDX-License-Identifier: Apache-2.0
"""The memory and files of one engine: stores for each kind of state, staging buffers, homes of units that stay."""

from __future__ import annotations

from collections.abc import Callable, Iterable

from offload.config import Config
from offload.device.accelerator import Accelerator, HomeMemory
from offload.device.virtual.current import virtual_machine
from offload.layout import Extent, Layout
from offload.planning.budget import Tier
from offload.planning.placement import Placement
from offload.planning.purposes import ACCUMULATED, GRADIENTS, OPTIMIZER_STATES, PARAMETERS, StateNames
from offload.planning.route import Memory, Route
from offload.step.components import Closable
from offload.tiers.memory import HostMemory, MemoryLedger
from offload.tiers.staging import StagingPool
from offload.tiers.store import Store
from offload.tiers.stores import Stores


class Allocation:
    """Makes what the placement decided; whatever it makes is added to `made`, to be closed in reverse order."""

    def __init__(
        self,
        config: Config,
        accelerator: Accelerator,
        layout: Layout,
        placement: Placement,
        ledger: MemoryLedger,
        made: list[Closable],
    ) -> None:
        self._layout, self._placement = layout, placement
        self._accelerator, self._ledger, self._made = accelerator, ledger, made
        self._home: HostMemory | None = None
        self._home_offset_nbytes = 0
        self._stores = Stores(accelerator, ledger, config.nvme_paths, placement.nvme_nbytes)
        self.backend = self._stores.backend
        if self.backend is not None:
            self._made.append(self.backend)

    def parameters(self, tier: Tier, extents: Iterable[Extent]) -> Store:
        return self._made_store(PARAMETERS, self._placement.parameters, tier, extents)

    def records(self, tier: Tier, extents: Iterable[Extent]) -> Store:
        updated_in = {route.update_in for route in self._placement.routes if route.records_in is Memory.HOST}
        is_copied = Memory.DEVICE in updated_in
        return self._made_store(OPTIMIZER_STATES, self._placement.optimizer_states, tier, extents, is_copied=is_copied)

    def gradients(self, tier: Tier, extents: Iterable[Extent]) -> Store:
        extents = list(extents)
        store = self._made_store(GRADIENTS, self._placement.gradients, tier, extents)
        if (machine := virtual_machine()) is not None and extents and (part := store.view(extents[0])) is not None:
            machine.takes_as_written(part)  # those of autograd may be kept instead
        return store

    def sums(self, tier: Tier, extents: Iterable[Extent]) -> Store:
        """Of micro-batches. They may be made on the device and come over whole, in one copy, wherever gradients leave it."""
        is_copied = self._placement.transit_buffer_count > 0
        return self._added(self._stores.make(tier, ACCUMULATED, extents, is_copied=is_copied))

    def _made_store(
        self, names: StateNames, furthest: Tier, tier: Tier, extents: Iterable[Extent], *, is_copied: bool = True
    ) -> Store:
        """A store of what lies in `tier`, of a state that may lie as far as `furthest`. `is_copied`: as of `Stores.make`."""
        return self._added(self._stores.make(tier, names.of(tier, furthest), extents, is_copied=is_copied))

    def _added(self, store: Store) -> Store:
        self._made.append(store)
        return store

    def staging_pool(self) -> StagingPool:
        """Every staging buffer of the placement, allocated."""
        pool = StagingPool(ledger=self._ledger, register=self._register_staging)
        for purpose, (count, nbytes) in self._placement.staging.items():
            pool.reserve(purpose, count, nbytes)
        pool.freeze()
        self._made.append(pool)
        return pool

    def home(self, route: Route, nbytes: int) -> HomeMemory:
        """The next `nbytes` of one memory for all parameters that stay: of device memory that is host memory, a part of one
        mapping. To be asked for in the order of the flats."""
        if route.model_in is Memory.DEVICE:
            return HomeMemory(self._accelerator.unit_memory(nbytes).flat)
        if self._home is None:
            staying = zip(self._layout.units, self._placement.routes, strict=True)
            whole_nbytes = sum(unit.nbytes for unit, other in staying if not other.has_store)
            purpose = PARAMETERS.of(route.parameters, self._placement.parameters)
            self._home = HostMemory(whole_nbytes, purpose, ledger=self._ledger)
            self._made.append(self._home)
        offset, self._home_offset_nbytes = self._home_offset_nbytes, self._home_offset_nbytes + nbytes
        return HomeMemory(self._home.tensor[offset : offset + nbytes])

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
