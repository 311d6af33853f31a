# SPDX-License-Identifier: Apache-2.0
"""`torch.cuda` played on the CPU, with a detector of races between streams and host threads.

Work runs at once, where it is issued, so numbers are right whatever the order. What is checked is the order that the
program *asked* for: every stream and every host thread has a vector clock, carried on by events, stream waits, locks, lane
jobs and launches. Two accesses to the same bytes, one of them a write, of which neither is ordered before the other, are
a race on a real device, and raise here. Accesses of two host threads to each other are not looked at.

Device memory is any tensor outside the engine's host memory. Its addresses are reused by the C library like blocks by
the caching allocator: at once, in the order of the compute stream and of no other.
"""

from __future__ import annotations

import contextlib
import ctypes
import mmap
import random
import threading
import time
import weakref
from collections.abc import Callable, Iterator, Sequence
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from offload import _native
from offload._native_library import UpdateSegmentStructure
from offload.device.arithmetic import kernels
from offload.device.arithmetic.encoding import SCALE_GROUP
from offload.device.arithmetic.flat import DTYPE_CODES
from offload.device.cuda import CudaAccelerator
from offload.device.lane import HostLane, ThreadLane
from offload.device.pending import Pending
from offload.model.taken_gradient import TakenGradient
from tests.device.kernel_files import no_kernels_loaded
from tests.devices import computed_on
from tests.native.paths import at_library_call

Clock = dict[Any, int]
_GRANULE_NBYTES = 64
_REGION_GRANULES = 4096
_ACTORS_MOST = 24
_NO_STREAM = -1
_lock_type, _rlock_type = threading.Lock, threading.RLock


class Race(AssertionError):
    """Two accesses that nothing orders."""


class _Region:
    """The last accesses to 256 KiB of addresses: by actor and 64 bytes, when (on the actor's clock) and which operation."""

    def __init__(self) -> None:
        self.times = {kind: np.zeros((_ACTORS_MOST, _REGION_GRANULES), np.int32) for kind in ("read", "write")}
        self.operations = {kind: np.zeros((_ACTORS_MOST, _REGION_GRANULES), np.int32) for kind in ("read", "write")}
        self.owners = np.full(_REGION_GRANULES, _NO_STREAM, np.int32)
        """The stream on which the memory was allocated."""

    def allocated(self, part: slice, owner: int = _NO_STREAM) -> None:
        """CUDA's allocator gives memory of one stream to no other: what another's had at this address was other memory."""
        others = np.flatnonzero(self.owners[part] != owner) + part.start
        for kind in ("read", "write"):
            self.times[kind][:, others] = 0
        self.owners[part] = owner


class _Allocator:
    """What torch's allocator counts: memory that operations made, each as large as it is now."""

    nbytes = 1 << 40
    """All there is."""

    def __init__(self) -> None:
        self._held: dict[int, weakref.ref[torch.UntypedStorage]] = {}
        self.peak_nbytes = 0

    def hold(self, made: torch.Tensor) -> None:
        storage = made.untyped_storage()
        self._held[id(storage)] = weakref.ref(storage)
        self.peak_nbytes = max(self.peak_nbytes, self.used_nbytes)

    @property
    def used_nbytes(self) -> int:
        known = self._held.copy()
        held = {key: storage for key, made in known.items() if (storage := made()) is not None}
        for key in known.keys() - held.keys():
            self._held.pop(key, None)
        return sum(storage.nbytes() for storage in held.values())

    def counts(self, device: object) -> dict[str, dict[str, dict[str, int]]]:
        used = self.used_nbytes
        now = {"current": used, "peak": max(self.peak_nbytes, used)}
        return {kind: {"all": now} for kind in ("allocated_bytes", "active_bytes", "reserved_bytes")}

    def begin_peak(self, device: object) -> None:
        self.peak_nbytes = 0

    def free_and_total(self, device: object) -> tuple[int, int]:
        return self.nbytes - self.used_nbytes, self.nbytes


