# SPDX-License-Identifier: Apache-2.0
"""`plan` says what `initialize` does: the same lines, budgets that hold and not one byte less, the traffic of the design."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import offload
from offload.cli.main import main
from offload.cli.outline import Outline

from .conftest import run
from .plain import adamw, new_model

PLACES = ("device", "cpu", "nvme")
NOT_UNIFIED, UNIFIED = "deferred", "cpu"


def fields_of(parameters: str, states: str, nvme: Path) -> dict[str, Any]:
    fields: dict[str, Any] = {"parameters": parameters, "optimizer_states": states, "dtype": "bf16"}
    return fields | ({"nvme": str(nvme)} if "nvme" in (parameters, states) else {})


@pytest.mark.parametrize("accelerator", [UNIFIED, NOT_UNIFIED])
@pytest.mark.parametrize("states", PLACES)
@pytest.mark.parametrize("parameters", PLACES)
def test_the_plan_is_what_initialize_does(
    parameters: str, states: str, accelerator: str, model: Path, nvme: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OFFLOAD_ACCELERATOR", accelerator)
    built = new_model(model)
    optimizer = adamw(built, 1e-3)
    config = offload.Config(**fields_of(parameters, states, nvme))
    with Outline(built, optimizer, config) as outline:
        placement = outline.placement()
        smallest = {field: outline.smallest_nbytes(placement, field) for field in ("cpu_memory", "device_memory")}
    lines = [{"tier": line.tier, "purpose": line.purpose, "nbytes": line.nbytes} for line in placement.plan.lines]
    budgets = {field: nbytes for field, nbytes in smallest.items() if nbytes is not None}
    assert ("device_memory" in budgets) == (accelerator == NOT_UNIFIED)
    for field, nbytes in budgets.items():
        if parameters == "nvme" and states != "nvme":
            break  # gradients could stay in host memory or spill, and the bound holds for one of the two
        with pytest.raises(offload.BudgetError, match=f"smallest {field} that can is {nbytes}"):
            offload.initialize(built, optimizer, offload.Config(**fields_of(parameters, states, nvme), **{field: nbytes - 1}))
    for field, nbytes in budgets.items():
        fresh = new_model(model)
        with offload.initialize(
            fresh, adamw(fresh, 1e-3), offload.Config(**fields_of(parameters, states, nvme), **{field: nbytes})
        ) as engine:
            _step(fresh, engine)
    with offload.initialize(built, optimizer, config) as engine:
        assert engine.stats()["planned"] == lines


def _step(model: nn.Module, engine: offload.Engine) -> None:
    batch = torch.arange(16).reshape(2, 8)
    engine.backward(model(input_ids=batch, labels=batch).loss)
    engine.step()
    engine.zero_grad()


@pytest.mark.parametrize("micro_batches", [1, 3])
@pytest.mark.parametrize(
    ("parameters", "states", "to_device", "from_device", "read", "written"),
    [  # bytes for each parameter, in 16-bit compute: (fixed, for each micro-batch)
        ("device", "device", (0, 0), (0, 0), (0, 0), (0, 0)),
        ("device", "cpu", (2, 0), (0, 2), (0, 0), (0, 0)),
        ("cpu", "cpu", (0, 4), (0, 2), (0, 0), (0, 0)),
        ("cpu", "nvme", (0, 4), (0, 2), (12, 0), (12, 0)),
        ("nvme", "nvme", (0, 4), (0, 2), (12, 4), (14, 0)),
    ],
)
def test_the_traffic_of_a_step(
    parameters: str,
    states: str,
    to_device: tuple[int, int],
    from_device: tuple[int, int],
    read: tuple[int, int],
    written: tuple[int, int],
    micro_batches: int,
    nvme: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("OFFLOAD_ACCELERATOR", NOT_UNIFIED)
    # Multiples of 4096 elements in every unit: no padding to count.
    model = nn.Sequential(*(nn.Linear(64, 64, bias=False) for _ in range(4)))
    config = offload.Config(**fields_of(parameters, states, nvme))  # no budget: nothing beyond the minimum is kept
    with Outline(model, torch.optim.AdamW(model.parameters()), config) as outline:
        traffic = outline.traffic(outline.placement(), micro_batches)
    numel = 4 * 64 * 64
    expected = [(fixed + each * micro_batches) * numel for fixed, each in (to_device, from_device, read, written)]
    besides_spilled = [nbytes - traffic.spilled_nbytes for nbytes in (traffic.read_nbytes, traffic.written_nbytes)]
    actual = [traffic.to_device_nbytes, traffic.from_device_nbytes, *besides_spilled]
    assert actual == expected


def test_the_command_builds_nothing_and_prints_the_plan(nvme: Path) -> None:
    shape = ("--hidden", 2048, "--layers", 18, "--vocabulary", 32000, "--dtype", "bf16")  # a billion parameters
    done = run("plan", *shape, "--parameters", "nvme", "--optimizer-states", "nvme", "--nvme", nvme, "--accumulate", 2)
    assert done.code == 0, done.err
    numel = 2 * 32000 * 2048 + 18 * (4 * 2048**2 + 3 * 2048 * 5632 + 2 * 2048) + 2048
    assert f"{numel / 1e9:.1f} G parameters" in done.out
    on_nvme = int(re.search(r"nvme +parameters +[0-9.]+ GiB +[0-9.]+ +(\d+)", done.out)[1])
    assert 2 * numel <= on_nvme < 2.01 * numel
    assert re.search(r"--cpu-memory +[0-9.]+ [MG]iB +\d+", done.out)
    assert not list(nvme.iterdir())


def test_a_budget_that_cannot_be_shows_what_can(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OFFLOAD_ACCELERATOR", UNIFIED)
    assert main(["plan", "--hidden", "64", "--layers", "2", "--cpu-memory", "1KiB"]) == 2
    printed = capsys.readouterr()
    assert "Placements, without budgets" in printed.out
    assert "cannot hold" in printed.err


def test_several_ranks(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OFFLOAD_ACCELERATOR", UNIFIED)
    shape = ["plan", "--hidden", "256", "--layers", "2", "--ranks", "4"]
    assert main([*shape, "--stage", "2"]) == 0
    printed = capsys.readouterr().out
    assert "4 ranks, stage 2; bytes are those of one rank" in printed and "of all 4 ranks together" in printed
    assert "nvme        nvme" not in printed  # below stage 3 parameters stay where they are used
    assert main([*shape, "--stage", "3"]) == 0
    assert "nvme        nvme" in capsys.readouterr().out
