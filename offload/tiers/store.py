# SPDX-License-Identifier: Apache-2.0
"""Where extents lie: one protocol, in host memory or on NVMe, and one conformance suite for both.

Promises of every store
  - Whole extents only: those given at construction.
  - One writer and no concurrent reader per extent; several readers at once are fine. Checked.
  - A read returns the last completed write, and zeros where nothing was written yet.
  - Nothing is allocated after construction.
  - What a `snapshot` keeps is there until it is dropped, whatever is written meanwhile; no write waits for that.
  - Every transfer moves every byte or fails with `StorageError`; an extent whose write failed cannot be read until it
    was written again. A failure that nobody waited for is raised by `flush()`.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Protocol

from torch import Tensor

from offload.device.pending import Pending, Settled
from offload.layout import Extent
from offload.tiers.extent_guard import ExtentGuard
from offload.tiers.io.backend import OpenFile, Priority
from offload.tiers.memory import HostMemory, MemoryLedger, RegisterMemory


class ExtentSnapshot(Protocol):
    """What an extent held when this was made, whatever was written to the extent since. For one thread."""

    def read(self, into: Tensor, *, priority: Priority = Priority.BACKGROUND) -> Pending:
        """Fill `into` with it."""
        ...

    def clone(self, part: range, target: OpenFile, offset_nbytes: int) -> bool:
        """Make these bytes of the extent the target's from `offset_nbytes` on, in blocks that both share until one of them is
        written to; False where the two files cannot. Raises `OSError` where it failed."""
        ...

    def drop(self) -> None:
        """It is not needed any more. No read of it may be in flight."""
        ...


class Store(Protocol):
    """Extents in a tier. Every method may be called from any thread.

    Tensors are uint8 [extent.nbytes], contiguous, in host memory, on a 4 KiB boundary (leases and `HostMemory` are).
    They are held until the operation settled; the caller may not touch the memory until then."""

    @property
    def name(self) -> str: ...

    @property
    def nbytes(self) -> int:
        """Size of the store: where its last extent ends."""
        ...

    @property
    def verifies(self) -> bool:
        """Whether what is read is compared with what was written, by checksums."""
        ...

    def read(self, extent: Extent, into: Tensor, *, priority: Priority = Priority.PARAMETER) -> Pending:
        """Fill `into` with the extent."""
        ...

    def write(
        self, extent: Extent, source: Tensor, *, priority: Priority = Priority.STATE, sums: Tensor | None = None
    ) -> Pending:
        """Store `source` as the extent. `sums`: the checksums of its blocks (`offload.device.arithmetic.checksums`), where the
        store `verifies` and somebody passed over them anyway."""
        ...

    def view(self, extent: Extent) -> Tensor | None:
        """The extent's own memory, uint8 [extent.nbytes], where it lies in host memory; else None.

        Whoever uses it in place keeps the rule of one writer himself."""
        ...

    def snapshot(self, extent: Extent) -> ExtentSnapshot | None:
        """Keep what the extent holds. Not during a write; one at a time of each extent.

        None where the store cannot: what is updated in place, or there is no room. Raises `StorageError`."""
        ...

    def room_for_snapshots(self) -> list[tuple[OpenFile, int]]:
        """What keeping all extents at once takes: (a file there that nobody writes to, bytes on its file system)."""
        ...

    def flush(self) -> None:
        """Wait for everything in flight and raise the first failure that nobody waited for."""
        ...

    def close(self) -> None:
        """Wait for everything in flight and give the space back. May be called again."""
        ...


class KeepsNothing:
    """That part of a store whose extents are updated where they lie, or that has nothing to compare."""

    verifies = False

    def snapshot(self, extent: Extent) -> ExtentSnapshot | None:
        return None

    def room_for_snapshots(self) -> list[tuple[OpenFile, int]]:
        return []


class CpuStore(KeepsNothing):
    """Extents in host memory. Reads and writes are copies, over when the call returns."""

    def __init__(
        self,
        name: str,
        extents: Iterable[Extent],
        *,
        ledger: MemoryLedger | None = None,
        register: RegisterMemory | None = None,
    ) -> None:
        """`name` is the purpose on the ledger and in messages. Raises `BudgetError` where memory cannot be had."""
        self.name = name
        self._guard = ExtentGuard(name, extents)
        self.nbytes = self._guard.nbytes
        self._memory = HostMemory(self.nbytes, name, ledger=ledger, register=register)
        self._views: dict[Extent, Tensor] = {}
        """What `view` gave."""

    def read(self, extent: Extent, into: Tensor, *, priority: Priority = Priority.PARAMETER) -> Pending:
        return self._copy(extent, into, is_write=False)

    def write(
        self, extent: Extent, source: Tensor, *, priority: Priority = Priority.STATE, sums: Tensor | None = None
    ) -> Pending:
        return self._copy(extent, source, is_write=True)

    def view(self, extent: Extent) -> Tensor | None:
        found = self._views.get(extent)
        if found is None:
            self._guard.check_extent(extent, "a view")
            found = self._views[extent] = self._range(extent)
        return found

    def flush(self) -> None:
        self._guard.drain()

    def close(self) -> None:
        self._views = {}  # they keep the memory
        self._guard.close()
        self._memory.close()

    def _range(self, extent: Extent) -> Tensor:
        return self._memory.tensor[extent.offset_nbytes : extent.offset_nbytes + extent.nbytes]

    def _copy(self, extent: Extent, tensor: Tensor, *, is_write: bool) -> Pending:
        operation = self._guard.begin(extent, tensor, is_write=is_write)
        try:
            stored = self._range(extent)
            if not _same_place(stored, tensor):  # else: used in place through view()
                target, source = (stored, tensor) if is_write else (tensor, stored)
                target.copy_(source)
        except BaseException as error:
            self._guard.abandon(operation, error)
            raise
        self._guard.ended(operation, None, seen=True)
        return Settled()


def _same_place(one: Tensor, other: Tensor) -> bool:
    if one.is_meta:  # on a machine in numbers
        return one.untyped_storage()._cdata == other.untyped_storage()._cdata and one.storage_offset() == other.storage_offset()
    return one.data_ptr() == other.data_ptr()