class Detector:
    """The clocks and the accesses. Its own lock is not a part of the order."""

    def __init__(self, seed: int = 0) -> None:
        self.random = random.Random(seed)
        self.registered: dict[int, int] = {}
        self.unregistered: list[int] = []
        """Bytes of each copy from or into host memory that is not registered: it would hold up the thread that issues it."""
        self.host: dict[int, int] = {}
        self.allocator = _Allocator()
        self.kept: list[Any] = []
        self._guard = _lock_type()
        self._clocks: dict[Any, Clock] = {}
        self._actors: dict[Any, int] = {}
        self._regions: dict[int, _Region] = {}
        self.operations: list[str] = [""]

    def clock(self, actor: Any) -> Clock:
        return self._clocks.setdefault(actor, {})

    def thread(self) -> Clock:
        return self.clock(("thread", threading.get_ident()))

    def tick(self, actor: Any) -> Clock:
        clock = self.clock(actor)
        clock[actor] = clock.get(actor, 0) + 1
        return clock

    def snapshot(self) -> Clock:
        """What has happened before now in the calling thread."""
        return dict(self.tick(("thread", threading.get_ident())))

    def is_host(self, address: int) -> bool:
        return any(start <= address < start + nbytes for start, nbytes in list(self.host.items()))

    def operation(
        self, what: str, reads: list[torch.Tensor], writes: list[torch.Tensor], made: Sequence[torch.Tensor] = ()
    ) -> None:
        """An operation of the calling thread: on its current stream, unless all it touches is host memory. `made`: of `writes`
        what it allocated."""
        touched = [*reads, *writes]
        if not touched:
            return
        if all(self.is_host(tensor.data_ptr()) for tensor in touched):
            actor: Any = ("thread", threading.get_ident())
        else:
            actor = current_stream()
            join(self.clock(actor), self.snapshot())
        with self._guard:
            self.tick(actor)
            self.operations.append(what)
            for tensor in reads:
                self._access(actor, "read", tensor)
            for tensor in writes:
                self._access(actor, "write", tensor, is_made=any(tensor is one for one in made))

    def made_by_python(self, tensor: torch.Tensor) -> None:
        """Values out of Python, which are host memory; a device's tensor may have had the address."""
        with self._guard:
            for region, part in self._parts(tensor):
                region.allocated(part)

    def _access(self, actor: Any, kind: str, tensor: torch.Tensor, *, is_made: bool = False) -> None:
        own = self._actors.setdefault(actor, len(self._actors))
        for region, part in self._parts(tensor):
            if is_made:
                region.allocated(part, own)
            self._check(actor, region, "write", part)
            if kind == "write":
                self._check(actor, region, "read", part)
            region.times[kind][own, part] = self.clock(actor)[actor]
            region.operations[kind][own, part] = len(self.operations) - 1

    def _parts(self, tensor: torch.Tensor) -> Iterator[tuple[_Region, slice]]:
        """Where its memory lies, in granules."""
        extent = 1 + sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
        first = tensor.data_ptr() // _GRANULE_NBYTES
        stop = (tensor.data_ptr() + extent * tensor.element_size() - 1) // _GRANULE_NBYTES + 1
        while first < stop:
            number, low = divmod(first, _REGION_GRANULES)
            high = min(low + stop - first, _REGION_GRANULES)
            if number not in self._regions:
                self._regions[number] = _Region()
            yield self._regions[number], slice(low, high)
            first += high - low

    def _check(self, actor: Any, region: _Region, kind: str, part: slice) -> None:
        for other, index in self._actors.items():
            if other is actor or other == actor or (isinstance(actor, tuple) and isinstance(other, tuple)):
                continue
            late = np.flatnonzero(region.times[kind][index, part] > self.clock(actor).get(other, 0))
            if late.size:
                before = self.operations[region.operations[kind][index, part.start + late[0]]]
                raise Race(f"{self.operations[-1]} on {actor} is not ordered after {before} on {other}")


def join(clock: Clock, other: Clock) -> None:
    for actor, moment in other.items():
        clock[actor] = max(clock.get(actor, 0), moment)


_detector = Detector()
_local = threading.local()


class Stream:
    def __init__(self, name: str = "") -> None:
        self.name = name or f"stream-{id(self):x}"
        self.device = torch.device("cpu")

    def __repr__(self) -> str:
        return self.name

    def record_event(self) -> Event:
        event = Event()
        event.record(self)
        return event

    def wait_event(self, event: Event) -> None:
        join(_detector.clock(self), _detector.snapshot())
        join(_detector.clock(self), event.clock)

    def wait_stream(self, other: Stream) -> None:
        self.wait_event(other.record_event())

    def synchronize(self) -> None:
        join(_detector.thread(), _detector.clock(self))


DEFAULT = Stream("default")


def current_stream(device: Any = None) -> Stream:
    return getattr(_local, "stream", DEFAULT)


def synchronize(device: Any = None) -> None:
    """The host waits for every stream."""
    for actor in [actor for actor in list(_detector._clocks) if isinstance(actor, Stream)]:
        actor.synchronize()


