# SPDX-License-Identifier: Apache-2.0
"""What happens when: told by those who do it while somebody records, one row for each link and each lane.

    OpRecorder    what everybody asks: `to` is None while nobody records, and that is all it costs then
    Recording   the ops that were told of; and what torch.profiler or NVTX is told, where one of them listens
    Op          one of them: a copy, a transfer, a job, a phase, a wait

Times are nanoseconds of the clock that the device goes by (`Clock`): the host's monotonic one, or virtual time. What runs
beside the host (a stream, a drive) keeps its own times, which are asked for at the end (`Pending.times_ns`, `Stamp`).
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Protocol

import torch

MAIN, COMPUTE, H2D, D2H, COLLECTIVES, NVME_READ, NVME_WRITE = (
    "main thread",
    "compute",
    "H2D",
    "D2H",
    "collectives",
    "NVMe read",
    "NVMe write",
)
LINKS = (H2D, D2H, COLLECTIVES, NVME_READ, NVME_WRITE)
USE, WORK, WAIT, TRANSFER = "use", "work", "wait", "transfer"
"""Kinds: the model's own forward or backward through a unit; what the engine does; a wait; bytes that move."""

Stamp = Callable[[], int]
"""When the device got to where it was made; 0 while that is not known (`Clock.settle_stamps`)."""


def lane_row(name: str) -> str:
    """The row of the lane of that name."""
    return f"{name} lane"


class Timed(Protocol):
    """What keeps its own times; see `offload.device.pending.Pending`."""

    def keep_times(self) -> None: ...

    def times_ns(self) -> tuple[int, int] | None: ...


class Clock(Protocol):
    """The time by which a device's work goes."""

    def begin_stamps(self) -> None:
        """Stamps will be made."""
        ...

    def clock_ns(self) -> int:
        """Now."""
        ...

    def stamp(self) -> Stamp:
        """When the device will have done all that compute was given so far."""
        ...

    def settle_stamps(self) -> None:
        """Wait until all stamps are known; where that would take time from what is recorded, some stay unknown."""
        ...


@dataclass(slots=True, eq=False)
class Op:
    """One op. `about`: the unit, or a name; `place`: (store, extent) where only that is known. `awaits`: of a wait, the rows
    that are waited for. `end_ns` is 0 until it is over."""

    row: str
    kind: str
    name: str
    about: object = None
    place: object = None
    nbytes: int = 0
    awaits: tuple[str, ...] = ()
    start_ns: int = 0
    end_ns: int = 0
    transfer: Timed | None = None
    stamps: tuple[Stamp, Stamp | None] | None = None
    said: Callable[[], None] | None = None
    """Tells the profiler that listens that it is over."""


