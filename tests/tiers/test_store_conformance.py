# SPDX-License-Identifier: Apache-2.0
"""What every store promises, tried on every store: in host memory, and on files by every backend, striped or not."""

from __future__ import annotations

import contextlib
import errno
import random
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from offload.device.pending import Pending
from offload.errors import ConfigError, StorageError
from offload.layout import Extent
from offload.tiers import (
    CpuStore,
    IoBackend,
    MemoryLedger,
    NvmeStore,
    Priority,
    ScratchFolder,
    Store,
    open_backend,
)
from tests.tiers.faulty_io import FaultyBackend

from ..scratch_files import scratch_files

KIB = 1024
SIZES = (4 * KIB, 64 * KIB, 1024 * KIB + 4 * KIB, 12 * KIB, 256 * KIB, 4 * KIB)
STRIPE_NBYTES = 16 * KIB
BACKENDS = ("io_uring", "threads", "aiofiles", "faulty")
KINDS = [
    "cpu",
    *(f"nvme-{backend}-{count}" for backend in BACKENDS for count in (1, 3)),
]

Aligned = Callable[..., Tensor]


def extents_of(sizes: tuple[int, ...], gap_nbytes: int = 8 * KIB) -> list[Extent]:
    extents, offset = [], 0
    for size in sizes:
        extents.append(Extent(offset, size))
        offset += size + gap_nbytes
    return extents


class Refusing:
    """A drive that takes `room` transfers more, once that is said, and refuses the next with `failure`."""

    def __init__(self, drive: IoBackend) -> None:
        self._drive, self.room, self.failure = drive, -1, BaseException()

    def read(self, *given: Any, **named: Any) -> Pending:
        self._take()
        return self._drive.read(*given, **named)

    def write(self, *given: Any, **named: Any) -> Pending:
        self._take()
        return self._drive.write(*given, **named)

    def _take(self) -> None:
        self.room -= 1
        if self.room == -1:
            raise self.failure

    def __getattr__(self, name: str) -> Any:
        return getattr(self._drive, name)


@dataclass
class Subject:
    store: Store
    extents: list[Extent]
    backend: Refusing | None
    ledger: MemoryLedger
    kept_count: int = 0

    @property
    def in_memory(self) -> list[Extent]:
        return self.extents[: self.kept_count]

    @property
    def on_nvme(self) -> list[Extent]:
        return self.extents[self.kept_count :]


def make_backend(name: str) -> IoBackend:
    if name == "faulty":
        return FaultyBackend(seed=7)
    try:
        # Small blocks, so that one transfer is many, and more than the queue takes at once.
        return open_backend(name, queue_depth=4, block_nbytes=32 * KIB)
    except ConfigError as error:
        pytest.skip(str(error))


@contextlib.contextmanager
def subject_of(kind: str, tmp_path: Path) -> Iterator[Subject]:
    extents, ledger = extents_of(SIZES), MemoryLedger()
    if kind == "cpu":
        store: Store = CpuStore("states", extents, ledger=ledger)
        yield Subject(store, extents, None, ledger, kept_count=len(extents))
        store.close()
        return
    _, backend_name, path_count = kind.split("-")
    backend = Refusing(make_backend(backend_name))
    scratch = ScratchFolder([tmp_path / f"drive{index}" for index in range(int(path_count))])

    store = NvmeStore("states", extents, scratch, backend, stripe_nbytes=STRIPE_NBYTES)
    yield Subject(store, extents, backend, ledger)
    store.close()
    backend.close()


@pytest.fixture(params=KINDS)
def subject(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Subject]:
    with subject_of(request.param, tmp_path) as made:
        yield made


def test_reads_zeros_where_nothing_was_written(subject: Subject, aligned: Aligned) -> None:
    for extent in subject.extents:
        into = aligned(extent.nbytes, seed=1)
        subject.store.read(extent, into).wait()
        assert not into.any()


