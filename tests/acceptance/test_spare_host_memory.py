# SPDX-License-Identifier: Apache-2.0
"""What `cpu_memory` leaves beyond the minimum keeps a part of what lies on NVMe: never another bit, and less traffic."""

from __future__ import annotations

from functools import lru_cache
from pathlib import Path
from tempfile import gettempdir
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import offload
from offload.cli.plans.outline import Outline
from offload.planning.placement import Placement
from tests.inside import parts_of, placement_of

from .models import IN_MEMORY, Setup, adamw, llama, two_groups, vector_batches
from .runs import CLIP, Run, assert_same_bits, bitwise_loop, run_engine

LAYERS = 14
"""So many that staging buffers, which depend on the largest unit, take much less than the states."""
STEPS = 4
CASES = (("fp32", 0.0), ("fp32", 0.35), ("fp32", 0.7), ("fp32", 1.0), ("bf16", 0.5))
"""dtype, and the share of the way from the least to what keeps everything."""
ALL = 1 << 40


def train(run: Run) -> list[float]:
    return bitwise_loop(run, STEPS)


@lru_cache
def reference(dtype: str) -> tuple[list[float], dict[str, torch.Tensor]]:
    """Losses and final weights with everything on the device of the cpu accelerator."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("OFFLOAD_ACCELERATOR", "cpu")
        model = llama(LAYERS)
        fields = IN_MEMORY.fields(Path("."), dtype=dtype, max_grad_norm=CLIP)
        with offload.initialize(model, two_groups(model), offload.Config(**fields)) as engine:
            losses, weights = run_engine(engine, train)
    assert len(losses) == 2 * STEPS and len(set(losses)) == len(losses)
    return losses, weights


def all_nbytes(placement: Placement) -> int:
    """Of host memory, where everything lies there; but for room to undo updates, which takes what a budget has left then."""
    lines = [line for line in placement.plan.lines if line.tier == "cpu"]
    return sum(line.nbytes for line in lines if line.purpose != "room to undo updates")


@lru_cache
def limits(setup: Setup, **fields: Any) -> tuple[int, int]:
    """The smallest cpu_memory, and what keeping everything in memory takes."""
    model = llama(LAYERS)
    config = offload.Config(**setup.fields(Path(gettempdir()), cpu_memory=ALL, **fields))
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("OFFLOAD_ACCELERATOR", setup.accelerator)
        with Outline(model, two_groups(model), config) as generous:
            placement = generous.placement()
            everything = all_nbytes(placement)
            assert not placement.uses_nvme
            smallest = generous.smallest_nbytes(placement, "cpu_memory")
    assert smallest is not None and smallest < 0.75 * everything
    return smallest, everything


@pytest.mark.parametrize(("dtype", "share"), CASES)
@pytest.mark.parametrize(
    "setup",
    [Setup("nvme", "nvme", "cpu"), Setup("nvme", "nvme", "deferred"), Setup("cpu", "nvme", "deferred", "backward")],
    ids=lambda setup: setup.name,
)
def test_no_budget_changes_a_bit(opened: Any, setup: Setup, dtype: str, share: float) -> None:
    smallest, everything = limits(setup, dtype=dtype)
    budget = smallest + int(share * (everything - smallest))
    model = llama(LAYERS)
    engine = opened(model, two_groups(model), setup, dtype=dtype, max_grad_norm=CLIP, cpu_memory=budget)
    losses, weights = run_engine(engine, train)
    assert_same_bits([losses, weights], list(reference(dtype)))
    stats = engine.stats()
    planned = {tier: sum(line["nbytes"] for line in stats["planned"] if line["tier"] == tier) for tier in ("cpu", "nvme")}
    assert planned["cpu"] <= budget
    assert (planned["nvme"] == 0) == (share == 1.0), stats["planned"]
    kept = sum(line["nbytes"] for line in stats["planned"] if "kept" in line["purpose"])
    assert kept == sum(nbytes for purpose, nbytes in stats["host_nbytes"].items() if "kept" in purpose)
    assert kept > 0 or share == 0.0


WIDTH, BLOCKS = 128, 40


def blocks() -> nn.Module:
    torch.manual_seed(3)

    class Blocks(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.blocks = nn.ModuleList(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(BLOCKS))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            for block in self.blocks:
                x = torch.tanh(block(x))
            return x

    return Blocks()


def traffic(setup: Setup, nvme: Path, budget: int, steps: int) -> tuple[int, int, offload.Engine]:
    """Bytes read and written by an engine that trains `steps` steps and is closed."""
    model = blocks()
    engine = offload.initialize(model, adamw(model), offload.Config(**setup.fields(nvme, cpu_memory=budget)))
    run = Run(engine.module, engine.optimizer, engine)
    with engine:
        for x, y in vector_batches(steps, WIDTH):
            F.mse_loss(run.model(x), y).backward()
            run.optimizer.step()
            run.optimizer.zero_grad()
    backend = parts_of(engine).backend
    if backend is None:
        return 0, 0, engine
    return backend.stats().read_nbytes, backend.stats().written_nbytes, engine


@pytest.mark.parametrize("accelerator", ["cpu", "deferred"])
def test_traffic_falls_in_proportion(nvme: Path, monkeypatch: pytest.MonkeyPatch, accelerator: str) -> None:
    """To the byte: a step reads and writes the records that are not kept and the gradients that find no room, once."""
    monkeypatch.setenv("OFFLOAD_ACCELERATOR", accelerator)
    setup = Setup("cpu", "nvme", accelerator)
    model = blocks()
    with Outline(model, adamw(model), offload.Config(**setup.fields(nvme, cpu_memory=ALL))) as generous:
        everything = all_nbytes(generous.placement())
        smallest = generous.smallest_nbytes(generous.placement(), "cpu_memory")
    assert smallest is not None
    moved = []
    for share in (0.0, 0.25, 0.5, 0.75, 1.0):
        budget = smallest + int(share * (everything - smallest))
        config = offload.Config(**setup.fields(nvme, cpu_memory=budget))
        with Outline(model, adamw(model), config) as outline:
            expected = outline.traffic(outline.placement(), micro_batches=1)
            kept = outline.placement().kept
        few, many = traffic(setup, nvme, budget, 2), traffic(setup, nvme, budget, 5)
        assert many[0] - few[0] == 3 * expected.read_nbytes
        assert many[1] - few[1] == 3 * expected.written_nbytes
        placement = placement_of(many[2])
        assert placement.kept == kept
        records = placement.kept.record_nbytes + sum(
            line.nbytes for line in placement.plan.lines if (line.tier, line.purpose) == ("nvme", "optimizer states")
        )
        assert expected.read_nbytes == records - kept.record_nbytes + expected.spilled_nbytes
        moved.append(expected.read_nbytes + expected.written_nbytes)
    assert moved == sorted(moved, reverse=True)
    assert moved[-1] == 0 and len(set(moved)) == len(moved)
