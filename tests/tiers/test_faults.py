# SPDX-License-Identifier: Apache-2.0
"""Every fault ends in the right error or in right data, at whichever operation it strikes."""

from __future__ import annotations

import errno
import functools
import os
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path

import pytest
import torch
from torch import Tensor

from offload.errors import StorageError
from offload.layout import Extent
from offload.tiers import NvmeStore, ScratchFolder
from offload.tiers.io import aio
from offload.tiers.io.backend import IoMeter, Transfer
from offload.tiers.io.failure import CHECKPOINT, SCRATCH, Place, remedy_of
from tests.tiers.faulty_io import Fault, FaultyBackend, seeded_faults

from .faulty_io import around_aio

KIB = 1024
STRIPE_NBYTES = 16 * KIB
EXTENTS = [Extent(0, 64 * KIB), Extent(64 * KIB, 48 * KIB), Extent(128 * KIB, 4 * KIB)]
PIECE_COUNT = 4 + 3 + 1  # of the three extents, in stripes
CODES = (errno.EIO, errno.ENOSPC, errno.EROFS, errno.EDQUOT, errno.ENODATA, errno.ENXIO, errno.EINVAL, errno.ENOMEM)

Aligned = Callable[..., Tensor]
MakeStore = Callable[[FaultyBackend], NvmeStore]


@pytest.fixture
def make_store(paths3: list[Path]) -> Iterator[MakeStore]:
    scratch = ScratchFolder(paths3)
    stores: list[NvmeStore] = []

    def make(backend: FaultyBackend) -> NvmeStore:
        stores.append(NvmeStore(f"states-{len(stores)}", EXTENTS, scratch, backend, stripe_nbytes=STRIPE_NBYTES))
        return stores[-1]

    yield make
    for store in stores:
        store.close()


def read_back(store: NvmeStore, extent: Extent, aligned: Aligned) -> Tensor:
    into = aligned(extent.nbytes)
    store.read(extent, into).wait()
    return into


@pytest.mark.parametrize("place", [SCRATCH, CHECKPOINT])
def test_every_errno_has_words_of_its_place(place: Place) -> None:
    for code in errno.errorcode:
        words = remedy_of(code, place)
        assert words and "{" not in words
        assert place is SCRATCH or "nvme=" not in words
    assert "dmesg" not in remedy_of(errno.ENOENT, place) + remedy_of(errno.ENOTDIR, place) + remedy_of(errno.EMFILE, place)


@pytest.mark.parametrize("index", range(PIECE_COUNT))
@pytest.mark.parametrize("code", CODES)
def test_a_failed_write_names_what_and_where(make_store: MakeStore, aligned: Aligned, index: int, code: int) -> None:
    store = make_store(FaultyBackend(seed=index, faults={index: Fault("errno", code)}))
    sources = [aligned(extent.nbytes, seed=1) for extent in EXTENTS]
    writes = [store.write(extent, source) for extent, source in zip(EXTENTS, sources, strict=True)]
    struck = 0 if index < 4 else 1 if index < 7 else 2
    for position, write in enumerate(writes):
        if position != struck:
            write.wait()
            assert torch.equal(read_back(store, EXTENTS[position], aligned), sources[position])
    for _ in range(2):  # at every wait
        with pytest.raises(StorageError) as caught:
            writes[struck].wait()
    message = str(caught.value)
    assert caught.value.errno == code
    assert "write to" in message and "states-0.swap" in message and "failed at byte" in message
    assert errno.errorcode[code] in message and os.strerror(code) in message and remedy_of(code) in message
    # Half written: it can no longer be read, until it is written again.
    with pytest.raises(StorageError, match="last write of it failed"):
        read_back(store, EXTENTS[struck], aligned)
    store.write(EXTENTS[struck], sources[struck]).wait()
    assert torch.equal(read_back(store, EXTENTS[struck], aligned), sources[struck])
    store.flush()


@pytest.mark.parametrize("index", range(PIECE_COUNT))
def test_a_failed_read_leaves_the_extent_as_it_was(make_store: MakeStore, aligned: Aligned, index: int) -> None:
    store = make_store(FaultyBackend(seed=index, faults={PIECE_COUNT + index: Fault("errno", errno.EIO)}))
    for position, extent in enumerate(EXTENTS):
        store.write(extent, aligned(extent.nbytes, seed=position)).wait()
    failures = []
    for position, extent in enumerate(EXTENTS):
        try:
            assert torch.equal(read_back(store, extent, aligned), aligned(extent.nbytes, seed=position))
        except StorageError as error:
            failures.append(error)
    assert [error.errno for error in failures] == [errno.EIO]
    for position, extent in enumerate(EXTENTS):
        assert torch.equal(read_back(store, extent, aligned), aligned(extent.nbytes, seed=position))


