# SPDX-License-Identifier: Apache-2.0
"""Sharing blocks: what every errno means, what a snapshot shares, and the room that is held for the next write."""

from __future__ import annotations

import errno
import os
import struct
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from offload.layout import Extent
from offload.tiers import CpuStore, NvmeStore, ScratchFolder, Store, open_backend
from offload.tiers.io import reflink
from tests.file_systems import clone_calls, raising, sharing_blocks

from ..scratch_files import scratch_files

KIB = 1024
EXTENTS = [Extent(0, 48 * KIB), Extent(64 * KIB, 16 * KIB), Extent(80 * KIB, 4 * KIB)]
Aligned = Callable[..., torch.Tensor]


@pytest.mark.parametrize("code", sorted(reflink.CANNOT))
def test_what_cannot_share(monkeypatch: pytest.MonkeyPatch, code: int) -> None:
    clone_calls(monkeypatch, raising(code))
    assert reflink.clone_range(3, 0, 4096, 4, 0) is False


@pytest.mark.parametrize("code", [errno.EIO, errno.ENOSPC, errno.EDQUOT, errno.ENOMEM, errno.EROFS, errno.EBADF])
def test_what_fails(monkeypatch: pytest.MonkeyPatch, code: int) -> None:
    clone_calls(monkeypatch, raising(code))
    with pytest.raises(OSError) as caught:
        reflink.clone_range(3, 0, 4096, 4, 0)
    assert caught.value.errno == code


def test_the_call(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of linux/fs.h; interrupted once."""
    calls: list[Any] = []

    def recorded(*call: Any) -> None:
        calls.append(call)
        if len(calls) == 1:
            raise InterruptedError

    clone_calls(monkeypatch, recorded)
    assert reflink.clone_range(7, 8192, 4096, 9, 12288) is True
    assert calls == [(9, 0x4020940D, struct.pack("=qQQQ", 7, 8192, 4096, 12288))] * 2


def test_a_file_system_without_it(tmp_path: Path) -> None:
    """/proc shares nothing with anybody."""
    target = os.open(tmp_path / "target", os.O_WRONLY | os.O_CREAT)
    source = os.open("/proc/self/stat", os.O_RDONLY)
    try:
        assert reflink.clone_range(source, 0, 4096, target, 0) is False
    finally:
        os.close(source)
        os.close(target)


# ---- stores ----------------------------------------------------------------------------------------------------------


@pytest.fixture
def make(tmp_path: Path) -> Iterator[Callable[[str], Store]]:
    with ExitStack() as stack:

        def made(kind: str) -> Store:
            if kind == "cpu":
                store: Store = CpuStore("s", EXTENTS)
            else:
                scratch = ScratchFolder([tmp_path / "a", tmp_path / "b"])
                backend = stack.enter_context(closing(open_backend("threads")))
                store = NvmeStore("s", EXTENTS, scratch, backend, stripe_nbytes=8 * KIB)
            return stack.enter_context(closing(store))

        yield made


@pytest.mark.parametrize("kind", ["cpu", "nvme"])
def test_every_byte_that_lies_in_a_file(
    make: Callable[[str], Store], aligned: Aligned, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    """Any part of it, wherever it lies by now, goes where it was asked for."""

    def copied(source: int, source_offset: int, nbytes: int, target: int, target_offset: int) -> bool:
        content = Path(f"/proc/self/fd/{source}").read_bytes()[source_offset : source_offset + nbytes]
        return os.pwrite(target, content, target_offset) == nbytes

    sharing_blocks(monkeypatch, copied)
    store = make(kind)
    for extent in EXTENTS:
        for _ in range(2):  # in one place and then in the other
            buffer = aligned(extent.nbytes)
            buffer.copy_(torch.randint(0, 256, (extent.nbytes,), dtype=torch.uint8))
            store.write(extent, buffer).wait()
            snapshot = store.snapshot(extent)
            assert (snapshot is None) == (kind == "cpu")
            if snapshot is None:
                continue
            store.write(extent, aligned(extent.nbytes)).wait()
            with open(tmp_path / "target", "wb") as target:
                file: Any = SimpleNamespace(fileno=target.fileno, path=Path("target"))
                for part in (range(4 * KIB, extent.nbytes), range(4 * KIB)):
                    assert not part or snapshot.clone(part, file, 8 * KIB + part.start)
            assert (tmp_path / "target").read_bytes() == bytes(8 * KIB) + bytes(buffer.numpy())
            snapshot.drop()


OWN_NBYTES = 8 * KIB
"""What a file system may take for its own account of where files lie."""


def held_nbytes(root: Path) -> int:
    """What the store takes of the drive beyond its own size."""
    return sum(path.stat().st_blocks * 512 for path in scratch_files(root)) - 84 * KIB


def test_room_is_held_until_the_next_write(
    make: Callable[[str], Store], aligned: Aligned, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store, held, target = make("nvme"), 0, SimpleNamespace(fileno=lambda: -1, path=Path("target"))
    for extent in EXTENTS:
        sharing_blocks(monkeypatch, lambda *_, extent=extent: extent is not EXTENTS[2])
        for _ in range(2):  # what is shared twice is written once
            snapshot = store.snapshot(extent)
            assert snapshot is not None
            snapshot.clone(range(extent.nbytes), target, 0)  # type: ignore[arg-type]
            snapshot.drop()
        held += extent.nbytes if extent is not EXTENTS[2] else 0
        assert held <= held_nbytes(tmp_path) <= held + OWN_NBYTES
    kept = store.snapshot(EXTENTS[0])  # by a save whose file can share nothing
    assert kept is not None
    kept.drop()
    assert held <= held_nbytes(tmp_path) <= held + OWN_NBYTES
    for seed, extent in enumerate(EXTENTS):
        content, into = aligned(extent.nbytes, seed=seed + 1), aligned(extent.nbytes)
        for _ in range(2):
            store.write(extent, content).wait()
        held -= extent.nbytes if extent is not EXTENTS[2] else 0
        assert held <= held_nbytes(tmp_path) <= held + OWN_NBYTES
        store.read(extent, into).wait()
        assert torch.equal(into, content)
    assert held == 0


def test_shared_and_overwritten_before_it_is_dropped(
    make: Callable[[str], Store], aligned: Aligned, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    sharing_blocks(monkeypatch, lambda *_: True)
    store, target = make("nvme"), SimpleNamespace(fileno=lambda: -1, path=Path("target"))
    for _ in range(2):
        snapshot = store.snapshot(EXTENTS[0])
        assert snapshot is not None
        snapshot.clone(range(EXTENTS[0].nbytes), target, 0)  # type: ignore[arg-type]
        store.write(EXTENTS[0], aligned(EXTENTS[0].nbytes)).wait()
        snapshot.drop()
        assert held_nbytes(tmp_path) <= OWN_NBYTES
