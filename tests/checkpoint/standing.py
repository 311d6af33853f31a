# SPDX-License-Identifier: Apache-2.0
"""Saves beside training that stand still for a while."""

from __future__ import annotations

import errno
import sys
import threading
import time
from collections import Counter
from pathlib import Path
from types import FrameType
from typing import Any

import pytest
import torch

from offload.checkpoint import state_reading
from offload.checkpoint.saving.copies import Copies
from offload.device.pending import Latch, Pending
from offload.step.residency.residency import Residency
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

    def go_when_an_update_waits(self) -> None:
        """For the save to let it overwrite a chunk, which it has told by then."""

        def look() -> None:
            until = time.monotonic() + 60
            while not any(_waits_for_a_save(frame) for frame in sys._current_frames().values()) and time.monotonic() < until:
                time.sleep(0.001)
            self.go.set()

        threading.Thread(target=look).start()


def _waits_for_a_save(frame: FrameType) -> bool:
    caller = frame.f_back
    return frame.f_code is Latch.wait.__code__ and caller is not None and caller.f_code is Copies.before_update.__code__


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
    """Of engines made after this: the first write of the next step's updates stands until they go on, and with it their lane.

    They are held before the step: after it nobody knows how far they are. Its updates begin at `step()`, since a backward that
    began them would wait for them."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self.reached = threading.Event()
        """Set as the lane stands."""
        self._go, self._seconds = threading.Event(), 0.0
        self._trainer: threading.Thread | None = None
        drives_from(patch, lambda: Told(self._before))

    def _before(self, path: Path, nbytes: int, offset_nbytes: int) -> None:
        # What the trainer itself writes are gradients.
        if self._trainer not in (None, threading.current_thread()) and path.suffix != ".safetensors":
            self._trainer = None
            self.reached.set()
            assert self._go.wait(60)
            time.sleep(self._seconds)

    def hold(self) -> None:
        """Those of the next step of this thread. Nothing is left of the steps before."""
        self._trainer = threading.current_thread()

    def go_on(self, after: float) -> None:
        """That many seconds from now. The lane stands."""
        assert self.reached.wait(60)
        self._seconds = after
        self._go.set()


class Hands:
    """Threads that are about the updates which are still to come: this one and those that start later. `most`: at once."""

    def __init__(self) -> None:
        self.most = 0
        self._inside: Counter[int] = Counter()
        self._lock = threading.Lock()

    def look(self, frame: FrameType, event: str, _: object) -> None:
        if frame.f_code in (Residency.finish_updates.__code__, Residency.finish_update.__code__):
            with self._lock:
                self._inside[threading.get_ident()] += (event == "call") - (event == "return")
                self.most = max(self.most, sum(map(bool, self._inside.values())))

    def __enter__(self) -> Hands:
        threading.setprofile(self.look)
        sys.setprofile(self.look)
        return self

    def __exit__(self, *_: object) -> None:
        threading.setprofile(None)
        sys.setprofile(None)


def chunk_count(run: Resumable) -> int:
    return sum(len(flat.layout.chunks) for unit in units_of(run.engine) for flat in unit.flats)


def begun_at_the_end(run: Resumable, folder: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """A save that takes the units in the order in which updates come last to them."""
    order = residency_of(run.engine).next_order()
    with monkeypatch.context() as patch:
        patch.setattr(residency_of(run.engine), "next_order", lambda: order[::-1])
        return run.engine.save_checkpoint(folder, client_state={"scheduler": run.scheduler.state_dict()}, wait=False)
