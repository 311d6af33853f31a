# SPDX-License-Identifier: Apache-2.0
"""An I/O backend whose faults, delays and order of completion come from a seed.

Nothing runs in the background: a transfer is queued when it is submitted and runs when somebody waits for it or asks
whether it is done, so a wait that was left out leaves the data unmoved, on any machine and every time. Which of the
queued transfers run first is drawn from the seed; transfers of one extent never overlap (`ExtentGuard`), so every
order is one that hardware could have chosen.
"""

from __future__ import annotations

import errno
import itertools
import os
import random
import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, NamedTuple

import pytest
from torch import Tensor

from offload.device.pending import Pending
from offload.tiers.io import aio
from offload.tiers.io.backend import IoMeter, IoStats, OpenFile, Priority, Transfer, not_registered
from offload.tiers.io.failure import transfer_error


@dataclass(frozen=True, slots=True)
class Fault:
    """What happens to one transfer.

    errno     it fails with `code` after about half of its bytes moved
    short     every call moves less than asked for, and some are interrupted; all bytes arrive in the end
    delay     it is done only after `poll_count` more questions, or when waited for
    bit_flip  one bit arrives changed, and nothing reports it
    """

    kind: Literal["errno", "short", "delay", "bit_flip"]
    code: int = errno.EIO
    poll_count: int = 16


def around_aio(patch: pytest.MonkeyPatch, name: Literal["_preadv", "_pwritev"], made: Callable[[Any], Any]) -> None:
    """What aiofiles calls for a transfer: `made` of what it would."""
    patch.setattr(aio, name, made(getattr(aio, name)))


def seeded_faults(seed: int, operation_count: int, rate: float, kinds: tuple[Fault, ...]) -> dict[int, Fault]:
    """About `rate` of the first `operation_count` transfers get one of `kinds`."""
    draw = random.Random(seed)
    return {index: draw.choice(kinds) for index in range(operation_count) if draw.random() < rate}


class Moved(NamedTuple):
    """One transfer that ran: `index` in order of submission, and the place that it read or wrote."""

    index: int
    kind: Literal["read", "write"]
    offset_nbytes: int
    nbytes: int
    path: Path

    @property
    def place(self) -> tuple[Path, int, int]:
        return self.path, self.offset_nbytes, self.nbytes


class _QueuedTransfer(Pending):
    def __init__(self, backend: FaultyBackend, index: int, file: OpenFile, tensor: Tensor, offset: int, is_write: bool) -> None:
        self.backend = backend
        self.index = index
        self.file = file
        self.tensor = tensor
        self.offset_nbytes = offset
        self.is_write = is_write
        self.fault = backend.faults.get(index)
        self.poll_count = self.fault.poll_count if self.fault is not None and self.fault.kind == "delay" else 0
        self.settled = False
        self.failure: Exception | None = None

    def wait(self) -> None:
        self.backend.run_until(self)
        self.backend.told.add(self.index)
        if self.failure is not None:
            raise self.failure

    def done(self) -> bool:
        self.backend.ask(self)
        return self.settled


