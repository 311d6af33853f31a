# SPDX-License-Identifier: Apache-2.0
"""The native I/O engine, both kinds: every test runs on io_uring where the system has it, and on threads."""

from __future__ import annotations

import errno
import os
import random
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest

from offload import _native
from offload._native_io import PRIORITY_BACKGROUND, PRIORITY_HIGH, PRIORITY_LOW, IoEngine, Ticket
from tests.native.paths import at_library_call
from tests.warm import WarmProcess

pytestmark = pytest.mark.skipif(not _native.available(), reason="the native library is not built")
BLOCK = 4096


@pytest.fixture(params=["io_uring", "threads"])
def engine(request: pytest.FixtureRequest) -> Iterator[IoEngine]:
    try:
        engine = IoEngine(request.param, queue_depth=4, block_nbytes=BLOCK)
    except OSError as error:
        pytest.skip(f"no {request.param} here: {error}")
    yield engine
    engine.close()


@pytest.fixture
def fd(tmp_path: Path) -> Iterator[int]:
    descriptor = os.open(tmp_path / "data", os.O_RDWR | os.O_CREAT)
    yield descriptor
    os.close(descriptor)


def _noise(nbytes: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, 256, nbytes, dtype=np.uint8)


@pytest.mark.parametrize("nbytes", [0, 1, 511, BLOCK - 1, BLOCK, BLOCK + 1, 10 * BLOCK + 77])
def test_a_round_trip_at_an_odd_offset(engine: IoEngine, fd: int, nbytes: int) -> None:
    data, back = _noise(nbytes), np.zeros(nbytes, np.uint8)
    assert engine.wait(engine.submit("write", fd, data.ctypes.data, nbytes, 13)) == (0, nbytes, -1)
    assert engine.wait(engine.submit("fdatasync", fd, 0, 0, 0)) == (0, 0, -1)
    assert engine.wait(engine.submit("read", fd, back.ctypes.data, nbytes, 13)) == (0, nbytes, -1)
    assert np.array_equal(data, back)
    if nbytes:
        assert os.pread(fd, nbytes, 13) == data.tobytes()
    stats = engine.stats()
    assert (stats.read_nbytes, stats.written_nbytes, stats.in_flight_count) == (nbytes, nbytes, 0)


def test_a_round_trip_by_direct_io(engine: IoEngine, tmp_path: Path) -> None:
    try:
        fd = os.open(tmp_path / "direct", os.O_RDWR | os.O_CREAT | os.O_DIRECT)
    except OSError as error:
        pytest.skip(f"no O_DIRECT in {tmp_path}: {error}")
    arena = _native.Arena(1 << 20)
    try:
        buffer = np.frombuffer(arena.buffer(), np.uint8)
        buffer[:] = _noise(1 << 20)
        before = buffer.copy()
        assert engine.wait(engine.submit("write", fd, arena.address, 1 << 20, 8192)).status == 0
        buffer[:] = 0
        assert engine.wait(engine.submit("read", fd, arena.address, 1 << 20, 8192)).status == 0
        assert np.array_equal(buffer, before)
        # The file ends inside an aligned block: all of what is there is counted, and then it ends.
        os.ftruncate(fd, 8192 + 5000)
        result = engine.wait(engine.submit("read", fd, arena.address, 1 << 20, 8192))
        assert result == (-errno.ENODATA, 5000, 8192 + 5000)
    finally:
        os.close(fd)


