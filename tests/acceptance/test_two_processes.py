# SPDX-License-Identifier: Apache-2.0
"""Two processes on one nvme path do not touch each other's data; a killed one leaves nothing that stops the next."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path
from typing import Any

from . import worker
from .models import IN_MEMORY, Setup
from .runs import CLIP, files_under

PLACEMENT = Setup("nvme", "nvme")


def arguments(directory: Path, seed: int, steps: int, announce: bool = False, setup: Setup = PLACEMENT) -> dict[str, Any]:
    fields = setup.fields(directory, dtype="bf16", max_grad_norm=CLIP)
    return {"fields": fields, "steps": steps, "width": 64, "announce": announce, "seed": seed}


def same(one: dict[str, Any], other: dict[str, Any]) -> bool:
    return bool(one["losses"] == other["losses"] and one["weights"] == other["weights"])


def test_two_at_once(nvme: Path) -> None:
    """Two models of one shape, so that names and sizes of all files would collide; each as in memory alone."""
    alone = [worker.train_bytes(**arguments(nvme, seed, 12, setup=IN_MEMORY)) for seed in (1, 2)]
    assert not same(alone[0], alone[1]), "the two runs must differ, or mixing them would not be seen"
    both = [worker.start(arguments(nvme, seed, 12)) for seed in (1, 2)]
    together = [worker.finish(process) for process in both]
    assert same(together[0], alone[0]) and same(together[1], alone[1])
    assert files_under(nvme) == []


def kill_within_a_step(nvme: Path, seed: int) -> None:
    process = worker.start(arguments(nvme, seed, 10_000, announce=True))
    try:
        assert process.stdout is not None
        line = process.stdout.readline()
        assert line == "started\n", (line, process.stderr.read() if process.stderr else "")
        time.sleep(0.3)
        assert process.poll() is None
    finally:
        os.kill(process.pid, signal.SIGKILL)
        process.communicate()


def test_a_killed_process_leaves_nothing_that_stops_the_next(nvme: Path) -> None:
    (nvme / "mine.txt").write_text("a user's file in the same folder")
    expected = worker.train_bytes(**arguments(nvme, 3, 5, setup=IN_MEMORY))
    kill_within_a_step(nvme, 4)
    after = worker.run(arguments(nvme, 3, 5))
    assert same(after, expected)
    assert files_under(nvme) == ["mine.txt"], "leftovers of a killed process (or a user's file is gone)"
    assert (nvme / "mine.txt").read_text() == "a user's file in the same folder"


def test_cleaning_up_after_the_dead_spares_the_living(nvme: Path) -> None:
    """One is killed while another trains; a third starts, cleans up, and the second still has its data."""
    expected = worker.train_bytes(**arguments(nvme, 6, 40, setup=IN_MEMORY))
    living = worker.start(arguments(nvme, 6, 40))
    kill_within_a_step(nvme, 7)
    third = worker.run(arguments(nvme, 8, 3))
    assert third["losses"]
    assert same(worker.finish(living), expected)
    assert files_under(nvme) == []


def test_interrupted_processes_end(nvme: Path) -> None:
    """SIGINT and SIGTERM in the middle of a step: they end within seconds, without a hang in a thread of ours."""
    signals = (signal.SIGINT, signal.SIGTERM)
    processes = [worker.start(arguments(nvme, 9, 10_000, announce=True)) for _ in signals]
    for process, number in zip(processes, signals, strict=True):
        assert process.stdout is not None and process.stdout.readline() == "started\n"
        process.send_signal(number)
    for process, number in zip(processes, signals, strict=True):
        _, err = process.communicate(timeout=60)
        assert process.returncode != 0
        if number == signal.SIGINT:
            assert "KeyboardInterrupt" in err, err
    assert worker.run(arguments(nvme, 3, 2))["losses"]
    assert files_under(nvme) == []
