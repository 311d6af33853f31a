"""A store in two tiers holds what one in memory does, wherever the cut is."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings, strategies as st

from offload.errors import StorageError
from offload.layout import Extent, ExtentAllocator
from offload.tiers import CpuStore, HostMemory, NvmeStore, ScratchFolder, SplitStore, Store, open_backend
from tests.tiers.faulty_io import Fault, FaultyBackend

Aligned = Callable[..., torch.Tensor]
PAGE = 4096


def _memory(extent: Extent) -> torch.Tensor:
    return HostMemory(extent.nbytes, "test").tensor


def _extents(pages: Iterable[int]) -> list[Extent]:
    allocator = ExtentAllocator()
    return [allocator.take(count * PAGE) for count in pages]


@settings(max_examples=40, deadline=None)
@given(
    pages=st.lists(st.integers(1, 6), min_size=1, max_size=7),
    kept=st.integers(0, 7),
    writes=st.lists(st.tuples(st.integers(0, 6), st.integers(0, 255)), max_size=20),
)
def test_wherever_the_cut_is(
    tmp_path_factory: pytest.TempPathFactory,
    pages: list[int],
    kept: int,
    writes: list[tuple[int, int]],
) -> None:
    extents = _extents(pages)
    kept_count = min(kept, len(extents))
    scratch, backend = ScratchFolder([tmp_path_factory.mktemp("drive")]), open_backend("threads", queue_depth=2)
    store = SplitStore(
        "states",
        extents,
        kept_count,
        lambda part: CpuStore("kept", part),
        lambda part: NvmeStore("states", part, scratch, backend, stripe_nbytes=PAGE),
    )
    try:
        model = dict.fromkeys(extents, 0)
        for index, value in writes:
            extent = extents[index % len(extents)]
            store.write(extent, _memory(extent).fill_(value)).wait()
            model[extent] = value
        for position, extent in enumerate(extents):
            into = _memory(extent).fill_(3)
            store.read(extent, into).wait()
            assert into.eq(model[extent]).all()
            assert (store.view(extent) is not None) == (position < kept_count)
        moved = sum(extent.nbytes for extent in extents[kept_count:])
        assert backend.stats().read_nbytes == moved
    finally:
        store.close()
        backend.close()


class _Failing(CpuStore):
    def flush(self) -> None:
        raise StorageError(5, f"{self.name} failed")

    def close(self) -> None:
        super().close()
        raise StorageError(5, f"{self.name} failed to close")


def test_a_failure_of_one_part_does_not_keep_the_other_open(aligned: Aligned) -> None:
    made: list[Store] = []

    def make(name: str, kind: type[CpuStore]) -> Callable[[Iterable[Extent]], Store]:
        def of(part: Iterable[Extent]) -> Store:
            made.append(kind(name, part))
            return made[-1]

        return of

    extents = _extents([1, 1])
    store = SplitStore("states", extents, 1, make("first", _Failing), make("second", CpuStore))
    with pytest.raises(StorageError, match="first failed"):
        store.flush()
    with pytest.raises(StorageError, match="first failed to close"):
        store.close()
    for part in made:
        with pytest.raises(AssertionError, match="closed"):
            part.read(Extent(0, PAGE), aligned(PAGE))


def test_when_the_second_store_cannot_be_made_the_first_is_closed() -> None:
    made: list[CpuStore] = []

    def first(part: Iterable[Extent]) -> Store:
        made.append(CpuStore("first", part))
        return made[0]

    def second(part: Iterable[Extent]) -> Store:
        raise StorageError(28, "no room")

    with pytest.raises(StorageError, match="no room"):
        SplitStore("states", _extents([1, 1]), 1, first, second)
    with pytest.raises(AssertionError, match="closed"):
        made[0].view(Extent(0, PAGE))


def test_a_failed_write_is_raised_by_flush(tmp_path: Path, aligned: Aligned) -> None:
    backend = FaultyBackend(seed=1, faults={1: Fault("errno")})
    scratch = ScratchFolder([tmp_path])
    extents = _extents([1, 2, 3])
    store = SplitStore(
        "states",
        extents,
        1,
        lambda part: CpuStore("kept", part),
        lambda part: NvmeStore("states", part, scratch, backend),
    )
    for extent in extents:
        store.write(extent, aligned(extent.nbytes, seed=2))
    with pytest.raises(StorageError):
        store.flush()
    store.close()
    backend.close()
