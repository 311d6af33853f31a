# SPDX-License-Identifier: Apache-2.0
"""A crew: N processes in one gloo group, started once, each doing one job after the other. One alone is in no group.

They start at once (tests/warm.py). A member reads lines of JSON, {"job": a function of the jobs' module, "arguments": {...}},
and answers each with a line of JSON: {"result": ...} or {"error": [class, message]}.
"""

from __future__ import annotations

import contextlib
import importlib
import json
import os
import sys
import threading
import traceback
from pathlib import Path
from typing import Any

from tests.warm import WarmProcess

TIMEOUT_SECONDS = 120


class Crew:
    """Close it; `do` runs one job on all members and returns their answers by rank. `jobs`: the module that has the jobs."""

    def __init__(
        self, size: int, folder: Path, *, seconds: int = TIMEOUT_SECONDS, jobs: str = "tests.ranks.jobs", **variables: str
    ) -> None:
        self.size, self._seconds, self._folder = size, seconds, folder
        self.processes = [
            _Member(folder / f"stderr-{rank}", (rank, size, str(folder / "store"), seconds, jobs), variables)
            for rank in range(size)
        ]

    def begin(self, job: str, **arguments: Any) -> None:
        for process in self.processes:
            if process.poll() is None:
                process.stdin.write(json.dumps({"job": job, "arguments": arguments}) + "\n")
                process.stdin.flush()

    def answers(self) -> list[dict[str, Any]]:
        """By rank. A member that ended without one: {"ended": return code}. One that hangs fails the test."""
        found: list[dict[str, Any]] = [{} for _ in self.processes]
        threads = [threading.Thread(target=self._read, args=(rank, found), daemon=True) for rank in range(self.size)]
        for thread in threads:
            thread.start()
        for rank, thread in enumerate(threads):
            thread.join(self._seconds + 30)
            assert not thread.is_alive(), f"rank {rank} gave no answer:\n{self.said(rank)}"
        return found

    def _read(self, rank: int, found: list[dict[str, Any]]) -> None:
        process = self.processes[rank]
        line = process.stdout.readline()
        found[rank] = json.loads(line) if line else {"ended": process.wait(10)}

    def do(self, job: str, **arguments: Any) -> list[Any]:
        """The results of all members; an error on any of them fails the test."""
        self.begin(job, **arguments)
        answers = self.answers()
        for rank, answer in enumerate(answers):
            assert "result" in answer, f"rank {rank}: {answer}\n{self.said(rank)}"
        return [answer["result"] for answer in answers]

    def errors(self, job: str, **arguments: Any) -> list[tuple[str, str]]:
        """(class, message) of every member's error; a member without one fails the test."""
        self.begin(job, **arguments)
        answers = self.answers()
        for rank, answer in enumerate(answers):
            assert "error" in answer, f"rank {rank}: {answer}\n{self.said(rank)}"
        return [tuple(answer["error"]) for answer in answers]

    def said(self, rank: int) -> str:
        """The end of what the member wrote to stderr."""
        return (self._folder / f"stderr-{rank}").read_text()[-6000:]

    def close(self) -> None:
        for process in self.processes:
            process.kill()
        for process in self.processes:
            process.communicate()


class _Member(WarmProcess):
    """One of them, with a pipe to its standard input."""

    def __init__(self, stderr: Path, membership: tuple[int, int, str, int, str], variables: dict[str, str]) -> None:
        asked, ours = os.pipe()
        with open(asked, "rb") as stdin, stderr.open("wb") as said:
            argv = ["-c", f"from tests.ranks.crew import member; member{membership}"]
            super().__init__(argv, stdin=stdin.fileno(), stderr=said.fileno(), **variables)
        self.stdin = open(ours, "w")  # noqa: SIM115

    def _close(self) -> None:
        with contextlib.suppress(BrokenPipeError):
            self.stdin.close()
        super()._close()


def member(rank: int, size: int, store: str, seconds: int, module: str) -> None:
    """What a process of a crew does: jobs that come on standard input."""
    from datetime import timedelta

    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    jobs = importlib.import_module(module)
    jobs.settle()
    if size > 1:
        # gloo's thread spins while another one holds its connection, which the process that it has just written to puts off:
        # half of all that a crew computed. Nobody puts off another one of this class.
        os.sched_setscheduler(0, os.SCHED_BATCH, os.sched_param(0))
        dist.init_process_group("gloo", f"file://{store}", rank=rank, world_size=size, timeout=timedelta(seconds=seconds))
    for line in sys.stdin:
        asked = json.loads(line)
        try:
            answer = {"result": getattr(jobs, asked["job"])(**asked["arguments"])}
        except Exception as error:
            traceback.print_exc()
            answer = {"error": [type(error).__name__, str(error)]}
        print(json.dumps(answer), flush=True)
    os._exit(0)  # the others may be gone: nothing waits for them
