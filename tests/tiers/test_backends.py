# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import asyncio
import errno
import logging
import os
import sys
import tempfile
import threading
import time
from pathlib import Path

import pytest
from aiofiles.os import wrap

from offload._native_io import IO_KINDS
from offload.errors import ConfigError
from offload.layout import Extent
from offload.tiers import HostMemory, NvmeStore, Priority, ScratchFolder, io, open_backend, striped_nbytes
from offload.tiers.io import aio
from offload.tiers.io.aio import AioBackend
from tests.acceptance.ctrl_c import Interrupting
from tests.native.paths import at_library_call
from tests.warm import WarmProcess

from ..scratch_files import scratch_files
from .faulty_io import around_aio


def test_unknown_name_lists_the_right_ones(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ConfigError, match="'libaio'; expected one of auto, io_uring, threads, aiofiles"):
        open_backend("libaio")
    monkeypatch.setenv("OFFLOAD_IO", "fast")
    with pytest.raises(ConfigError, match="environment variable OFFLOAD_IO is 'fast'"):
        open_backend()


def test_the_environment_names_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OFFLOAD_IO", "aiofiles")
    backend = open_backend()
    assert backend.name == "aiofiles"
    backend.close()


def refuse(patch: pytest.MonkeyPatch, *names: str) -> None:
    """The system does not let the native library open backends of these names."""

    def forbidden(kind: int, *_: object) -> None:
        if kind in [IO_KINDS[name] for name in names]:
            raise OSError(errno.EPERM, "no")

    at_library_call(patch, {"offload_io_create": forbidden})


