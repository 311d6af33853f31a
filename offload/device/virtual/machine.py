"""A machine that runs in virtual time: its resources, the queues in front of them, and the memory of its device."""

from __future__ import annotations

import weakref
from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

from offload.device.virtual import presence
from offload.device.virtual.description import Machine
from offload.device.virtual.links import Queue, Resource, Sharing
from offload.device.virtual.simulation import Event, Simulation

RESOURCES = ("h2d", "d2h", "nvme_read", "nvme_write", "nvme_both", "memory_bandwidth", "device_bandwidth", "flops")
"""Those fields of `Machine` that are rates."""


class VirtualMachine:
    """The resources of a machine and the queues in front of them.

    h2d, d2h, nvme read, nvme write, nvme   links; `nvme` is for both directions together
    memory, device memory                   what everything that reads or writes there shares
    flops                                   of the device
    """

    def __init__(self, machine: Machine) -> None:
        self.machine, self.simulation = machine, Simulation()
        self.cpu_nbytes, self.nvme_nbytes = int(machine.cpu_nbytes), int(machine.nvme_nbytes)
        self.sharing = Sharing(self.simulation)
        self.resources = {name: Resource(name, getattr(machine, name)) for name in RESOURCES}
        self.sharing.foreground = frozenset({self.resources["flops"], self.resources["device_bandwidth"]})
        self.compute, self.fetch, self.drain, self.reads, self.writes = (Queue(self.sharing) for _ in range(5))
        self.device_nbytes = self.peak_device_nbytes = self.late_peak_device_nbytes = 0
        """Now, at most, and at most since somebody began to look."""
        self.compute_seconds = 0.0
        """What the operations given to the device take there, one after another."""
        self.values_read = 0
        """How often the model asked for a value on the device, which there is none of."""

    @contextmanager
    def running(self) -> Iterator[None]:
        """Inside, this process runs on this machine; the calling thread is the one that drives the model."""
        presence.enter(self)
        try:
            with self.simulation.running():
                yield
        finally:
            presence.leave()

    def call(self) -> None:
        """The calling thread asked for something."""
        self.simulation.spend(self.machine.call_seconds)

    def launch(self, flops: float, nbytes: float) -> None:
        """One operation on the device, behind those before it."""
        self.simulation.spend(self.machine.launch_seconds)
        self.compute_seconds += max(flops / self.machine.flops, nbytes / self.machine.device_bandwidth)
        self.compute.append(self.amounts({"flops": flops, "device_bandwidth": nbytes}))

    def amounts(self, named: dict[str, float]) -> dict[Resource, float]:
        return {self.resources[name]: amount for name, amount in named.items()}

    def pass_over(self, place: Tensor, nbytes: int) -> None:
        if place.is_meta:
            self.launch(0, nbytes)
            return
        self.call()
        self.sharing.start(self.amounts({"memory_bandwidth": nbytes})).wait()

    def transfer(self, nbytes: int, *, is_write: bool, priority: int) -> Event:
        self.call()
        direction, queue = ("nvme_write", self.writes) if is_write else ("nvme_read", self.reads)
        return queue.add(self.amounts({direction: nbytes, "nvme_both": nbytes, "memory_bandwidth": nbytes}), priority=priority)

    def transferred(self) -> tuple[float, float, float, float]:
        read, write = self.resources["nvme_read"], self.resources["nvme_write"]
        return read.moved, write.moved, read.busy_seconds, write.busy_seconds

    def value_read(self, dtype: torch.dtype) -> bool | int | float:
        """The model waits for the device and reads one number: conditions hold, numbers are 1."""
        self.values_read += 1
        self.compute.last.wait()
        if dtype is torch.bool:
            return True
        return 1.0 if dtype.is_floating_point else 1

    # ---- device memory -------------------------------------------------------------------------------------------

    def occupy(self, nbytes: int) -> None:
        """So many bytes of the device's memory more are in use; fewer where negative."""
        self.device_nbytes += nbytes
        self.peak_device_nbytes = max(self.peak_device_nbytes, self.device_nbytes)
        self.late_peak_device_nbytes = max(self.late_peak_device_nbytes, self.device_nbytes)

    def track(self, tensor: Tensor) -> None:
        """Count the tensor's memory until nothing refers to it."""
        storage = tensor.untyped_storage()
        self.occupy(storage.nbytes())
        weakref.finalize(storage, self.occupy, -storage.nbytes()).atexit = False
