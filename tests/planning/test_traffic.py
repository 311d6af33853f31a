# SPDX-License-Identifier: Apache-2.0
"""The NVMe traffic that `plan` says is what the engine then moves, to the byte: every placement, dtype and state format."""

from __future__ import annotations

import copy
import dataclasses
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import offload
from offload.cli.plans.outline import Outline
from offload.config import with_internal_settings
from tests.inside import parts_of
from tests.small_sizes import small

PLACES = [("nvme", "nvme"), ("nvme", "cpu"), ("nvme", "device"), ("cpu", "nvme"), ("device", "nvme")]
FORMATS = [(None, "fp32"), ("bf16", "fp32"), ("bf16", "split"), ("bf16", "8bit")]
STEPS = 2
STAYING = {"deferred": 2, "cpu": 3}
"""Units that are there already when they are used again: the last of forward and the last of backward; where updates need the
unit in memory also that of the last update."""


def moved(engine: Any) -> tuple[int, int]:
    for places in (parts_of(engine).parameter_store, parts_of(engine).records):
        if places is not None:
            places.settle_writes()
    io = engine.stats()["io"]
    return io.read_nbytes, io.written_nbytes


@pytest.mark.parametrize("update", ["step", "auto"])
@pytest.mark.parametrize("accelerator", ["cpu", "deferred"])
@pytest.mark.parametrize(("parameters", "states"), PLACES)
@pytest.mark.parametrize(("dtype", "state_format"), FORMATS)
def test_a_step_moves_what_the_plan_says(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    accelerator: str,
    parameters: str,
    states: str,
    dtype: str | None,
    state_format: str,
    update: str,
) -> None:
    monkeypatch.setenv("OFFLOAD_ACCELERATOR", accelerator)
    model = nn.Sequential(*(nn.Linear(64, 64, bias=False) for _ in range(4)))
    model[2].requires_grad_(False)
    optimizer = torch.optim.AdamW(model.parameters())
    config: Any = {"parameters": parameters, "optimizer_states": states, "nvme": str(tmp_path), "prefetch": 0}
    config |= {"update": update}
    config |= {"dtype": dtype, "state_format": state_format}
    with Outline(model, optimizer, offload.Config(**config)) as outline:
        traffic = outline.traffic(outline.placement(), micro_batches=1)
    with offload.initialize(model, optimizer, config) as engine:
        for step in range(1 + STEPS):
            if step == 1:  # the first is planned from a guess
                before = moved(engine)
            engine.backward(model(torch.ones(2, 64)).float().square().mean())
            engine.step()
            engine.zero_grad()
            with engine.gathered([]):  # the updates are in place
                pass
        read, written = (after - first for after, first in zip(moved(engine), before, strict=True))
        unit_nbytes = engine.stats()["units"][1]["nbytes"]
    # Where updates are made in backward, the first unit is there for the next forward.
    updated_in_backward = (update, accelerator, states) == ("auto", "cpu", "nvme")
    staying = (STAYING[accelerator] + updated_in_backward) * unit_nbytes if parameters == "nvme" else 0
    assert written == STEPS * traffic.written_nbytes
    assert read == STEPS * (traffic.read_nbytes - staying)


@pytest.mark.parametrize("accelerator", ["cpu", "deferred"])
@pytest.mark.parametrize(("micro_batches", "narrow"), [(1, False), (2, False), (4, False), (2, True), (4, True)])
def test_where_several_micro_batches_are_expected_the_first_spills_two_bytes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, accelerator: str, micro_batches: int, narrow: bool
) -> None:
    """Of a parameter, and each further one the four of a sum, or the two of one in the parameters' dtype (`narrow`), but for
    what the last finds buffers for. To the byte."""
    small(monkeypatch, chunk_numel=4096)
    monkeypatch.setenv("OFFLOAD_ACCELERATOR", accelerator)
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(64, 64, bias=False) for _ in range(40)))
    beside = copy.deepcopy(model)
    optimizer = torch.optim.AdamW(model.parameters())
    fields: Any = {"parameters": "cpu", "optimizer_states": "nvme", "nvme": str(tmp_path), "dtype": "bf16", "update": "step"}
    roomy = with_internal_settings(offload.Config(**fields).expecting(micro_batches), sums_are_narrow=narrow)
    with Outline(model, optimizer, roomy) as outline:
        least = outline.smallest_nbytes(outline.placement(), "cpu_memory")
    config = dataclasses.replace(roomy, cpu_memory=least)
    with Outline(model, optimizer, config) as outline:
        placement = outline.placement()
        traffic = outline.traffic(placement, micro_batches)
    sizes = [2, *(2 if narrow else 4 for _ in range(micro_batches - 1))]
    free = placement.retained_gradient_buffers // 2
    assert traffic.spilled_nbytes == 4096 * (40 * sum(sizes) - free * sizes[-1])

    def steps(engine: offload.Engine, count: int) -> None:
        for _ in range(count):
            for _ in range(micro_batches):
                engine.backward(engine.module(torch.ones(2, 64)).float().square().mean())
            engine.step()
            engine.zero_grad()
        with engine.gathered([]):  # the updates are in place
            pass

    with offload.initialize(model, optimizer, config) as engine:
        steps(engine, 1)
        before = moved(engine)
        steps(engine, STEPS)
        found = [after - first for after, first in zip(moved(engine), before, strict=True)]
        weights = engine.state_dict()
    assert found == [STEPS * traffic.read_nbytes, STEPS * traffic.written_nbytes]
    in_memory = offload.Config(parameters="device", optimizer_states="cpu", dtype="bf16", update="step")
    in_memory = with_internal_settings(in_memory, sums_are_narrow=narrow)
    with offload.initialize(beside, torch.optim.AdamW(beside.parameters()), in_memory) as engine:
        steps(engine, 1 + STEPS)
        expected = engine.state_dict()
    assert all(torch.equal(weights[name], expected[name]) for name in expected)
