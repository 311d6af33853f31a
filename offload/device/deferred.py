"""The deferred accelerator: a device on which every missing wait fails, on a laptop.

Device memory is CPU memory of its own. A copy or a host job does nothing when it is issued: it is put in the queue of
its stream and runs only when somebody waits for it (what was queued on the same stream before it runs first, as on a
real stream), or at a moment that the seed picks. Memory that was evicted, and memory that was filled but not yet
written, holds NaN (all bits set). So work that forgot to wait computes with NaN, and says so in the loss.
"""

from __future__ import annotations

import random
import weakref
from dataclasses import dataclass

import torch

from offload.device.accelerator import Accelerator, UnitMemory
from offload.device.lane import HostLane, InlineLane, Job
from offload.device.pending import Pending

_POISON = 0xFF


@dataclass(slots=True)
class _InUse:
    """What a device's allocator would count."""

    nbytes: int = 0
    peak_nbytes: int = 0

    def add(self, nbytes: int) -> None:
        self.nbytes += nbytes
        self.peak_nbytes = max(self.peak_nbytes, self.nbytes)


class _PoisonedMemory(UnitMemory):
    """Emptied memory is kept, and poisoned: reading it gives NaN in a loss instead of a crash without a word."""

    def __init__(self, nbytes: int, in_use: _InUse) -> None:
        self.flat = torch.full((nbytes,), _POISON, dtype=torch.uint8)
        self.nbytes = nbytes
        self.filled = True
        self._in_use = in_use
        in_use.nbytes += nbytes  # for a moment: what is not in use is emptied at once

    def _gain(self) -> None:
        """It is there, and poisoned since it was made or emptied."""
        self._in_use.add(self.nbytes)

    def _lose(self) -> None:
        self.flat.fill_(_POISON)
        self._in_use.add(-self.nbytes)


class _Deferred(Pending):
    """Work of one of this device's streams or lanes. A class of its own, so that tests can take its waits out."""

    def __init__(self, work: Pending) -> None:
        self._work = work

    def wait(self) -> None:
        self._work.wait()

    def done(self) -> bool:
        return self._work.done()


class _Stream(InlineLane):
    """Serves as a device stream and, with the same laziness, as a host lane."""

    def submit(self, job: Job) -> Pending:
        return _Deferred(super().submit(job))


class DeferredAccelerator(Accelerator):
    """See the module. `seed` decides which streams run ahead of the waits, and when; `nbytes`: what memory it says it has."""

    name = "deferred"
    unified = False

    def __init__(self, seed: int = 0, nbytes: int | None = None) -> None:
        self._nbytes = nbytes
        self.device = torch.device("cpu")
        self._random = random.Random(seed)
        self._fetch = _Stream()
        self._drain = _Stream()
        self._streams = [self._fetch, self._drain]
        self._in_use = _InUse()
        self.copied_in_nbytes = self.copied_out_nbytes = 0

    def _run_something(self) -> None:
        # Only the device's own streams run ahead: a host lane's job may wait for a stream, never the reverse.
        if self._random.random() < 0.25:
            self._random.choice(self._streams).run_one()

    def unit_memory(self, nbytes: int) -> UnitMemory:
        return _PoisonedMemory(nbytes, self._in_use)

    def memory(self, nbytes: int) -> torch.Tensor:
        self._in_use.add(nbytes)
        made = super().memory(nbytes)
        weakref.finalize(made, self._in_use.add, -nbytes)
        return made

    def free_nbytes(self) -> int | None:
        return None if self._nbytes is None else max(self._nbytes - self._in_use.nbytes, 0)

    def peak_nbytes(self) -> int:
        return self._in_use.peak_nbytes

    def copy_in(self, destination: torch.Tensor, source: torch.Tensor) -> Pending:
        self._run_something()
        self.copied_in_nbytes += source.nbytes
        return self._fetch.submit(lambda: _copy(destination, source))

    def copy_out(self, destination: torch.Tensor, source: torch.Tensor) -> Pending:
        self._run_something()
        self.copied_out_nbytes += source.nbytes
        return self._drain.submit(lambda: _copy(destination, source))

    def join(self, pending: Pending) -> None:
        pending.wait()

    def host_lane(self, name: str, *, waits_for_io: bool) -> HostLane:
        del name, waits_for_io
        return _Stream()

    def close(self) -> None:
        for stream in self._streams:
            stream.close()


def _copy(destination: torch.Tensor, source: torch.Tensor) -> None:
    with torch.no_grad():
        destination.detach().copy_(source.detach())