def test_many_tickets_from_many_threads(engine: IoEngine, fd: int) -> None:
    per_thread, slot = 60, 3 * BLOCK
    failures: list[str] = []

    def work(thread_index: int) -> None:
        rng = random.Random(thread_index)
        places = [(thread_index * per_thread + i) * slot for i in range(per_thread)]
        data = {place: _noise(rng.randrange(1, slot), place) for place in places}
        writes = [engine.submit("write", fd, data[p].ctypes.data, len(data[p]), p, priority=rng.randrange(2)) for p in places]
        rng.shuffle(writes)
        if any(engine.wait(ticket).status != 0 for ticket in writes):
            failures.append("write")
        back = {place: np.zeros(len(data[place]), np.uint8) for place in places}
        reads = [engine.submit("read", fd, back[p].ctypes.data, len(back[p]), p) for p in places]
        pending = set(reads)
        while pending:
            pending -= {ticket for ticket in pending if engine.poll(ticket) is not None}
        failures.extend(f"bytes at {p}" for p in places if not np.array_equal(data[p], back[p]))

    threads = [threading.Thread(target=work, args=(i,)) for i in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert failures == []
    stats = engine.stats()
    assert stats.read_nbytes == stats.written_nbytes > 0
    assert stats.read_busy_ns > 0
    assert stats.write_busy_ns > 0


def test_the_end_of_the_file_is_an_error_that_says_where(engine: IoEngine, fd: int) -> None:
    os.pwrite(fd, b"x" * (2 * BLOCK + 100), 0)
    back = np.zeros(8 * BLOCK, np.uint8)
    result = engine.wait(engine.submit("read", fd, back.ctypes.data, len(back), 0))
    assert result == (-errno.ENODATA, 2 * BLOCK + 100, 2 * BLOCK + 100)
    assert bytes(back[: 2 * BLOCK + 100]) == b"x" * (2 * BLOCK + 100)


def test_failures_carry_errno_and_offset(engine: IoEngine, fd: int, tmp_path: Path) -> None:
    data = _noise(3 * BLOCK)
    closed = os.dup(fd)
    os.close(closed)
    result = engine.wait(engine.submit("write", closed, data.ctypes.data, len(data), 700))
    assert result == (-errno.EBADF, 0, 700)
    full = os.open("/dev/full", os.O_WRONLY)
    try:
        assert engine.wait(engine.submit("write", full, data.ctypes.data, len(data), 0)).status == -errno.ENOSPC
    finally:
        os.close(full)
    read_only = os.open(tmp_path / "data", os.O_RDONLY)
    try:
        assert engine.wait(engine.submit("write", read_only, data.ctypes.data, 10, 5)) == (-errno.EBADF, 0, 5)
    finally:
        os.close(read_only)
    assert engine.wait(engine.submit("fdatasync", closed, 0, 0, 0)).status == -errno.EBADF
    # The engine goes on after failures.
    assert engine.wait(engine.submit("write", fd, data.ctypes.data, len(data), 0)).status == 0


def test_a_result_can_be_had_again(engine: IoEngine, fd: int) -> None:
    data = _noise(100)
    ticket = engine.submit("write", fd, data.ctypes.data, 100, 0)
    for again in (engine.wait, engine.poll, engine.wait):
        assert again(ticket) == (0, 100, -1)
    for of_no_engine in (engine.wait, engine.poll):
        with pytest.raises(OSError) as caught:
            of_no_engine(Ticket())
        assert caught.value.errno == errno.ENOENT


@pytest.mark.parametrize("call", ["offload_io_submit", "offload_io_wait", "offload_io_poll"])
def test_an_interrupt_right_after_a_call_of_the_library_loses_nothing(
    engine: IoEngine, fd: int, call: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupted(status: int, *_: object) -> None:
        if status == 0:
            raise KeyboardInterrupt

    data, ticket = _noise(100), Ticket()
    with monkeypatch.context() as patched:
        at_library_call(patched, after={call: interrupted})
        with pytest.raises(KeyboardInterrupt):
            engine.submit("write", fd, data.ctypes.data, 100, 0, ticket=ticket)
            while engine.poll(ticket) is None if call == "offload_io_poll" else engine.wait(ticket):
                pass
    assert ticket.is_submitted and engine.wait(ticket) == (0, 100, -1)


def test_a_wait_that_is_too_short_leaves_the_ticket(engine: IoEngine) -> None:
    # A read of an eventfd that nobody has written waits; io_uring does that without an offset, pread refuses.
    fd = os.eventfd(0) if hasattr(os, "eventfd") else -1
    if fd < 0:
        pytest.skip("needs Python 3.10's os.eventfd")
    back = np.zeros(8, np.uint8)
    ticket = engine.submit("read", fd, back.ctypes.data, 8, 0)
    try:
        try:
            early = engine.wait(ticket, timeout_ns=20_000_000)
        except TimeoutError:
            assert engine.poll(ticket) is None
            os.eventfd_write(fd, 1)
            assert engine.wait(ticket).status == 0
        else:
            assert early.status == -errno.ESPIPE
    finally:
        os.close(fd)


def test_what_cannot_be_right_is_refused(engine: IoEngine, fd: int) -> None:
    for arguments in ((0, 10, 0), (1, -1, 0), (1, 10, -1), (1, 10, 2**63 - 5)):
        with pytest.raises(OSError) as caught:
            engine.submit("read", fd, *arguments)
        assert caught.value.errno == errno.EINVAL
    for depth, block in ((0, 4096), (5000, 4096), (4, 100), (4, 2**31)):
        with pytest.raises(OSError) as caught:
            IoEngine("threads", depth, block)
        assert caught.value.errno == errno.EINVAL


@pytest.mark.parametrize("kind", ["io_uring", "threads"])
def test_close_finishes_what_was_submitted(kind: str, fd: int) -> None:
    try:
        engine = IoEngine(kind, 2, BLOCK)
    except OSError as error:
        pytest.skip(f"no {kind} here: {error}")
    data = _noise(200 * BLOCK)
    engine.submit("write", fd, data.ctypes.data, len(data), 0)
    engine.close()
    engine.close()
    assert os.pread(fd, len(data), 0) == data.tobytes()


@pytest.mark.parametrize("kind", ["io_uring", "threads"])
def test_a_forked_child_is_refused_and_can_end(kind: str, fd: int) -> None:
    try:
        engine = IoEngine(kind, 2, BLOCK)
    except OSError as error:
        pytest.skip(f"no {kind} here: {error}")
    child = os.fork()
    if child == 0:
        status = 1
        try:
            engine.submit("fdatasync", fd, 0, 0, 0)
        except OSError as error:
            status = 0 if error.errno == errno.ECHILD else 2
        engine.close()
        os._exit(status)
    assert os.waitpid(child, 0)[1] == 0
    assert engine.wait(engine.submit("fdatasync", fd, 0, 0, 0)).status == 0
    engine.close()


@pytest.fixture
def ring() -> Iterator[IoEngine]:
    try:
        engine = IoEngine("io_uring", queue_depth=4, block_nbytes=BLOCK)
    except OSError as error:
        pytest.skip(f"no io_uring here: {error}")
    yield engine
    engine.close()


def _register(engine: IoEngine, address: int, nbytes: int) -> None:
    try:
        engine.register(address, nbytes)
    except OSError as error:
        if error.errno in (errno.EOPNOTSUPP, errno.ENOMEM):
            pytest.skip(f"no memory can be registered here: {error}")
        raise


def _refusal(call: Callable[[], object]) -> int | None:
    with pytest.raises(OSError) as caught:
        call()
    return caught.value.errno


def test_registered_memory_moves_the_same_bytes(ring: IoEngine, fd: int) -> None:
    arena = _native.Arena(64 * BLOCK)
    _register(ring, arena.address, 32 * BLOCK)
    buffer = np.frombuffer(arena.buffer(), np.uint8)
    buffer[:] = _noise(64 * BLOCK)
    before = buffer.copy()
    # Wholly inside, across the end of what is registered (that block is transferred the ordinary way), and outside.
    pieces = [(0, 16 * BLOCK), (20 * BLOCK + 100, 20 * BLOCK), (48 * BLOCK, 16 * BLOCK)]
    for start, nbytes in pieces:
        assert ring.wait(ring.submit("write", fd, arena.address + start, nbytes, start)) == (0, nbytes, -1)
    assert ring.stats().fixed_nbytes == 16 * BLOCK + 11 * BLOCK
    buffer[:] = 0
    for start, nbytes in pieces:
        assert ring.wait(ring.submit("read", fd, arena.address + start, nbytes, start)) == (0, nbytes, -1)
        assert np.array_equal(buffer[start : start + nbytes], before[start : start + nbytes])
    assert ring.stats().fixed_nbytes == 2 * 27 * BLOCK
    assert ring.stats().registered_nbytes == 32 * BLOCK
    ring.unregister(arena.address)
    assert ring.stats().registered_nbytes == 0
    assert ring.wait(ring.submit("read", fd, arena.address, BLOCK, 0)).status == 0
    assert ring.stats().fixed_nbytes == 2 * 27 * BLOCK


def test_ranges_that_are_registered_do_not_overlap_and_go_one_by_one(ring: IoEngine) -> None:
    arena = _native.Arena(8 * BLOCK)
    _register(ring, arena.address, 4 * BLOCK)
    for start, count in ((0, 4), (3, 2), (0, 1)):
        assert _refusal(lambda s=start, n=count: ring.register(arena.address + s * BLOCK, n * BLOCK)) == errno.EEXIST
    ring.register(arena.address + 4 * BLOCK, 4 * BLOCK)
    assert _refusal(lambda: ring.unregister(arena.address + BLOCK)) == errno.ENOENT
    ring.unregister(arena.address)
    assert ring.stats().registered_nbytes == 4 * BLOCK
    assert _refusal(lambda: ring.unregister(arena.address)) == errno.ENOENT
    ring.close()
    ring.unregister(arena.address + 4 * BLOCK)  # closing did


def test_threads_register_nothing() -> None:
    engine = IoEngine("threads", 2, BLOCK)
    arena = _native.Arena(BLOCK)
    assert _refusal(lambda: engine.register(arena.address, BLOCK)) == errno.EOPNOTSUPP
    engine.close()


LIMITED = """
import os, resource, sys
from offload import _native
from offload.tiers.io.native import NativeBackend
resource.setrlimit(resource.RLIMIT_MEMLOCK, (65536, 65536))
if os.geteuid() == 0:
    os.setgid(65534)
    os.setuid(65534)
backend = NativeBackend("io_uring")
arena = _native.Arena(16 << 20)
undo = backend.register_memory(arena.address, arena.nbytes)
print(backend.stats().registered_nbytes)
undo()
backend.close()
"""


def test_beyond_the_limit_of_locked_memory_nothing_is_registered_and_nothing_fails(ring: IoEngine) -> None:
    done = WarmProcess.run(["-c", LIMITED], 60)
    assert (done.returncode, done.stdout.strip()) == (0, "0"), done.stderr


def test_high_priority_starts_before_all_that_waits(tmp_path: Path) -> None:
    """However much low-priority work is queued, high priority waits for what is in flight and no more. (The queue is the
    same for both kinds of engine; io_uring can be held up at will.)"""
    try:
        engine = IoEngine("io_uring", queue_depth=1, block_nbytes=BLOCK)
    except OSError as error:
        pytest.skip(f"no io_uring here: {error}")
    fd, gate = os.open(tmp_path / "data", os.O_RDWR | os.O_CREAT), os.eventfd(0)
    try:
        os.ftruncate(fd, 8 * BLOCK)
        data, count, seen, late = (
            _noise(8 * BLOCK),
            np.zeros(8, np.uint8),
            np.ones(8 * BLOCK, np.uint8),
            np.zeros(8 * BLOCK, np.uint8),
        )
        held = engine.submit("read", gate, count.ctypes.data, 8, 0, PRIORITY_LOW)
        writes = [engine.submit("write", fd, data.ctypes.data, len(data), 0, PRIORITY_LOW) for _ in range(20)]
        last = engine.submit("read", fd, late.ctypes.data, len(late), 0, PRIORITY_LOW)
        first = engine.submit("read", fd, seen.ctypes.data, len(seen), 0, PRIORITY_HIGH)
        os.eventfd_write(gate, 1)
        assert all(engine.wait(ticket).status == 0 for ticket in (held, first, *writes, last))
        assert not seen.any(), "a write that was queued before the urgent read ran before it"
        assert np.array_equal(late, data)
    finally:
        engine.close()
        os.close(fd)
        os.close(gate)


def test_background_stands_aside(tmp_path: Path) -> None:
    """One block of it at a time beside others, and an eighth of the depth alone; what is urgent does not wait for it."""
    try:
        engine = IoEngine("io_uring", queue_depth=16, block_nbytes=BLOCK)
    except OSError as error:
        pytest.skip(f"no io_uring here: {error}")
    fd, gates = os.open(tmp_path / "data", os.O_RDWR | os.O_CREAT), [os.eventfd(0) for _ in range(3)]
    try:
        os.ftruncate(fd, BLOCK)
        counts, seen, late = np.zeros((3, 8), np.uint8), np.ones(BLOCK, np.uint8), np.ones(BLOCK, np.uint8)

        def held(index: int, priority: int) -> int:
            return engine.submit("read", gates[index], counts[index].ctypes.data, 8, 0, priority)

        other, first = held(0, PRIORITY_LOW), held(1, PRIORITY_BACKGROUND)
        second = engine.submit("read", fd, late.ctypes.data, BLOCK, 0, PRIORITY_BACKGROUND)
        urgent = engine.submit("read", fd, seen.ctypes.data, BLOCK, 0, PRIORITY_HIGH)
        assert engine.wait(urgent).status == 0 and not seen.any()
        assert engine.poll(second) is None and late.all(), "two background blocks beside another one"
        os.eventfd_write(gates[0], 1)
        assert engine.wait(other).status == 0
        assert engine.wait(second, 60_000_000_000).status == 0, "alone, a second one starts"
        third = held(2, PRIORITY_BACKGROUND)
        fourth = engine.submit("read", fd, seen.ctypes.data, BLOCK, 0, PRIORITY_BACKGROUND)
        assert engine.poll(fourth) is None, "more than an eighth of the depth"
        os.eventfd_write(gates[1], 1)
        os.eventfd_write(gates[2], 1)
        assert all(engine.wait(ticket).status == 0 for ticket in (first, third, fourth))
    finally:
        engine.close()
        for descriptor in (fd, *gates):
            os.close(descriptor)


@pytest.mark.parametrize("kind", ["io_uring", "threads"])
def test_background_work_is_all_done(tmp_path: Path, kind: str) -> None:
    """Beside others and after them, whatever comes in which order."""
    try:
        engine = IoEngine(kind, queue_depth=32, block_nbytes=BLOCK)
    except OSError as error:
        pytest.skip(f"no {kind} here: {error}")
    fd = os.open(tmp_path / "data", os.O_RDWR | os.O_CREAT)
    try:
        data, seen = _noise(64 * BLOCK), np.zeros(64 * BLOCK, np.uint8)
        priorities = (
            PRIORITY_BACKGROUND,
            PRIORITY_LOW,
            PRIORITY_BACKGROUND,
            PRIORITY_HIGH,
        )
        for operation, array in (("write", data), ("read", seen)):
            tickets = [
                engine.submit(operation, fd, array.ctypes.data + at * BLOCK, 4 * BLOCK, at * BLOCK, priorities[at // 4 % 4])
                for at in range(0, 64, 4)
            ]
            assert all(engine.wait(ticket, 60_000_000_000).status == 0 for ticket in tickets)
        assert np.array_equal(seen, data)
    finally:
        engine.close()
        os.close(fd)


@pytest.mark.skipif(not hasattr(_native.loaded(), "offload_io_wait_timed"), reason="built before it kept times")
@pytest.mark.parametrize("seen_by", ["wait", "poll"])
def test_a_ticket_keeps_its_times_where_that_is_asked(engine: IoEngine, fd: int, seen_by: str) -> None:
    data = _noise(3 * BLOCK)
    tickets = []
    for index in range(8):
        before = time.monotonic_ns()
        tickets.append((before, engine.submit("write", fd, data.ctypes.data, len(data), index * len(data))))
        tickets[-1][1].keep_times()
    plain = engine.submit("write", fd, data.ctypes.data, len(data), 0)
    for _, ticket in tickets:
        assert ticket.times is None
        while (engine.wait(ticket) if seen_by == "wait" else engine.poll(ticket)) is None:
            pass
    after = time.monotonic_ns()
    for before, ticket in tickets:
        assert ticket.times is not None and before <= ticket.times.began_ns <= ticket.times.ended_ns <= after
    assert engine.wait(plain).status == 0 and plain.times is None
