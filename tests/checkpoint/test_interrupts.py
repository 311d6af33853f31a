# SPDX-License-Identifier: Apache-2.0
"""KeyboardInterrupt at any moment of a step, a save or a load: every checkpoint that is there is what it says it is."""

from __future__ import annotations

import json
import threading
from pathlib import Path
from typing import Any

import pytest

from offload.device.lane import ThreadLane
from tests.threads import starting_threads
from tests.warm import WarmProcess

from .interrupting import PLACEMENTS


def interrupted(folder: Path, interrupts: int, seed: int) -> dict[str, dict[str, Any]]:
    """What came of so many interrupts in each placement."""
    arguments = {"folder": str(folder), "interrupts": interrupts, "seed": seed, "placements": list(PLACEMENTS)}
    done = WarmProcess.run(["-m", "tests.checkpoint.interrupting", json.dumps(arguments)], 1800)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]
    found: dict[str, dict[str, Any]] = {}
    for line in done.stdout.splitlines():
        found |= json.loads(line)
    for placement, one in found.items():
        assert one.get("wrong") == [] and one["interrupts"] >= interrupts, f"{placement}: {one}\n{done.stderr[-6000:]}"
    assert set(found) == set(PLACEMENTS)
    return found


def test_some_interrupts(tmp_path: Path) -> None:
    found = interrupted(tmp_path, 15, seed=1)
    assert sum(one["checkpoints"] for one in found.values()) >= 10


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(3))
def test_many_interrupts(tmp_path: Path, seed: int) -> None:
    found = interrupted(tmp_path, 150, seed)
    assert all(one["checkpoints"] >= 10 for one in found.values())


@pytest.mark.parametrize("comes_late", [False, True])
def test_one_thread_serves_a_lane_whose_start_was_interrupted(monkeypatch: pytest.MonkeyPatch, comes_late: bool) -> None:
    """An interrupt before the thread is known to run: the next job starts another, and `close` waits for the right one."""
    lane, started, start = ThreadLane("interrupted"), [], threading.Thread.start

    def interrupted_start(thread: Any) -> None:
        started.append(thread)
        if not comes_late:
            start(thread)
        thread._ident = None
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        starting_threads(patch, interrupted_start)
        with pytest.raises(KeyboardInterrupt):
            lane.submit(lambda: None)
    ran: list[int] = []
    lane.submit(lambda: ran.append(1)).wait()
    if comes_late:
        start(started[0])
    lane.submit(lambda: ran.append(2)).wait()
    closing = threading.Thread(target=lane.close, daemon=True)
    closing.start()
    closing.join(60)
    assert ran == [1, 2] and not closing.is_alive()
    assert not [thread for thread in threading.enumerate() if thread.name == "offload-interrupted"]