class Event:
    def __init__(self, blocking: bool = False, enable_timing: bool = False) -> None:
        self.clock: Clock = {}
        self.has_time, self.recorded_ns = enable_timing, 0

    def elapsed_time(self, later: Event) -> float:
        assert self.has_time and later.has_time, "events without timing have no time"
        return (later.recorded_ns - self.recorded_ns) / 1e6

    def record(self, stream: Stream) -> None:
        self.recorded_ns = time.monotonic_ns()
        join(_detector.clock(stream), _detector.snapshot())
        self.clock = dict(_detector.clock(stream))

    def synchronize(self) -> None:
        join(_detector.thread(), self.clock)

    def query(self) -> bool:
        if _detector.random.random() < 0.5:
            return False  # not yet
        self.synchronize()
        return True


@contextlib.contextmanager
def stream(chosen: Stream) -> Iterator[None]:
    before = current_stream()
    _local.stream = chosen
    try:
        yield
    finally:
        _local.stream = before


class Watch(TorchDispatchMode):
    """Reports every operation of the thread it is entered in."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        result = func(*args, **kwargs)
        if func is torch.ops.aten.lift_fresh.default:
            for memory in _memories(result):
                _detector.made_by_python(memory)
        schema = func._schema
        is_view = any(one.alias_info is not None and not one.alias_info.is_write for one in schema.returns)
        if not is_view:
            reads, writes = [], list(_memories(result))
            made = list(writes) if all(one.alias_info is None for one in schema.returns) else []
            for declared, given in zip(schema.arguments, args, strict=False):
                written = declared.alias_info is not None and declared.alias_info.is_write
                (writes if written else reads).extend(_memories(given))
            reads.extend(_memories(kwargs))
            _detector.operation(str(func), reads, writes, made)
            for one in made:
                _detector.allocator.hold(one)
            if func is torch.ops.aten._local_scalar_dense.default:
                current_stream().synchronize()
            if func is torch.ops.aten.copy_.default and not (len(args) > 2 and args[2]):
                mixed = len({_detector.is_host(memory.data_ptr()) for memory in (*reads, *writes)}) > 1
                if mixed:
                    current_stream().synchronize()
        return result


def _memories(value: Any) -> Iterator[torch.Tensor]:
    for leaf in tree_leaves(value):
        has_memory = isinstance(leaf, torch.Tensor) and not leaf.is_meta and not isinstance(leaf, TakenGradient)
        if has_memory and leaf.layout is torch.strided and leaf.numel() and leaf.untyped_storage().nbytes():
            yield leaf


class _Followed(Pending):
    """Whoever sees that a job is over comes after what it did, also where no lock was taken."""

    def __init__(self, job: Pending, after: Clock) -> None:
        self._job, self._after = job, after

    def wait(self) -> None:
        try:
            self._job.wait()
        finally:
            join(_detector.thread(), self._after)

    def done(self) -> bool:
        found = self._job.done()
        if found:
            join(_detector.thread(), self._after)
        return found


class _WatchedLane(ThreadLane):
    """A lane's thread is watched too, and what happened before a job was handed over happened before it."""

    def submit(self, job: Callable[[], None], about: object = None, nbytes: int = 0) -> Pending:
        before, after = _detector.snapshot(), Clock()

        def watched() -> None:
            join(_detector.thread(), before)
            try:
                with Watch():
                    job()
            finally:
                after.update(_detector.snapshot())

        return _Followed(super().submit(watched, about, nbytes), after)


class PlayedAccelerator(CudaAccelerator):
    """`CudaAccelerator`, line by line, over the streams above; its device memory is the CPU's."""

    def __init__(self) -> None:
        super().__init__()
        self.device = torch.device("cpu")

    def host_lane(self, name: str, *, waits_for_io: bool, waits_for_ranks: bool = False) -> HostLane:
        made = super().host_lane(name, waits_for_io=waits_for_io, waits_for_ranks=waits_for_ranks)
        assert isinstance(made, ThreadLane)
        return _WatchedLane(name, begin=made._begin, told=made._told)

    def pin(self, address: int, nbytes: int, *, is_written: bool = False) -> Callable[[], None] | None:
        """What is freed when the play is over is not unregistered: there is nobody left who knows of it."""
        unpin, detector = super().pin(address, nbytes, is_written=is_written), _detector

        def undo() -> None:
            if unpin is not None and detector is _detector and torch.cuda.current_stream is current_stream:
                unpin()

        return undo if unpin is not None else None

    def copy_in(self, destination: torch.Tensor, source: torch.Tensor) -> Pending:
        self._note(source)
        return super().copy_in(destination, source)

    def copy_out(self, destination: torch.Tensor, source: torch.Tensor) -> Pending:
        self._note(destination)
        return super().copy_out(destination, source)

    def copy_out_beside_compute(self, destination: torch.Tensor, source: torch.Tensor) -> Pending:
        self._note(destination)
        return super().copy_out_beside_compute(destination, source)

    def on_host(self, tensor: torch.Tensor) -> torch.Tensor:
        """A copy, for which the host waits."""
        found = tensor.clone()
        current_stream().synchronize()
        return found

    def _note(self, host: torch.Tensor) -> None:
        """A copy is asynchronous only where the driver knows every byte of its host side."""
        start, stop = host.data_ptr(), host.data_ptr() + host.nbytes
        known = any(first <= start and stop <= first + nbytes for first, nbytes in list(_detector.registered.items()))
        if not known:
            _detector.unregistered.append(host.nbytes)


