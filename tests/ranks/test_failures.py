# SPDX-License-Identifier: Apache-2.0
"""A rank that differs, fails, hangs or goes away: the others say which and where, within the timeout, and none hangs."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.warm import WarmProcess

from .crew import Crew

STAGE_3 = {"stage": 3, "parameters": "cpu", "optimizer_states": "cpu"}
TIMEOUT_SECONDS = 8


@pytest.mark.parametrize(
    ("what", "kinds", "words"),
    [
        ("config", {"ConfigError"}, ["max_grad_norm", "rank 1"]),
        ("shape", {"ConfigError"}, ["parameter '0.weight'", "rank 1"]),
        ("optimizer", {"ConfigError"}, ["rank 1"]),
        ("seed", {"ConfigError"}, ["the initial value of", "torch.manual_seed"]),
        ("failure", {"RankError", "ConfigError"}, ["failed on rank 1", "OFFLOAD_ACCELERATOR='abacus'"]),
    ],
)
def test_ranks_that_differ_are_told_so(pair: Crew, what: str, kinds: set[str], words: list[str]) -> None:
    """Before anything was trained; the group goes on to be of use."""
    errors = pair.errors("differing", what=what)
    assert {kind for kind, _ in errors} == kinds
    for word in words:
        assert any(word in message for _, message in errors), errors
    pair.do("narrow", fields={"stage": 2}, rows=[2, 2])


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"stage": 4}, ["stage=4", "expected one of 0, 1, 2, 3"]),
        ({"stage": 2, "parameters": "nvme", "nvme": "nowhere"}, ["stage=2", "stage=3", "parameters='device'"]),
    ],
)
def test_bad_stages(pair: Crew, fields: dict[str, Any], words: list[str]) -> None:
    for kind, message in pair.errors("narrow", fields=fields, rows=[1, 1]):
        assert kind == "ConfigError"
        assert all(word in message for word in words), message


SLOW = pytest.mark.slow


@pytest.mark.parametrize(
    ("how", "when"),
    [
        ("dies", "backward"),
        pytest.param("raises", "forward", marks=SLOW),
        pytest.param("hangs", "backward", marks=SLOW),
        pytest.param("dies", "forward", marks=SLOW),
        pytest.param("dies", "step", marks=SLOW),
        pytest.param("raises", "backward", marks=SLOW),
        pytest.param("raises", "step", marks=SLOW),
    ],
)
def test_a_rank_that_fails(fresh: Callable[..., Crew], how: str, when: str) -> None:
    crew = fresh(3, seconds=TIMEOUT_SECONDS)
    began = time.monotonic()
    crew.begin("failing", fields=STAGE_3, how=how, when=when)
    answers = crew.answers()
    assert time.monotonic() - began < TIMEOUT_SECONDS + 60  # with the start of three processes
    for rank in (0, 2):
        kind, message = answers[rank]["error"]
        assert kind in ("RankError", "EngineFailedError"), message
        assert "rank 1" in message and "phase" in message, message
        if how == "raises":
            assert "rank 1 has had enough" in message
    if how == "raises":
        assert answers[1]["error"] == ["ValueError", "rank 1 has had enough"]


@pytest.mark.parametrize(("when", "failing"), [("step", 1), ("export", 0)])
def test_a_rank_that_fails_and_lives_on(fresh: Callable[..., Crew], tmp_path: Path, when: str, failing: int) -> None:
    """Its script caught the error. The others hear of it at once, though neither it nor its connections' time ends."""
    crew = fresh(2, seconds=100)
    (tmp_path / "nvme").mkdir()
    began = time.monotonic()
    fields = {"stage": 3, "parameters": "nvme", "optimizer_states": "cpu"}
    said = crew.do("staying", fields=fields, folder=str(tmp_path), when=when, failing=failing)
    failed, other = said[failing], said[1 - failing]
    assert failed[0] == "StorageError", failed
    assert other[0] == "RankError" and f"rank {failing}" in other[1] and "Input/output error" in other[1], other
    assert time.monotonic() - began < 60


