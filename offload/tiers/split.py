"""Extents in two tiers behind one store: the first ones in host memory, the others in a second store.

Why a fixed set, and why no order of use is reversed: an optimizer step uses every extent once, in the same order each time.
Of memory for a fraction f of the bytes, a fixed set saves exactly f of the transfers in both directions. What evicts the
least recently used saves nothing on such a cycle. Passing over the extents in alternating direction with a set that
changes saves the same f (what one pass ends with, the next begins with) and no more, since no policy can hold more than
f from one pass to the next; it would take the order away from the next forward, which wants the first units first, and
would move what a fixed set updates where it lies. The first extents are the ones kept: the forward waits for them first,
and the drive has all the time of their updates to bring the others.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

from torch import Tensor

from offload.device.pending import Pending
from offload.layout import Extent, ExtentAllocator
from offload.tiers.extent_guard import ExtentGuard, describe
from offload.tiers.io.backend import OpenFile, Priority
from offload.tiers.store import ShareBlocks, Store

MakeStore = Callable[[Iterable[Extent]], Store]


class SplitStore:
    """See the module. Owns both stores. Neither may be used by others."""

    def __init__(
        self, name: str, extents: Iterable[Extent], kept_count: int, make_kept: MakeStore, make_others: MakeStore
    ) -> None:
        """The first `kept_count` extents, in the order given, go to the store that `make_kept` makes; no store is made
        for none."""
        self.name = name
        given = list(extents)
        self.nbytes = ExtentGuard(name, given).nbytes
        self._of: dict[Extent, tuple[Store, Extent]] = {}
        self._stores: list[Store] = []
        try:
            for part, make in ((given[:kept_count], make_kept), (given[kept_count:], make_others)):
                if not part:
                    continue
                allocator = ExtentAllocator()
                own = [allocator.take(extent.nbytes) for extent in part]
                store = make(allocator.extents)
                self._stores.append(store)
                self._of.update((extent, (store, there)) for extent, there in zip(part, own, strict=True))
        except BaseException:
            self.close()
            raise

    def read(self, extent: Extent, into: Tensor, *, priority: Priority = Priority.PARAMETER) -> Pending:
        store, there = self._find(extent, "a read")
        return store.read(there, into, priority=priority)

    def write(self, extent: Extent, source: Tensor, *, priority: Priority = Priority.STATE) -> Pending:
        store, there = self._find(extent, "a write")
        return store.write(there, source, priority=priority)

    def view(self, extent: Extent) -> Tensor | None:
        store, there = self._find(extent, "a view")
        return store.view(there)

    def share(self, extent: Extent, share: ShareBlocks) -> None:
        store, there = self._find(extent, "sharing")
        store.share(there, share)

    def snapshot(self, extent: Extent) -> bool:
        store, there = self._find(extent, "keeping")
        return store.snapshot(there)

    def read_snapshot(self, extent: Extent, into: Tensor, *, priority: Priority = Priority.BACKGROUND) -> Pending:
        store, there = self._find(extent, "reading what was kept")
        return store.read_snapshot(there, into, priority=priority)

    def drop_snapshot(self, extent: Extent) -> None:
        store, there = self._find(extent, "letting go")
        store.drop_snapshot(there)

    def room_for_snapshots(self) -> list[tuple[OpenFile, int]]:
        return [room for store in self._stores for room in store.room_for_snapshots()]

    def flush(self) -> None:
        self._of_each(lambda store: store.flush())

    def close(self) -> None:
        self._of_each(lambda store: store.close())

    def _find(self, extent: Extent, purpose: str) -> tuple[Store, Extent]:
        found = self._of.get(extent)
        if found is None:
            raise AssertionError(f"{self.name}: {purpose} of extent {describe(extent)}: it is not one of the store's extents")
        return found

    def _of_each(self, call: Callable[[Store], None]) -> None:
        """Call both, whatever the first one raises; the first failure is raised."""
        failure: Exception | None = None
        for store in self._stores:
            try:
                call(store)
            except Exception as error:
                failure = failure or error
        if failure is not None:
            raise failure
