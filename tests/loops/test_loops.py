# SPDX-License-Identifier: Apache-2.0
"""Any loop, by random search: the engine as drawn is the engine in memory, and PyTorch.

A program (`programs.py`) is a small model, where its states lie, and 10 to 60 operations as users write them. It is played
by plain PyTorch, by the engine in memory and by the engine as drawn. Every loss, norm, value read, checkpoint, and the
weights, moments and step counts at the end are equal between the engines to the bit, and within rounding of PyTorch; or
an operation is refused, for a reason in `refusals.py`, and everything goes on as if it had not been called.

On one rank an interrupt, or the fault of a drive (`drives.py`), leaves what was before the operation or what is behind it,
or an engine that says that it failed and loads the last checkpoint. Of two ranks it ends one process or both, the other finds
out, and new ones go on from the last checkpoint (`ends.py`).
"""

from __future__ import annotations

import os

import pytest

from .judging import Stage
from .searching import play, shrunk

QUICK_ALONE, QUICK_PAIRS = 170, 30
SOAK = int(os.environ.get("OFFLOAD_LOOPS_COUNT", "10000"))
SEED = int(os.environ.get("OFFLOAD_LOOPS_SEED", "1"))


def search(stage: Stage, ranks: int, count: int, first_seed: int, *, widely: bool = False) -> None:
    """Play so many programs; if any fail, shrink one of them, and name all."""
    failures = play(stage, ranks, count, first_seed, widely=widely)
    seeds = sorted({one.seed for one in failures})
    assert not failures, f"{len(failures)} of {count} programs failed, of the seeds {seeds}. {shrunk(stage, failures[0])}"


def test_any_loop(stage: Stage) -> None:
    search(stage, 1, QUICK_ALONE, 0)


def test_any_loop_on_two_ranks(stage: Stage) -> None:
    search(stage, 2, QUICK_PAIRS, 0)


@pytest.mark.slow
def test_any_loop_for_long(stage: Stage) -> None:
    search(stage, 1, SOAK - SOAK // 7, SEED * 1000000, widely=True)


@pytest.mark.slow
def test_any_loop_on_two_ranks_for_long(stage: Stage) -> None:
    search(stage, 2, SOAK // 7, SEED * 1000000, widely=True)