def test_reads_what_was_written_all_in_flight_at_once(subject: Subject, aligned: Aligned) -> None:
    for round_index in range(3):
        sources = [aligned(extent.nbytes, seed=10 * round_index + index) for index, extent in enumerate(subject.extents)]
        writes = [subject.store.write(extent, source) for extent, source in zip(subject.extents, sources, strict=True)]
        for write in reversed(writes):
            write.wait()
            assert write.done()
        targets = [aligned(extent.nbytes) for extent in subject.extents]
        reads = [subject.store.read(extent, into) for extent, into in zip(subject.extents, targets, strict=True)]
        for read in reads:
            read.wait()
        assert all(torch.equal(source, target) for source, target in zip(sources, targets, strict=True))
    subject.store.flush()


def test_random_operations_equal_a_model_in_memory(subject: Subject, aligned: Aligned) -> None:
    draw = random.Random(3)
    model = {extent: torch.zeros(extent.nbytes, dtype=torch.uint8) for extent in subject.extents}
    pending: dict[Extent, list[tuple[object, Tensor | None, Tensor]]] = {extent: [] for extent in subject.extents}

    def settle(extent: Extent) -> None:
        for operation, into, expected in pending.pop(extent):
            operation.wait()  # type: ignore[attr-defined]
            assert into is None or torch.equal(into, expected)
        pending[extent] = []

    for step in range(120):
        extent = draw.choice(subject.extents)
        priority = draw.choice(list(Priority))
        if draw.random() < 0.5:
            settle(extent)
            source = aligned(extent.nbytes, seed=step)
            pending[extent].append((subject.store.write(extent, source, priority=priority), None, source))
            model[extent] = source.clone()
        else:
            if any(into is None for _, into, _ in pending[extent]):
                settle(extent)
            into = aligned(extent.nbytes, seed=step)
            pending[extent].append((subject.store.read(extent, into, priority=priority), into, model[extent]))
    for extent in subject.extents:
        settle(extent)
    subject.store.flush()


def test_a_polled_operation_becomes_done(subject: Subject, aligned: Aligned) -> None:
    extent = subject.extents[2]
    source = aligned(extent.nbytes, seed=1)
    write = subject.store.write(extent, source)
    while not write.done():
        pass
    source.zero_()  # settled: the memory is the caller's again
    into = aligned(extent.nbytes)
    read = subject.store.read(extent, into)
    while not read.done():
        pass
    assert torch.equal(into, aligned(extent.nbytes, seed=1))


def test_several_readers_of_one_extent(subject: Subject, aligned: Aligned) -> None:
    extent = subject.extents[4]
    source = aligned(extent.nbytes, seed=5)
    subject.store.write(extent, source).wait()
    targets = [aligned(extent.nbytes) for _ in range(5)]
    reads = [subject.store.read(extent, into) for into in targets]
    for read in reads:
        read.wait()
        read.wait()  # any number of times
    assert all(torch.equal(source, into) for into in targets)


def test_operations_from_several_threads(subject: Subject, aligned: Aligned) -> None:
    failures: list[BaseException] = []

    def work(extent: Extent, seed: int) -> None:
        try:
            for round_index in range(5):
                source, into = aligned(extent.nbytes, seed=100 * seed + round_index), aligned(extent.nbytes)
                subject.store.write(extent, source).wait()
                subject.store.read(extent, into).wait()
                assert torch.equal(source, into)
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=work, args=(extent, index)) for index, extent in enumerate(subject.extents)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert failures == []


def test_what_is_dropped_without_a_wait_still_arrives(subject: Subject, aligned: Aligned) -> None:
    for index, extent in enumerate(subject.extents):
        subject.store.write(extent, aligned(extent.nbytes, seed=index))
    subject.store.flush()
    for index, extent in enumerate(subject.extents):
        into = aligned(extent.nbytes)
        subject.store.read(extent, into).wait()
        assert torch.equal(into, aligned(extent.nbytes, seed=index))


def test_only_whole_registered_extents(subject: Subject, aligned: Aligned) -> None:
    first = subject.extents[1]
    with pytest.raises(AssertionError, match="not one of the store's extents"):
        subject.store.read(Extent(first.offset_nbytes, 4 * KIB), aligned(4 * KIB))
    with pytest.raises(AssertionError, match="not one of the store's extents"):
        subject.store.view(Extent(first.offset_nbytes, 4 * KIB))
    with pytest.raises(AssertionError, match="whole extents only"):
        subject.store.write(first, aligned(first.nbytes - 4 * KIB))


