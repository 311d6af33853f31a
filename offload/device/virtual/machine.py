# SPDX-License-Identifier: Apache-2.0
"""A machine that runs in virtual time: its resources, the queues in front of them, and the memory that is in use."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

import torch
from torch import Tensor

from offload.device.device_memory import DeviceMemory
from offload.device.virtual import current
from offload.device.virtual.description import Machine
from offload.device.virtual.links import Queue, Resource, Sharing
from offload.device.virtual.simulation import Event, Simulation

RESOURCES = ("h2d", "d2h", "nvme_read", "nvme_write", "nvme_both", "memory_bandwidth", "device_bandwidth", "flops")
"""Those fields of `Machine` that are rates, but for `flops_32`."""
CORES = "cores"
"""Where they compute the model, too: seconds of all of them. What else takes one of them holds up all: the model's operations
are over when the last core is through with its part."""
CALLS = "calls"
"""What the engine's own Python takes."""
_UNBOUND = 1e12
"""Times its rate, of a resource that is looked away from."""
COLLECTIVES = "collectives"
"""What ranks send each other: bytes that this one sends, as it receives as many."""


class VirtualMachine:
    """The resources of a machine and the queues in front of them: one for each field of `Machine` that is a rate; on a machine
    that computes on its cores, those.

    Host memory that a model computes on is on the meta device; host memory beside a device is addresses that nobody writes to.
    """

    def __init__(self, machine: Machine, rank_count: int = 1, unbound: Collection[str] = ()) -> None:
        """`rank_count`: one of so many ranks runs here, which all do the same; `machine` is its share (`share_of`). `unbound`:
        resources, or `CALLS`, that take no time, though the engine is told of the machine as it is: so it is seen what waiting
        for them costs."""
        self.machine, self.simulation = machine, Simulation()
        self.rank_count = rank_count
        self.cpu_nbytes, self.nvme_nbytes = int(machine.cpu_nbytes), int(machine.nvme_nbytes)
        self.sharing = Sharing(self.simulation)
        self.resources = {name: Resource(name, getattr(machine, name)) for name in RESOURCES}
        self.resources[CORES] = Resource(CORES, 1.0)
        self.resources[COLLECTIVES] = Resource(COLLECTIVES, machine.exchange)
        for name in set(unbound) - {CALLS}:
            self.resources[name].rate *= _UNBOUND
        self._call_seconds = 0.0 if CALLS in unbound else machine.call_seconds
        self.sharing.foreground = frozenset({self.resources["flops"], self.resources["device_bandwidth"]})
        self.compute, self.fetch, self.drain, self.reads, self.writes = (Queue(self.sharing) for _ in range(5))
        self.collectives = Queue(self.sharing)
        self.memory = DeviceMemory()
        """That of the device; where the model computes on host memory, that and all else that lies there."""
        self.compute_seconds = 0.0
        """What the operations given to the device take there, one after another."""
        self.calls = 0
        """How often the engine asked for a copy, a transfer or a pass."""
        self.values_read = 0
        """How often the model asked for a value on the device that there is none of."""
        self._left_out = 0
        self._lanes: set[int] = set()
        self._communicating: set[int] = set()
        self._as_written: dict[int, AsWritten] = {}

    @contextmanager
    def running(self) -> Iterator[None]:
        """Inside, this process runs on this machine; the calling thread is the one that drives the model."""
        current.enter(self)
        try:
            with self.simulation.running():
                yield
        finally:
            current.leave()

    def is_lane(self) -> None:
        """The calling thread does host work: it computes on the cores, not on the device."""
        self._lanes.add(threading.get_ident())

    @contextmanager
    def communicating(self) -> Iterator[None]:
        """What the calling thread gives to the device inside goes to the queue of what ranks send each other."""
        thread = threading.get_ident()
        self._communicating.add(thread)
        try:
            yield
        finally:
            self._communicating.discard(thread)

    @property
    def stream(self) -> Queue:
        """What the calling thread gives its device work to."""
        return self.collectives if threading.get_ident() in self._communicating else self.compute

    def leave_out(self, micro_batches: int) -> None:
        """So many of a step, before the next one, are counted and not run."""
        self._left_out += micro_batches

    def take_left_out(self) -> int:
        """How many micro-batches of the step, before the one that begins, are counted and not run; each is told of once."""
        count, self._left_out = self._left_out, 0
        return count

    # ---- work ----------------------------------------------------------------------------------------------------

    def call(self) -> None:
        """The calling thread asked for something."""
        self.calls += 1
        if self.machine.kind == "cpu" and threading.get_ident() in self._lanes:
            self.sharing.start(self.amounts({CORES: self._call_seconds})).wait()
        else:
            self.simulation.spend(self._call_seconds)

    def launch(self, flops: float, nbytes: float, *, wide: bool = False) -> None:
        """One operation of the model, behind those before it. `wide`: in 32 bits."""
        machine = self.machine
        if threading.get_ident() in self._lanes:
            self._pass_on_host(nbytes)
            return
        self.simulation.spend(machine.launch_seconds)
        if wide:
            flops *= machine.flops / machine.flops_32
        seconds = max(flops / machine.flops, nbytes / machine.device_bandwidth)
        self.compute_seconds += seconds
        amounts = {"flops": flops, "device_bandwidth": nbytes}
        if machine.is_unified:
            amounts["memory_bandwidth"] = nbytes
        if machine.kind == "cpu":
            self.sharing.start(self.amounts({**amounts, CORES: seconds})).wait()
        else:
            self.stream.append(self.amounts(amounts))

    def amounts(self, named: dict[str, float]) -> dict[Resource, float]:
        return {self.resources[name]: amount for name, amount in named.items()}

    def pass_over(self, place: Tensor, nbytes: int) -> None:
        """One pass over `nbytes`, by whoever computes on the memory in which `place` lies."""
        self.call()
        if place.is_meta and self.machine.kind != "cpu" and threading.get_ident() not in self._lanes:
            self.launch(0, nbytes)
        else:
            self._pass_on_host(nbytes)

    def _pass_on_host(self, nbytes: float) -> None:
        amounts = {"memory_bandwidth": nbytes} | self._cores(nbytes / self.machine.memory_bandwidth)
        self.sharing.start(self.amounts(amounts)).wait()

    def _cores(self, seconds: float) -> dict[str, float]:
        """What host work of so many seconds takes of the cores that compute the model, where they do."""
        return {CORES: seconds} if self.machine.kind == "cpu" else {}

    def transfer(self, nbytes: int, *, is_write: bool, priority: int) -> Event:
        """Read or write so many bytes of NVMe."""
        self.call()
        direction, queue = ("nvme_write", self.writes) if is_write else ("nvme_read", self.reads)
        amounts: dict[str, float] = {direction: nbytes, "nvme_both": nbytes, "memory_bandwidth": nbytes}
        return queue.add(self.amounts(amounts | self._cores(nbytes / self.machine.nvme_core)), priority=priority)

    def exchange(self, nbytes: float) -> Event:
        """Send the other ranks so many bytes, and receive as many."""
        self.call()
        machine, amounts = self.machine, {COLLECTIVES: nbytes}
        if not machine.peer:
            amounts["memory_bandwidth"] = 2 * nbytes
            amounts |= {} if machine.is_unified else {"h2d": nbytes, "d2h": nbytes}
        return self.collectives.add(self.amounts(amounts))

    def moved(self) -> dict[str, float]:
        """Bytes so far over each link, that of the ranks' exchange too; what that takes of others is not counted again."""
        names = ("h2d", "d2h", "nvme_read", "nvme_write", COLLECTIVES)
        found = {name: self.resources[name].moved for name in names}
        if not self.machine.peer and not self.machine.is_unified:
            found |= {name: found[name] - found[COLLECTIVES] for name in ("h2d", "d2h")}
        return found

    def transferred(self) -> tuple[float, float, float, float]:
        """Bytes of NVMe read and written, and the seconds in which reads and writes were in flight."""
        read, write = self.resources["nvme_read"], self.resources["nvme_write"]
        return read.moved, write.moved, read.busy_seconds, write.busy_seconds

    def value_read(self, dtype: torch.dtype, known: bool | int | float | None = None) -> bool | int | float:
        """The model waits for the device and reads one number. Where nobody knows it, conditions hold and numbers are 1."""
        self.stream.last.wait()
        if known is not None:
            return known
        self.values_read += 1
        if dtype is torch.bool:
            return True
        return 1.0 if dtype.is_floating_point else 1

    # ---- memory --------------------------------------------------------------------------------------------------

    def host_memory(self, nbytes: int) -> Tensor | None:
        """What stands for so many bytes of host memory: uint8 [nbytes]. Where the model computes on it, a tensor on
        the meta device, which counts with what the model takes; else None: addresses do that nobody writes to."""
        return torch.empty(nbytes, dtype=torch.uint8, device="meta") if self.machine.is_unified else None

    def takes_as_written(self, memory: Tensor) -> None:
        """Of the storage of `memory`, a mapping of host memory, a page is taken when it is written first."""
        if not (self.machine.is_unified and memory.is_meta):
            return
        storage = memory.untyped_storage()
        taken = self._as_written[storage._cdata] = AsWritten(storage.nbytes())
        self.memory.occupy(-taken.nbytes)
        weakref.finalize(storage, self._was_freed, storage._cdata).atexit = False

    def _was_freed(self, identity: int) -> None:
        self.memory.occupy(self._as_written.pop(identity).left_nbytes)  # all of it counts as freed (`DeviceMemory.hold`)

    def wrote(self, place: Tensor) -> None:
        """`place` was written."""
        memory = self._as_written.get(place.untyped_storage()._cdata)
        if memory is not None:
            before = memory.left_nbytes
            memory.parts.add((int(place.storage_offset()), place.nbytes))
            self.memory.occupy(before - memory.left_nbytes)

    @property
    def unwritten_nbytes(self) -> int:
        """Of memory that is taken as it is written, what was not yet."""
        return sum(memory.left_nbytes for memory in self._as_written.values())


@dataclass(slots=True)
class AsWritten:
    """Memory that is taken as it is written. `parts`: what was, by offset and bytes; they do not overlap."""

    nbytes: int
    parts: set[tuple[int, int]] = field(default_factory=set)

    @property
    def left_nbytes(self) -> int:
        return max(self.nbytes - sum(nbytes for _, nbytes in self.parts), 0)
