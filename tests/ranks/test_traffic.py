# SPDX-License-Identifier: Apache-2.0
"""What goes over the wire, and what lies where: counted, and compared with the formulas."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

import offload
from offload.cli.plans import outline
from tests.small_sizes import small

from ..acceptance.models import adamw, llama
from .crew import Crew


@pytest.mark.parametrize("size", [2, pytest.param(4, marks=pytest.mark.slow)])
@pytest.mark.parametrize("stage", [0, 1, 2])
def test_two_passes_over_the_parameters_below_stage_3(request: pytest.FixtureRequest, stage: int, size: int) -> None:
    """Gradients once (reduce-scatter), and once what each rank made of its shard (all-gather): 2P, one message a unit."""
    crew: Crew = request.getfixturevalue("pair" if size == 2 else "four")
    steps = 3
    for one in crew.do("counted", fields={"stage": stage}, steps=steps):
        parameters = sum(one["flat_nbytes"])
        count = len(one["flat_nbytes"])
        passes = [steps * count, steps * parameters]
        assert one["moved"] == {"reduce": passes, "gather": passes}


@pytest.mark.parametrize("prefetch", [0, 1])
def test_three_passes_at_stage_3(pair: Crew, prefetch: int) -> None:
    """Parameters for the forward and again for the backward, gradients once: 3P, less what need not come twice because it
    is still there (the root throughout the step, the last block when backward begins, what the schedule had room for)."""
    steps = 3
    fields = {"stage": 3, "parameters": "cpu", "optimizer_states": "cpu", "prefetch": prefetch}
    for one in pair.do("counted", fields=fields, steps=steps):
        parameters = sum(one["flat_nbytes"])
        assert one["moved"]["reduce"] == [steps * len(one["flat_nbytes"]), steps * parameters]
        assert one["moved"]["gather"][1] == steps * one["scheduled_nbytes"]
        assert 2 * parameters - one["capacity_nbytes"] <= one["scheduled_nbytes"] < 2 * parameters
        assert one["capacity_nbytes"] < parameters


@pytest.mark.parametrize("size", [2, 4])
def test_memory_follows_the_formulas(request: pytest.FixtureRequest, tmp_path: Path, size: int) -> None:
    """Of P fp32 parameters: states 8P/N from stage 1 on, gradients 4P/N, parameters 4P/N at stage 3; within 3 %."""
    crew: Crew = request.getfixturevalue("pair" if size == 2 else "four")
    near = 0.03
    for stage in (0, 1, 2, 3):
        case: dict[str, Any] = {"stage": stage, "optimizer_states": "cpu"}
        case |= {"parameters": "cpu"} if stage == 3 else {}
        for one in crew.do("memory", fields=case):
            numel, host, planned = one["numel"], one["host"], one["planned"]
            assert host["optimizer states"] == pytest.approx(8 * numel / (size if stage >= 1 else 1), rel=near), stage
            assert host["parameters"] == pytest.approx(4 * numel / (size if stage == 3 else 1), rel=near), stage
            # The shard's averages; whole gradients pass through one or two units' buffers from stage 2 on.
            assert host["gradients"] == pytest.approx(4 * numel / (size if stage >= 1 else 1), rel=near), stage
            assert one["unreduced_peak"] <= planned["gradients before their reduction"]
            if stage >= 2:
                assert one["unreduced_peak"] < 0.6 * 4 * numel
            else:
                assert one["unreduced_peak"] == pytest.approx(4 * numel, rel=near)
            for purpose in ("parameters", "optimizer states", "gradients"):
                assert host[purpose] == planned[purpose]
            if stage == 3:
                assert one["resident_peak"] <= planned["parameters in use"] < 0.9 * 4 * numel


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_the_plan_of_one_rank_is_what_each_takes(
    pair: Crew, monkeypatch: pytest.MonkeyPatch, stage: int, tmp_path: Path
) -> None:
    """`python -m offload plan --ranks 2` asks without ranks; the same lines as with them, and the budget they need."""
    small(monkeypatch, least_unit_numel=0)  # as in the jobs
    monkeypatch.setenv("OFFLOAD_ACCELERATOR", "cpu")
    places = ("cpu" if stage == 3 else "device", "nvme")
    case: dict[str, Any] = {"stage": stage, "parameters": places[0], "optimizer_states": places[1], "nvme": str(tmp_path)}
    model = llama(layers=4, width=384)
    with outline.Outline(model, adamw(model), offload.Config(**case), rank_count=2) as planned:
        placement = planned.placement()
        smallest = planned.smallest_nbytes(placement, "cpu_memory")
    for one in pair.do("memory", fields=case):
        assert one["planned"] == {line.purpose: line.nbytes for line in placement.plan.lines}
    assert smallest is not None
    for kind, message in pair.errors("memory", fields=case | {"cpu_memory": smallest - 2}):
        assert kind == "BudgetError" and f"smallest cpu_memory that can is {smallest}" in message
    pair.do("memory", fields=case | {"cpu_memory": smallest})


def test_budgets_are_those_of_the_node(pair: Crew, tmp_path: Path) -> None:
    """cpu_memory is shared by the ranks of a node: what is too little for two is refused with the sum."""
    case = {"stage": 3, "parameters": "cpu", "optimizer_states": "cpu", "cpu_memory": "8MiB"}
    errors = pair.errors("memory", fields=case)
    assert all(kind == "BudgetError" and "2 ranks" in message for kind, message in errors)
    smallest = int(errors[0][1].split("that can is ")[1].split(".")[0])
    pair.do("memory", fields=case | {"cpu_memory": smallest})
    pair.errors("memory", fields=case | {"cpu_memory": smallest - 2})


def test_small_units_travel_together(pair: Crew) -> None:
    """Twelve layers of 272 elements and one of 17 k: two messages a step instead of thirteen."""
    for stage in (2, 3):
        apart = pair.do("folded", fields={"stage": stage}, least_numel=0)
        joined = pair.do("folded", fields={"stage": stage}, least_numel=4096)
        assert {(one["units"], one["reduced"]) for one in apart} == {(14, 2 * 13)}
        assert {(one["units"], one["reduced"]) for one in joined} == {(2, 2 * 2)}
