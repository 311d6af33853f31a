# SPDX-License-Identifier: Apache-2.0
"""The other ranks of a machine in numbers. All do the same, so one of them runs and the others say what it says.

bytes    an all-gather or a reduce-scatter of a flat sends and receives its bytes times (N-1)/N
link     between devices `Machine.peer`; where there is none, each device's own links and host memory
waits    nobody is late: a meeting is passed when this rank is there, a gather begins when it is asked for
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable
from dataclasses import dataclass, field

import torch
from torch import Tensor

from offload.device.virtual.current import virtual_machine
from offload.device.virtual.machine import VirtualMachine
from offload.device.virtual.operations import CountedOperations
from offload.device.virtual.simulation import Event, Simulation
from offload.ranks.group import Alone, Group
from offload.ranks.threads import Asked, Started, Threads, Waited
from offload.ranks.transport import DATA, Posted, Ranks


class _Latch:
    """As `offload.device.pending.Latch`."""

    def __init__(self, simulation: Simulation) -> None:
        self._event = Event(simulation)

    def set(self) -> None:
        if not self._event.done():
            self._event.settle()

    def wait(self) -> None:
        self._event.wait()


class _Asked:
    """As `queue.SimpleQueue`, for one thread that takes from it."""

    def __init__(self, simulation: Simulation) -> None:
        self._simulation = simulation
        self._count = 0
        self._waiting: _Latch | None = None

    def put(self, item: None) -> None:
        self._count += 1
        waiting, self._waiting = self._waiting, None
        if waiting is not None:
            waiting.set()

    def get(self, block: bool = True, timeout: float | None = None) -> None:
        if not self._count:
            self._waiting = waiting = _Latch(self._simulation)
            if timeout is not None:
                self._simulation.at(self._simulation.now + timeout, waiting.set)
            waiting.wait()
        if not self._count:
            raise queue.Empty
        self._count -= 1

    def empty(self) -> bool:
        return not self._count


class _Started:
    def __init__(self, over: Event) -> None:
        self._over = over

    def join(self) -> None:
        self._over.wait()


class _VirtualThreads(Threads):
    """Threads that take turns in virtual time."""

    def __init__(self, machine: VirtualMachine) -> None:
        self._machine, self._simulation = machine, machine.simulation

    def latch(self) -> Waited:
        return _Latch(self._simulation)

    def queue(self) -> Asked:
        return _Asked(self._simulation)

    def start(self, target: Callable[[], None], name: str) -> Started:
        over = Event(self._simulation)

        def run() -> None:
            self._simulation.join_in()
            try:
                with CountedOperations(self._machine):
                    target()
            finally:
                over.settle()
                self._simulation.leave()

        self._simulation.start_thread(threading.Thread(target=run, name=name, daemon=True))
        return _Started(over)


@dataclass(slots=True)
class _Wire(Posted):
    """Transfers under way. `into`: what is received, with its tag."""

    into: list[tuple[Tensor, int]] = field(default_factory=list)


class VirtualRanks(Ranks):
    """Rank 0 of the machine's. What goes point to point is the base's; here it is on a wire in numbers."""

    def __init__(self, machine: VirtualMachine) -> None:
        # Not the base's: there are no processes to connect.
        self._machine = machine
        count = machine.rank_count
        self.index = self.shard_index = self.order_digest = 0
        self.world_size = self.local_world_size = self.shard_count = count
        self.shards, self.replicas = tuple(range(count)), (0,)
        self.phase = "initialize"
        self._traffic = {}
        self.threads = _VirtualThreads(machine)
        self._said: dict[int, Tensor] = {}
        """By tag what this rank sent last."""
        self.close = lambda: None  # type: ignore[assignment]

    def renewed(self) -> VirtualRanks:
        return VirtualRanks(self._machine)

    def leave(self) -> None:
        pass  # nobody waits

    # ---- point to point ------------------------------------------------------------------------------------------

    def posted(self) -> Posted:
        return _Wire()

    def exchange(self, payload: Tensor) -> list[Tensor]:
        return [payload] * self.world_size

    def exchange_bytes(self, data: bytes) -> list[bytes]:
        return [data] * self.world_size

    def send(self, posted: Posted, tensor: Tensor, to: int, tag: int) -> None:
        self._said[tag] = tensor

    def receive(self, posted: Posted, tensor: Tensor, source: int, tag: int) -> None:
        assert isinstance(posted, _Wire)
        posted.into.append((tensor, tag))

    def settle(self, posted: Posted) -> None:
        assert isinstance(posted, _Wire)
        received, posted.into = posted.into, []
        nbytes = 0
        for tensor, tag in received:
            if tag == DATA:
                nbytes += tensor.nbytes
            else:
                tensor.copy_(self._said[tag])
        if nbytes:
            self._machine.exchange(nbytes).wait()

    def add_replicas(self, values: Tensor) -> None:
        """There are none."""

    # ---- between devices -----------------------------------------------------------------------------------------

    def use_devices(self, device: torch.device) -> None:
        self.has_devices = not self._machine.machine.is_unified

    def _send_of(self, whole: Tensor) -> None:
        self._machine.exchange(whole.nbytes * (self.world_size - 1) / self.world_size)

    def gather_on_device(self, whole: Tensor, own: Tensor) -> None:
        self._send_of(whole)
        self.count("gather", whole.nbytes)

    def exchange_on_device(self, into: Tensor, whole: Tensor) -> None:
        self._send_of(whole)
        self.count("reduce", whole.nbytes)

    def add_replicas_on_device(self, values: Tensor) -> None:
        """There are none."""

    # ---- failures ------------------------------------------------------------------------------------------------

    def say_failed(self, reason: str) -> None:
        """Nobody listens."""


def virtual_ranks() -> Group | None:
    """Those of the virtual machine; None on a real one."""
    machine = virtual_machine()
    if machine is None:
        return None
    return VirtualRanks(machine) if machine.rank_count > 1 else Alone()
