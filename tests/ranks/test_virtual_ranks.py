# SPDX-License-Identifier: Apache-2.0
"""Ranks of a machine in numbers: one runs, and moves and holds what each of real ones does."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest
import torch

from offload.cli.main import main
from offload.cli.plans.forecast import Work, forecast
from offload.config import Config
from offload.device.recording import COLLECTIVES
from offload.device.virtual.description import Machine, changed, read_machine, share_of
from offload.device.virtual.machine import VirtualMachine
from offload.device.virtual.operations import CountedOperations, fused_attention
from offload.profiling.trace_events import read_trace
from tests.devices import records_stay_home
from tests.small_sizes import small

from ..acceptance.models import adamw, byte_batches, llama
from . import jobs
from .crew import Crew

ON_CPU = {"parameters": "cpu", "optimizer_states": "cpu"}
ON_NVME = {"parameters": "nvme", "optimizer_states": "nvme"}
CASES: dict[str, dict[str, Any]] = {
    "stage 0": {"stage": 0},
    "stage 1": {"stage": 1, "optimizer_states": "cpu"},
    "stage 2": {"stage": 2, "parameters": "device", "optimizer_states": "cpu"},
    "stage 3": {"stage": 3, **ON_CPU},
    "stage 3, clipped, bf16": {"stage": 3, **ON_CPU, "dtype": "bf16", "max_grad_norm": 1.0},
    "nvme": {"stage": 3, **ON_NVME},
}
CPU = dataclasses.replace(read_machine("gb10"), kind="cpu")


@pytest.fixture
def virtually(monkeypatch: pytest.MonkeyPatch) -> Any:
    """`virtually(machine, job, **arguments)`: what one of two ranks there answers, by the very code of the real ones."""

    def model(**shape: int) -> torch.nn.Module:
        with torch.device("meta"):
            return llama(**shape)

    small(monkeypatch, least_unit_numel=0)
    monkeypatch.setattr(jobs, "place", lambda: (0, 2))
    monkeypatch.setattr(jobs, "llama", model)
    monkeypatch.setattr(jobs, "byte_batches", lambda count: [batch.to("meta") for batch in byte_batches(count)])

    def run(machine: Machine, job: str, **arguments: Any) -> Any:
        virtual = VirtualMachine(share_of(machine, 2), 2)
        with virtual.running(), CountedOperations(virtual), fused_attention():
            return getattr(jobs, job)(**arguments)

    return run


def with_drive(fields: dict[str, Any], tmp_path: Path) -> dict[str, Any]:
    return fields | ({"nvme": str(tmp_path)} if "nvme" in fields.values() else {})


@pytest.mark.parametrize("case", CASES)
def test_bytes_are_those_that_each_of_two_ranks_moves(pair: Crew, virtually: Any, tmp_path: Path, case: str) -> None:
    """Over the wire, and to and from NVMe; `update="step"`: when an update begins is a matter of time."""
    fields = with_drive(CASES[case], tmp_path) | {"update": "step"}
    real = pair.do("counted", fields=fields, steps=3)
    found = virtually(CPU, "counted", fields=fields, steps=3)
    assert found in real and found["moved"]["reduce"][1] > 0
    # Between devices of their own the same goes over their link.
    assert virtually(read_machine("h100"), "counted", fields=fields, steps=3)["moved"] == found["moved"]


@pytest.mark.parametrize("case", CASES)
def test_memory_is_what_each_of_two_ranks_takes(pair: Crew, virtually: Any, tmp_path: Path, case: str) -> None:
    fields = with_drive(CASES[case], tmp_path)
    real = pair.do("memory", fields=fields)
    found = virtually(CPU, "memory", fields=fields)
    for one in real:
        assert found["planned"] == one["planned"] and found["host"].keys() == one["host"].keys()
        for purpose, nbytes in one["host"].items():
            assert found["host"][purpose] == pytest.approx(nbytes, rel=0.05), purpose
        for peak in ("unreduced_peak", "resident_peak"):
            assert found[peak] == pytest.approx(one[peak], rel=0.05), peak


def foretold(machine: Machine, count: int, trace: Path | None = None, **fields: Any) -> Any:
    with torch.device("meta"):
        model = llama(layers=4, width=64).to(torch.bfloat16)
    config = Config(dtype="bf16", nvme=".", **(ON_CPU | fields))
    return forecast(model, adamw(model), config, machine, Work(2, 16, 1, False, count), trace)


@pytest.mark.parametrize("name", ["rtx4090", "h100"])
def test_a_slower_link_between_ranks_is_a_slower_step(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    small(monkeypatch, least_unit_numel=0)
    records_stay_home(monkeypatch)  # those of one rank alone would visit the device
    machine = read_machine(name)
    found = foretold(machine, 2)
    assert found == foretold(machine, 2) and found.fits and found.ranks == 2
    slow = foretold(changed(machine, peer=1e8), 2)
    assert slow.moved_nbytes == found.moved_nbytes
    assert slow.bottleneck == "collectives" and slow.step_seconds > slow.floor_seconds > found.step_seconds
    assert slow.floors["collectives"] == pytest.approx(slow.moved_nbytes["collectives"] / 1e8)
    whole = foretold(machine, 1)
    assert found.moved_nbytes["h2d"] < whole.moved_nbytes["h2d"] and "collectives" not in whole.moved_nbytes
    assert found.peak_nbytes["cpu"] < whole.peak_nbytes["cpu"] < found.peak_nbytes_of_all["cpu"]
    assert found.tokens_per_second == pytest.approx(2 * 32 / found.step_seconds)


def test_without_a_link_of_their_own_it_takes_the_way_through_host_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """And counts where it goes: the links' own seconds, not the bytes of what is fetched."""
    small(monkeypatch, least_unit_numel=0)
    machine = changed(read_machine("rtx4090"), h2d=1e8, d2h=1e8)
    through, beside = foretold(machine, 2), foretold(changed(machine, peer=1e12), 2)
    assert through.moved_nbytes == beside.moved_nbytes
    more = through.floors["host to device"] - beside.floors["host to device"]
    assert more == pytest.approx(through.moved_nbytes["collectives"] / 1e8)
    assert through.step_seconds > beside.step_seconds


