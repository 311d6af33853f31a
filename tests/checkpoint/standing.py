# SPDX-License-Identifier: Apache-2.0
"""Saves beside training that stand still for a while."""

from __future__ import annotations

import errno
import threading
import time
from pathlib import Path
from typing import Any

import pytest
import torch

from offload.checkpoint import state_reading
from offload.device.pending import Pending
from offload.tiers.io.backend import OpenFile, Priority
from tests.drives import Told, drives_from
from tests.inside import residency_of, units_of
from tests.tiers.faulty_io import Fault, FaultyBackend

from .loops import Resumable


class Held:
    """The lane's reading of chunks, held up at some of them until it is let go."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, at: int) -> None:
        self.reached, self.go = threading.Event(), threading.Event()
        self.read: list[Any] = []
        original = state_reading.StateReader.begin

        def begin(reader: Any, chunk: Any, *given: Any, **named: Any) -> Any:
            self.read.append(chunk)
            if len(self.read) == at:
                self.reached.set()
                assert self.go.wait(60)
            return original(reader, chunk, *given, **named)

        monkeypatch.setattr(state_reading.StateReader, "begin", begin)


class FillingDrive(FaultyBackend):
    """One that holds no more than `room` writes of checkpoints, once that is said."""

    def __init__(self) -> None:
        super().__init__(1)
        self.room: int | None = None
        self.late = 0
        """Writes of checkpoints that began after somebody had been told of one without room."""
        self._full: set[int] = set()

    def write(self, file: OpenFile, source: torch.Tensor, offset_nbytes: int, *, priority: Priority) -> Pending:
        with self._lock:
            if file.path.suffix == ".safetensors" and self.room is not None:
                self.late += bool(self._full & self.told)
                if self.room == 0:
                    self._full.add(self.submitted_count)
                    self.faults[self.submitted_count] = Fault("errno", errno.ENOSPC)
                self.room = max(self.room - 1, 0)
            return super().write(file, source, offset_nbytes, priority=priority)

    @property
    def is_full(self) -> bool:
        """Whether something found no room."""
        return bool(self._full & set(self.struck))


class HeldUpdates:
    """Of engines made after this: what an update makes is written late, once that is told. Their lane stands there."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self.reached = threading.Event()
        """Set as the lane stands."""
        self._seconds, self._saves_wait = 0.0, False
        drives_from(patch, lambda: Told(self._before))

    def _before(self, path: Path, nbytes: int, offset_nbytes: int) -> None:
        if path.suffix == ".safetensors":
            assert not self._saves_wait or self.reached.wait(60)
        elif self._seconds:
            seconds, self._seconds = self._seconds, 0.0
            self.reached.set()
            time.sleep(seconds)

    def hold(self, seconds: float, *, saves_wait: bool = False) -> None:
        """The next one. `saves_wait`: saves write nothing before."""
        self.reached.clear()
        self._seconds, self._saves_wait = seconds, saves_wait


def chunk_count(run: Resumable) -> int:
    return sum(len(flat.layout.chunks) for unit in units_of(run.engine) for flat in unit.flats)


def begun_at_the_end(run: Resumable, folder: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """A save that takes the units in the order in which updates come last to them."""
    order = residency_of(run.engine).next_order()
    with monkeypatch.context() as patch:
        patch.setattr(residency_of(run.engine), "next_order", lambda: order[::-1])
        return run.engine.save_checkpoint(folder, client_state={"scheduler": run.scheduler.state_dict()}, wait=False)
