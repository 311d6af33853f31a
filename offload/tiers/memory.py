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

import contextlib
import errno
import mmap
import os
import sys
import threading
import weakref
from collections import deque
from collections.abc import Callable
from ctypes import c_uint8
from functools import partial

import torch
from torch import Tensor

from offload.device.host_memory.host_pages import populate
from offload.device.host_memory.memory_limits import refused_memory
from offload.device.virtual.current import virtual_machine
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
        self._freed: deque[tuple[str, int]] = deque()
        """What is not yet taken off."""
        self._peak_nbytes = 0

    def add(self, purpose: str, nbytes: int) -> None:
        """Count `nbytes` more for `purpose`."""
        with self._lock:
            self._take_off()
            self._nbytes[purpose] = self._nbytes.get(purpose, 0) + nbytes
            self._peak_nbytes = max(self._peak_nbytes, sum(self._nbytes.values()))

    def freed(self, purpose: str, nbytes: int) -> None:
        """Count `nbytes` fewer. Takes no lock: the garbage collector comes here, also out of the middle of another call."""
        self._freed.append((purpose, nbytes))

    def _take_off(self) -> None:
        while self._freed:
            purpose, nbytes = self._freed.popleft()
            left = self._nbytes.get(purpose, 0) - nbytes
            if left < 0:
                raise AssertionError(f"the ledger would hold {left} bytes for {purpose!r}: more was freed than allocated")
            self._nbytes[purpose] = left

    @property
    def by_purpose(self) -> dict[str, int]:
        """A copy: purpose -> bytes now, without those that hold none."""
        with self._lock:
            self._take_off()
            return {purpose: nbytes for purpose, nbytes in self._nbytes.items() if nbytes}

    @property
    def total_nbytes(self) -> int:
        with self._lock:
            self._take_off()
            return sum(self._nbytes.values())

    @property
    def peak_nbytes(self) -> int:
        """The largest total so far."""
        with self._lock:
            return self._peak_nbytes


class _Held:
    """Keeps a mapping until nothing refers to it and nobody knows of it any more: only then it is unmapped. Addresses that are
    given to other memory while a device or the kernel takes them for this would have that read and written in its place."""

    def __init__(self, mapping: mmap.mmap, lent: object) -> None:
        """`lent`: what tensors of it refer to."""
        self._mapping: mmap.mmap | None = mapping
        self._process_id = os.getpid()
        self._is_being_registered = self._was_interrupted = False
        self._unregister: Callable[[], None] | None = None
        self._uncount: Callable[[], None] | None = None
        self._lent = weakref.ref(lent, lambda _: self._freed())
        _held.add(self)

    def register(self, register: RegisterMemory, address: int, nbytes: int) -> bool:
        """Whether it is registered now."""
        self._is_being_registered = True  # an interrupt in here leaves it so, and the mapping is kept
        try:
            self._unregister = register(address, nbytes)
        except Exception:
            self._is_being_registered = False
            raise
        self._is_being_registered = False
        return self._unregister is not None

    def count(self, ledger: MemoryLedger, purpose: str, nbytes: int) -> None:
        ledger.add(purpose, nbytes)
        self._uncount = partial(ledger.freed, purpose, nbytes)

    def _freed(self, is_finalizing: Callable[[], bool] = sys.is_finalizing) -> None:
        """Nothing refers to it any more. Python makes a warning of an interrupt in here: the rest is `free_all_left`'s."""
        # At exit the system frees what the process had, and the device's runtime may be gone already.
        if is_finalizing() or self._is_being_registered:
            return
        if os.getpid() == self._process_id:  # in a forked child the registration is the parent's
            unregister, is_again = self._unregister, self._was_interrupted
            self._was_interrupted = True
            if unregister is not None:
                with contextlib.suppress(*((Exception,) if is_again else ())):  # it may be done, and not have been noted
                    unregister()
                self._unregister = None
            uncount, self._uncount = self._uncount, None  # first: it is not to be counted down twice
            if uncount is not None:
                uncount()
        _held.discard(self)
        self._mapping = None

    @staticmethod
    def free_all_left() -> None:
        """What an interrupt kept from being freed."""
        # A copy: while a tuple is made of the set, the garbage collector may run and take memory out of it.
        for one in [one for one in _held.copy() if one._lent() is None]:
            one._freed()


_held: set[_Held] = set()


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
        _Held.free_all_left()
        self.nbytes = nbytes
        self.purpose = purpose
        self._tensor: Tensor | None = torch.empty(0, dtype=torch.uint8, device="cpu")
        if nbytes == 0:
            return
        mapped_nbytes = round_up(nbytes, PAGE_NBYTES)
        if (machine := virtual_machine()) is not None and (stand_in := machine.host_memory(nbytes)) is not None:
            self._tensor = stand_in
            if ledger is not None:
                ledger.add(purpose, mapped_nbytes)
                weakref.finalize(stand_in.untyped_storage(), ledger.freed, purpose, mapped_nbytes).atexit = False
            return
        try:
            mapping, start = _map(mapped_nbytes, direct_io=direct_io)
            lent = (c_uint8 * mapped_nbytes).from_buffer(mapping, start)
            self._tensor = torch.frombuffer(lent, dtype=torch.uint8, count=nbytes)
            if prefault and virtual_machine() is None:
                populate(self._tensor.data_ptr(), mapped_nbytes)
            held = _Held(mapping, lent)
            is_registered = register is not None and held.register(register, self._tensor.data_ptr(), mapped_nbytes)
        except OSError as error:
            raise refused_memory(nbytes, purpose, error) from error
        if is_registered:
            # A fork could leave the pages that the device has in the child's hands, and give the parent copies.
            _advise(mapping, mmap.MADV_DONTFORK, start, mapped_nbytes)
        if ledger is not None:
            held.count(ledger, purpose, mapped_nbytes)

    @property
    def tensor(self) -> Tensor:
        """All of it: uint8 [nbytes]."""
        if self._tensor is None:
            raise AssertionError(f"host memory for {self.purpose!r} was used after close()")
        return self._tensor

    def close(self) -> None:
        """Let go of the memory. It is freed when the last tensor given out is."""
        self._tensor = None
        _Held.free_all_left()


def _map(nbytes: int, *, direct_io: bool) -> tuple[mmap.mmap, int]:
    """An anonymous mapping with `nbytes` from the returned offset on, which lies on a 2 MiB boundary."""
    # Addresses are rounded up to the boundary; pages outside of [start, start + nbytes) are never touched.
    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | (_MAP_NORESERVE if virtual_machine() is not None else 0)
    mapping = mmap.mmap(-1, nbytes + HUGE_PAGE_NBYTES, flags=flags)
    base = torch.frombuffer(mapping, dtype=torch.uint8, count=1).data_ptr()
    start = round_up(base, HUGE_PAGE_NBYTES) - base
    _advise(mapping, mmap.MADV_HUGEPAGE, start, nbytes)
    if direct_io:
        _advise(mapping, mmap.MADV_DONTFORK, start, nbytes)
    return mapping, start


def _advise(mapping: mmap.mmap, advice: int, start: int, nbytes: int) -> None:
    try:
        mapping.madvise(advice, start, nbytes)
    except OSError as error:
        # EINVAL: a kernel without it (no huge pages compiled in): slower, but as right.
        if error.errno != errno.EINVAL:
            raise
