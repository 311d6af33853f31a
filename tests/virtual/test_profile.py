# SPDX-License-Identifier: Apache-2.0
"""A trace of a step in virtual time is that step: its seconds, its bytes."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import pytest
import torch

import offload
from offload.cli.main import main
from offload.cli.plans.forecast import Work, forecast
from offload.device.recording import D2H, H2D, NVME_READ, NVME_WRITE
from offload.profiling.attribution import DRIVE, SUMS
from offload.profiling.explanation import explain
from offload.profiling.trace_events import read_trace
from tests.devices import records_stay_home

from .test_forecast import CASES, MACHINE, SLOW, WORK, adamw, foretold, tiny


@pytest.mark.parametrize("case", CASES)
def test_a_trace_is_of_the_very_step(case: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    records_stay_home(monkeypatch)
    expected = foretold(**CASES[case])
    with torch.device("meta"):
        model = tiny()
    config = offload.Config(dtype="bf16", nvme=".", **CASES[case])
    found = forecast(model, adamw(model), config, MACHINE, WORK, tmp_path / "trace.json")
    assert found == expected  # who looks on changes nothing
    trace = read_trace(tmp_path / "trace.json")
    assert trace.duration_ns == pytest.approx(found.step_seconds * 1e9, abs=2)
    said = explain(trace)
    assert said.work[H2D].nbytes == found.moved_nbytes["h2d"] and said.work[D2H].nbytes == found.moved_nbytes["d2h"]
    assert sum(
        one.exposed_seconds for name, one in said.work.items() if name != "NVMe"
    ) + said.compute_seconds == pytest.approx(said.step_seconds)
    assert said.floor_seconds <= said.step_seconds


@pytest.mark.parametrize("slow", ["h2d", "d2h", "nvme", "memory"])
def test_what_the_device_waits_for_is_no_computing(slow: str, tmp_path: Path) -> None:
    """Also where the host goes on: its streams wait for copies that bring parameters, or that take gradients away."""
    fields = CASES["nvme" if slow == "nvme" else "cpu"] | {"device_memory": 730_000}
    rate = "memory_bandwidth" if slow == "memory" else slow
    machine = dataclasses.replace(SLOW, flops=1e10, **({} if slow == "nvme" else {rate: 2e6}))
    micro_batches = 12 if slow == "memory" else 3  # each of which is added to the sum, before one update
    found = foretold(Work(2, 16, micro_batches, checkpointing=False), machine, tmp_path / "trace.json", **fields)
    said = explain(read_trace(tmp_path / "trace.json"))
    assert said.step_seconds > 1.5 * said.compute_seconds
    assert said.compute_seconds == pytest.approx(found.floors["compute"], rel=0.02)
    assert max(said.work, key=lambda name: said.work[name].exposed_seconds) in {
        "h2d": (H2D,), "d2h": (D2H,), "nvme": (NVME_READ, NVME_WRITE, DRIVE), "memory": (SUMS,),
    }[slow]  # fmt: skip
    assert any("gradients are summed on the device" in one.change for one in said.advice) == (slow == "memory")


def test_the_plan_writes_one(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "trace.json"
    shape = ["--hidden", "64", "--layers", "2", "--vocabulary", "256", "--dtype", "bf16", "--sequence", "16"]
    assert main(["plan", *shape, "--machine", "rtx4090", "--json", "--trace", str(path)]) == 0
    found = json.loads(capsys.readouterr().out)
    assert main(["explain", str(path), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["step_seconds"] == pytest.approx(found["step_seconds"], rel=1e-6)
