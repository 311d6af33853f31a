# SPDX-License-Identifier: Apache-2.0
"""The deferred accelerator: a device on which every missing wait fails, on a laptop.

Device memory is CPU memory of its own. A copy or a host job does nothing when it is issued: it is put in the queue of
its stream and runs only when somebody waits for it (what was queued on the same stream before it runs first, as on a
real stream), or at a moment that the seed picks. Memory that was evicted, and memory that was filled but not yet
written, holds NaN (all bits set). So work that forgot to wait computes with NaN, and says so in the loss.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch.utils._python_dispatch import _disable_current_modes

from offload.device.accelerator import Accelerator, UnitMemory
from offload.device.device_memory import DeviceMemory, MemoryUse
from offload.device.lane import HostLane, InlineLane, Job, LaneRow, ThreadLane
from offload.device.pending import Pending
from offload.device.recording import D2H, H2D, TRANSFER
from offload.device.seen_operations import SeenOperations, tensors_in, with_new_storage

_POISON = 0xFF


class _CountedTensors(SeenOperations):
    """Memory of tensors that operations make, until nothing refers to it. For the calling thread, backward included."""

    def __init__(self, memory: DeviceMemory) -> None:
        super().__init__()
        self._memory = memory

    def seen(self, function: Any, args: Any, given: Mapping[str, Any]) -> Any:
        result = function(*args, **given)
        for one in with_new_storage(tensors_in((result,)), tensors_in((*args, *given.values()))):
            self._memory.hold(one)
        return result


class _PoisonedMemory(UnitMemory):
    """Emptied memory is kept, and poisoned: reading it gives NaN in a loss instead of a crash without a word."""

    def __init__(self, nbytes: int, memory: DeviceMemory) -> None:
        self.flat = torch.full((nbytes,), _POISON, dtype=torch.uint8, device="cpu")
        self.nbytes = nbytes
        self.filled = True
        self._memory = memory
        memory.nbytes += nbytes  # no limit: for a moment, what is not in use is emptied at once

    def _gain(self) -> None:
        """It is there, and poisoned since it was made or emptied."""
        self._memory.occupy(self.nbytes)

    def _lose(self) -> None:
        self.flat.fill_(_POISON)
        self._memory.occupy(-self.nbytes)


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

    def submit(self, job: Job, about: object = None, nbytes: int = 0) -> Pending:
        return _Deferred(super().submit(job, about, nbytes))


class DeferredAccelerator(Accelerator):
    """See the module. `seed` decides which streams run ahead of the waits, and when; `nbytes`: what memory it has, more raises
    `torch.OutOfMemoryError`."""

    name = "deferred"
    copies_beside = True
    unified = False

    def __init__(self, seed: int = 0, nbytes: int | None = None) -> None:
        super().__init__()
        self.device = torch.device("cpu")
        self._random = random.Random(seed)
        self._fetch, self._drain = (_Stream(told=LaneRow("copy", self.recorder, row=row, kind=TRANSFER)) for row in (H2D, D2H))
        self._streams = [self._fetch, self._drain]
        self._memory = DeviceMemory(nbytes)
        self.copied_in_nbytes = self.copied_out_nbytes = 0

    def _run_something(self) -> None:
        # Only the device's own streams run ahead: a host lane's job may wait for a stream, never the reverse.
        if self._random.random() < 0.25:
            self._random.choice(self._streams).run_one()

    def unit_memory(self, nbytes: int) -> UnitMemory:
        return _PoisonedMemory(nbytes, self._memory)

    def memory(self, nbytes: int) -> torch.Tensor:
        with _disable_current_modes():  # else it is counted twice
            made = super().memory(nbytes)
        self._memory.hold(made)
        return made

    def free_nbytes(self) -> int | None:
        limit = self._memory.limit_nbytes
        return None if limit is None else max(limit - self._memory.nbytes, 0)

    def memory_use(self) -> MemoryUse | None:
        limit = self._memory.limit_nbytes
        return None if limit is None else self._memory.use(limit)

    def begin_peak(self) -> None:
        self._memory.begin_peak()

    @contextmanager
    def counting(self) -> Iterator[None]:
        """Inside, what the calling thread's operations make (activations, gradients) lies in this device's memory too."""
        with _CountedTensors(self._memory):
            yield

    def peak_nbytes(self) -> int:
        return self._memory.peak_nbytes

    def copy_in(self, destination: torch.Tensor, source: torch.Tensor) -> Pending:
        self._run_something()
        self.copied_in_nbytes += source.nbytes
        return self._submit(self._fetch, destination, source)

    def copy_out(self, destination: torch.Tensor, source: torch.Tensor) -> Pending:
        self._run_something()
        self.copied_out_nbytes += source.nbytes
        return self._submit(self._drain, destination, source)

    def _submit(self, stream: _Stream, destination: torch.Tensor, source: torch.Tensor) -> Pending:
        recording = self.recorder.to
        about = recording.about_here() if recording is not None else None
        return stream.submit(lambda: _copy(destination, source), about, source.nbytes)

    def join(self, pending: Pending) -> None:
        pending.wait()

    def host_lane(self, name: str, *, waits_for_io: bool, waits_for_ranks: bool = False) -> HostLane:
        del waits_for_io
        told = LaneRow(name, self.recorder)
        return ThreadLane(name, told=told) if waits_for_ranks else _Stream(told=told)

    def close(self) -> None:
        for stream in self._streams:
            stream.close()


def _copy(destination: torch.Tensor, source: torch.Tensor) -> None:
    destination.detach().copy_(source.detach())
