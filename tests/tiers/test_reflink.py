"""Sharing blocks: what every errno means, what a store gives out to be shared, and the room that is held for it."""

from __future__ import annotations

import errno
import fcntl
import os
import struct
import tempfile
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing
from pathlib import Path
from typing import Any

import pytest
import torch

from offload.errors import StorageError
from offload.layout import Extent
from offload.tiers import CpuStore, NvmeStore, ScratchFolder, Store, held_room, open_backend
from offload.tiers.io import reflink

from ..scratch_files import scratch_files

KIB = 1024
EXTENTS = [Extent(0, 48 * KIB), Extent(64 * KIB, 16 * KIB), Extent(80 * KIB, 4 * KIB)]
Aligned = Callable[..., torch.Tensor]


@pytest.mark.parametrize("code", sorted(reflink.CANNOT))
def test_what_cannot_share(monkeypatch: pytest.MonkeyPatch, code: int) -> None:
    def refuse(*_: Any) -> None:
        raise OSError(code, os.strerror(code))

    monkeypatch.setattr(fcntl, "ioctl", refuse)
    assert reflink.clone_range(3, 0, 4096, 4, 0) is False


@pytest.mark.parametrize("code", [errno.EIO, errno.ENOSPC, errno.EDQUOT, errno.ENOMEM, errno.EROFS, errno.EBADF])
def test_what_fails(monkeypatch: pytest.MonkeyPatch, code: int) -> None:
    def fail(*_: Any) -> None:
        raise OSError(code, os.strerror(code))

    monkeypatch.setattr(fcntl, "ioctl", fail)
    with pytest.raises(OSError) as caught:
        reflink.clone_range(3, 0, 4096, 4, 0)
    assert caught.value.errno == code


@pytest.mark.parametrize(("code", "works"), [(0, True), (errno.EOPNOTSUPP, False), (errno.EXDEV, False), (errno.EIO, True)])
def test_whether_it_works_between_a_file_and_a_folder(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, code: int, works: bool
) -> None:
    """What is not known is to be tried; nothing is left there."""

    def answer(*_: Any) -> None:
        if code:
            raise OSError(code, os.strerror(code))

    monkeypatch.setattr(fcntl, "ioctl", answer)
    with tempfile.TemporaryFile(dir=tmp_path) as source:
        open_count = len(os.listdir("/proc/self/fd"))
        assert reflink.works_between(source.fileno(), tmp_path) is works
        assert reflink.works_between(source.fileno(), tmp_path / "missing") is True
        assert os.listdir(tmp_path) == [] and len(os.listdir("/proc/self/fd")) == open_count


def test_the_call(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of linux/fs.h; interrupted once."""
    calls: list[Any] = []

    def recorded(*call: Any) -> None:
        calls.append(call)
        if len(calls) == 1:
            raise InterruptedError

    monkeypatch.setattr(fcntl, "ioctl", recorded)
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


def held_nbytes(root: Path) -> int:
    return sum(path.stat().st_blocks * 512 for path in scratch_files(root, "*-room"))


@pytest.mark.parametrize("kind", ["cpu", "nvme"])
def test_every_byte_that_lies_in_a_file(make: Callable[[str], Store], aligned: Aligned, kind: str) -> None:
    store = make(kind)
    for extent in EXTENTS:
        content = torch.randint(0, 256, (extent.nbytes,), dtype=torch.uint8)
        buffer = aligned(extent.nbytes)
        buffer.copy_(content)
        store.write(extent, buffer).wait()
        found, seen = bytearray(extent.nbytes), 0

        def share(file: Any, offset: int, part: range, found: bytearray = found) -> bool:
            found[part.start : part.stop] = Path(f"/proc/self/fd/{file.fileno()}").read_bytes()[offset : offset + len(part)]
            nonlocal seen
            seen += len(part)
            return False

        store.share(extent, share)
        in_memory = kind == "cpu"
        assert seen == (0 if in_memory else extent.nbytes)
        assert in_memory or bytes(found) == bytes(content.numpy())


def test_room_is_held_until_the_next_write(make: Callable[[str], Store], aligned: Aligned, tmp_path: Path) -> None:
    store, shared = make("nvme"), EXTENTS[0].nbytes + EXTENTS[1].nbytes
    for _ in range(2):  # what is shared twice is written once
        for extent in EXTENTS[:2]:
            store.share(extent, lambda *_: True)
        assert held_nbytes(tmp_path) == shared
    store.share(EXTENTS[2], lambda *_: False)
    assert held_nbytes(tmp_path) == shared
    for extent in EXTENTS:
        store.write(extent, aligned(extent.nbytes)).wait()
        shared -= extent.nbytes if extent is not EXTENTS[2] else 0
        assert held_nbytes(tmp_path) == shared
    assert shared == 0


def test_no_room(make: Callable[[str], Store], aligned: Aligned, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store = make("nvme")
    with monkeypatch.context() as patch:
        patch.setattr(held_room, "allocate", lambda *_: errno.ENOSPC)
        with pytest.raises(StorageError, match="ENOSPC") as caught:
            store.share(EXTENTS[0], lambda *_: True)
        assert caught.value.errno == errno.ENOSPC
    store.write(EXTENTS[0], aligned(EXTENTS[0].nbytes)).wait()
    store.share(EXTENTS[0], lambda *_: True)
    assert held_nbytes(tmp_path) == EXTENTS[0].nbytes


def test_a_file_system_that_cannot_hold_room(make: Callable[[str], Store], monkeypatch: pytest.MonkeyPatch) -> None:
    store = make("nvme")
    monkeypatch.setattr(held_room, "allocate", lambda *_: errno.EOPNOTSUPP)
    store.share(EXTENTS[0], lambda *_: True)
