"""What a drive was measured to want is remembered, used, never trusted blindly, and never changes a byte."""

from __future__ import annotations

import json
import os
import threading
from pathlib import Path

import pytest
import torch

from offload.errors import ConfigError
from offload.layout import Extent
from offload.tiers import HostMemory, NvmeStore, Priority, ScratchFolder, io, open_backend
from offload.tiers.io import tuning
from offload.tiers.io.devices import DeviceBackends
from offload.tiers.io.tuning import IoSettings, device_of, remember, remembered, settings_path


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "cache" / "offload" / "io.json"


def test_what_is_remembered_is_found_again(cache: Path) -> None:
    assert settings_path() == cache and remembered("uuid 1", "io_uring") is None
    assert remember("uuid 1", "io_uring", IoSettings(1 << 20, 16)) == cache
    remember("uuid 1", "threads", IoSettings(1 << 21, 8))
    remember("uuid 2", "io_uring", IoSettings(1 << 22, 4))
    remember("uuid 1", "io_uring", IoSettings(1 << 19, 64))
    assert remembered("uuid 1", "io_uring") == IoSettings(1 << 19, 64)
    assert remembered("uuid 1", "threads") == IoSettings(1 << 21, 8)
    assert remembered("uuid 2", "io_uring") == IoSettings(1 << 22, 4)
    assert remembered("uuid 2", "aiofiles") is None
    assert cache.stat().st_mode & 0o777 == 0o600
    assert sorted(path.name for path in cache.parent.iterdir()) == ["io.json", "io.lock"]


GOOD = {"block_nbytes": 1 << 20, "queue_depth": 16}
GARBAGE = {
    "no json": b"\x00\xff{",
    "nothing": b"",
    "deep": b"[" * 100_000,
    "another version": json.dumps({"version": 2, "devices": {"d": {"b": GOOD}}}).encode(),
    "a list": b"[1, 2]",
    "devices": json.dumps({"version": 1, "devices": 7}).encode(),
    "backends": json.dumps({"version": 1, "devices": {"d": [1]}}).encode(),
    "text": json.dumps({"version": 1, "devices": {"d": {"b": GOOD | {"queue_depth": "16"}}}}).encode(),
    "a bool": json.dumps({"version": 1, "devices": {"d": {"b": GOOD | {"queue_depth": True}}}}).encode(),
    "huge": json.dumps({"version": 1, "devices": {"d": {"b": GOOD | {"block_nbytes": 1 << 40}}}}).encode(),
    "odd": json.dumps({"version": 1, "devices": {"d": {"b": GOOD | {"block_nbytes": 5000}}}}).encode(),
    "negative": json.dumps({"version": 1, "devices": {"d": {"b": GOOD | {"queue_depth": -1}}}}).encode(),
    "missing": json.dumps({"version": 1, "devices": {"d": {"b": {"block_nbytes": 4096}}}}).encode(),
}


@pytest.mark.parametrize("content", GARBAGE.values(), ids=GARBAGE.keys())
def test_garbage_is_as_good_as_nothing_and_is_replaced(cache: Path, content: bytes) -> None:
    cache.parent.mkdir(parents=True)
    cache.write_bytes(content)
    assert remembered("d", "b") is None
    remember("e", "b", IoSettings(8192, 3))
    assert remembered("e", "b") == IoSettings(8192, 3)


def test_an_unreadable_file_is_as_good_as_nothing(cache: Path) -> None:
    cache.mkdir(parents=True)
    assert remembered("d", "b") is None
    with pytest.raises(OSError):
        remember("d", "b", IoSettings(4096, 1))
    assert sorted(path.name for path in cache.parent.iterdir()) == ["io.json", "io.lock"]


def test_no_home_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tuning, "settings_path", lambda: None)
    assert remembered("d", "b") is None
    with pytest.raises(OSError, match="XDG_CACHE_HOME"):
        remember("d", "b", IoSettings(4096, 1))


