"""A device that exists only in numbers: tensors on the meta device, no bytes, and a virtual time at which each thing is done."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable

import torch

from offload.device.accelerator import Accelerator, UnitMemory
from offload.device.lane import HostLane, Job, LaneJob
from offload.device.pending import Pending
from offload.device.virtual.links import Queue, Resource, Sharing
from offload.device.virtual.machine import Machine
from offload.device.virtual.simulation import Event, Simulation


class VirtualMachine:
    """A machine's resources and queues in one simulation."""

    def __init__(self, machine: Machine) -> None:
        self.machine, self.simulation = machine, Simulation()
        self.sharing = Sharing(self.simulation)
        self.resources = {
            name: Resource(name, rate)
            for name, rate in {
                "h2d": machine.h2d, "d2h": machine.d2h, "memory": machine.memory_bandwidth, "flops": machine.flops,
                "device memory": machine.device_bandwidth, "nvme read": machine.nvme_read,
                "nvme write": machine.nvme_write, "nvme": machine.nvme_both,
            }.items()
        }  # fmt: skip
        self.compute, self.fetch, self.drain = (Queue(self.sharing) for _ in range(3))

    def amounts(self, **named: float) -> dict[Resource, float]:
        return {self.resources[name.replace("_", " ")]: amount for name, amount in named.items()}


class _VirtualMemory(UnitMemory):
    def __init__(self, nbytes: int) -> None:
        self.flat = torch.empty(nbytes, dtype=torch.uint8, device="meta")
        self.nbytes, self.filled = nbytes, True

    def _gain(self) -> None:
        """No byte of it exists."""

    def _lose(self) -> None:
        """As above."""


class _LaneJob(LaneJob):
    def __init__(self, simulation: Simulation, job: Job) -> None:
        super().__init__(job)
        self.end = Event(simulation)

    def wait(self) -> None:
        self.end.wait()
        self.raise_failure()

    def done(self) -> bool:
        return self.end.done()


class VirtualLane(HostLane):
    """A thread of its own, in virtual time."""

    def __init__(self, name: str, simulation: Simulation) -> None:
        self._name, self._simulation = name, simulation
        self._jobs: queue.SimpleQueue[_LaneJob | None] = queue.SimpleQueue()
        self._more: Event | None = None
        self._is_running = False

    def submit(self, job: Job) -> Pending:
        pending = _LaneJob(self._simulation, job)
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
        while True:
            if self._jobs.empty():
                self._more = Event(self._simulation)
                self._more.wait()
            job = self._jobs.get()
            if job is None:
                break
            try:
                job.run()
            finally:
                job.end.settle()
        self._is_running = False
        self._simulation.leave()

    def close(self) -> None:
        if self._is_running:
            self._put(None)


class VirtualAccelerator(Accelerator):
    name = "virtual"
    unified = False

    def __init__(self, machine: VirtualMachine) -> None:
        self.device = torch.device("meta")
        self.machine = machine
        self._simulation = machine.simulation
        self._host = machine.machine

    def unit_memory(self, nbytes: int) -> UnitMemory:
        return _VirtualMemory(nbytes)

    def copy_in(self, destination: torch.Tensor, source: torch.Tensor) -> Pending:
        self._simulation.spend(self._host.verb_seconds)
        return self.machine.fetch.add(self.machine.amounts(h2d=source.nbytes, memory=source.nbytes))

    def copy_out(self, destination: torch.Tensor, source: torch.Tensor) -> Pending:
        self._simulation.spend(self._host.verb_seconds)
        after = [self.machine.compute.last]
        return self.machine.drain.add(self.machine.amounts(d2h=source.nbytes, memory=source.nbytes), after=after)

    def copy_in_after_compute(self) -> None:
        self.machine.fetch.add({}, after=[self.machine.compute.last])

    def wait_for_all(self) -> None:
        for one in (self.machine.compute, self.machine.fetch, self.machine.drain):
            one.last.wait()

    def join(self, pending: Pending) -> None:
        self._simulation.spend(self._host.verb_seconds)
        if isinstance(pending, Event):
            self.machine.compute.add({}, after=[pending])
        else:
            pending.wait()

    def mark(self) -> Pending:
        return self.machine.compute.last

    def host_lane(self, name: str, *, waits_for_io: bool) -> HostLane:
        return VirtualLane(name, self._simulation)

    def pin(self, address: int, nbytes: int) -> Callable[[], None] | None:
        return None

    def free_nbytes(self) -> int | None:
        return self._host.device_nbytes
