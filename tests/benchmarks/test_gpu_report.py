"""The report for GPUs runs on the CPU from end to end, and what it makes of traces and results is right."""

from __future__ import annotations

import importlib
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

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


@pytest.fixture(scope="module")
def report(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    path = tmp_path_factory.mktemp("report") / "gpu.json"
    command = [
        sys.executable,
        str(FOLDER / "gpu.py"),
        "--dry-run",
        "--out",
        str(path),
        "--only",
        "offload,torchao",
        "--seconds",
        "120",
    ]
    done = subprocess.run(command, capture_output=True, text=True, timeout=180)
    assert done.returncode == 0, done.stderr
    read: dict[str, Any] = json.loads(path.read_text())
    return read


def test_the_dry_run_says_what_a_report_says(report: dict[str, Any]) -> None:
    assert report["dry_run"] and report["finished"]
    assert report["rates"]["links"]["h2d"] > 0 and report["rates"]["matrix_flops"] > 0 and report["rates"]["cpu_adam_numel"] > 0
    cells = {cell["contender"]: cell for cell in report["cells"]}
    ours = cells["offload"]
    assert ours["status"] == "ok" and next(batch["micro_batch"] for batch in ours["batches"]) == 1
    for batch in ours["batches"]:
        assert batch["tokens_per_second"] > 0 and batch["floor_seconds"] == max(batch["terms"].values())
        assert all(2.0 < loss < 7.0 for loss in batch["losses"]), "not the losses of a language model of 256 tokens"
    assert ours["batches"][0]["losses"][-1] < ours["batches"][0]["losses"][0] + 0.5
    assert ours["engine"]["host_peak_nbytes"] > 0 and "links" in ours["trace"]
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
    assert "| tiny, 8 GiB | h2d | 0.00 |" in table
    plots = tables.gpu_plots(measured)
    assert set(plots) == {"gpu-tiny-rate.svg", "gpu-tiny-loss.svg"} and all("<polyline" in svg for svg in plots.values())


def test_a_cell_that_hangs_is_killed_and_keeps_what_it_said(module: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    gpu = module("gpu")
    hanging = 'import time; print(\'{"batch": {"micro_batch": 1}}\', flush=True); time.sleep(60)'
    popen = subprocess.Popen
    monkeypatch.setattr(gpu.subprocess, "Popen", lambda command, **options: popen([sys.executable, "-c", hanging], **options))
    cell: dict[str, Any] = {"batches": []}
    gpu.run_cell(cell, {}, 2.0, {})
    assert cell == {"batches": [{"micro_batch": 1}], "status": "ok, until the time was up"}


def test_a_cell_that_dies_says_its_last_words(module: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    gpu = module("gpu")
    popen = subprocess.Popen
    dying = "raise RuntimeError('out of luck')"
    monkeypatch.setattr(gpu.subprocess, "Popen", lambda command, **options: popen([sys.executable, "-c", dying], **options))
    cell: dict[str, Any] = {"batches": []}
    gpu.run_cell(cell, {}, 20.0, {})
    assert cell["status"] == "failed (1): RuntimeError: out of luck"
