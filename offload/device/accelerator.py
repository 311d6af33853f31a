# SPDX-License-Identifier: Apache-2.0
"""What the engine asks of a device: memory for units, copies, waits, host jobs. One implementation per kind of device.

Streams, as every implementation has them (on `cpu` they are empty words, the order of the program is theirs):

    compute   the caller's current stream; forward, backward and device-side updates run on it
    fetch     H2D copies of parameters
    drain     D2H copies of gradients
    ranks     collectives (a thread of its own hands them over, see `offload.ranks.rendezvous`)
    host      the lane of CPU work: optimizer updates, additions of accumulated gradients

Rules. A copy or job settles its `Pending`. `join(pending)` makes *compute* wait for it without blocking the host
where the device can do that. A source must stay unchanged, and a destination untouched, until its copy settled.
"""

from __future__ import annotations

import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager

import torch

from offload.device.device_memory import MemoryUse
from offload.device.lane import HostLane, Job
from offload.device.pending import Pending, Settled
from offload.device.rates import GPU, HOST, Rates
from offload.device.recording import COLLECTIVES, TRANSFER, OpRecorder, Stamp


class UnitMemory(ABC):
    """Device memory of one flat, at a fixed identity: views of `flat` that autograd saved stay valid across refills.

    `flat` is a uint8 tensor [nbytes]. Between `empty()` and the next `fill()` its contents do not exist and must not
    be touched. Owned by the thread that drives the model (hooks run there, or in autograd's thread, never both at once).
    """

    flat: torch.Tensor
    nbytes: int
    filled: bool
    stays = False
    """Whether it is filled for good."""

    def fill(self) -> None:
        """Give the flat memory; contents undefined. Precondition: not filled."""
        if self.filled:
            raise AssertionError("fill of a filled flat")
        self._gain()
        self.filled = True

    def empty(self) -> None:
        """Take the memory away. Precondition: filled, and nothing in flight reads or writes it."""
        if not self.filled:
            raise AssertionError("empty of an empty flat")
        self._lose()
        self.filled = False

    @abstractmethod
    def _gain(self) -> None:
        """What `fill` does on this device."""

    @abstractmethod
    def _lose(self) -> None:
        """What `empty` does on this device."""


class HomeMemory(UnitMemory):
    """A flat that is always there: parameters placed on the device, or in CPU memory that the device computes on."""

    stays = True

    def __init__(self, flat: torch.Tensor) -> None:
        self.flat = flat
        self.nbytes = flat.numel()
        self.filled = True

    def _gain(self) -> None:
        raise AssertionError("a home flat is always filled")

    def _lose(self) -> None:
        raise AssertionError("a home flat is never emptied")


def with_own_storage(part: torch.Tensor) -> torch.Tensor:
    """`part` (uint8, contiguous) with a storage that begins and ends where it does, over the same memory, kept alive by it.

    For memory that is filled for good: other libraries take tensors for one where they lie in one storage.
    """
    if part.is_meta:
        return part
    own: torch.Tensor = torch.utils.dlpack.from_dlpack(torch._C._to_dlpack(part))
    return own


class ResizedMemory(UnitMemory):
    """A flat whose storage keeps its identity and is resized to nothing and back (any torch device)."""

    def __init__(self, nbytes: int, device: torch.device) -> None:
        self.flat = torch.empty(nbytes, dtype=torch.uint8, device=device)
        self.nbytes = nbytes
        self.filled = True

    def _gain(self) -> None:
        self.flat.untyped_storage().resize_(self.nbytes)

    def _lose(self) -> None:
        self.flat.untyped_storage().resize_(0)