class FaultyBackend:
    """Implements `IoBackend`. `faults`: by index of the transfer, counted from 0 in order of submission."""

    name = "faulty"

    def __init__(self, seed: int = 0, faults: Mapping[int, Fault] | None = None) -> None:
        self.faults = dict(faults or {})
        self.struck: dict[int, Path] = {}
        """The files of the transfers that met their fault."""
        self.log: list[Moved] = []
        """In the order in which they ran."""
        self.told: set[int] = set()
        """The transfers of which somebody waited for the end."""
        self._random = random.Random(seed)
        self._lock = threading.RLock()
        self._queue: list[_QueuedTransfer] = []
        self._serial = itertools.count()
        self._meter = IoMeter()
        self._closed = False

    def read(self, file: OpenFile, into: Tensor, offset_nbytes: int, *, priority: Priority) -> Pending:
        return self._submit(file, into, offset_nbytes, is_write=False)

    def write(self, file: OpenFile, source: Tensor, offset_nbytes: int, *, priority: Priority) -> Pending:
        return self._submit(file, source, offset_nbytes, is_write=True)

    def register_memory(self, address: int, nbytes: int) -> Callable[[], None]:
        return not_registered(address, nbytes)

    def stats(self) -> IoStats:
        return self._meter.stats()

    @property
    def submitted_count(self) -> int:
        return len(self.log) + len(self._queue)

    def was_looked_at(self, index: int) -> bool:
        """Whether somebody has looked at what transfer `index` moved: read it, from a place that had been written, and waited
        for that; or wrote it, and it was read so before its place was written again. Places are compared whole."""
        at = next((at for at, moved in enumerate(self.log) if moved.index == index), len(self.log))
        if at == len(self.log):
            return False
        place, before, after = self.log[at].place, self.log[:at], self.log[at + 1 :]
        if self.log[at].kind == "read":
            return index in self.told and any(moved.place == place and moved.kind == "write" for moved in before)
        later = [moved for moved in after if moved.place == place]
        reads = itertools.takewhile(lambda moved: moved.kind == "read", later)
        return any(moved.index in self.told for moved in reads)

    def close(self) -> None:
        with self._lock:
            self._closed = True
            while self._queue:
                self._run_one(self._queue)

    def run_until(self, transfer: _QueuedTransfer) -> None:
        with self._lock:
            while not transfer.settled:
                # Any of the others may overtake it; a delayed one comes last.
                prompt = [queued for queued in self._queue if queued is transfer or queued.poll_count == 0]
                self._run_one(prompt)

    def ask(self, transfer: _QueuedTransfer) -> None:
        with self._lock:
            if transfer.poll_count > 0:
                transfer.poll_count -= 1
            elif not transfer.settled and self._random.random() < 0.5:
                self._run(transfer)

    def _submit(self, file: OpenFile, tensor: Tensor, offset_nbytes: int, *, is_write: bool) -> Pending:
        with self._lock:
            assert not self._closed, "submitted to a closed backend"
            file.fileno()
            transfer = _QueuedTransfer(self, next(self._serial), file, tensor, offset_nbytes, is_write)
            self._queue.append(transfer)
            return transfer

    def _run_one(self, candidates: list[_QueuedTransfer]) -> None:
        self._run(self._random.choice(candidates))

    def _run(self, transfer: _QueuedTransfer) -> None:
        self._queue.remove(transfer)
        self._meter.begin(is_write=transfer.is_write)
        if transfer.fault is not None:
            self.struck[transfer.index] = transfer.file.path
        kind: Literal["read", "write"] = "write" if transfer.is_write else "read"
        self.log.append(Moved(transfer.index, kind, transfer.offset_nbytes, transfer.tensor.numel(), transfer.file.path))
        block, code = self._move(transfer)
        if code:
            transfer.failure = transfer_error(
                is_write=transfer.is_write,
                path=transfer.file.path,
                offset_nbytes=transfer.offset_nbytes + block.done_nbytes,
                nbytes=len(block.view),
                done_nbytes=block.done_nbytes,
                code=code,
            )
        self._meter.end(block.done_nbytes, is_write=transfer.is_write)
        transfer.settled = True

    def _move(self, transfer: _QueuedTransfer) -> tuple[Transfer, int]:
        tensor, fault = transfer.tensor, transfer.fault
        if fault is not None and fault.kind == "bit_flip" and transfer.is_write:
            tensor = _aligned_copy(tensor)
            self._flip(tensor)
        block = Transfer(transfer.file.fileno(), tensor.numpy().data, transfer.offset_nbytes, is_write=transfer.is_write)
        code = 0
        while code == 0 and not block.finished:
            code = block.advance(self._call(block, fault))
        if fault is not None and fault.kind == "bit_flip" and not transfer.is_write:
            self._flip(tensor)
        return block, code

    def _call(self, block: Transfer, fault: Fault | None) -> int:
        """One preadv or pwritev, or what the fault makes of it."""
        allowed_nbytes = len(block.view) - block.done_nbytes
        if fault is not None and fault.kind == "errno":
            half_nbytes = len(block.view) // 2 // 4096 * 4096
            if block.done_nbytes >= half_nbytes:
                return -fault.code
            allowed_nbytes = half_nbytes - block.done_nbytes
        elif fault is not None and fault.kind == "short":
            draw = self._random.random()
            if draw < 0.2:
                return -self._random.choice((errno.EINTR, errno.EAGAIN))
            if draw < 0.7:
                allowed_nbytes = max(4096, int(allowed_nbytes * draw) // 4096 * 4096)
        call = os.pwritev if block.is_write else os.preadv
        view = block.view[block.done_nbytes : block.done_nbytes + allowed_nbytes]
        try:
            result = call(block.fileno, [view], block.offset_nbytes + block.done_nbytes)
        except OSError as error:
            return -(error.errno or errno.EIO)
        if fault is not None and fault.kind == "short" and result > 4096 and self._random.random() < 0.3:
            return result - self._random.randrange(1, 4096)  # ends within a block
        return result

    def _flip(self, tensor: Tensor) -> None:
        position = self._random.randrange(tensor.numel())
        tensor[position] ^= 1 << self._random.randrange(8)


def _aligned_copy(tensor: Tensor) -> Tensor:
    from offload.tiers.memory import HostMemory

    copy = HostMemory(tensor.numel(), "bit flip").tensor
    copy.copy_(tensor)
    return copy