def test_what_ranks_share_each_has_an_equal_part_of() -> None:
    machine = read_machine("rtx4090")
    share = share_of(machine, 4)
    assert share.nvme_both == machine.nvme_both / 4 and share.memory_bandwidth == machine.memory_bandwidth / 4
    assert (share.flops, share.h2d, share.cpu_nbytes) == (machine.flops, machine.h2d, machine.cpu_nbytes)
    assert share_of(CPU, 2).flops == CPU.flops / 2 and share_of(machine, 1) == machine


def test_the_plan_of_several_ranks(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    shape = ["plan", "--hidden", "64", "--layers", "2", "--vocabulary", "256", "--dtype", "bf16", "--sequence", "16"]
    machine = ["--machine", "h100", "--ranks", "2"]
    assert main([*shape, *machine, "--json", "--trace", str(tmp_path / "trace.json"), "--parameters", "cpu"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["ranks"] == 2 and found["fits"] and found["step_seconds"] >= found["floor_seconds"] > 0
    assert set(found["moved_nbytes"]) == {"h2d", "d2h", "nvme_read", "nvme_write", "collectives"} == set(found["hidden"])
    assert found["peak_nbytes_of_all"] == {tier: 2 * nbytes for tier, nbytes in found["peak_nbytes"].items()}
    assert set(found["largest"]) >= {"batch", "sequence"} and found["buys"]
    trace = read_trace(tmp_path / "trace.rank0.json")
    on_the_wire = [event for event in trace.events if event.row == COLLECTIVES]
    assert {event.name for event in on_the_wire} == {"gather", "reduce"} and all(event.nbytes for event in on_the_wire)
    assert main([*shape, *machine, "--tokens", "1e9"]) == 0
    page = capsys.readouterr().out
    assert "of all 2 ranks" in page and "between ranks" in page and "days for" in page
    assert main([*shape, "--machine", "gb10", "--ranks", "2"]) == 2
    assert "gb10 has one device" in capsys.readouterr().err