class Recording:
    """Ops in the order in which they were told of. Any thread may tell."""

    def __init__(self, clock: Clock, *, keeps: bool, emits_nvtx: bool = False) -> None:
        """`keeps`: its own ops; else only a profiler is told."""
        self._clock, self.keeps, self._emits_nvtx = clock, keeps, emits_nvtx
        self.has_listener = False
        """Whether torch.profiler records now."""
        self.ops: list[Op] = []
        self._here = threading.local()
        clock.begin_stamps()
        self.start_ns, self.end_ns = clock.clock_ns(), 0

    # ---- phases of a thread --------------------------------------------------------------------------------------

    def begin(
        self, row: str, kind: str, name: str, about: object = None, *, nbytes: int = 0, awaits: tuple[str, ...] = ()
    ) -> Op:
        """From now until `end` the calling thread is at it. What begins inside without `about` is about the same."""
        about = about if about is not None else self.about_here()
        op = Op(row, kind, name, about, nbytes=nbytes, awaits=awaits, start_ns=self._clock.clock_ns())
        self._stack().append(op)
        self._tell(op)
        return op

    def end(self, op: Op) -> None:
        """It is over; and so is what began inside it and was cut short."""
        op.end_ns = self._clock.clock_ns()
        stack = self._stack()
        if op in stack:
            del stack[stack.index(op) :]
        if op.said is not None:
            op.said()

    @contextmanager
    def span(self, row: str, kind: str, name: str, about: object = None, *, nbytes: int = 0) -> Iterator[None]:
        """`begin` and `end`."""
        op = self.begin(row, kind, name, about, nbytes=nbytes)
        try:
            yield
        finally:
            self.end(op)

    def begin_compute(self, kind: str, name: str, about: object, awaits: tuple[str, ...] = ()) -> tuple[Op, Op]:
        """The same of the thread that drives the model, and of what that gives to compute meanwhile. Uses may overlap, so
        nothing is taken to be inside."""
        host = Op(MAIN, kind, name, about, awaits=awaits, start_ns=self._clock.clock_ns())
        there = Op(COMPUTE, kind, name, about, awaits=awaits, stamps=(self._clock.stamp(), None))
        self._tell(host)
        self._keep(there)
        return host, there

    def end_compute(self, ops: tuple[Op, Op]) -> None:
        host, there = ops
        host.end_ns = self._clock.clock_ns()
        if there.stamps is not None:
            there.stamps = there.stamps[0], self._clock.stamp()
        if host.said is not None:
            host.said()

    @contextmanager
    def join(self, name: str, about: object, awaits: tuple[str, ...]) -> Iterator[None]:
        """What compute is given inside is a wait, and the host goes on."""
        began = self._clock.stamp()
        yield
        self._keep(Op(COMPUTE, WAIT, name, about, awaits=awaits, stamps=(began, self._clock.stamp())))

    def use(self, name: str, about: object) -> Callable[[], None]:
        """The model is in forward or backward through the unit, until what is returned is called."""
        ops = self.begin_compute(USE, name, about)
        return lambda: self.end_compute(ops)

    def about_here(self) -> object:
        """What the calling thread is at."""
        stack = self._stack()
        return stack[-1].about if stack else None

    # ---- transfers -----------------------------------------------------------------------------------------------

    def transfer(
        self, row: str, name: str, nbytes: int, under_way: Timed, *, about: object = None, place: object = None
    ) -> None:
        """It keeps its times itself. It is about what the thread is at, unless that is said, or `place` tells later."""
        if about is None and place is None:
            about = self.about_here()
        op = Op(row, TRANSFER, name, about, place=place, nbytes=nbytes)
        op.start_ns, op.transfer = self._clock.clock_ns(), under_way
        under_way.keep_times()
        self._tell(op)
        if op.said is not None:
            op.said()

    # ---- the end -------------------------------------------------------------------------------------------------

    def finish(self) -> list[Op]:
        """All ops with their times. What is not over ends now, and counts with all its bytes, as what was under way when the
        recording began does not count at all. What keeps no times is left out."""
        self._clock.settle_stamps()
        self.end_ns = self._clock.clock_ns()
        return [op for op in list(self.ops) if self._timed(op)]

    def _timed(self, op: Op) -> bool:
        if op.transfer is not None:
            times = op.transfer.times_ns()
            if times == (0, 0):
                return False
            op.start_ns, op.end_ns = times or (op.start_ns, 0)
        elif op.stamps is not None:
            first, last = op.stamps
            op.start_ns, op.end_ns = first(), last() if last is not None else 0
            if not op.start_ns:
                return False
        op.start_ns = max(op.start_ns, self.start_ns)
        op.end_ns = min(op.end_ns or self.end_ns, self.end_ns)
        return op.start_ns <= op.end_ns

    # ---- who listens ---------------------------------------------------------------------------------------------

    def _tell(self, op: Op) -> None:
        self._keep(op)
        if not (self.has_listener or self._emits_nvtx):
            return
        text = f"offload {op.row}: {op.name}"
        about = named(op.about)
        if about:
            text += f" {about}"
        if op.nbytes:
            text += f" ({op.nbytes} bytes)"
        op.said = _say(text, to_profiler=self.has_listener)

    def _keep(self, op: Op) -> None:
        if self.keeps:
            self.ops.append(op)

    def _stack(self) -> list[Op]:
        stack: list[Op] | None = getattr(self._here, "stack", None)
        if stack is None:
            stack = self._here.stack = []
        return stack


def named(about: object) -> str:
    """A unit's name, or what it is itself."""
    return "" if about is None else str(getattr(about, "name", about))


def _say(text: str, *, to_profiler: bool) -> Callable[[], None]:
    if to_profiler:
        function: Any = torch.autograd.profiler.record_function(text)
        function.__enter__()
        return lambda: function.__exit__(None, None, None)
    nvtx: Any = torch.cuda.nvtx
    number = nvtx.range_start(text)
    return lambda: nvtx.range_end(number)


def _profiler_enabled() -> bool:
    # One that listens to all threads does not answer to torch._C._autograd._profiler_enabled().
    return bool(torch.autograd.profiler._is_profiler_enabled)


class OpRecorder:
    """See the module. One for each accelerator."""

    __slots__ = ("_clock", "to")

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self.to: Recording | None = None

    def look(self) -> None:
        """A step begins: tell torch.profiler, where it has begun to listen, and no longer where it has ended."""
        listens = _profiler_enabled()
        if self.to is None:
            if not listens:
                return
            self.to = Recording(self._clock, keeps=False)
        self.to.has_listener = listens
        if not listens and not self.to.keeps:
            self.to = None

    def start(self, *, emits_nvtx: bool) -> Recording:
        """Record from now on."""
        self.to = recording = Recording(self._clock, keeps=True, emits_nvtx=emits_nvtx)
        recording.has_listener = _profiler_enabled()
        return recording

    def stop(self) -> None:
        """No longer."""
        self.to = None


class _NoClock:
    def clock_ns(self) -> int:
        return 0

    def begin_stamps(self) -> None:
        """There will be none."""

    def stamp(self) -> Stamp:
        return lambda: 0

    def settle_stamps(self) -> None:
        """There are none."""


NOBODY = OpRecorder(_NoClock())
"""Where nothing is ever recorded."""