@pytest.mark.parametrize("where", ["new_group", "virtual_memory"])
def test_a_rank_that_dies_where_states_are_made_room_for(fresh: Callable[..., Crew], where: str) -> None:
    """It is seen at once, not when connecting anew has taken the group's time."""
    crew = fresh(2, seconds=200)
    began = time.monotonic()
    crew.begin("dying_in_refit", fields=STAGE_3, where=where)
    answer = crew.answers()[0]
    assert "error" in answer, f"{answer}\n{crew.said(0)}"
    kind, message = answer["error"]
    assert kind == "RankError" and "rank 1" in message and "newly trained parameters" in message, message
    assert time.monotonic() - began < 120


def test_a_rank_that_cannot_make_room_for_states_keeps_all_from_it(fresh: Callable[..., Crew], tmp_path: Path) -> None:
    """The others are told what came of it there, and all go on as if nothing had been unfrozen."""
    crew = fresh(2, seconds=60)
    fields = {"stage": 3, "parameters": "cpu", "optimizer_states": "nvme", "nvme": str(tmp_path)}
    found = crew.do("refused_refit", fields=fields, refusals=1)
    (there,), (here,) = (one.pop("said") for one in found[::-1])
    assert there == ["StorageError", "the drive is full"]
    assert here == ["RankError", "making the parts anew failed on rank 1: StorageError: the drive is full"]
    expected = crew.do("refused_refit", fields=fields, refusals=0)
    assert found == [{name: one[name] for name in ("losses", "weights")} for one in expected]


def test_a_rank_that_cannot_have_its_parts_again_ends_the_engine_on_all(fresh: Callable[..., Crew], tmp_path: Path) -> None:
    fields = {"stage": 3, "parameters": "cpu", "optimizer_states": "nvme", "nvme": str(tmp_path)}
    here, there = (one["said"] for one in fresh(2, seconds=60).do("refused_refit", fields=fields, refusals=2))
    assert there[0] == ["StorageError", "the drive is full"]
    assert here[0] == ["RankError", "making the parts anew failed on rank 1: StorageError: the drive is full"]
    assert there[1][0] == here[1][0] == "EngineFailedError"


def test_ranks_that_call_different_things(fresh: Callable[..., Crew]) -> None:
    for kind, message in fresh(2).errors("different_calls", fields=STAGE_3):
        assert kind == "RankError"
        assert "optimizer.step()" in message and "engine.state_dict()" in message


@pytest.mark.parametrize("fields", [STAGE_3, {"stage": 1}], ids=["stage 3", "stage 1"])
def test_ranks_that_write_different_values(fresh: Callable[..., Crew], fields: dict[str, Any]) -> None:
    for kind, message in fresh(2).errors("writes_differ", fields=fields):
        assert kind == "RankError"
        assert "lm_head.weight" in message and "gathered" in message


SCRIPT = """
import os
import torch, offload
from tests.ranks import jobs
from tests.acceptance.models import adamw, stack, vector_batches
jobs.settle()
rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
model = stack()
with offload.initialize(model, adamw(model), {"stage": 3}) as engine:  # no init_process_group: torchrun's environment is used
    for step in range(2):
        x, y = vector_batches(2 * world)[step * world + rank]
        torch.nn.functional.mse_loss(model(x), y).backward()
        engine.optimizer.step()
        engine.optimizer.zero_grad()
    digest = jobs.digest(engine.state_dict())
    with open(f"{os.path.dirname(__file__)}/rank-{rank}-of-{world}", "x") as said:  # on one stdout the ranks' lines may mix
        said.write(digest)
"""


def test_torchrun(tmp_path: Path) -> None:
    """The README's way to start several ranks; the process group is started for the user."""
    script = tmp_path / "script.py"
    script.write_text(SCRIPT)
    arguments = ["-m", "torch.distributed.run", "--nproc-per-node=2", "--standalone", str(script)]
    done = WarmProcess.run(arguments, 120, PYTHONPATH=str(Path(__file__).resolve().parents[2]))
    assert done.returncode == 0, done.stderr
    said = {file.name: file.read_text() for file in tmp_path.glob("rank-*")}
    assert said.keys() == {"rank-0-of-2", "rank-1-of-2"}
    assert len(set(said.values())) == 1