class _TrackedLock:
    """A lock that carries the order of the threads that hold it."""

    def __init__(self, lock: Any) -> None:
        self._lock, self._clock = lock, {}

    def acquire(self, *args: Any, **kwargs: Any) -> bool:
        taken = bool(self._lock.acquire(*args, **kwargs))
        if taken:
            join(_detector.thread(), self._clock)
        return taken

    def release(self) -> None:
        join(self._clock, _detector.snapshot())
        self._lock.release()

    def __enter__(self) -> bool:
        return self.acquire()

    def __exit__(self, *_: object) -> None:
        self.release()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._lock, name)


def play(monkeypatch: pytest.MonkeyPatch, seed: int = 0, kind: type[PlayedAccelerator] = PlayedAccelerator) -> Detector:
    """Put everything in place until the test ends. Returns the detector; enter `Watch()` around the training. `kind`: of the
    accelerator."""
    global _detector
    _detector = Detector(seed)
    cudart = SimpleNamespace(cudaHostRegister=_register, cudaHostUnregister=_unregister)
    plays = {
        "is_available": lambda: True,
        "current_device": lambda: 0,
        "set_device": lambda device: None,
        "device": lambda device: contextlib.nullcontext(),
        "Stream": lambda device: Stream(),
        "Event": Event,
        "current_stream": current_stream,
        "synchronize": synchronize,
        "stream": stream,
        "cudart": lambda: cudart,
        "mem_get_info": _detector.allocator.free_and_total,
        "memory_stats_as_nested_dict": _detector.allocator.counts,
        "reset_peak_memory_stats": _detector.allocator.begin_peak,
    }
    for name, value in plays.items():
        monkeypatch.setattr(torch.cuda, name, value)
    monkeypatch.setattr(torch.Tensor, "record_stream", lambda self, stream: _detector.kept.append(self.untyped_storage()))
    monkeypatch.setattr(threading, "Lock", lambda: _TrackedLock(_lock_type()))
    monkeypatch.setattr(threading, "RLock", lambda: _TrackedLock(_rlock_type()))
    no_kernels_loaded(monkeypatch, missing=[0])
    computed_on(monkeypatch, CudaAccelerator, lambda _: kind)
    monkeypatch.setattr(mmap, "mmap", _NotedMemory)
    _watch_kernels(monkeypatch)
    monkeypatch.setenv("OFFLOAD_ACCELERATOR", "cuda")
    return _detector


def at_registration(monkeypatch: pytest.MonkeyPatch, after: Callable[[int, int], int]) -> None:
    """Once host memory is registered: with its address and its bytes. Returns the code that is answered."""
    cudart = torch.cuda.cudart()
    register = cudart.cudaHostRegister

    def watched(address: int, nbytes: int, flags: int) -> int:
        assert register(address, nbytes, flags) == 0
        return after(address, nbytes)

    monkeypatch.setattr(cudart, "cudaHostRegister", watched)


def backward_elsewhere(monkeypatch: pytest.MonkeyPatch) -> None:
    """`Tensor.backward` runs in a thread of its own, on the stream that was current, as autograd does it for a GPU."""
    backward = torch.Tensor.backward

    def elsewhere(self: torch.Tensor, *args: Any, **keywords: Any) -> None:
        before, chosen = _detector.snapshot(), current_stream()
        after: list[Clock] = []

        def work() -> None:
            join(_detector.thread(), before)
            with stream(chosen), Watch():
                backward(self, *args, **keywords)
            after.append(_detector.snapshot())

        run_elsewhere(work)
        join(_detector.thread(), after[0])

    monkeypatch.setattr(torch.Tensor, "backward", elsewhere)


def run_elsewhere(work: Callable[[], None]) -> None:
    """Run to the end in another thread; what it raises is raised here."""
    failures: list[BaseException] = []

    def run() -> None:
        try:
            work()
        except BaseException as error:
            failures.append(error)

    thread = threading.Thread(target=run, name="autograd's")
    thread.start()
    thread.join()
    if failures:
        raise failures[0]


