# SPDX-License-Identifier: Apache-2.0
"""Crews whose processes start at once: each is forked from one process that has imported everything and done nothing."""

from __future__ import annotations

import atexit
import multiprocessing
import os
import sys
import threading
from multiprocessing.connection import Connection
from typing import Any

from tests.ranks.crew import Crew, member

JOBS = "tests.loops.jobs"
_context = multiprocessing.get_context("forkserver")


class ForkedCrew(Crew):
    """See the module, and `Crew`."""

    def _started(self, rank: int, variables: dict[str, str]) -> _Forked:
        _context.set_forkserver_preload(["pytest", JOBS])
        return _Forked(str(self._folder / f"stderr-{rank}"), variables, self._membership(rank))


class _Forked:
    """What `Crew` asks of a `subprocess.Popen`."""

    def __init__(self, *arguments: Any) -> None:
        self._ours, theirs = _context.Pipe()
        self._process = _context.Process(target=_run, args=(theirs, *arguments), daemon=True)
        self._process.start()
        theirs.close()
        self.pid = self._process.pid
        self.stdin = open(self._ours.fileno(), "w", closefd=False)  # noqa: SIM115
        self.stdout = open(self._ours.fileno(), closefd=False)  # noqa: SIM115

    def poll(self) -> int | None:
        return self._process.exitcode

    def wait(self, seconds: float) -> int | None:
        self._process.join(seconds)
        return self._process.exitcode

    def kill(self) -> None:
        self._process.kill()

    def communicate(self) -> None:
        self._process.join()
        self._ours.close()


def _run(pipe: Connection, stderr: str, variables: dict[str, str], membership: tuple[int, int, str, int, str]) -> None:
    for name in [name for name in os.environ if name.startswith("OFFLOAD_")]:
        del os.environ[name]
    os.environ.update({"OFFLOAD_ACCELERATOR": "cpu", "OMP_NUM_THREADS": "1"} | variables)
    os.dup2(os.open(stderr, os.O_WRONLY | os.O_CREAT | os.O_TRUNC), 2)
    os.dup2(pipe.fileno(), 0)
    os.dup2(pipe.fileno(), 1)
    sys.stdin, sys.stdout, sys.stderr = open(0), open(1, "w"), open(2, "w", buffering=1)  # noqa: SIM115
    try:
        member(*membership)
    finally:
        threading._shutdown()  # the end of a process in its order, of which a fork server leaves out the last part
        atexit._run_exitfuncs()
