# SPDX-License-Identifier: Apache-2.0
"""Unit memory on the CPU as pages that move: a unit's addresses are fixed, the memory behind them is recycled.

Every flat has a range of addresses of its own, reserved once and never given back, so views of it that autograd saved
stay valid. `fill` moves 2 MiB pages from a free list to those addresses in the page table (`mremap`), `empty` moves
them back: nothing is copied, zeroed or faulted in, and as many pages exist as were ever in use at once. In between the
range is not accessible.
"""

from __future__ import annotations

import torch

from offload import _native
from offload.device.accelerator import UnitMemory
from offload.device.host_memory.memory_limits import refused_memory
from offload.layout import round_up

PAGE_NBYTES = _native.HUGE_PAGE_NBYTES


def pages_supported() -> bool:
    """Whether the native library is there and the kernel can move pages."""
    return _native.available() and _native.pages_supported()


class PagePool:
    """The pages that all units' memory is made of. Owned by the thread that drives the model."""

    def __init__(self) -> None:
        self._free: list[int] = []
        self._arenas: list[_native.Arena] = []

    def unit_memory(self, nbytes: int) -> MovedPages:
        return MovedPages(self, nbytes)

    def take(self, count: int) -> list[int]:
        """Addresses of `count` free pages; makes more where there are not enough."""
        missing = count - len(self._free)
        if missing > 0:
            try:
                arena = _native.Arena(missing * PAGE_NBYTES, huge_pages=True)
            except OSError as error:
                raise refused_memory(missing * PAGE_NBYTES, "parameters in use", error) from error
            self._arenas.append(arena)
            self._free.extend(arena.address + index * PAGE_NBYTES for index in range(missing))
        taken, self._free = self._free[-count:], self._free[: len(self._free) - count]
        return taken

    def give_back(self, addresses: list[int]) -> None:
        self._free.extend(addresses)

    def close(self) -> None:
        """Give all memory back. Every unit must be empty."""
        self._free.clear()
        while self._arenas:
            self._arenas.pop().close()


class MovedPages(UnitMemory):
    """One flat's fixed addresses; see the module. Starts out empty."""

    def __init__(self, pool: PagePool, nbytes: int) -> None:
        self._pool = pool
        self.nbytes = nbytes
        self.filled = False
        self._homes: list[int] = []
        try:
            self._range = _native.PageRange(round_up(nbytes, PAGE_NBYTES))
        except OSError as error:
            raise refused_memory(nbytes, "the addresses of parameters", error) from error
        self.flat = torch.frombuffer(self._range.buffer(), dtype=torch.uint8, count=nbytes)

    def _gain(self) -> None:
        self._homes = self._pool.take(self._range.nbytes // PAGE_NBYTES)
        for index, home in enumerate(self._homes):
            _native.pages_move(home, self._range.address + index * PAGE_NBYTES, PAGE_NBYTES)

    def _lose(self) -> None:
        for index, home in enumerate(self._homes):
            _native.pages_move(self._range.address + index * PAGE_NBYTES, home, PAGE_NBYTES)
        self._pool.give_back(self._homes)
        self._homes = []
