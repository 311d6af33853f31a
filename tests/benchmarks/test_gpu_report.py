# SPDX-License-Identifier: Apache-2.0
"""The report for GPUs runs on the CPU from end to end, and what it makes of traces and results is right."""

from __future__ import annotations

import contextlib
import dataclasses
import importlib
import itertools
import json
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import offload
from offload.device.deferred import DeferredAccelerator
from tests.devices import before_each_copy
from tests.warm import WarmProcess

FOLDER = Path(__file__).resolve().parents[2] / "benchmarks"


@pytest.fixture
def module(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Imports a benchmark by name."""
    monkeypatch.syspath_prepend(str(FOLDER))
    return importlib.import_module


def event(cat: str, name: str, start: float, seconds: float, **args: Any) -> dict[str, Any]:
    return {"ph": "X", "cat": cat, "name": name, "ts": start, "dur": seconds, "args": args}


def test_overlap_of_a_made_up_trace(module: Any) -> None:
    """Kernels at [0, 10) and [20, 30); H2D at [5, 25) in two touching copies, D2H at [24, 44)."""
    trace = {
        "traceEvents": [
            event("kernel", "a", 0, 6),
            event("kernel", "b on another stream", 4, 6),
            event("kernel", "c", 20, 10),
            event("gpu_memcpy", "Memcpy HtoD (Pinned -> Device)", 5, 10, bytes=1000),
            event("gpu_memcpy", "Memcpy HtoD (Pinned -> Device)", 15, 10, bytes=1000),
            event("gpu_memcpy", "Memcpy DtoH (Device -> Pageable)", 24, 20, bytes=500),
            event("gpu_memcpy", "Memcpy DtoD (Device -> Device)", 0, 44, bytes=9),
            event("cpu_op", "aten::copy_", 0, 100),
            {"ph": "M", "name": "process_name"},
        ]
    }
    found = module("gpu_report.overlap").summarize(trace)
    h2d, d2h = found["links"]["h2d"], found["links"]["d2h"]
    assert found["seconds"] == pytest.approx(44e-6) and found["kernel_seconds"] == pytest.approx(20e-6)
    assert found["idle_seconds"] == pytest.approx(0.0)
    assert h2d["nbytes"] == 2000 and h2d["seconds"] == pytest.approx(20e-6) and h2d["bytes_per_second"] == pytest.approx(1e8)
    assert h2d["overlap_percent"] == pytest.approx(100 * (5 + 5) / 20)
    assert d2h["overlap_percent"] == pytest.approx(100 * 6 / 20)
    assert h2d["duplex_percent"] == pytest.approx(100 * 1 / 20) == d2h["duplex_percent"]
    assert h2d["pageable_nbytes"] == 0 and d2h["pageable_nbytes"] == 500


def test_a_trace_of_the_profiler_has_the_form_that_is_read(module: Any, tmp_path: Path) -> None:
    """On a CPU it has no device events, so everything is zero, and nothing fails."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profiler:
        torch.ones(10).add_(1)
    profiler.export_chrome_trace(str(tmp_path / "trace.json"))
    found = module("gpu_report.overlap").summarize(json.loads((tmp_path / "trace.json").read_text()))
    assert found["kernel_seconds"] == 0 and found["links"]["h2d"]["overlap_percent"] is None


def test_the_shapes_have_the_parameters_they_say(module: Any) -> None:
    model = module("gpu_report.model")
    for shape in (model.SHAPES["tiny"], model.SHAPES["7B"]):
        with torch.device("meta"):
            built = model.Llama(shape)
        assert sum(parameter.numel() for parameter in built.parameters()) == shape.numel
    assert 6.5e9 < model.SHAPES["7B"].numel < 7.5e9


CELL = f"""
import runpy, sys
sys.path.insert(0, {str(FOLDER)!r})
runpy.run_module("gpu_report.cell", run_name="__main__", alter_sys=True)
"""


@pytest.fixture(scope="module")
def report(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """Its cells are forked: importing torch and its compiler takes longer than all that they do."""
    path = tmp_path_factory.mktemp("report") / "gpu.json"
    options = ["--dry-run", "--out", str(path), "--only", "offload,torchao", "--seconds", "300"]
    with contextlib.ExitStack() as begun, pytest.MonkeyPatch.context() as patch:

        def fork(command: list[str], *, env: dict[str, str], **_: Any) -> WarmProcess:
            assert command[:3] == [sys.executable, "-m", "gpu_report.cell"]
            return begun.enter_context(WarmProcess(["-c", CELL, *command[3:]], **env))

        patch.syspath_prepend(str(FOLDER))
        patch.setattr(sys, "argv", ["gpu.py", *options])
        gpu = importlib.import_module("gpu")
        patch.setattr(gpu, "subprocess", SimpleNamespace(Popen=fork, PIPE=subprocess.PIPE))
        gpu.main()
    read: dict[str, Any] = json.loads(path.read_text())
    return read


def test_the_dry_run_says_what_a_report_says(report: dict[str, Any]) -> None:
    assert report["dry_run"] and report["finished"]
    assert report["rates"]["links"]["h2d"] > 0 and report["rates"]["matrix_flops"] > 0
    assert set(report["rates"]["cpu_adam_numel"]) == {"fp32", "split"}
    assert min(report["rates"]["cpu_adam_numel"].values()) > 0 and min(report["rates"]["nvme"].values()) > 0
    cells = {cell["contender"]: cell for cell in report["cells"]}
    ours = cells["offload"]
    assert ours["status"] == "ok" and next(batch["micro_batch"] for batch in ours["batches"]) == 1
    for batch in ours["batches"]:
        assert batch["tokens_per_second"] > 0 and batch["floor_seconds"] == max(batch["terms"].values())
        assert all(2.0 < loss < 7.0 for loss in batch["losses"]), "not the losses of a language model of 256 tokens"
    assert ours["batches"][0]["losses"][-1] < ours["batches"][0]["losses"][0] + 0.5
    assert ours["engine"]["host_peak_nbytes"] > 0 and "links" in ours["trace"] and ours["initialize_seconds"] > 0
    assert all(batch["host_share"] > 0 for batch in ours["batches"])
    four = cells["offload, accumulation 4"]
    assert four["status"] == "ok" and four["micro_batches_per_step"] == 4 and four["traffic"]["h2d"] == 16
    assert four["batches"][0]["terms"]["compute"] == pytest.approx(4 * ours["batches"][0]["terms"]["compute"])
    drive = cells["offload, on NVMe"]
    assert drive["status"] == "ok" and drive["engine"]["placement"]["optimizer_states"] == "nvme"
    assert {"nvme read", "nvme write", "host memory", "cpu adam"} <= set(drive["batches"][0]["terms"])
    assert cells["torchao CPUOffloadOptimizer"]["status"] in ("not installed", "needs a GPU")


def test_tables_and_plots_are_made_of_a_report(module: Any, report: dict[str, Any]) -> None:
    """What only a GPU can say is filled in, as a report from one has it."""
    tables = module("gpu_report.tables")
    measured = json.loads(json.dumps(report)) | {"dry_run": False}
    measured["machine"] |= {"gpu": "a GPU", "gpu_memory_nbytes": 2**34, "cuda": "13.0"}
    measured["rates"]["links"]["share_of_bare"] = {"h2d": 0.99, "d2h": 0.98, "both": 0.97}
    for cell in measured["cells"]:
        for batch in cell["batches"]:
            batch["peak_device_nbytes"] = 2**30
    table = tables.gpu(measured)
    assert "| tiny | 8 GiB | offload | " in table and "97 % of bare" in table and "not installed" in table
    assert "| offload, tiny, 8 GiB | h2d | 0.00 |" in table and "with split states); drive " in table
    plots = tables.gpu_plots(measured)
    assert set(plots) == {"gpu-tiny-rate.svg", "gpu-tiny-loss.svg"} and all("<polyline" in svg for svg in plots.values())


def cells_run(monkeypatch: pytest.MonkeyPatch, gpu: Any, code: str) -> None:
    """In place of their own."""
    popen = subprocess.Popen
    monkeypatch.setattr(gpu.subprocess, "Popen", lambda command, **options: popen([sys.executable, "-c", code], **options))


def test_a_cell_that_hangs_is_killed_and_keeps_what_it_said(module: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    gpu = module("gpu")
    hanging = 'import time; print(\'{"batch": {"micro_batch": 1}}\', flush=True); time.sleep(60)'
    cells_run(monkeypatch, gpu, hanging)
    cell: dict[str, Any] = {"batches": []}
    gpu.run_cell(cell, {}, 2.0, {})
    assert cell == {"batches": [{"micro_batch": 1}], "status": "ok, until the time was up"}


def test_a_cell_that_dies_says_its_last_words(module: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    gpu = module("gpu")
    cells_run(monkeypatch, gpu, "raise RuntimeError('out of luck')")
    cell: dict[str, Any] = {"batches": []}
    gpu.run_cell(cell, {}, 20.0, {})
    assert cell["status"] == "failed (1): RuntimeError: out of luck"


def test_a_cell_that_is_killed_says_so_and_leaves_nobody(module: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """As when host memory ends: it is the first to go, its helpers go with it, and the next cell runs."""
    gpu = module("gpu")
    body = (
        "import os, pathlib, signal, subprocess, sys, time\n"
        "helper = subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(600)'], stdout=subprocess.DEVNULL)\n"
        f"while pathlib.Path('/proc/self/oom_score_adj').read_text().strip() != '1000': time.sleep(0.01)\n"
        f"pathlib.Path({str(tmp_path / 'helper')!r}).write_text(str(helper.pid))\n"
        "os.kill(os.getpid(), signal.SIGKILL)\n"
    )
    cells_run(monkeypatch, gpu, body)
    cell: dict[str, Any] = {"batches": []}
    gpu.run_cell(cell, {}, 60.0, {})
    assert cell["status"].startswith("killed")
    helper, stop = Path("/proc") / (tmp_path / "helper").read_text() / "stat", time.monotonic() + 60
    while helper.exists() and helper.read_text().rsplit(")", 1)[1].split()[0] != "Z":
        assert time.monotonic() < stop, "its helper lives on"
        time.sleep(0.01)


def test_a_cell_that_host_memory_cannot_hold_is_not_begun(module: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    gpu = module("gpu")
    monkeypatch.setattr(gpu, "available_nbytes", lambda: 100 * 2**30)
    assert gpu.missing_room("FSDP2 CPUOffloadPolicy", "7B").startswith("needs 100 GiB of host memory, 100 are")
    assert gpu.missing_room("offload, split states", "7B") == "" == gpu.missing_room("offload, on NVMe", "7B")
    assert set(gpu.HOST_NBYTES) <= set(module("gpu_report.contenders").CONTENDERS)
    for dry_run in (True, False):
        assert all(cell[0] in module("gpu_report.contenders").CONTENDERS for cell in gpu.cells(dry_run))


@pytest.fixture
def said(module: Any, monkeypatch: pytest.MonkeyPatch) -> Iterator[dict[str, Any]]:
    """What a cell that runs in this process says, gathered as `run_cell` does."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    gathered: dict[str, Any] = {"batches": []}

    def say(**what: Any) -> None:
        gathered["batches"] += [what.pop("batch")] if "batch" in what else []
        gathered.update(what)

    monkeypatch.setattr(module("gpu_report.cell"), "say", say)
    monkeypatch.setenv("OFFLOAD_ACCELERATOR", "deferred")
    yield gathered
    torch.set_num_threads(threads)


@pytest.mark.parametrize(("copies", "status"), [(3, "out of memory"), (60, "ok, out of memory at 2")])
def test_memory_that_ends_inside_the_engine_ends_the_cell(
    module: Any, monkeypatch: pytest.MonkeyPatch, said: dict[str, Any], copies: int, status: str
) -> None:
    """The engine is unusable then, and says all the same what it had planned and reached."""
    count = itertools.count()

    def full(*_: torch.Tensor) -> None:
        if next(count) >= copies:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 MiB.")

    before_each_copy(monkeypatch, DeferredAccelerator, "copy_in", full)
    module("gpu_report.cell").train("offload", "tiny", None, [1, 2, 4], 4, 100.0)
    assert said["status"] == status and len(said["batches"]) == (status != "out of memory")
    assert said["engine"]["planned"] and said["engine"]["host_peak_nbytes"] > 0


def test_another_failure_is_no_lack_of_memory(module: Any, monkeypatch: pytest.MonkeyPatch, said: dict[str, Any]) -> None:
    def broken(*_: Any) -> None:
        raise RuntimeError("a mistake")

    before_each_copy(monkeypatch, DeferredAccelerator, "copy_in", broken)
    with pytest.raises(RuntimeError, match="a mistake"):
        module("gpu_report.cell").train("offload", "tiny", None, [1, 2], 2, 100.0)


def test_a_batch_that_cannot_fit_is_not_tried(module: Any, monkeypatch: pytest.MonkeyPatch, said: dict[str, Any]) -> None:
    """4 GiB between steps and 1 GiB for each of the batch: 8 GiB hold four and not eight, and the engine goes on being one."""
    cell = module("gpu_report.cell")
    measure, tried = cell._measure, []

    def measured(contender: Any, shape: Any, micro_batch: int, *rest: Any) -> Any:
        tried.append(micro_batch)
        figures = {"peak_device_nbytes": (4 + micro_batch) * 2**30, "rest_device_nbytes": 4 * 2**30}
        return (
            measure(contender, shape, 1, *rest)
            | figures
            | {"micro_batch": micro_batch, "tokens_per_second": 100.0 * micro_batch}
        )

    monkeypatch.setattr(cell, "_measure", measured)
    monkeypatch.setattr(cell, "_limit_nbytes", lambda limit_gib: limit_gib * 2**30)
    cell.train("offload", "tiny", 8.0, [1, 2, 4, 8, 16], 1, 100.0)
    assert tried == [1, 2, 4] and said["status"] == "ok, 8 would need 12.0 GiB" and "trace" in said


def test_the_floor_counts_what_the_records_are_and_who_shares_host_memory(module: Any) -> None:
    traffic = module("gpu_report.traffic")
    rates = {
        "matrix_flops": 1e15,
        "links": {"h2d": 50e9, "d2h": 50e9, "both": 80e9},
        "cpu_adam_numel": {"fp32": 2e9, "split": 1e9},
        "host_memory": 100e9,
        "nvme": {"read": 5e9, "write": 4e9},
    }
    numel = module("gpu_report.model").SHAPES["1B"].numel
    batch = {"micro_batch": 1, "step_seconds": 10.0}

    def terms(*where: Any) -> dict[str, float]:
        moved = dataclasses.asdict(traffic.Traffic.of(*where))
        found: dict[str, float] = traffic.floor({"model": "1B", "traffic": moved}, batch, rates)["terms"]
        return found

    on_cpu, split, drive = terms("cpu", "cpu"), terms("cpu", "cpu", "split"), terms("nvme", "nvme")
    assert on_cpu["cpu adam"] == pytest.approx(numel / 2e9) and split["cpu adam"] == pytest.approx(numel / 1e9)
    # Weights twice to the device, gradients once back; 28 bytes of Adam; the drive's go through host memory, too.
    assert on_cpu["host memory"] == pytest.approx((4 + 2 + 28) * numel / 100e9)
    assert split["host memory"] == pytest.approx((4 + 2 + 26) * numel / 100e9)
    assert drive["host memory"] == pytest.approx((4 + 2 + 28 + 16 + 14) * numel / 100e9)
    assert drive["nvme read"] == pytest.approx(16 * numel / 5e9) and "nvme read" not in on_cpu
    assert terms("cpu", "cpu", "fp32", 4)["h2d"] == pytest.approx(4 * on_cpu["h2d"])
    without = dict(rates, host_memory=None, nvme=None)
    moved = dataclasses.asdict(traffic.Traffic.of("cpu", "cpu"))
    assert "host memory" not in traffic.floor({"model": "1B", "traffic": moved}, batch, without)["terms"]
    fewer = traffic.floor({"model": "1B", "recomputes": False}, batch, rates)["terms"]["compute"]
    assert on_cpu["compute"] == pytest.approx(fewer * 8 / 6)
    assert traffic.Traffic.of("cpu", "device") is None


def test_few_rows_are_drawn_and_the_others_repeat_them(module: Any) -> None:
    """The same values deferred or not; a report says which it is."""
    model, tables = module("gpu_report.model"), module("gpu_report.tables")
    shape = dataclasses.replace(model.SHAPES["tiny"], drawn_rows=16)
    torch.manual_seed(3)
    built = model.Llama(shape)
    for name, value in built.named_parameters():
        if value.dim() == 2:
            assert torch.equal(value, value[:16].repeat(value.shape[0] // 16, 1)) and value[:16].unique().numel() > 500, name
    torch.manual_seed(3)
    with offload.deferred_init():
        deferred = model.Llama(shape)
    with offload.initialize(deferred, None, {"parameters": "cpu"}) as engine:
        kept = engine.state_dict()
    assert all(torch.equal(kept[name], value) for name, value in built.state_dict().items())
    machine = {"gpu": "x", "gpu_memory_nbytes": 1, "cores": 1, "cpu": "x", "memory_nbytes": 1, "torch": "x", "cuda": "x"}
    links = {"h2d": 1, "d2h": 1, "both": 1, "share_of_bare": {"h2d": 1, "d2h": 1, "both": 1}}
    rates = {"links": links, "matrix_flops": 1, "cpu_adam_numel": {"fp32": 1, "split": 1}, "nvme": None}
    found = {"machine": machine, "rates": rates, "cells": [], "models": {}, "micro_batches": [1, 2]}
    assert "16 rows of initial values are drawn and the others repeat" in tables.gpu(found | {"drawn_rows": 16})
    assert "All initial values are drawn" in tables.gpu(found | {"drawn_rows": None})
