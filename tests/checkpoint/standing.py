# SPDX-License-Identifier: Apache-2.0
"""Saves beside training that stand still for a while."""

from __future__ import annotations

import errno
import threading
from pathlib import Path
from typing import Any, Literal

import pytest

from offload.checkpoint import state_reading
from offload.checkpoint.format.staged_folder import write_failure
from offload.checkpoint.saving import unit_file
from tests.inside import residency_of, units_of

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


def full_drive(patch: pytest.MonkeyPatch, call: Literal["write", "finish"] = "write", after: int = 0) -> list[Any]:
    """No room for what a save writes but for so many chunks: at that call of a chunk's copy. Returns those that came so far."""
    written: list[Any] = []
    write = getattr(unit_file.ChunkCopy, call)

    def full(copy: Any, *given: Any) -> None:
        written.append(copy)
        if len(written) > after:
            raise write_failure("writing", Path("there"), OSError(errno.ENOSPC, "No space left on device"))
        write(copy, *given)

    patch.setattr(unit_file.ChunkCopy, call, full)
    return written


def chunk_count(run: Resumable) -> int:
    return sum(len(flat.layout.chunks) for unit in units_of(run.engine) for flat in unit.flats)


def begun_at_the_end(run: Resumable, folder: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """A save that takes the units in the order in which updates come last to them."""
    order = residency_of(run.engine).next_order()
    with monkeypatch.context() as patch:
        patch.setattr(residency_of(run.engine), "next_order", lambda: order[::-1])
        return run.engine.save_checkpoint(folder, client_state={"scheduler": run.scheduler.state_dict()}, wait=False)
