# SPDX-License-Identifier: Apache-2.0
"""A device in numbers: tensors on the meta device, no bytes, and a virtual time at which each thing is done."""

from __future__ import annotations

import queue
import threading
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager

import torch
from torch.utils._python_dispatch import _disable_current_modes

from offload.device.accelerator import Accelerator, UnitMemory
from offload.device.device_memory import DeviceMemory, MemoryUse
from offload.device.host_memory.pages import PAGE_NBYTES
from offload.device.lane import HostLane, InlineLane, Job, LaneJob, LaneRow
from offload.device.pending import Pending, Settled
from offload.device.rates import Rates
from offload.device.recording import COLLECTIVES, D2H, H2D, Stamp
from offload.device.virtual.machine import VirtualMachine
from offload.device.virtual.operations import CountedOperations
from offload.device.virtual.simulation import Event, Mutex, Simulation
from offload.layout import round_up


class _VirtualMemory(UnitMemory):
    """Counted as any tensor on the device is, and besides as it is filled and emptied."""

    def __init__(self, memory: DeviceMemory, nbytes: int) -> None:
        self.flat = torch.empty(nbytes, dtype=torch.uint8, device="meta")
        self.nbytes, self.filled, self._memory = nbytes, True, memory

    def _gain(self) -> None:
        self._memory.occupy(self.nbytes)

    def _lose(self) -> None:
        self._memory.occupy(-self.nbytes)


class _FreePages:
    """Pages that a process on the CPU keeps for the next unit (`offload.device.host_memory.pages`)."""

    def __init__(self, memory: DeviceMemory) -> None:
        self._memory, self._nbytes = memory, 0

    def take(self, nbytes: int) -> None:
        missing = max(nbytes - self._nbytes, 0)
        self._memory.occupy(missing)
        self._nbytes += missing - nbytes

    def give_back(self, nbytes: int) -> None:
        self._nbytes += nbytes


class _VirtualPages(UnitMemory):
    """A flat's addresses, empty at first."""

    def __init__(self, free: _FreePages, nbytes: int) -> None:
        with _disable_current_modes():  # addresses take no memory
            self.flat = torch.empty(nbytes, dtype=torch.uint8, device="meta")
        self.nbytes, self.filled, self._free = nbytes, False, free
        self._pages_nbytes = round_up(nbytes, PAGE_NBYTES)

    def _gain(self) -> None:
        self._free.take(self._pages_nbytes)

    def _lose(self) -> None:
        self._free.give_back(self._pages_nbytes)


class _LaneJob(LaneJob):
    def __init__(self, simulation: Simulation, job: Job, told: LaneRow, about: object, nbytes: int) -> None:
        super().__init__(job, told, about, nbytes)
        self.end = Event(simulation)

    def wait(self) -> None:
        self.end.wait()
        super().wait()

    def done(self) -> bool:
        return self.end.done()


class VirtualLane(HostLane):
    """A thread of its own, in virtual time."""

    runs_beside = True
    _told: LaneRow

    def __init__(self, name: str, machine: VirtualMachine, told: LaneRow) -> None:
        self._name, self._machine, self._simulation, self._told = name, machine, machine.simulation, told
        self._jobs: queue.SimpleQueue[_LaneJob | None] = queue.SimpleQueue()
        self._more: Event | None = None
        self._is_running = False

    def submit(self, job: Job, about: object = None, nbytes: int = 0) -> Pending:
        pending = _LaneJob(self._simulation, job, self._told, about, nbytes)
        self._put(pending)
        return pending

    def _put(self, job: _LaneJob | None) -> None:
        self._jobs.put(job)
        if not self._is_running:
            self._is_running = True
            self._simulation.start_thread(threading.Thread(target=self._work, name=f"virtual-{self._name}", daemon=True))
        elif self._more is not None:
            more, self._more = self._more, None
            more.settle()

    def _work(self) -> None:
        self._simulation.join_in()
        self._machine.is_lane()
        with CountedOperations(self._machine):
            self._serve()
        self._is_running = False
        self._simulation.leave()

    def _serve(self) -> None:
        while True:
            if self._jobs.empty():
                self._more = Event(self._simulation)
                self._more.wait()
            job = self._jobs.get()
            if job is None:
                return
            try:
                job.run()
            finally:
                job.end.settle()

    def close(self) -> None:
        if self._is_running:
            self._put(None)


class _Between:
    """From the end of one event to that of another."""

    def __init__(self, began: Event, ended: Event) -> None:
        self._began, self._ended = began, ended

    def keep_times(self) -> None:
        """Events do."""

    def times_ns(self) -> tuple[int, int] | None:
        first, last = self._began.times_ns(), self._ended.times_ns()
        return (first[1], last[1]) if first is not None and last is not None else None


_CALLS_OF_A_CHUNK = 5
"""Of the lane that updates: reads, passes and writes that it asks for."""
_OPERATIONS_OF_A_UNIT = 50
"""Of the forward of a block."""


def _nanoseconds(seconds: float) -> int:
    return round(seconds * 1e9)


