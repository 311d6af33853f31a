# SPDX-License-Identifier: Apache-2.0
"""`plan` says what `initialize` does: the same lines, budgets that hold and not one byte less, the traffic of the design."""

from __future__ import annotations

import gc
import json
import os
import re
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from torch import nn
from torch.nn.modules.module import register_module_forward_pre_hook

import offload
from offload.cli.main import main
from offload.cli.plans.forecast import Work, forecast_granted
from offload.cli.plans.outline import Outline
from offload.device.virtual.description import changed, read_machine, share_of
from offload.device.virtual.machine import VirtualMachine

from .conftest import LLAMA, run
from .measured import measured_once
from .plain import adamw, new_model

__all__ = ["measured_once"]

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
    shape = ("--hidden", 4096, "--layers", 4, "--vocabulary", 32000, "--dtype", "bf16")  # a billion parameters
    done = run("plan", *shape, "--parameters", "nvme", "--optimizer-states", "nvme", "--nvme", nvme, "--accumulate", 2)
    assert done.code == 0, done.err
    numel = 2 * 32000 * 4096 + 4 * (4 * 4096**2 + 3 * 4096 * 11008 + 2 * 4096) + 4096
    assert f"{numel / 1e9:.1f} G parameters" in done.out
    on_nvme = int(re.search(r"nvme +parameters +[0-9.]+ GiB +[0-9.]+ +(\d+)", done.out)[1])
    assert 2 * numel <= on_nvme < 2.01 * numel
    assert re.search(r"--cpu-memory +[0-9.]+ [MG]iB +\d+", done.out)
    assert not list(nvme.iterdir())


