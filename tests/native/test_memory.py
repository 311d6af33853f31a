# SPDX-License-Identifier: Apache-2.0
"""Arenas and moving pages."""

from __future__ import annotations

import errno
import random

import numpy as np
import psutil
import pytest

from offload import _native
from offload._native import HUGE_PAGE_NBYTES, Arena, PageRange, pages_move

pytestmark = pytest.mark.skipif(not _native.available(), reason="the native library is not built")
needs_pages = pytest.mark.skipif(not _native.pages_supported(), reason="this kernel cannot move pages")


@pytest.mark.parametrize("nbytes", [1, 4096, 4097, 3 * HUGE_PAGE_NBYTES + 5000])
@pytest.mark.parametrize("huge_pages", [True, False])
def test_an_arena_is_aligned_exact_and_zero(nbytes: int, huge_pages: bool) -> None:
    arena = Arena(nbytes, huge_pages=huge_pages)
    assert arena.address % HUGE_PAGE_NBYTES == 0
    assert arena.nbytes == -(-nbytes // 4096) * 4096
    values = np.frombuffer(arena.buffer(), np.uint8)
    assert values.size == arena.nbytes
    assert not values.any()
    values[:] = 7
    assert int(values.sum(dtype=np.int64)) == 7 * arena.nbytes


def test_a_buffer_keeps_its_arena_mapped() -> None:
    values = np.frombuffer(Arena(1 << 20).buffer(), np.uint8)
    values[:] = 5
    assert int(values[-1]) == 5


def test_bad_sizes_are_refused() -> None:
    for make in (lambda: Arena(0), lambda: Arena(-5), lambda: PageRange(4096), lambda: PageRange(0)):
        with pytest.raises(OSError) as caught:
            make()
        assert caught.value.errno == errno.EINVAL


def test_more_memory_than_there_is_fails_without_harm() -> None:
    with pytest.raises(OSError) as caught:
        Arena(1 << 46)
    assert caught.value.errno == errno.ENOMEM


@needs_pages
def test_pages_move_with_their_contents() -> None:
    nbytes = 2 * HUGE_PAGE_NBYTES
    arena, place = Arena(nbytes), PageRange(nbytes)
    values = np.frombuffer(arena.buffer(), np.uint8)
    values[:] = np.random.default_rng(0).integers(0, 256, nbytes, dtype=np.uint8)
    before = values.copy()
    pages_move(arena.address, place.address, nbytes)
    assert np.array_equal(np.frombuffer(place.buffer(), np.uint8), before)
    pages_move(place.address, arena.address, nbytes)
    assert np.array_equal(values, before)
    values[:] = 3  # and it is ordinary memory again


@needs_pages
def test_pages_move_thousands_of_times_in_changing_pairs() -> None:
    nbytes, process = 2 * HUGE_PAGE_NBYTES, psutil.Process()
    pool = [Arena(nbytes) for _ in range(3)]
    places = [PageRange(nbytes) for _ in range(7)]
    for index, arena in enumerate(pool):
        np.frombuffer(arena.buffer(), np.uint8)[:] = index + 1
    at = [arena.address for arena in pool]  # where each physical buffer is now
    rng = random.Random(0)
    mappings = len(process.memory_maps(grouped=False))
    for _ in range(3000):
        index = rng.randrange(len(pool))
        home = pool[index].address
        taken = set(at)
        free = [place.address for place in places if place.address not in taken]
        target = home if at[index] != home and rng.random() < 0.5 else rng.choice(free)
        pages_move(at[index], target, nbytes)
        at[index] = target
    for index, arena in enumerate(pool):
        if at[index] != arena.address:
            pages_move(at[index], arena.address, nbytes)
        assert bool((np.frombuffer(arena.buffer(), np.uint8) == index + 1).all())
    maps = process.memory_maps(grouped=False)
    assert len(maps) <= mappings + len(places) + len(pool)
    ours = [(place.address, place.address + nbytes) for place in (*pool, *places)]
    resident = 0
    for one in maps:
        start, stop = (int(address, 16) for address in one.addr.split("-"))
        resident += one.rss if any(start < high and low < stop for low, high in ours) else 0
    assert len(pool) * nbytes <= resident < (len(pool) + 1) * nbytes


@needs_pages
def test_moves_that_cannot_be_right_are_refused() -> None:
    nbytes = 2 * HUGE_PAGE_NBYTES
    arena, place = Arena(nbytes), PageRange(nbytes)
    for source, target, size in (
        (arena.address, place.address, 4096),
        (arena.address + 4096, place.address, HUGE_PAGE_NBYTES),
        (arena.address, arena.address + HUGE_PAGE_NBYTES, nbytes),
        (0, place.address, nbytes),
    ):
        with pytest.raises(OSError) as caught:
            pages_move(source, target, size)
        assert caught.value.errno == errno.EINVAL
