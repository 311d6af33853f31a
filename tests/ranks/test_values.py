# SPDX-License-Identifier: Apache-2.0
"""Reading and writing parameters across ranks: gathered, state_dict in whole and in shares, torch.distributed.checkpoint."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest

from .crew import Crew

CASES: list[dict[str, Any]] = [
    {"stage": 0},
    {"stage": 1, "dtype": "bf16"},
    {"stage": 2},
    {"stage": 3, "parameters": "cpu", "optimizer_states": "nvme", "dtype": "bf16"},
    {"stage": 3, "parameters": "nvme", "optimizer_states": "nvme"},
]


def placed(case: dict[str, Any], folder: Path) -> dict[str, Any]:
    return case | ({"nvme": str(folder / "nvme")} if "nvme" in case.values() else {})


@pytest.mark.parametrize("size", [2, pytest.param(4, marks=pytest.mark.slow)])
def test_gathered_and_state_dicts(request: pytest.FixtureRequest, tmp_path: Path, size: int) -> None:
    crew: Crew = request.getfixturevalue("pair" if size == 2 else "four")
    seen: dict[str, Any] = {}
    for case in CASES:
        found = crew.do("gathered", fields=placed(case, tmp_path))
        for key in ("seen", "halved", "full", "names", "back"):
            assert len({str(one[key]) for one in found}) == 1, (case, key)
            assert seen.setdefault(f"{key} {case.get('dtype')}", found[0][key]) == found[0][key], (case, key)
        shares = [name for one in found for name in one["share"]]
        assert sorted(shares) == found[0]["names"]
        assert all(one["share"] for one in found)
        assert [one["first"] for one in found] == [len(found[0]["names"])] + [0] * (size - 1)
        assert found[0]["back"] == found[0]["after"] == found[0]["full"]  # load_state_dict undid the step in between


def test_distributed_checkpoint(pair: Crew, tmp_path: Path) -> None:
    """Written from one stage and placement, read into another."""
    cases = [placed(case, tmp_path) for case in CASES]
    for index, case in enumerate(cases):
        other = cases[(index + 2) % len(cases)]
        found = pair.do("distributed_checkpoint", fields=case, other=other, folder=str(tmp_path / f"dcp-{index}"))
        assert all(one["saved"] == one["loaded"] == found[0]["saved"] for one in found), case


def test_engines_dropped_without_close_leave_no_thread(pair: Crew, tmp_path: Path) -> None:
    for case in CASES:
        assert pair.do("dropped", fields=placed(case, tmp_path)) == [[], []], case


def test_engines_give_back_their_process_groups(pair: Crew, tmp_path: Path) -> None:
    assert pair.do("threads_left_by", count=3, fields=placed(CASES[0], tmp_path)) == [0, 0]


def test_clipping_by_torch_is_the_engines_to_the_bit(pair: Crew, tmp_path: Path) -> None:
    for case in CASES:
        found = [
            one for by_torch in (False, True) for one in pair.do("clipped", fields=placed(case, tmp_path), by_torch=by_torch)
        ]
        assert all(one == found[0] for one in found), case


def test_unfreezing(pair: Crew, tmp_path: Path) -> None:
    """What has no states gets them on all ranks alike, in any placement: as if it had had them from the start."""
    expected: dict[str, Any] = {}
    for case in CASES:
        fields = placed(case, tmp_path)
        found = pair.do("unfreeze", fields=fields, knows_all=False)
        assert found[0]["weights"] == found[1]["weights"] and found[0]["steps"] == 6, case
        if not expected:
            expected[None] = pair.do("unfreeze", fields=fields, knows_all=True)
        # What is frozen in 16 bits has no fp32 master to go on from: the stages are compared among themselves.
        assert found == expected.setdefault(case.get("dtype"), found), case
        assert os.listdir(tmp_path) == [] or not any((tmp_path / "nvme").iterdir()), case


def test_a_load_gives_states_to_what_was_trained_and_is_frozen_now(pair: Crew, tmp_path: Path) -> None:
    for number, case in enumerate(case for case in CASES if case.get("dtype") is None):
        for found in pair.do("load_frozen", fields=placed(case, tmp_path), folder=str(tmp_path / f"saved-{number}")):
            assert found["loaded"] == found["on"] and found["on"]["steps"] == 6, case