def test_the_model_is_named_with_or_without_a_flag(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    transformers.LlamaConfig(**LLAMA).save_pretrained(tmp_path)
    path, work = str(tmp_path), ("--machine", "rtx4090", "--sequence", "16", "--json")
    said = []
    for named in ((path, *work), ("--model", path, *work), (*work, path)):
        assert main(["plan", *named]) == 0
        said.append(capsys.readouterr().out)
    assert said[0] == said[1] == said[2] and json.loads(said[0])["fits"]
    with pytest.raises(SystemExit) as left:
        main(["plan", path, "--model", path])
    assert left.value.code == 2 and "not allowed with argument" in capsys.readouterr().err
    assert main(["plan", path + "-none"]) == 2
    assert f"{path}-none' does not exist" in capsys.readouterr().err


TINY = ("plan", "--hidden", "64", "--layers", "2", "--vocabulary", "256", "--dtype", "bf16", "--sequence", "16")


@pytest.mark.usefixtures("measured_once")
@pytest.mark.parametrize("machine", ["this", "rtx4090"])
def test_a_budget_that_cannot_be_shows_what_can(
    machine: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """No is an answer, and the same one as an object says."""
    monkeypatch.setenv("OFFLOAD_ACCELERATOR", UNIFIED)
    flags = [*TINY, "--cpu-memory", "1KiB", "--parameters", "cpu", "--optimizer-states", "cpu", "--machine", machine]
    assert main(flags) == 1
    first, reason, *rest = capsys.readouterr().out.splitlines()
    assert first.startswith("It does not fit. 164.2 k parameters") and "cpu_memory=1024 cannot hold" in reason
    assert "parameters='nvme', optimizer_states='nvme'" in reason
    assert "Placements, without budgets" in rest
    assert main([*flags, "--json"]) == 1
    assert "because " + json.loads(capsys.readouterr().out)["reason"] == reason


@pytest.mark.parametrize("flags", [(), ("--accumulate", "2"), ("--ranks", "2"), ("--optimizer-states", "nvme", "--lora", "4")])
def test_the_answer_comes_first_and_all_of_it_is_of_one_placement(
    flags: tuple[str, ...], capsys: pytest.CaptureFixture[str]
) -> None:
    asked = [*TINY, "--machine", "rtx4090", "--tokens", "1e9", *flags]
    assert main([*asked, "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert main(asked) == 0
    lines = capsys.readouterr().out.splitlines()
    tokens = 16 * (2 if "--accumulate" in flags or "--ranks" in flags else 1)
    assert lines[0].startswith("It fits. ") and " on rtx4090" in lines[0]
    assert f" a step of {tokens} tokens, {found['tokens_per_second']:,.0f} tokens/s, {found['days']:,.1f} days" in lines[1]
    assert lines[2].startswith(f"bottleneck: {found['bottleneck']}, which alone needs ")
    assert " device memory " in lines[3] and " of 23.50 GiB" in lines[3]
    assert lines[4].startswith("parameters ") and "optimizer states " in lines[4] and lines[5] == ""
    rows = [line.rsplit(maxsplit=4) for line in lines if re.match(r"  (device|cpu|nvme) .* [0-9.]+ \w+B? +[0-9.]+ +\d+$", line)]
    table = Counter({tuple(re.split(" {2,}", row[0].strip())): int(row[-1]) for row in rows if "TOTAL" not in row[0]})
    assert table == Counter({(one["tier"], one["purpose"]): one["nbytes"] for one in found["planned"]})


@pytest.mark.parametrize("states", ["auto", "nvme"])
@pytest.mark.parametrize("ranks", [1, 2])
def test_what_the_tables_are_of_is_what_the_forecast_ran_with(states: Any, ranks: int) -> None:
    machine = changed(read_machine("rtx4090"), device_nbytes=3e6)
    shape = transformers.LlamaConfig(**LLAMA | {"num_hidden_layers": 6, "hidden_size": 128})

    def make() -> tuple[nn.Module, torch.optim.Optimizer]:
        with torch.device("meta"):
            model = transformers.LlamaForCausalLM(shape).to(torch.bfloat16)
        return model, torch.optim.AdamW(model.parameters())

    config = offload.Config(dtype="bf16", nvme=".", cpu_memory=2**24, optimizer_states=states).expecting(2, 16)
    found, used = forecast_granted(make, config, machine, Work(1, 16, 2, checkpointing=False, ranks=ranks))
    assert found.peak_nbytes
    with VirtualMachine(share_of(machine, ranks), ranks).running(), Outline(*make(), used, ranks) as outline:
        lines = outline.placement().plan.lines
    assert [{"tier": line.tier, "purpose": line.purpose, "nbytes": line.nbytes} for line in lines] == found.planned


def test_a_link_between_ranks_that_is_not_known_is_said(capsys: pytest.CaptureFixture[str]) -> None:
    for machine, known in (("h100", True), ("rtx4090", False)):
        assert main([*TINY, "--machine", machine, "--ranks", "2"]) == 0
        assert ("counted over host memory" in capsys.readouterr().out) != known
        assert main([*TINY, "--machine", machine, "--ranks", "2", "--json"]) == 0
        notes = json.loads(capsys.readouterr().out)["notes"]
        assert any("counted over host memory" in one for one in notes) != known
    assert main([*TINY, "--machine", "rtx4090"]) == 0  # one rank sends nobody anything
    assert "counted over host memory" not in capsys.readouterr().out


def test_a_described_machine_has_drives_without_a_folder_here(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*TINY, "--machine", "rtx4090", "--parameters", "nvme", "--optimizer-states", "nvme", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["placement"]["optimizer_states"] == "nvme"
    assert main([*TINY, "--optimizer-states", "nvme"]) == 2
    assert "needs a folder" in capsys.readouterr().err


@pytest.mark.usefixtures("measured_once")
def test_several_ranks(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OFFLOAD_ACCELERATOR", UNIFIED)
    shape = ["plan", "--hidden", "256", "--layers", "2", "--ranks", "4"]
    assert main([*shape, "--stage", "2"]) == 0
    printed = capsys.readouterr().out
    assert "4 ranks, stage 2; bytes are those of one rank" in printed and "of all 4 ranks together" in printed
    assert "nvme        nvme" not in printed  # below stage 3 parameters stay where they are used
    assert main([*shape, "--stage", "3"]) == 0
    assert "nvme        nvme" in capsys.readouterr().out


@pytest.fixture
def unfrozen() -> Iterator[None]:
    """What the collector is to leave alone (tests/frozen.py) is given up inside."""
    gc.unfreeze()
    yield
    gc.freeze()


def test_the_engine_runs_on_one_core_beside_no_garbage_and_the_process_has_all_again(unfrozen: None) -> None:
    if not hasattr(os, "sched_setaffinity"):
        pytest.skip("this system binds no threads to cores")
    before = os.sched_getaffinity(0)
    cores, frozen = list[set[int]](), list[int]()

    def look(*_: Any) -> None:
        cores.append(os.sched_getaffinity(0))
        frozen.append(gc.get_freeze_count())

    shape = ["--hidden", "64", "--layers", "2", "--vocabulary", "256", "--dtype", "bf16", "--sequence", "16"]
    with register_module_forward_pre_hook(look):
        assert main(["plan", *shape, "--machine", "rtx4090", "--json"]) == 0
    assert cores and all(len(one) == 1 and one <= before for one in cores)
    assert all(count > 10_000 for count in frozen), "torch alone has more objects than that"
    assert os.sched_getaffinity(0) == before and gc.get_freeze_count() == 0
