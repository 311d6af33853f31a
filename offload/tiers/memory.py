# SPDX-License-Identifier: Apache-2.0
"""Host memory that is exactly as large as asked for, counted by purpose, and registered with the device once.

Why not tensors from torch's allocators: the caching host allocator rounds pinned memory up to powers of two, and the
physical contiguity of a buffer decides the speed of direct I/O, so the memory asks for 2 MiB pages. Why Python's mmap
and not the native arena: it is the same mapping, it is there without the native library, and it can be kept out of
forked children.

Lifetime: the mapping lives as long as the `HostMemory` or any tensor given out, whichever is later, so a tensor never
dangles. Only then is it unregistered, unmapped and taken off the ledger.
"""

from __future__ import annotations

import errno
import mmap
import os
import sys
import threading
import weakref
from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor

from offload.device.host_pages import populate
from offload.device.host_room import refused_memory
from offload.device.virtual.current import imagined
from offload.layout import round_up

PAGE_NBYTES = 4096
HUGE_PAGE_NBYTES = 2 * 1024 * 1024

_MAP_NORESERVE = 0x4000  # Python has a name for it from 3.13 on

RegisterMemory = Callable[[int, int], Callable[[], None] | None]
"""Called with (address, nbytes); makes the range, which nobody has written to yet, known to the device (pins it) and returns
what undoes that, if it did. Its `OSError` says that there is no such memory."""


class MemoryLedger:
    """Bytes of host memory by purpose, now and at the peak. Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._nbytes: dict[str, int] = {}
        self._peak_nbytes = 0

    def add(self, purpose: str, nbytes: int) -> None:
        """Count `nbytes` more (fewer where negative) for `purpose`."""
        with self._lock:
            total = self._nbytes.get(purpose, 0) + nbytes
            if total < 0:
                raise AssertionError(f"the ledger would hold {total} bytes for {purpose!r}: more was freed than allocated")
            self._nbytes[purpose] = total
            self._peak_nbytes = max(self._peak_nbytes, sum(self._nbytes.values()))

    @property
    def by_purpose(self) -> dict[str, int]:
        """A copy: purpose -> bytes now, without those that hold none."""
        with self._lock:
            return {purpose: nbytes for purpose, nbytes in self._nbytes.items() if nbytes}

    @property
    def total_nbytes(self) -> int:
        with self._lock:
            return sum(self._nbytes.values())

    @property
    def peak_nbytes(self) -> int:
        """The largest total so far."""
        with self._lock:
            return self._peak_nbytes


class _Mapping(mmap.mmap):
    """Calls `before_unmap` when nothing refers to it any more, and only then unmaps. (A weakref's callback would come
    after.)"""

    before_unmap: Callable[[], None] | None = None

    def __del__(self) -> None:
        # At exit the system frees what the process had, and the device's runtime may be gone already.
        if self.before_unmap is not None and not sys.is_finalizing():
            self.before_unmap()


class HostMemory:
    """`nbytes` of zeroed host memory, starting on a 2 MiB boundary.

    `close()` lets go of it and may be called again; see the module on when the memory is really freed."""

    def __init__(
        self,
        nbytes: int,
        purpose: str,
        *,
        ledger: MemoryLedger | None = None,
        register: RegisterMemory | None = None,
        prefault: bool = False,
        direct_io: bool = False,
    ) -> None:
        """`prefault` makes all pages now. `direct_io` is for memory that the kernel transfers files into and out of: it
        is not passed on to forked children, because a fork while such a transfer is in flight (a DataLoader that
        starts its workers) may leave the data in the child's copy of the page.

        Raises `BudgetError` where the system has no such memory."""
        if nbytes < 0:
            raise AssertionError(f"{purpose}: a host allocation of {nbytes} bytes")
        self.nbytes = nbytes
        self.purpose = purpose
        self._tensor: Tensor | None = torch.empty(0, dtype=torch.uint8)
        if nbytes == 0:
            return
        mapped_nbytes = round_up(nbytes, PAGE_NBYTES)
        if (machine := imagined()) is not None and (stand_in := machine.host_memory(nbytes)) is not None:
            self._tensor = stand_in
            if ledger is not None:
                ledger.add(purpose, mapped_nbytes)
                weakref.finalize(stand_in.untyped_storage(), ledger.add, purpose, -mapped_nbytes).atexit = False
            return
        try:
            mapping, start = _map(mapped_nbytes, direct_io=direct_io)
            self._tensor = torch.frombuffer(mapping, dtype=torch.uint8, count=nbytes, offset=start)
            if prefault and imagined() is None:
                populate(self._tensor.data_ptr(), mapped_nbytes)
            unregister = register(self._tensor.data_ptr(), mapped_nbytes) if register is not None else None
        except OSError as error:
            raise refused_memory(nbytes, purpose, error) from error
        if unregister is not None:
            # A fork could leave the pages that the device has in the child's hands, and give the parent copies.
            _advise(mapping, mmap.MADV_DONTFORK, start, mapped_nbytes)
        if ledger is not None:
            ledger.add(purpose, mapped_nbytes)
        mapping.before_unmap = partial(_freed, unregister, ledger, purpose, mapped_nbytes, os.getpid())

    @property
    def tensor(self) -> Tensor:
        """All of it: uint8 [nbytes]."""
        if self._tensor is None:
            raise AssertionError(f"host memory for {self.purpose!r} was used after close()")
        return self._tensor

    def close(self) -> None:
        """Let go of the memory. It is freed when the last tensor given out is."""
        self._tensor = None


def _map(nbytes: int, *, direct_io: bool) -> tuple[_Mapping, int]:
    """An anonymous mapping with `nbytes` from the returned offset on, which lies on a 2 MiB boundary."""
    # Addresses are rounded up to the boundary; pages outside of [start, start + nbytes) are never touched.
    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | (_MAP_NORESERVE if imagined() is not None else 0)
    mapping = _Mapping(-1, nbytes + HUGE_PAGE_NBYTES, flags=flags)
    base = torch.frombuffer(mapping, dtype=torch.uint8, count=1).data_ptr()
    start = round_up(base, HUGE_PAGE_NBYTES) - base
    _advise(mapping, mmap.MADV_HUGEPAGE, start, nbytes)
    if direct_io:
        _advise(mapping, mmap.MADV_DONTFORK, start, nbytes)
    return mapping, start


def _advise(mapping: _Mapping, advice: int, start: int, nbytes: int) -> None:
    try:
        mapping.madvise(advice, start, nbytes)
    except OSError as error:
        # EINVAL: a kernel without it (no huge pages compiled in): slower, but as right.
        if error.errno != errno.EINVAL:
            raise


def _freed(
    unregister: Callable[[], None] | None, ledger: MemoryLedger | None, purpose: str, nbytes: int, process_id: int
) -> None:
    if os.getpid() != process_id:
        return  # in a forked child the registration is the parent's
    if unregister is not None:
        unregister()
    if ledger is not None:
        ledger.add(purpose, -nbytes)
