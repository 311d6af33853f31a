# SPDX-License-Identifier: Apache-2.0
"""Ranks that do not do the same: other experts, other lengths, other batch sizes, an overflow on one of them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from .crew import Crew

STAGES = (
    {"stage": 0},
    {"stage": 1},
    {"stage": 2},
    {"stage": 3, "parameters": "cpu", "optimizer_states": "cpu"},
    {"stage": 3, "parameters": "cpu", "optimizer_states": "cpu", "update": "backward"},
)


def cases(folder: Path) -> list[dict[str, Any]]:
    return [*STAGES, {"stage": 3, "parameters": "nvme", "optimizer_states": "nvme", "nvme": str(folder / "nvme")}]


PLANS = {
    "apart": [[[0, 1], [2, 3]], [[3, 0], [1]], [[0], [0]]],
    "against each other": [[[0, 1, 2], [2, 1, 0]], [[3], [0, 3]], [[2, 0], [0, 2]]],
    "one does nothing": [[[], [1, 2]], [[3], []], [[], []]],
}


@pytest.mark.parametrize("plan", PLANS.values(), ids=PLANS)
@pytest.mark.parametrize("kind", ["experts", "branches"])
def test_a_mixture_of_experts(pair: Crew, tmp_path: Path, kind: str, plan: list[list[list[int]]]) -> None:
    """Units of their own, or parts of a block: unused on one rank they count zero there, unused on all they are left alone."""
    if kind == "branches":
        plan = [[[expert % 3 for expert in route] or [0] for route in step] for step in plan]
    found = [pair.do("routes", fields=case, kind=kind, plan=plan) for case in cases(tmp_path)]
    for one in found:
        assert one == found[0]
        assert one[0] == one[1]
    prefix = "experts" if kind == "experts" else "blocks.0.choices"
    for expert in range(4 if kind == "experts" else 3):
        used = sum(any(expert in route for route in step) for step in plan)
        assert found[0][0]["counts"][f"{prefix}.{expert}.weight"] == used


@pytest.mark.slow
def test_four_routes(four: Crew, tmp_path: Path) -> None:
    plan = [[[0, 1], [2, 3], [0], [3]], [[3, 0], [1], [2, 0], [1]], [[0], [0], [0], [1]]]
    found = [four.do("routes", fields=case, kind="experts", plan=plan) for case in cases(tmp_path)[2:]]
    for one in found:
        assert one == found[0]
        assert all(other == one[0] for other in one)


@pytest.mark.parametrize("accelerator", ["cpu", "deferred"])
def test_routes_on_a_device_of_its_own(pair: Crew, tmp_path: Path, accelerator: str) -> None:
    plan = PLANS["apart"]
    expected = pair.do("routes", fields={"stage": 0}, kind="experts", plan=plan)
    for case in cases(tmp_path)[1:]:
        assert pair.do("routes", fields=case, kind="experts", plan=plan, accelerator=accelerator) == expected


@pytest.mark.parametrize("accelerator", ["cpu", "deferred"])
@pytest.mark.parametrize("syncs", [False, True], ids=["no_sync", "every backward"])
def test_gradients_that_are_taken_out_are_nowhere(pair: Crew, tmp_path: Path, syncs: bool, accelerator: str) -> None:
    """Whoever takes them out, and whether they were averaged: also where a rank has those of others alone."""
    for case in cases(tmp_path):
        run = {"fields": case, "syncs": syncs, "accelerator": accelerator}
        expected = pair.do("taken_out", how="", **run)
        for how in ("optimizer", "model"):
            assert pair.do("taken_out", how=how, **run) == expected, (case, how)
        replaced = pair.do("taken_out", how="assigned", **run)
        assert replaced[0] == replaced[1] and set(replaced[0]["counts"].values()) == {1}
        assert replaced[0]["norm"] == pytest.approx((6 * 16 * 17) ** 0.5)  # six layers of 16 x 16 and a bias


def test_evaluations_of_different_lengths(pair: Crew, tmp_path: Path) -> None:
    """The other rank lends its shards meanwhile, from wherever it is blocked."""
    found = [pair.do("different_evaluations", fields=case) for case in cases(tmp_path) if "update" not in case]
    assert len({one for ranks in found for one in ranks}) == 1


@pytest.mark.parametrize("set_to_none", [True, False])
def test_collectives_of_the_loops_own(fresh: type[Crew], tmp_path: Path, set_to_none: bool) -> None:
    """Behind a call that all ranks made, and inside `gathered`, no rank waits for another that is in such a collective."""
    crew = fresh(3, seconds=20)
    on_cpu = {"stage": 3, "parameters": "cpu"}
    apart, far_ahead = on_cpu | {"optimizer_states": "device"}, on_cpu | {"optimizer_states": "cpu", "prefetch": 3}
    all_cases = [*cases(tmp_path), {"stage": 3}, apart, far_ahead]
    found = [crew.do("own_collectives", fields=case, set_to_none=set_to_none) for case in all_cases]
    assert len({str(one) for ranks in found for one in ranks}) == 1


@pytest.mark.parametrize("what", ["lr", "weight_decay", "clip", "clip by torch", "loss_scale"])
def test_numbers_that_differ_are_no_step(pair: Crew, what: str) -> None:
    """Whole copies would go apart in silence, and of a model in shards each would have a step of its own."""
    for case in STAGES[:4]:
        for kind, message in pair.errors("numbers_apart", fields=case, what=what):
            assert kind == "RankError" and "optimizer.step() with different numbers in param_groups" in message, message


def test_tiny_units_and_batch_sizes_of_their_own(pair: Crew, four: Crew, tmp_path: Path) -> None:
    """Units smaller than a block of the layout: some ranks have nothing but padding."""
    for crew, rows in ((pair, [1, 5]), (four, [3, 1, 4, 2])):
        found = [crew.do("narrow", fields=case, rows=rows) for case in cases(tmp_path)]
        assert len({one for ranks in found for one in ranks}) == 1


def test_an_overflow_on_one_rank(pair: Crew, tmp_path: Path) -> None:
    """fp16: all ranks leave the step out and halve the scale."""
    for case in cases(tmp_path):
        for bad_rank in (0, 1):
            found = pair.do("overflow", fields=case, bad_rank=bad_rank)
            assert found[0] == found[1]
            assert found[0]["skipped"] == 1
            assert found[0]["scales"] == [2.0**16, 2.0**15, 2.0**15]
            assert found[0]["weights"][0] == found[0]["weights"][1] != found[0]["weights"][2]
