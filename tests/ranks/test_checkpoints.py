# SPDX-License-Identifier: Apache-2.0
"""Checkpoints of several ranks: written by all, loaded by any number; damage and kills."""

from __future__ import annotations

import os
import random
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file

from . import jobs
from .crew import Crew

CASES: dict[str, dict[str, Any]] = {
    "stage 0": {"stage": 0},
    "stage 1": {"stage": 1, "dtype": "bf16"},
    "stage 2, states on nvme": {"stage": 2, "optimizer_states": "nvme"},
    "stage 3 on cpu": {"stage": 3, "parameters": "cpu", "optimizer_states": "cpu"},
    "stage 3 on nvme": {"stage": 3, "parameters": "nvme", "optimizer_states": "nvme", "dtype": "bf16"},
}


def placed(name: str, folder: Path, **more: Any) -> dict[str, Any]:
    case = CASES[name]
    return case | ({"nvme": str(folder / "nvme")} if "nvme" in case.values() else {}) | more


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("wait", [True, False], ids=["waited for", "beside training"])
def test_resumed_on_as_many_ranks_to_the_bit(pair: Crew, tmp_path: Path, name: str, wait: bool) -> None:
    folder = str(tmp_path / "saved")
    ran = pair.do("save_and_go_on", fields=placed(name, tmp_path), folder=folder, wait=wait)
    resumed = pair.do("resume", fields=placed(name, tmp_path), folder=folder)
    assert resumed == ran  # weights, the losses after it, and what each rank's generator draws
    assert {path.suffix for path in Path(folder).iterdir()} == {".json", ".safetensors"}
    assert sorted(path.name for path in Path(folder).glob("*.json")) == ["MANIFEST.json"]


SLOW = pytest.mark.slow


@pytest.mark.parametrize(
    ("saving", "loading"),
    [
        (1, 2),
        pytest.param(4, 2, marks=SLOW),
        pytest.param(2, 4, marks=SLOW),
        pytest.param(4, 1, marks=SLOW),
    ],
)
def test_any_number_of_ranks_any_stage(
    pair: Crew, four: Crew, tmp_path: Path, tmp_path_factory: pytest.TempPathFactory, saving: int, loading: int
) -> None:
    def run(size: int, job: str, **arguments: Any) -> list[dict[str, Any]]:
        if size == 1:
            return [getattr(jobs, job)(**arguments)]
        return (pair if size == 2 else four).do(job, **arguments)

    names = list(CASES)
    for index, name in enumerate(names):
        folder = str(tmp_path / f"saved-{index}")
        ran = run(saving, "save_and_go_on", fields=placed(name, tmp_path, dtype="fp32"), folder=folder)
        for other in (names[(index + 2) % len(names)], names[(index + 3) % len(names)]):
            resumed = run(loading, "resume", fields=placed(other, tmp_path, dtype="fp32"), folder=folder)
            assert {one["before"] for one in resumed} == {ran[0]["before"]}
            assert len({one["weights"] for one in resumed}) == 1


def test_damage_is_refused_on_every_rank(pair: Crew, tmp_path: Path) -> None:
    """Each rank reads a share of the checksums: what one finds, all are told, and nothing has changed."""
    fields = placed("stage 3 on cpu", tmp_path)
    folder = tmp_path / "saved"
    pair.do("save_and_go_on", fields=fields, folder=str(folder))
    for victim in sorted(folder.glob("unit-*"))[1:4]:
        content = victim.read_bytes()
        victim.write_bytes(content[:-5] + bytes([content[-5] ^ 1]) + content[-4:])
        found = pair.do("refused_load", fields=fields, folder=str(folder))
        assert all(victim.name in message for message in found), found
        victim.write_bytes(content)
    pair.do("resume", fields=fields, folder=str(folder))


NAMES: dict[str, tuple[list[str | None], list[list[str]]]] = {
    "a time stamp": (["at-10", "at-11"], [["RankError", "at-10", "at-11"], ["RankError", "at-10", "at-11"]]),
    "none": (["at-10", None], [["RankError", "rank 1", "None"], ["UsageError", "None"]]),
    "empty": (["", "at-10"], [["UsageError", "''"], ["RankError", "rank 0", "''"]]),
    "parts of it": (["at-10", "at-10"], [["RankError", "without_frozen False on rank 0", "True"]] * 2),
    "not numbered": (["step-1", "first"], [["RankError", "rank 1", "first"], ["UsageError", "first"]]),
}


@pytest.mark.parametrize("kind", NAMES)
def test_names_are_compared_first(pair: Crew, tmp_path: Path, kind: str) -> None:
    names, words = NAMES[kind]
    given = [str(tmp_path / name) if name else name for name in names]
    keep_last = 1 if kind == "not numbered" else None
    asked = {"names": given, "partial": [False, kind == "parts of it"], "keep_last": keep_last, "wait": kind != "none"}
    said = pair.do("save_as", fields=placed("stage 3 on cpu", tmp_path), rest=str(tmp_path / "rest"), **asked)
    for (error, message), expected in zip(said, words, strict=True):
        assert error == expected[0] and all(word in message for word in expected[1:]), said
    assert os.listdir(tmp_path) == ["rest"]


@pytest.mark.parametrize("resumes", [False, True], ids=["load_checkpoint", "resume_or_start"])
def test_ranks_that_load_another_checkpoint(pair: Crew, tmp_path: Path, resumes: bool) -> None:
    """Each would have a part of another state."""
    asked = {"folder": str(tmp_path), "names": ["first", "second"], "resumes": resumes}
    for (error, message), is_as_before in pair.do("load_another", fields=placed("stage 3 on cpu", tmp_path), **asked):
        assert error == "RankError" and "first" in message and "second" in message
        assert is_as_before


