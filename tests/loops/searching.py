# SPDX-License-Identifier: Apache-2.0
"""Draws programs from seeds and judges each; every failure is shrunk on its own, from its seed."""

from __future__ import annotations

import json
import os
import subprocess
import time
from dataclasses import dataclass
from pathlib import Path

from hypothesis import HealthCheck, Phase, given, seed, settings

from .drawing import programs
from .judging import Stage
from .programs import Program

AT_ONCE = 10
"""Programs from one seed: after so many hypothesis varies what it drew before, instead of drawing anew."""

RECORD = os.environ.get("OFFLOAD_LOOPS_RECORD")
"""A file: of each seed a line of JSON is added, what was played of which version, and what failed."""

_RULES = settings(
    max_examples=AT_ONCE,
    database=None,
    deadline=None,
    suppress_health_check=list(HealthCheck),
    derandomize=False,  # the seed is given
    print_blob=False,
)


@dataclass(frozen=True)
class Failure:
    """A program that failed, and from which seed it was drawn."""

    seed: int
    ranks: int
    program: Program
    says: str
    widely: bool
    """How it was drawn."""


def play(stage: Stage, ranks: int, count: int, first_seed: int, *, widely: bool = False) -> list[Failure]:
    """Draw so many programs, judge each, and go on behind what fails. Returns the failures. `widely`: see `programs`."""
    failures: list[Failure] = []
    for number in range(first_seed, first_seed + count // AT_ONCE):
        began, before = time.monotonic(), len(failures)
        played = _play_seed(stage, ranks, number, failures, widely)
        _record(ranks, number, played, failures[before:], time.monotonic() - began)
    return failures


def _play_seed(stage: Stage, ranks: int, number: int, failures: list[Failure], widely: bool) -> int:
    played = 0

    def judge(program: Program) -> None:
        nonlocal played
        played += 1
        found = stage.verdict(program)
        if found is not None:
            failures.append(Failure(number, ranks, program, found, widely))

    seed(number)(settings(_RULES, phases=(Phase.generate,))(given(programs(ranks, widely=widely))(judge)))()
    return played


def shrunk(stage: Stage, failure: Failure) -> str:
    """The shortest program found that fails as well, and how."""

    def judge(program: Program) -> None:
        found = stage.verdict(program)
        assert found is None, f"{found}\n\nThe program:\n\n{program!r}"

    try:
        drawn = programs(failure.ranks, widely=failure.widely)
        seed(failure.seed)(settings(_RULES, phases=(Phase.generate, Phase.shrink))(given(drawn)(judge)))()
    except Exception as error:
        return f"Shrunk: {error}"
    return f"One, which did not fail again: {failure.says}\n\n{failure.program!r}"


def _record(ranks: int, number: int, played: int, failures: list[Failure], seconds: float) -> None:
    if RECORD is None:
        return
    failed = [{"program": repr(one.program), "says": one.says} for one in failures]
    line = {
        "version": _version(),
        "ranks": ranks,
        "seed": number,
        "played": played,
        "seconds": round(seconds, 1),
        "failed": failed,
    }
    with open(RECORD, "a") as file:
        file.write(json.dumps(line) + "\n")


def _version() -> str:
    command = ["git", "-C", str(Path(__file__).parent), "describe", "--always", "--dirty"]
    return subprocess.run(command, capture_output=True, text=True, check=False).stdout.strip()