def test_auto_takes_the_best_that_works_and_says_why_not_the_better(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.delenv("OFFLOAD_IO", raising=False)
    refuse(monkeypatch, "io_uring", "threads")
    with caplog.at_level(logging.INFO, logger="offload.tiers.io"):
        backend = open_backend()
    assert backend.name == "aiofiles"
    assert "io_uring: EPERM" in caplog.text and "threads: EPERM" in caplog.text
    backend.close()
    monkeypatch.delitem(sys.modules, "offload.tiers.io.aio")
    monkeypatch.setitem(sys.modules, "aiofiles.os", None)
    with pytest.raises(ConfigError, match=r"no I/O backend works here.*pip install aiofiles"):
        open_backend()


def test_a_named_one_that_does_not_work_is_an_error_with_the_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    refuse(monkeypatch, "io_uring")
    with pytest.raises(ConfigError, match="asks for io_uring, which does not work here: EPERM"):
        open_backend("io_uring")


def test_a_second_drive_without_a_queue_leaves_none_of_the_first(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Each device has its own; the system grants one. A thread that has ended is listed a little longer."""
    with tempfile.TemporaryDirectory(dir="/dev/shm") as other:
        if os.stat(other).st_dev == tmp_path.stat().st_dev:
            pytest.skip("one device")
        made, before = list[int](), set(os.listdir("/proc/self/task"))

        def one(kind: int, *_: object) -> None:
            made.append(kind)
            if len(made) > 1:
                raise OSError(errno.EMFILE, "none for the second")

        at_library_call(monkeypatch, {"offload_io_create": one})
        with pytest.raises(OSError, match="none for the second") as refusal:
            open_backend("threads", paths=[tmp_path, other])
    deadline = time.monotonic() + 60
    while (left := set(os.listdir("/proc/self/task")) - before) and time.monotonic() < deadline:
        time.sleep(0.01)
    assert len(made) == 2 and not left and refusal.value.__traceback__ is not None


@pytest.mark.parametrize("name", ["io_uring", "threads"])
def test_its_threads_have_a_name(name: str) -> None:
    """In `top -H` and in profilers; benchmarks/cpu_kinds.py counts their seconds by it."""
    before = set(os.listdir("/proc/self/task"))
    try:
        backend = open_backend(name, queue_depth=2, block_nbytes=4096)
    except ConfigError as error:
        pytest.skip(str(error))
    try:
        deadline, names = time.monotonic() + 60, list[str]()
        while "offload-io" not in names and time.monotonic() < deadline:  # each says its name when it begins
            new = set(os.listdir("/proc/self/task")) - before
            names = [Path(f"/proc/self/task/{thread}/comm").read_text().strip() for thread in new]
        assert "offload-io" in names
    finally:
        backend.close()


@pytest.mark.parametrize("name", io.BACKEND_NAMES)
def test_close_settles_everything_and_then_refuses(name: str, tmp_path: Path) -> None:
    try:
        backend = open_backend(name, queue_depth=2, block_nbytes=4096)
    except ConfigError as error:
        pytest.skip(str(error))
    scratch = ScratchFolder([tmp_path])
    (file,) = scratch.create("states", [1 << 20])
    memory = HostMemory(1 << 20, "test").tensor
    writes = [
        backend.write(file, memory[start : start + 65536], start, priority=Priority.STATE) for start in range(0, 1 << 20, 65536)
    ]
    backend.close()
    backend.close()
    assert all(write.done() for write in writes)
    assert backend.stats().written_nbytes == 1 << 20
    with pytest.raises(AssertionError, match=r"closed"):
        backend.read(file, memory[:4096], 0, priority=Priority.PARAMETER)
    file.close()


@pytest.mark.parametrize("name", io.BACKEND_NAMES)
def test_a_transfer_of_nothing_is_over(name: str, tmp_path: Path) -> None:
    try:
        backend = open_backend(name)
    except ConfigError as error:
        pytest.skip(str(error))
    (file,) = ScratchFolder([tmp_path]).create("states", [4096])
    read = backend.read(file, HostMemory(4096, "test").tensor[:0], 0, priority=Priority.STATE)
    deadline = time.monotonic() + 60
    while not read.done() and time.monotonic() < deadline:
        time.sleep(0.01)
    assert read.done()
    read.wait()
    backend.close()
    file.close()


@pytest.mark.parametrize("name", ["io_uring", "threads"])
def test_a_close_that_goes_on_after_an_interrupt_keeps_the_totals(name: str) -> None:
    """`engine.stats()` of an engine that failed asks for them."""
    backend = open_backend(name)
    with pytest.raises(KeyboardInterrupt), Interrupting(1, "_settle_all"):
        backend.close()
    backend.close()
    assert backend.stats().read_nbytes == 0


def test_aiofiles_starts_urgent_transfers_first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    order: list[int] = []
    pwritev, started, gate = aio._pwritev, threading.Event(), threading.Event()

    async def recorded(fileno: int, views: list[memoryview], offset: int, **keywords: object) -> int:
        order.append(offset)
        if len(order) == 1:
            started.set()
            await asyncio.to_thread(gate.wait)
        return await pwritev(fileno, views, offset, **keywords)

    around_aio(monkeypatch, "_pwritev", lambda _: recorded)
    backend, scratch = AioBackend(queue_depth=1, block_nbytes=4096), ScratchFolder([tmp_path])
    (file,) = scratch.create("states", [65536])
    memory = HostMemory(65536, "test").tensor
    state = backend.write(file, memory[:32768], 0, priority=Priority.STATE)
    started.wait()
    parameter = backend.write(file, memory[32768:], 32768, priority=Priority.PARAMETER)
    gate.set()
    parameter.wait()
    state.wait()
    # One block of the first was under way; then all of the urgent one, then the rest; each in order.
    assert order == [0, *range(32768, 65536, 4096), *range(4096, 32768, 4096)]
    file.close()
    backend.close()


DROPPING = """
import sys
from offload.errors import ConfigError
from offload.layout import Extent
from offload.tiers import HostMemory, NvmeStore, ScratchFolder, open_backend

extents = [Extent(i << 20, 1 << 20) for i in range(8)]
kept = []
for name in sys.argv[2:]:
    for how in ("drop", "exit"):
        backend = open_backend(name)
        store = NvmeStore("states", extents, ScratchFolder([sys.argv[1]]), backend)
        for extent in extents:
            store.write(extent, HostMemory(extent.nbytes, "test").tensor)
        if how == "drop":
            del backend, store
            continue
        kept.append((backend, store))
print("end")
"""


def test_dropped_without_close_and_at_exit_nothing_hangs_or_is_left(tmp_path: Path) -> None:
    names = []
    for name in io.BACKEND_NAMES:
        try:
            open_backend(name).close()
        except ConfigError:
            continue
        names.append(name)
    process = WarmProcess.run(["-c", DROPPING, str(tmp_path), *names], 60, torn_down=True)
    assert (process.returncode, process.stdout, process.stderr) == (0, "end\n", "")
    assert list(tmp_path.iterdir()) == [] and "aiofiles" in names


def test_a_backend_that_is_collected_on_a_thread_of_its_own_ends(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    backend, scratch = AioBackend(queue_depth=1), ScratchFolder([tmp_path])
    (file,) = scratch.create("states", [4096])
    memory, service = HostMemory(4096, "test").tensor, backend._service
    kept, collected_on = [backend], []

    def dropping(fileno: int, parts: list[memoryview], offset_nbytes: int) -> int:
        kept.clear()  # as the collector may, which comes on any thread
        collected_on.append(threading.current_thread().name)
        return os.pwritev(fileno, parts, offset_nbytes)

    around_aio(monkeypatch, "_pwritev", lambda _: wrap(dropping))
    pending = backend.write(file, memory, 0, priority=Priority.STATE)
    del backend
    deadline = time.monotonic() + 60
    while (service in aio._services or not pending.done()) and time.monotonic() < deadline:
        time.sleep(0.01)
    assert pending.done() and collected_on == ["offload-aiofiles_0"] and service not in aio._services
    file.close()


@pytest.mark.parametrize("path_count", [1, 2, 3, 5])
def test_striped_sizes_are_where_the_last_pieces_end(path_count: int) -> None:
    stripe = 8192
    for nbytes in range(0, 12 * stripe, 4096):
        ends = [0] * path_count
        for position in range(0, nbytes, 4096):
            index, within = divmod(position, stripe)
            ends[index % path_count] = max(ends[index % path_count], index // path_count * stripe + within + 4096)
        assert striped_nbytes(nbytes, path_count, stripe) == tuple(ends)


def test_stripes_spread_over_all_paths(paths3: list[Path]) -> None:
    scratch, backend = ScratchFolder(paths3), AioBackend()
    extent = Extent(0, 3 * 8192)
    store = NvmeStore("states", [extent], scratch, backend, stripe_nbytes=8192)
    memory = HostMemory(extent.nbytes, "test").tensor
    for index in range(3):
        memory[index * 8192 : (index + 1) * 8192].fill_(index + 1)
    store.write(extent, memory).wait()
    for index, path in enumerate(scratch.paths):
        (file,) = scratch_files(path, "states")
        assert file.read_bytes() == bytes([index + 1]) * 8192
    store.close()
    backend.close()