class _NotedMemory(mmap.mmap):
    """The host memory there is: nobody maps any but the engine."""

    def __new__(cls, fileno: int, nbytes: int, **how: Any) -> _NotedMemory:
        made = super().__new__(cls, fileno, nbytes, **how)
        address = torch.frombuffer(made, dtype=torch.uint8, count=1).data_ptr()
        _detector.host[address] = nbytes
        weakref.finalize(made, _detector.host.pop, address, None)
        return made


def _register(address: int, nbytes: int, flags: int) -> int:
    _detector.registered[address] = nbytes
    return 0


def _unregister(address: int) -> int:
    return 0 if _detector.registered.pop(address, None) is not None else 713


def _watch_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    """The native kernels are no torch operations: say what they touch."""

    def ingest(_: Any, dst: int | None, dtype: int, src: int, source_dtype: int, *given: Any) -> None:
        numel, start, accumulate, sums, _ = given
        target = _memory(dst, numel * _ITEMSIZES[dtype])
        found = _memory(sums, 8 * kernels.touched_block_count(start, numel))
        reads = [*_memory(src, numel * _ITEMSIZES[source_dtype]), *(target if accumulate else [])]
        _kernel("ingest", reads, [*target, *found])

    def ingest_all(_: Any, dst: int, dtype: int, first: int, parts: Any, sources: Any, count: int) -> None:
        for part, source in zip(parts[:count], sources[:count], strict=True):
            nbytes, low = part.numel * _ITEMSIZES[dtype], (part.start_index - first) * _ITEMSIZES[dtype]
            found = _memory(part.block_sums, 8 * kernels.touched_block_count(part.start_index, part.numel))
            _kernel("ingest", _memory(source, nbytes), [*_memory(dst + low, nbytes), *found])

    def convert(_: Any, dst: int, dtype: int, src: int, source_dtype: int, numel: int) -> None:
        reads, writes = _memory(src, numel * _ITEMSIZES[source_dtype]), _memory(dst, numel * _ITEMSIZES[dtype])
        _kernel("convert", reads, writes)

    def update(_: Any, segments: Any, count: int) -> None:
        of_segments = UpdateSegmentStructure * count
        for one in of_segments.from_address(segments) if isinstance(segments, int) else segments:
            master, moment = _STATE_ITEMSIZES[one.state_format]
            states = [*_memory(one.master, one.numel * master)]
            for address, nbytes in ((one.exp_avg, moment), (one.exp_avg_sq, moment)):
                states += _memory(address, one.numel * nbytes)
            for address in (one.exp_avg_scale, one.exp_avg_sq_scale):
                states += _memory(address, -(-one.numel // SCALE_GROUP))
            values = _memory(one.values, one.numel * _ITEMSIZES[one.values_dtype])
            gradient = _memory(one.grad, one.numel * _ITEMSIZES[one.grad_dtype])
            _kernel("update", [*gradient, *states, *(values if master == 2 else [])], [*states, *values])

    def update_summed(pool: Any, segments: Any, count: int, *_: Any) -> None:
        update(pool, segments, count)

    names = ("gradient_ingest", "gradients_ingest", "convert", "update", "update_summed")
    watches = zip(names, (ingest, ingest_all, convert, update, update_summed), strict=True)
    at_library_call(monkeypatch, {f"offload_{name}": watch for name, watch in watches})


_ITEMSIZES = {code: dtype.itemsize for dtype, code in DTYPE_CODES.items()}
_STATE_ITEMSIZES = {
    _native.STATE_FORMATS[name]: sizes
    for name, sizes in (
        ("fp32", (4, 4)),
        ("split", (2, 4)),
        ("bf16", (2, 2)),
        ("8bit", (2, 1)),
    )
}
"""By the code of a format: of the master, or its lower half beside the values, and of a moment."""


def _kernel(what: str, reads: list[torch.Tensor], writes: list[torch.Tensor]) -> None:
    """A kernel is the device's or the host's; of one on host memory what else it touches is PyTorch's own, and its thread's."""
    on_host = any(_detector.is_host(one.data_ptr()) for one in (*reads, *writes))
    kept = [[one for one in some if not on_host or _detector.is_host(one.data_ptr())] for some in (reads, writes)]
    _detector.operation(what, *kept)


def _memory(address: int | None, nbytes: int) -> list[torch.Tensor]:
    """What lies there, if anything does."""
    if not address or not nbytes:
        return []
    return [torch.frombuffer((ctypes.c_uint8 * nbytes).from_address(address), dtype=torch.uint8)]