def test_several_writers_lose_nothing() -> None:
    def write(index: int) -> None:
        for depth in range(1, 9):
            remember(f"device {index}", "io_uring", IoSettings(4096 * depth, depth))

    threads = [threading.Thread(target=write, args=(index,)) for index in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for index in range(6):
        assert remembered(f"device {index}", "io_uring") == IoSettings(4096 * 8, 8)


def test_a_device_has_one_name_for_all_of_its_folders(tmp_path: Path) -> None:
    (tmp_path / "a").mkdir()
    assert device_of(tmp_path) == device_of(tmp_path / "a") != ""
    assert os.stat("/proc").st_dev == os.stat(tmp_path).st_dev or device_of("/proc") != device_of(tmp_path)


@pytest.mark.parametrize("name", ["io_uring", "threads", "aiofiles"])
def test_the_backend_is_opened_with_what_is_remembered(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    try:
        open_backend(name).close()
    except ConfigError as error:
        pytest.skip(str(error))
    opened: list[dict[str, int]] = []
    really = io._open
    monkeypatch.setattr(io, "_open", lambda kind, sizes: opened.append(dict(sizes)) or really(kind, sizes))
    open_backend(name, paths=[tmp_path]).close()
    remember(device_of(tmp_path), name, IoSettings(65536, 5))
    open_backend(name, paths=[tmp_path]).close()
    open_backend(name, paths=[tmp_path], queue_depth=2).close()
    open_backend(name).close()
    assert opened == [{}, {"block_nbytes": 65536, "queue_depth": 5}, {"block_nbytes": 65536, "queue_depth": 2}, {}]


@pytest.mark.parametrize("settings", [IoSettings(4096, 1), IoSettings(12288, 7), IoSettings(1 << 22, 1024)])
def test_no_setting_changes_a_byte(settings: IoSettings, tmp_path: Path) -> None:
    remember(device_of(tmp_path), open_backend_name(), settings)
    scratch = ScratchFolder([tmp_path / "a", tmp_path / "b"])
    backend = open_backend(paths=scratch.paths)
    extents = [Extent(0, 4096 * 50), Extent(4096 * 50, 4096 * 333)]
    store = NvmeStore("states", extents, scratch, backend, stripe_nbytes=8192)
    for seed, extent in enumerate(extents):
        source, into = HostMemory(extent.nbytes, "source").tensor, HostMemory(extent.nbytes, "into").tensor
        source.copy_(torch.randint(0, 256, (extent.nbytes,), dtype=torch.uint8, generator=torch.Generator().manual_seed(seed)))
        backend.register_memory(source.data_ptr(), source.numel())
        store.write(extent, source).wait()
        store.read(extent, into).wait()
        assert torch.equal(source, into)
    store.close()
    backend.close()


def open_backend_name() -> str:
    backend = open_backend()
    backend.close()
    return backend.name


def test_each_device_has_a_queue_of_its_own(tmp_path: Path) -> None:
    other = Path("/dev/shm")
    if not os.access(other, os.W_OK) or os.stat(other).st_dev == os.stat(tmp_path).st_dev:
        pytest.skip("needs a second file system to write to")
    folder = other / f"offload-test-{os.getpid()}"
    folder.mkdir()
    try:
        with pytest.warns(RuntimeWarning):
            scratch = ScratchFolder([tmp_path, folder])
        backend = open_backend(paths=scratch.paths)
        assert isinstance(backend, DeviceBackends)
        queues = list(backend._by_device.values())
        files = scratch.create("states", [8192, 4096])
        memory = HostMemory(8192, "test").tensor.fill_(5)
        undo = backend.register_memory(memory.data_ptr(), 8192)
        backend.write(files[0], memory, 0, priority=Priority.STATE).wait()
        backend.write(files[1], memory[:4096], 0, priority=Priority.STATE).wait()
        into = HostMemory(4096, "test").tensor
        backend.read(files[1], into, 0, priority=Priority.PARAMETER).wait()
        assert into.eq(5).all()
        assert [(queue.stats().written_nbytes, queue.stats().read_nbytes) for queue in queues] == [(8192, 0), (4096, 4096)]
        assert (backend.stats().written_nbytes, backend.stats().read_nbytes) == (12288, 4096)
        undo()
        for file in files:
            file.close()
        backend.close()
    finally:
        folder.rmdir()