def test_tensors_that_direct_io_cannot_take_are_refused_by_every_store(subject: Subject, aligned: Aligned) -> None:
    extent = subject.extents[0]
    wrong = {
        "aligned": aligned(extent.nbytes + 8)[8:],
        "uint8": aligned(extent.nbytes).view(torch.float32),
        "contiguous": aligned(2 * extent.nbytes)[::2],
        "1-D": aligned(extent.nbytes).view(2, -1),
    }
    for what, tensor in wrong.items():
        with pytest.raises(AssertionError, match=what):
            subject.store.write(extent, tensor)


def test_view_is_the_extent_itself_or_none(subject: Subject, aligned: Aligned) -> None:
    assert all(subject.store.view(extent) is None for extent in subject.on_nvme)
    for extent in subject.in_memory:
        view = subject.store.view(extent)
        assert view is not None and view.shape == (extent.nbytes,) and view.data_ptr() % 4096 == 0
        view.fill_(9)
        into = aligned(extent.nbytes)
        subject.store.read(extent, into).wait()
        assert into.eq(9).all()
        subject.store.write(extent, view).wait()  # in place
        assert view.eq(9).all()


def test_size_and_memory_are_those_of_the_extents(subject: Subject) -> None:
    last = subject.extents[-1]
    assert subject.store.nbytes == last.offset_nbytes + last.nbytes
    held = sum(subject.ledger.by_purpose.values())
    if subject.backend is None:
        assert held == subject.store.nbytes
    else:
        assert held == sum(extent.nbytes for extent in subject.in_memory)


def test_stats_count_every_byte_that_a_drive_moved(subject: Subject, aligned: Aligned) -> None:
    if subject.backend is None:
        pytest.skip("a copy in memory is no file I/O")
    for extent in subject.extents:
        subject.store.write(extent, aligned(extent.nbytes, seed=1)).wait()
    for extent in (subject.extents[0], subject.extents[4]):
        subject.store.read(extent, aligned(extent.nbytes)).wait()
    stats = subject.backend.stats()
    read = [subject.extents[0], subject.extents[4]]
    assert stats.read_nbytes == sum(extent.nbytes for extent in read if extent in subject.on_nvme)
    assert stats.written_nbytes == sum(extent.nbytes for extent in subject.on_nvme)
    assert stats.read_busy_ns > 0 and stats.write_busy_ns > 0


def test_close_waits_and_may_be_repeated(subject: Subject, aligned: Aligned) -> None:
    extent = subject.extents[2]
    write = subject.store.write(extent, aligned(extent.nbytes, seed=1))
    subject.store.close()
    assert write.done()
    subject.store.close()
    with pytest.raises(AssertionError, match="closed"):
        subject.store.read(extent, aligned(extent.nbytes))
    assert subject.ledger.total_nbytes == 0


@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind.startswith("nvme") and "faulty" not in kind])
def test_a_file_cut_short_by_others_is_an_error_that_says_where(kind: str, tmp_path: Path, aligned: Aligned) -> None:
    with subject_of(kind, tmp_path) as subject:
        for extent in subject.extents:
            subject.store.write(extent, aligned(extent.nbytes, seed=1)).wait()
        (victim,) = scratch_files(tmp_path / "drive0", "states")
        with victim.open("r+b") as file:
            file.truncate(32 * KIB)
        with pytest.raises(
            StorageError, match=r"read from .*states\.swap \(nameless\)' failed at byte \d+ .*ENODATA.*shorter"
        ) as caught:
            subject.store.read(subject.extents[2], aligned(SIZES[2])).wait()
        assert str(tmp_path / "drive0") in str(caught.value) and caught.value.errno == errno.ENODATA
        subject.store.read(subject.extents[0], aligned(SIZES[0])).wait()  # the others can still be read


FAILURES = (OSError(errno.ENOMEM, "no memory"), StorageError(errno.EIO, "gone"), KeyboardInterrupt())