class VirtualAccelerator(Accelerator):
    """A device beside the host. See the module; host memory is reserved addresses that nobody writes to."""

    name = "virtual"
    unified = False

    def __init__(self, machine: VirtualMachine) -> None:
        super().__init__()
        self.device = torch.device("meta")
        self._machine = machine

    def unit_memory(self, nbytes: int) -> UnitMemory:
        return _VirtualMemory(self._machine.memory, nbytes)

    def copy_in(self, destination: torch.Tensor, source: torch.Tensor) -> Pending:
        self._machine.call()
        amounts = self._machine.amounts({"h2d": source.nbytes, "memory_bandwidth": source.nbytes})
        return self._told(H2D, source.nbytes, self._machine.fetch.add(amounts))

    def copy_out(self, destination: torch.Tensor, source: torch.Tensor) -> Pending:
        return self._copy_out_after(self._machine.stream.last, source)

    def copy_out_beside_compute(self, destination: torch.Tensor, source: torch.Tensor) -> Pending:
        return self._copy_out_after(self._machine.fetch.last, source)

    def _copy_out_after(self, event: Event, source: torch.Tensor) -> Pending:
        self._machine.call()
        amounts = self._machine.amounts({"d2h": source.nbytes, "memory_bandwidth": source.nbytes})
        return self._told(D2H, source.nbytes, self._machine.drain.add(amounts, after=[event]))

    def _told(self, row: str, nbytes: int, copy: Event) -> Event:
        recording = self.recorder.to
        if recording is not None:
            recording.transfer(row, "copy", nbytes, copy)
        return copy

    def copy_in_after_compute(self) -> None:
        self._machine.fetch.add({}, after=[self._machine.compute.last])

    def copy_in_after(self, pending: Pending) -> None:
        if isinstance(pending, Event):
            self._machine.fetch.add({}, after=[pending])
        else:
            pending.wait()

    def wait_for_all(self) -> None:
        machine = self._machine
        for queue_of_device in (machine.compute, machine.fetch, machine.drain, machine.collectives):
            queue_of_device.last.wait()

    def join(self, pending: Pending) -> None:
        if isinstance(pending, Event):
            self._machine.stream.add({}, after=[pending])
        else:
            pending.wait()

    def joins_at_once(self, pending: Pending) -> bool:
        return isinstance(pending, Event) or pending.done()

    def mark(self) -> Pending:
        return self._machine.stream.last

    @contextmanager
    def communicating(self, what: str, about: object, nbytes: int, after: Pending | None = None) -> Iterator[None]:
        queue_of_ranks, recording = self._machine.collectives, self.recorder.to
        with self._machine.communicating():
            if isinstance(after, Event):
                queue_of_ranks.add({}, after=[after])
            elif after is not None:
                after.wait()
            if recording is None:
                yield
                return
            began = queue_of_ranks.last
            yield
            recording.transfer(COLLECTIVES, what, nbytes, _Between(began, queue_of_ranks.last), about=about)

    def lock(self) -> AbstractContextManager[object]:
        return Mutex(self._machine.simulation)

    def host_lane(self, name: str, *, waits_for_io: bool, waits_for_ranks: bool = False) -> HostLane:
        del waits_for_io, waits_for_ranks
        return VirtualLane(name, self._machine, LaneRow(name, self.recorder))

    def rates(self) -> Rates:
        machine = self._machine.machine
        return Rates(
            machine.h2d,
            machine.d2h,
            machine.memory_bandwidth,
            machine.device_bandwidth,
            machine.nvme_read,
            machine.nvme_write,
            machine.nvme_both,
            machine.flops,
            _CALLS_OF_A_CHUNK * machine.call_seconds,
            0.0 if machine.kind == "cpu" else _OPERATIONS_OF_A_UNIT * machine.launch_seconds,
            f"those of the machine {machine.name}",
        )

    def clock_ns(self) -> int:
        return _nanoseconds(self._machine.simulation.now)

    def stamp(self) -> Stamp:
        event, now = self._machine.compute.last, self._machine.simulation.now
        return lambda: _nanoseconds(max(now, event.settled_at)) if event.done() else 0

    def free_nbytes(self) -> int | None:
        return int(self._machine.machine.device_nbytes) - self._machine.memory.nbytes

    def memory_use(self) -> MemoryUse | None:
        return self._machine.memory.use(int(self._machine.machine.device_nbytes))

    def begin_peak(self) -> None:
        self._machine.memory.begin_peak()

    def peak_nbytes(self) -> int | None:
        return self._machine.memory.peak_nbytes


class VirtualUnified(VirtualAccelerator):
    """A device that computes on host memory: nothing is staged, a copy is one within it."""

    unified = True

    def copy_in(self, destination: torch.Tensor, source: torch.Tensor) -> Pending:
        return self._copied(source)

    def _copy_out_after(self, event: Event, source: torch.Tensor) -> Pending:
        return self._copied(source)

    def _copied(self, source: torch.Tensor) -> Pending:
        self._machine.pass_over(source, 2 * source.nbytes)
        return self.mark()

    # Its memory is host memory.
    free_nbytes, memory_use, peak_nbytes = Accelerator.free_nbytes, Accelerator.memory_use, Accelerator.peak_nbytes


class VirtualCpu(VirtualUnified):
    """The CPU, as `offload.device.cpu` has it: operations are over when they return."""

    def __init__(self, machine: VirtualMachine) -> None:
        super().__init__(machine)
        self._pages = _FreePages(machine.memory)

    def unit_memory(self, nbytes: int) -> UnitMemory:
        return _VirtualPages(self._pages, nbytes)

    def join(self, pending: Pending) -> None:
        pending.wait()

    joins_at_once = Accelerator.joins_at_once

    def mark(self) -> Pending:
        return Settled()

    communicating = Accelerator.communicating

    def host_lane(self, name: str, *, waits_for_io: bool, waits_for_ranks: bool = False) -> HostLane:
        row = LaneRow(name, self.recorder)
        return VirtualLane(name, self._machine, row) if waits_for_io or waits_for_ranks else InlineLane(self.lock(), row)


def accelerator_on(machine: VirtualMachine) -> VirtualAccelerator:
    """The one of that machine's kind."""
    kinds = {"gpu": VirtualAccelerator, "unified": VirtualUnified, "cpu": VirtualCpu}
    return kinds[machine.machine.kind](machine)
