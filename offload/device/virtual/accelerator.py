"""A device in numbers: tensors on the meta device, no bytes, and a virtual time at which each thing is done."""

from __future__ import annotations

import queue
import threading
from contextlib import AbstractContextManager

import torch

from offload.device.accelerator import Accelerator, MemoryUse, UnitMemory
from offload.device.lane import HostLane, Job, LaneJob, LaneRow
from offload.device.pending import Pending
from offload.device.recording import D2H, H2D, Stamp
from offload.device.virtual.machine import VirtualMachine
from offload.device.virtual.operations import CountedOperations
from offload.device.virtual.simulation import Event, Mutex, Simulation


class _VirtualMemory(UnitMemory):
    """Counted as any tensor on the device is, and besides as it is filled and emptied."""

    def __init__(self, machine: VirtualMachine, nbytes: int) -> None:
        self.flat = torch.empty(nbytes, dtype=torch.uint8, device="meta")
        self.nbytes, self.filled, self._machine = nbytes, True, machine

    def _gain(self) -> None:
        self._machine.occupy(self.nbytes)

    def _lose(self) -> None:
        self._machine.occupy(-self.nbytes)


class _LaneJob(LaneJob):
    def __init__(self, simulation: Simulation, job: Job, told: LaneRow, about: object, nbytes: int) -> None:
        super().__init__(job, told, about, nbytes)
        self.end = Event(simulation)

    def wait(self) -> None:
        self.end.wait()
        self.raise_failure()

    def done(self) -> bool:
        return self.end.done()


class VirtualLane(HostLane):
    """A thread of its own, in virtual time."""

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


def _nanoseconds(seconds: float) -> int:
    return round(seconds * 1e9)


class VirtualAccelerator(Accelerator):
    """See the module. Host memory is reserved addresses that nobody writes to."""

    name = "virtual"
    unified = False

    def __init__(self, machine: VirtualMachine) -> None:
        super().__init__()
        self.device = torch.device("meta")
        self._machine = machine

    def unit_memory(self, nbytes: int) -> UnitMemory:
        return _VirtualMemory(self._machine, nbytes)

    def copy_in(self, destination: torch.Tensor, source: torch.Tensor) -> Pending:
        self._machine.call()
        amounts = self._machine.amounts({"h2d": source.nbytes, "memory_bandwidth": source.nbytes})
        return self._told(H2D, source.nbytes, self._machine.fetch.add(amounts))

    def copy_out(self, destination: torch.Tensor, source: torch.Tensor) -> Pending:
        self._machine.call()
        amounts = self._machine.amounts({"d2h": source.nbytes, "memory_bandwidth": source.nbytes})
        return self._told(D2H, source.nbytes, self._machine.drain.add(amounts, after=[self._machine.compute.last]))

    def _told(self, row: str, nbytes: int, copy: Event) -> Event:
        recording = self.recorder.to
        if recording is not None:
            recording.transfer(row, "copy", nbytes, copy)
        return copy

    def copy_in_after_compute(self) -> None:
        self._machine.fetch.add({}, after=[self._machine.compute.last])

    def wait_for_all(self) -> None:
        for queue_of_device in (self._machine.compute, self._machine.fetch, self._machine.drain):
            queue_of_device.last.wait()

    def join(self, pending: Pending) -> None:
        if isinstance(pending, Event):
            self._machine.compute.add({}, after=[pending])
        else:
            pending.wait()

    def mark(self) -> Pending:
        return self._machine.compute.last

    def lock(self) -> AbstractContextManager[object]:
        return Mutex(self._machine.simulation)

    def host_lane(self, name: str, *, waits_for_io: bool) -> HostLane:
        del waits_for_io
        return VirtualLane(name, self._machine, LaneRow(name, self.recorder))

    def clock_ns(self) -> int:
        return _nanoseconds(self._machine.simulation.now)

    def stamp(self) -> Stamp:
        event, now = self._machine.compute.last, self._machine.simulation.now
        return lambda: _nanoseconds(max(now, event.settled_at)) if event.done() else 0

    def free_nbytes(self) -> int | None:
        return int(self._machine.machine.device_nbytes) - self._machine.device_nbytes

    def memory_use(self) -> MemoryUse:
        machine = self._machine
        return MemoryUse(int(machine.machine.device_nbytes), machine.device_nbytes, machine.late_peak_device_nbytes)

    def begin_peak(self) -> None:
        self._machine.late_peak_device_nbytes = self._machine.device_nbytes

    def peak_nbytes(self) -> int | None:
        return self._machine.peak_device_nbytes