@pytest.mark.parametrize("failure", FAILURES, ids=lambda failure: type(failure).__name__)
@pytest.mark.parametrize("verifies", ["0", "1"])
@pytest.mark.parametrize("kind", KINDS)
def test_what_could_not_be_begun_whole(
    kind: str, tmp_path: Path, aligned: Aligned, monkeypatch: pytest.MonkeyPatch, verifies: str, failure: BaseException
) -> None:
    """A write that raises has failed as one that was waited for: part of it may be there, so nobody reads it before the next
    write. A read leaves everything as it was."""
    monkeypatch.setenv("OFFLOAD_VERIFY", verifies)
    with subject_of(kind, tmp_path) as subject:
        store, extent, into = subject.store, subject.extents[2], aligned(SIZES[2])

        def refused(call: Callable[..., Pending], tensor: Tensor, room: int) -> None:
            """In memory what cannot be copied does."""
            if subject.backend is None:
                with pytest.raises(NotImplementedError):
                    call(extent, torch.empty(extent.nbytes, dtype=torch.uint8, device="meta"))
                return
            subject.backend.room, subject.backend.failure = room, failure
            with pytest.raises(type(failure)):
                call(extent, tensor)

        pieces = 1 if kind.endswith("1") or kind == "cpu" else -(-extent.nbytes // STRIPE_NBYTES)
        for room in {0, pieces - 1}:
            before, torn = aligned(extent.nbytes, seed=1), aligned(extent.nbytes, seed=2)
            store.write(extent, before).wait()
            if subject.backend is not None:
                refused(store.read, into, room)
            store.read(extent, into).wait()
            assert torch.equal(into, before)
            refused(store.write, torn, room)
            with pytest.raises(StorageError, match="last write of it failed"):
                store.read(extent, into)
            if extent in subject.on_nvme:
                with pytest.raises(StorageError, match="last write of it failed"):
                    store.snapshot(extent)
        store.write(extent, torn).wait()
        store.read(extent, into).wait()
        assert torch.equal(into, torn)
        store.flush()


def test_extents_that_overlap_or_are_not_aligned_are_refused() -> None:
    with pytest.raises(AssertionError, match="overlaps"):
        CpuStore("states", [Extent(0, 8 * KIB), Extent(4 * KIB, 4 * KIB)])
    with pytest.raises(AssertionError, match="aligned"):
        CpuStore("states", [Extent(0, 1000)])
    with pytest.raises(AssertionError, match="aligned"):
        CpuStore("states", [Extent(512, 4 * KIB)])


# ---- what is kept ----------------------------------------------------------------------------------------------------


def test_what_is_kept_stays_whatever_is_written(subject: Subject, aligned: Aligned) -> None:
    kept: dict[Extent, Any] = {}
    for extent in subject.extents:
        subject.store.write(extent, aligned(extent.nbytes, seed=1)).wait()
        kept[extent] = subject.store.snapshot(extent)
        assert (kept[extent] is not None) is (extent in subject.on_nvme)
    for seed in (2, 3):
        for extent in subject.extents:
            subject.store.write(extent, aligned(extent.nbytes, seed=seed)).wait()
    for round_index in range(2):
        for extent in subject.on_nvme:
            into = aligned(extent.nbytes)
            kept[extent].read(into).wait()
            assert torch.equal(into, aligned(extent.nbytes, seed=1))
            if round_index:
                kept[extent].drop()
        for extent in subject.extents:
            into = aligned(extent.nbytes)
            subject.store.read(extent, into).wait()
            assert torch.equal(into, aligned(extent.nbytes, seed=3))


def test_what_was_never_written_can_be_kept(subject: Subject, aligned: Aligned) -> None:
    for extent in subject.on_nvme:
        snapshot = subject.store.snapshot(extent)
        assert snapshot is not None
        subject.store.write(extent, aligned(extent.nbytes, seed=1)).wait()
        into = aligned(extent.nbytes, seed=5)
        snapshot.read(into).wait()
        assert not into.any()
        snapshot.drop()


@pytest.mark.parametrize("seed", range(4))
def test_any_order_of_keeping_and_writing(subject: Subject, aligned: Aligned, seed: int) -> None:
    """Against a dictionary: what each extent holds, and what is kept of it; the drive holds one place of each in the end."""
    draw = random.Random(seed)
    holds: dict[Extent, int] = {}
    kept: dict[Extent, tuple[Any, int]] = {}
    for extent in subject.extents:
        subject.store.write(extent, aligned(extent.nbytes, seed=99)).wait()
        holds[extent] = 99
    before = allocated_nbytes(subject)
    for seed_now in range(80):
        extent = draw.choice(subject.extents)
        verb = draw.choice(("keep", "let go", "write", "write", "read", "read kept"))
        into = aligned(extent.nbytes)
        if verb == "keep" and extent not in kept and (snapshot := subject.store.snapshot(extent)) is not None:
            kept[extent] = snapshot, holds[extent]
        elif verb == "let go" and extent in kept:
            kept.pop(extent)[0].drop()
        elif verb == "write":
            subject.store.write(extent, aligned(extent.nbytes, seed=seed_now + 1)).wait()
            holds[extent] = seed_now + 1
        elif verb == "read":
            subject.store.read(extent, into).wait()
            assert torch.equal(into, aligned(extent.nbytes, seed=holds[extent]))
        elif verb == "read kept" and extent in kept:
            kept[extent][0].read(into).wait()
            assert torch.equal(into, aligned(extent.nbytes, seed=kept[extent][1]))
    for snapshot, _ in kept.values():
        snapshot.drop()
    for extent in subject.extents:
        into = aligned(extent.nbytes)
        subject.store.read(extent, into).wait()
        assert torch.equal(into, aligned(extent.nbytes, seed=holds[extent]))
    assert abs(allocated_nbytes(subject) - before) <= 8 * 4096  # a file system keeps account of scattered files in blocks


def allocated_nbytes(subject: Subject) -> int:
    folders = {file.path.parent for file, _ in subject.store.room_for_snapshots()}
    return sum(path.stat().st_blocks * 512 for folder in folders for path in scratch_files(folder))


def test_what_keeping_takes(subject: Subject, aligned: Aligned) -> None:
    room = subject.store.room_for_snapshots()
    needed = sum(nbytes for _, nbytes in room)
    assert needed >= sum(extent.nbytes for extent in subject.on_nvme) and (needed == 0) == (not subject.on_nvme)
    before = allocated_nbytes(subject)
    kept = [subject.store.snapshot(extent) for extent in subject.on_nvme]
    assert allocated_nbytes(subject) - before <= needed + 8 * 4096
    for snapshot in kept:
        assert snapshot is not None
        snapshot.drop()


def test_a_bit_that_changes_in_what_is_kept_is_seen(subject: Subject, aligned: Aligned) -> None:
    for extent in subject.on_nvme[:1]:
        subject.store.write(extent, aligned(extent.nbytes, seed=1)).wait()
        snapshot = subject.store.snapshot(extent)
        assert snapshot is not None
        subject.store.write(extent, aligned(extent.nbytes, seed=2)).wait()
        for room, _ in subject.store.room_for_snapshots():
            (path,) = scratch_files(room.path.parent, "states")
            with path.open("r+b") as file:
                content = bytearray(file.read())
                file.seek(0)
                file.write(bytes(byte ^ 1 for byte in content))
        with pytest.raises(StorageError, match=r"states\.swap"):
            snapshot.read(aligned(extent.nbytes)).wait()
        into = aligned(extent.nbytes)
        subject.store.read(extent, into).wait()
        assert torch.equal(into, aligned(extent.nbytes, seed=2))
        snapshot.drop()


def test_what_a_cut_off_save_left_is_dropped_by_the_next(subject: Subject, aligned: Aligned) -> None:
    """Nobody has the first snapshot any more, whether the extent was written since or not."""
    before = allocated_nbytes(subject)
    for extent in subject.on_nvme:
        for is_written in (False, True):
            assert subject.store.snapshot(extent) is not None
            if is_written:
                subject.store.write(extent, aligned(extent.nbytes, seed=1)).wait()
        snapshot = subject.store.snapshot(extent)
        assert snapshot is not None
        subject.store.write(extent, aligned(extent.nbytes, seed=2)).wait()
        into = aligned(extent.nbytes)
        snapshot.read(into).wait()
        assert torch.equal(into, aligned(extent.nbytes, seed=1))
        snapshot.drop()
    assert allocated_nbytes(subject) - before <= 8 * 4096