@pytest.mark.parametrize("wait", [True, False], ids=["waited for", "beside training"])
def test_a_rank_that_dies_in_a_save(fresh: Callable[..., Crew], tmp_path: Path, wait: bool) -> None:
    crew = fresh(2, seconds=20)
    crew.begin("killed_in_a_save", fields=placed("stage 3 on cpu", tmp_path), folder=str(tmp_path / "saved"), wait=wait)
    first, second = crew.answers()
    assert second == {"ended": -signal.SIGKILL}
    assert first["error"][0] == "RankError" and "save_checkpoint" in first["error"][1], first
    assert not (tmp_path / "saved").exists()


@pytest.mark.parametrize("placement", ["stage 3 on cpu", "stage 3 on nvme"])
def test_export_of_a_peft_model(pair: Crew, tmp_path: Path, placement: str) -> None:
    fields = placed(placement, tmp_path) | {"dtype": None}
    assert pair.do("peft_export", fields=fields, folder=str(tmp_path / "exports"))[0] == {}


@pytest.mark.parametrize("first_writes", [True, False], ids=["its manifest", "its files"])
@pytest.mark.parametrize("wait", [True, False], ids=["waited for", "beside training"])
def test_a_rank_that_gives_a_save_up(pair: Crew, tmp_path: Path, wait: bool, first_writes: bool) -> None:
    """The other, which finds the folder gone, hears of it from that rank."""
    fields, folder = placed("stage 3 on cpu", tmp_path), tmp_path / "saves"
    first, second = pair.do("given_up_save", fields=fields, folder=str(folder), wait=wait, first_writes=first_writes)
    assert first == ["ValueError", "enough"]
    assert second[0] == "RankError" and "rank 0" in second[1] and "step-1" in second[1], second
    assert os.listdir(folder) == ["step-2"]


@pytest.mark.parametrize("loser", [0, 1])
@pytest.mark.parametrize("call", ["save_checkpoint", "load_checkpoint", "resume_or_start", "export"])
def test_a_save_that_was_lost_is_told_on_every_rank(pair: Crew, tmp_path: Path, call: str, loser: int) -> None:
    """By the next call, in which no rank waits for another that was told; then all goes on."""
    fields, folder = placed("stage 3 on cpu", tmp_path), tmp_path / "saves"
    said = pair.do("calls_after_a_lost_save", fields=fields, folder=str(folder), call=call, loser=loser)
    assert said[loser][0] == "StorageError" and "No space left" in said[loser][1], said
    error, message = said[1 - loser]
    assert error == "RankError" and f"rank {loser}" in message and "step-1" in message, said
    assert os.listdir(folder) == ["step-3"]


@pytest.mark.parametrize("call", ["load_checkpoint", "resume_or_start"])
def test_what_one_rank_lacks_is_told_on_every_rank(pair: Crew, tmp_path: Path, call: str) -> None:
    """It says nothing of the checkpoint, so that is not passed over."""
    asked = {"folder": str(tmp_path / "saves"), "call": call}
    first, second = pair.do("load_without_files", fields=placed("stage 3 on cpu", tmp_path), **asked)
    assert second[0] == "StorageError" and "EMFILE" in second[1], second
    assert first[0] == "RankError" and "on rank 1" in first[1] and "EMFILE" in first[1], first


def test_export(pair: Crew, tmp_path: Path) -> None:
    from transformers import LlamaForCausalLM

    found = pair.do("export", fields=placed("stage 3 on nvme", tmp_path), folder=str(tmp_path / "out"))
    assert jobs.digest(load_file(tmp_path / "out" / "model.safetensors")) == found[0] == found[1]
    LlamaForCausalLM.from_pretrained(tmp_path / "out")


# ---- kills


def kill_and_resume(
    fresh: Callable[..., Crew], fields: dict[str, Any], folder: Path, kills: int, seed: int, steps: int = 6
) -> None:
    """Kill one rank at a random moment, `kills` times in one run; what is resumed at last equals the run without kills."""
    draw = random.Random(seed)
    whole = fresh(2, seconds=60)
    expected = whole.do("train_to_the_end", fields=fields, folder=str(folder / "none"), steps=steps)
    whole.close()
    saves = folder / "saves"
    for _ in range(kills):
        crew = fresh(2, seconds=20)
        crew.begin("train_and_save", fields=fields, folder=str(saves), steps=steps)
        time.sleep(draw.uniform(3.0, 6.0))  # the start of the processes takes about three seconds
        victim = crew.processes[draw.randrange(2)]
        if victim.poll() is None:
            os.kill(victim.pid, signal.SIGKILL)
        crew.answers()
        crew.close()
    last = fresh(2, seconds=60)
    resumed = last.do("train_to_the_end", fields=fields, folder=str(saves), steps=steps)
    last.close()
    assert [one["weights"] for one in resumed] == [one["weights"] for one in expected]
    assert len({one["start"] for one in resumed}) == 1


@pytest.mark.slow
def test_a_kill_loses_nothing(fresh: Callable[..., Crew], tmp_path: Path) -> None:
    kill_and_resume(fresh, placed("stage 3 on nvme", tmp_path), tmp_path, kills=1, seed=1)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(12))
def test_many_kills_lose_nothing(fresh: Callable[..., Crew], tmp_path: Path, seed: int) -> None:
    name = list(CASES)[seed % len(CASES)]
    kill_and_resume(fresh, placed(name, tmp_path), tmp_path, kills=5, seed=seed, steps=12)