def test_flush_raises_once_what_nobody_waited_for(make_store: MakeStore, aligned: Aligned) -> None:
    store = make_store(FaultyBackend(faults={0: Fault("errno", errno.ENOSPC)}))
    for extent in EXTENTS:
        store.write(extent, aligned(extent.nbytes, seed=1))
    with pytest.raises(StorageError, match="ENOSPC"):
        store.flush()
    store.flush()


def test_flush_does_not_raise_again_what_was_seen(make_store: MakeStore, aligned: Aligned) -> None:
    store = make_store(FaultyBackend(faults={0: Fault("errno", errno.ENOSPC)}))
    write = store.write(EXTENTS[0], aligned(EXTENTS[0].nbytes))
    with pytest.raises(StorageError):
        write.wait()
    store.flush()


def test_a_failure_seen_late_is_not_raised_by_flush(make_store: MakeStore, aligned: Aligned) -> None:
    store = make_store(FaultyBackend(faults={0: Fault("errno", errno.EIO)}))
    read = store.read(EXTENTS[0], aligned(EXTENTS[0].nbytes))
    while not read.done():
        pass
    store.write(EXTENTS[0], aligned(EXTENTS[0].nbytes, seed=1)).wait()  # the store takes note of the read here
    with pytest.raises(StorageError):
        read.wait()
    store.flush()
    assert torch.equal(read_back(store, EXTENTS[0], aligned), aligned(EXTENTS[0].nbytes, seed=1))


def test_an_operation_into_one_in_flight_names_both(make_store: MakeStore, aligned: Aligned) -> None:
    backend = FaultyBackend(faults={index: Fault("delay", poll_count=10**9) for index in range(100)})
    store = make_store(backend)
    extent = EXTENTS[0]
    write = store.write(extent, aligned(extent.nbytes, seed=1))
    for operation, again in (("read", store.read), ("write", store.write)):
        with pytest.raises(AssertionError, match=rf"{operation} of extent \[0, 65536\) began while a write of extent \[0, "):
            again(extent, aligned(extent.nbytes))
    assert not write.done()
    write.wait()
    read = store.read(extent, aligned(extent.nbytes))
    with pytest.raises(AssertionError, match=r"write of extent \[0, 65536\) began while a read of extent \[0, 65536\) is"):
        store.write(extent, aligned(extent.nbytes))
    read.wait()
    store.write(extent, aligned(extent.nbytes)).wait()


@pytest.mark.parametrize("seed", range(25))
def test_short_interrupted_delayed_and_reordered_transfers_end_in_right_data(
    make_store: MakeStore, aligned: Aligned, seed: int
) -> None:
    faults = seeded_faults(seed, 100, 0.7, (Fault("short"), Fault("delay")))
    backend = FaultyBackend(seed, faults)
    store = make_store(backend)
    for round_index in range(2):
        sources = [aligned(extent.nbytes, seed=seed + round_index) for extent in EXTENTS]
        for write in [store.write(extent, source) for extent, source in zip(EXTENTS, sources, strict=True)]:
            write.wait()
        for extent, source in zip(EXTENTS, sources, strict=True):
            assert torch.equal(read_back(store, extent, aligned), source)
    order = [index for index, *_ in backend.log]
    assert sorted(order) == list(range(4 * PIECE_COUNT)) and order != sorted(order)


@pytest.mark.parametrize("seed", range(60))
def test_seeded_mixture_gives_the_right_error_or_the_right_data(make_store: MakeStore, aligned: Aligned, seed: int) -> None:
    kinds = (Fault("short"), Fault("delay"), *(Fault("errno", code) for code in (errno.EIO, errno.ENOSPC)))
    backend = FaultyBackend(seed, seeded_faults(seed, 400, 0.15, kinds))
    store = make_store(backend)
    content: dict[Extent, Tensor | None] = {extent: torch.zeros(extent.nbytes, dtype=torch.uint8) for extent in EXTENTS}
    for step in range(12):
        extent = EXTENTS[step % len(EXTENTS)]
        source = aligned(extent.nbytes, seed=step)
        try:
            store.write(extent, source).wait()
            content[extent] = source
        except StorageError as error:
            assert error.errno in (errno.EIO, errno.ENOSPC)
            content[extent] = None
        into, expected = aligned(extent.nbytes), content[extent]
        try:
            store.read(extent, into).wait()
        except StorageError:
            continue
        assert expected is not None and torch.equal(into, expected)
    store.flush()