class Accelerator(ABC):
    """One device. `unified`: its memory is host memory that the I/O engine and the CPU kernels can address."""

    name: str
    device: torch.device
    unified: bool

    def __init__(self) -> None:
        self.recorder = OpRecorder(self)
        """What happens on it is told there."""

    @abstractmethod
    def unit_memory(self, nbytes: int) -> UnitMemory:
        """Device memory for one flat, filled."""

    def memory(self, nbytes: int) -> torch.Tensor:
        """Device memory that is there until its last tensor is gone: zeros, uint8 [nbytes]."""
        return torch.zeros(nbytes, dtype=torch.uint8, device=self.device)

    @abstractmethod
    def copy_in(self, destination: torch.Tensor, source: torch.Tensor) -> Pending:
        """H2D on the fetch stream. Same dtype and numel; `source` is host memory, pinned where that exists."""

    @abstractmethod
    def copy_out(self, destination: torch.Tensor, source: torch.Tensor) -> Pending:
        """D2H on the drain stream, after all work given to compute so far. `source` is kept alive until then."""

    def on_host(self, tensor: torch.Tensor) -> torch.Tensor:
        """`tensor`, which lies where the device computes, in host memory: itself where that is the same memory."""
        return tensor if self.unified else tensor.to("cpu")

    def host_twin(self, tensor: torch.Tensor) -> torch.Tensor:
        """Host memory for what `tensor`, which lies where the device computes, is to hold: itself where that is the same
        memory."""
        return tensor if self.unified else torch.empty_like(tensor, device="cpu")

    def copy_out_beside_compute(self, destination: torch.Tensor, source: torch.Tensor) -> Pending:
        """D2H on the drain stream of what compute was done with at the last `copy_in_after_compute`, and after the H2D copies
        issued so far. `source` is kept alive until then."""
        return self.copy_out(destination, source)

    copies_beside = False
    """Whether `copy_in` of host memory that the engine has returns before its bytes have moved."""

    def copy_in_after_compute(self) -> None:  # noqa: B027 - where copies run in the program's order there is nothing to do
        """H2D copies that are issued from now on wait for all work given to compute so far: it may still read their targets."""

    def copy_in_after(self, pending: Pending) -> None:
        """H2D copies that are issued from now on wait for `pending`, which writes their sources."""
        pending.wait()

    def wait_for_all(self) -> None:  # noqa: B027 - where a call is over when it returns there is nothing to do
        """Wait until all work given to the device is done, so that any stream may use what it made."""

    @abstractmethod
    def join(self, pending: Pending) -> None:
        """Make compute wait for `pending`."""

    def joins_at_once(self, pending: Pending) -> bool:
        """Whether `join` keeps no host waiting, as far as is known at once."""
        return pending.done()

    def on_compute(self, job: Job) -> Job:
        """`job`, to be run by whichever thread: device work that it gives to compute is the calling thread's compute."""
        return job

    def mark(self) -> Pending:
        """Settles when all work given to compute so far is done."""
        return Settled()

    @contextmanager
    def communicating(self, what: str, about: object, nbytes: int, after: Pending | None = None) -> Iterator[None]:
        """Device work inside is on the stream of what ranks send each other, behind `after` (a `mark`). From any thread.

        `what` is done with `nbytes` of the unit `about`."""
        if after is not None:
            after.wait()
        recording = self.recorder.to
        if recording is None:
            yield
            return
        with recording.span(COLLECTIVES, TRANSFER, what, about, nbytes=nbytes):
            yield

    def lock(self) -> AbstractContextManager[object]:
        """A reentrant lock, to be held also while waiting for what this device's lanes and copies do."""
        return threading.RLock()

    @abstractmethod
    def host_lane(self, name: str, *, waits_for_io: bool, waits_for_ranks: bool = False) -> HostLane:
        """The lane on which CPU work of this name runs. `waits_for_io`: its jobs block on files. `waits_for_ranks`: on
        what other ranks do, so that no thread that those may wait for runs them."""

    def rates(self) -> Rates:
        """How fast bytes move here: what is usual for such a machine, or was measured."""
        return HOST if self.unified else GPU

    # ---- time ----------------------------------------------------------------------------------------------------

    clock_ns: Callable[[], int] = staticmethod(time.monotonic_ns)
    """The time by which its work goes."""

    def begin_stamps(self) -> None:  # noqa: B027 - most have nothing to prepare
        """Stamps will be made."""

    def stamp(self) -> Stamp:
        """When it will have done all work given to compute so far."""
        now_ns = self.clock_ns()
        return lambda: now_ns

    def settle_stamps(self) -> None:  # noqa: B027 - where the host computes they are known at once
        """Wait until all stamps are known; where that would take time from what is recorded, some stay unknown."""

    # ---- memory --------------------------------------------------------------------------------------------------

    def pin(self, address: int, nbytes: int, *, is_written: bool = False) -> Callable[[], None] | None:
        """Register host memory for direct copies; returns what undoes it. `is_written`: what is there stays; else nobody has
        written to it yet.

        None: the device knows no such thing, or the system refused (which is said once, and only slower).
        """
        del address, nbytes, is_written
        return None

    def about_to_allocate(self, nbytes: int) -> None:  # noqa: B027 - most allocators reuse what is freed
        """Tensors of `nbytes` in all are about to be computed: what was freed must not stay with the allocator beside them."""

    def about_to_free(self, nbytes: int) -> None:  # noqa: B027 - as above
        """Tensors of `nbytes` in all are about to be freed and must not stay with the allocator."""

    def free_nbytes(self) -> int | None:
        """Device memory in bytes that tensors could be given, what the allocator keeps of freed ones among it; None where that
        means nothing (host memory is the device's memory)."""
        return None

    def memory_use(self) -> MemoryUse | None:
        """Without waiting for the device; None where `free_nbytes` means nothing."""
        return None

    def begin_peak(self) -> None:  # noqa: B027 - where nothing is counted there is nothing to do
        """The peak of `memory_use` counts from now on."""

    def peak_nbytes(self) -> int | None:
        """Peak bytes of device memory in use, as the device's allocator counts them; None where there is none."""
        return None

    def close(self) -> None:  # noqa: B027 - most devices hold nothing that needs closing
        """Give back what the device holds. Idempotent."""