@pytest.mark.parametrize("on_write", [True, False])
def test_bit_flip_changes_exactly_one_bit_and_never_the_source(
    make_store: MakeStore, aligned: Aligned, monkeypatch: pytest.MonkeyPatch, on_write: bool
) -> None:
    monkeypatch.setenv("OFFLOAD_VERIFY", "0")
    extent = EXTENTS[2]  # one piece
    store = make_store(FaultyBackend(seed=5, faults={0 if on_write else 1: Fault("bit_flip")}))
    source = aligned(extent.nbytes, seed=2)
    store.write(extent, source).wait()
    assert torch.equal(source, aligned(extent.nbytes, seed=2))
    changed = read_back(store, extent, aligned) ^ source
    assert [value.bit_count() for value in changed[changed != 0].tolist()] == [1]


def test_short_and_interrupted_calls_of_aiofiles_are_continued(
    paths3: list[Path], aligned: Aligned, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls = {"read": 0, "write": 0}

    def shortened(kind: str, function: Callable[..., Awaitable[int]]) -> Callable[..., Awaitable[int]]:
        async def call(fileno: int, views: list[memoryview], offset: int, **keywords: object) -> int:
            calls[kind] += 1
            if calls[kind] % 3 == 0:
                raise OSError(errno.EINTR, "interrupted")
            view = views[0]
            return await function(fileno, [view[: max(4096, len(view) // 2 // 4096 * 4096)]], offset, **keywords)

        return call

    around_aio(monkeypatch, "_preadv", functools.partial(shortened, "read"))
    around_aio(monkeypatch, "_pwritev", functools.partial(shortened, "write"))
    backend, scratch = aio.AioBackend(queue_depth=2, block_nbytes=32 * KIB), ScratchFolder(paths3[:1])
    store = NvmeStore("states", EXTENTS, scratch, backend)
    for index, extent in enumerate(EXTENTS):
        store.write(extent, aligned(extent.nbytes, seed=index)).wait()
        assert torch.equal(read_back(store, extent, aligned), aligned(extent.nbytes, seed=index))
    assert calls["read"] > 8 and calls["write"] > 8
    store.close()
    backend.close()


def transfer(nbytes: int = 16 * KIB, *, is_write: bool = False) -> Transfer:
    return Transfer(0, memoryview(bytearray(nbytes)), 4096, is_write=is_write)


def test_transfer_decides_every_result() -> None:
    block = transfer()
    assert block.advance(5000) == 0 and block.done_nbytes == 4096  # goes on where direct I/O can
    assert block.advance(12 * KIB) == 0 and block.finished
    assert transfer().advance(0) == errno.ENODATA
    assert transfer(is_write=True).advance(0) == errno.EIO
    assert transfer().advance(-errno.ENXIO) == errno.ENXIO


@pytest.mark.parametrize(("result", "code"), [(-errno.EINTR, errno.EINTR), (-errno.EAGAIN, errno.EAGAIN), (100, errno.EIO)])
def test_transfer_without_progress_ends(result: int, code: int) -> None:
    block = transfer()
    codes = [block.advance(result) for _ in range(Transfer.STALL_LIMIT + 1)]
    assert codes == [0] * Transfer.STALL_LIMIT + [code]


def test_meter_counts_overlapping_transfers_once(monkeypatch: pytest.MonkeyPatch) -> None:
    now_ns = 0
    monkeypatch.setattr("offload.tiers.io.backend.time.monotonic_ns", lambda: now_ns)
    meter = IoMeter()
    meter.begin(is_write=False)
    now_ns = 10
    meter.begin(is_write=False)
    now_ns = 15
    meter.end(100, is_write=False)
    now_ns = 30
    assert meter.stats().read_busy_ns == 30  # still one in flight
    meter.end(50, is_write=False)
    now_ns = 100
    stats = meter.stats()
    assert (stats.read_nbytes, stats.read_busy_ns, stats.written_nbytes, stats.write_busy_ns) == (150, 30, 0, 0)
