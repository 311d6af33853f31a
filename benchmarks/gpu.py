# SPDX-License-Identifier: Apache-2.0
"""What a GPU machine reaches: link rates, CPU Adam, and Llama-shaped models trained by offload and by its peers.

    python benchmarks/gpu.py --out docs/performance/gpu.json     # make gpu-report; under 9 minutes, whatever happens
    python benchmarks/gpu.py --dry-run                           # the same on the CPU with tiny sizes, a minute

bf16 with fp32 masters, AdamW, clipping to 1.0, sequence 2048, activation checkpointing of every layer, real text. Every cell
is a process of its own with a limit of its own; results are written after each, so that a run that is stopped keeps what
it has. Beside every figure stands the floor: the largest of the times that compute, each link and CPU Adam need at least,
at rates measured in the same run. "8 GiB" is the allocator's limit (set_per_process_memory_fraction).
"""

from __future__ import annotations

import argparse
import contextlib
import importlib.util
import json
import os
import platform
import queue
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent))

from gpu_report.model import SHAPES, describe, flops_of_step
from gpu_report.traffic import floor

DEADLINE_SECONDS = 520.0
"""Of the whole run; the rest of the 9 minutes is for starting and writing."""
DRY_DEADLINE_SECONDS = 120.0
PEERS = (
    *("FSDP2 CPUOffloadPolicy", "torchao CPUOffloadOptimizer", "DeepSpeed stage 3 cpu", "DeepSpeed SuperOffload"),
    "plain, in memory",
)
REQUIRED = {
    "torchao CPUOffloadOptimizer": "torchao",
    "DeepSpeed stage 3 cpu": "deepspeed",
    "DeepSpeed SuperOffload": "deepspeed",
}
HOST_NBYTES = {
    "offload": 16,
    "offload, split states": 14,
    "offload, accumulation 4": 18,
    "offload, on NVMe": 2,
    "FSDP2 CPUOffloadPolicy": 16,
    "torchao CPUOffloadOptimizer": 8,
    "DeepSpeed stage 3 cpu": 18,
    "DeepSpeed SuperOffload": 18,
    "plain, in memory": 0,
}
"""Of host memory per parameter, by formula; the first of offload's rows for those that are not named."""
DRAWN_ROWS = 64
"""Of each matrix; drawing 7 B initial values takes a minute of one core, which a cell does not have."""
Cell = dict[str, Any]


def cells(dry_run: bool) -> Iterator[tuple[str, str, float | None, float]]:
    """(contender, model, limit in GiB, seconds), the most telling first."""
    if dry_run:
        for contender in ("offload", "offload, accumulation 4", "offload, on NVMe", *PEERS):
            yield contender, "tiny", 8.0 if contender == "offload" else None, 60.0
        return
    yield "offload", "1B", None, 30.0
    for peer in PEERS[:3]:
        yield peer, "1B", None, 35.0
    yield "offload, update in backward", "1B", None, 30.0
    yield "offload, split states", "7B", 8.0, 75.0
    yield PEERS[3], "1B", None, 35.0
    yield "plain, in memory", "1B", None, 30.0
    yield "offload, split states", "7B", None, 75.0
    yield "offload, accumulation 4", "1B", None, 30.0
    yield "offload, no checkpointing", "1B", None, 30.0
    yield "offload, on NVMe", "1B", None, 40.0
    yield "FSDP2 CPUOffloadPolicy", "7B", None, 75.0
    yield "DeepSpeed stage 3 cpu", "7B", None, 75.0
    yield "DeepSpeed SuperOffload", "7B", None, 75.0
    yield "offload", "3B", 8.0, 45.0
    yield "offload", "3B", None, 45.0
    yield "offload", "1B", 8.0, 30.0
    yield "FSDP2 CPUOffloadPolicy", "3B", None, 45.0
    yield "torchao CPUOffloadOptimizer", "3B", None, 45.0
    yield "offload, parameters on the device", "3B", None, 45.0
    yield "offload, split states", "7B", 24.0, 75.0
    yield "offload", "7B", None, 75.0
    yield "plain, in memory", "7B", None, 60.0
    yield "offload", "3B", 24.0, 45.0
    yield "offload", "1B", 24.0, 30.0
    yield "torchao CPUOffloadOptimizer", "7B", None, 60.0
    yield "offload, parameters on the device", "7B", None, 75.0


class Child:
    """A cell's process. Its lines are read as they come; at the limit it is killed, and what it said stays.

    It has a session of its own, which is killed whole, and is the first that the system ends where host memory runs out: a
    peer that takes too much takes nobody else along.
    """

    def __init__(self, arguments: dict[str, Any], environment: dict[str, str]) -> None:
        command = [sys.executable, "-m", "gpu_report.cell", json.dumps(arguments)]
        self._process = subprocess.Popen(
            command,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env=environment,
            cwd=Path(__file__).resolve().parent,
            start_new_session=True,
        )
        with contextlib.suppress(OSError):  # it is over already
            Path(f"/proc/{self._process.pid}/oom_score_adj").write_text("1000")
        self._lines: queue.SimpleQueue[str | None] = queue.SimpleQueue()
        self._errors: list[str] = []
        self._threads = [threading.Thread(target=one, daemon=True) for one in (self._read, self._read_errors)]
        for thread in self._threads:
            thread.start()

    def _read(self) -> None:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            self._lines.put(line)
        self._lines.put(None)

    def _read_errors(self) -> None:
        assert self._process.stderr is not None
        self._errors.extend(self._process.stderr)

    def said(self, seconds: float) -> Iterator[dict[str, Any]]:
        """Its lines. After `seconds` it is killed and {"status": "timed out"} is the last."""
        stop = time.monotonic() + seconds
        while True:
            try:
                line = self._lines.get(timeout=max(0.0, stop - time.monotonic()))
            except queue.Empty:
                self._end()
                yield {"status": "timed out"}
                return
            if line is None:
                break
            if line.startswith("{"):
                yield json.loads(line)
        code = self._process.wait()
        self._end()
        if code == -signal.SIGKILL:
            yield {"status": "killed: host memory ended, or somebody did it"}
        elif code != 0:
            self._threads[1].join(5.0)
            last = next((line.strip() for line in reversed(self._errors) if line.strip()), "no message")
            yield {"status": f"failed ({code}): {last[:300]}"}

    def _end(self) -> None:
        """Kill what is left of its session."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()


def write(path: Path | None, report: dict[str, Any]) -> None:
    """All of it, whole or not at all."""
    if path is not None:
        path.parent.mkdir(parents=True, exist_ok=True)
        beside = path.with_name(path.name + ".new")
        beside.write_text(json.dumps(report, indent=1) + "\n")
        os.replace(beside, path)


def complete(cell: Cell, rates: dict[str, Any] | None) -> None:
    """Add to every batch what follows from it."""
    shape = SHAPES[cell["model"]]
    for batch in cell["batches"]:
        tokens = batch["micro_batch"] * shape.sequence * cell.get("micro_batches_per_step", 1)
        batch["model_tflops"] = flops_of_step(shape, tokens) / batch["step_seconds"] / 1e12
        if rates is not None:
            batch |= floor(cell, batch, rates)


def run_cell(cell: Cell, arguments: dict[str, Any], seconds: float, environment: dict[str, str]) -> None:
    """Run one cell and gather into it what it says."""
    for said in Child(arguments, environment).said(seconds):
        if "batch" in said:
            cell["batches"].append(said.pop("batch"))
        cell.update(said)
    if cell.get("status") == "timed out" and cell["batches"]:
        cell["status"] = "ok, until the time was up"


def missing_room(contender: str, model: str) -> str:
    """Why this machine's memory cannot hold a cell, which is then not begun; "" if it can."""
    needed = HOST_NBYTES.get(contender, HOST_NBYTES["offload"]) * SHAPES[model].numel
    there = available_nbytes()
    return f"needs {needed / 2**30:.0f} GiB of host memory, {there / 2**30:.0f} are there" if needed > 0.95 * there else ""


def available_nbytes() -> int:
    line = next(line for line in Path("/proc/meminfo").read_text().splitlines() if line.startswith("MemAvailable:"))
    return int(line.split()[1]) * 1024


def describe_machine() -> dict[str, Any]:
    import torch

    from offload.device.host_memory.memory_limits import host_memory_limits

    cpu = [line for line in Path("/proc/cpuinfo").read_text().splitlines() if line.startswith("model name")]
    found: dict[str, Any] = {
        "cpu": cpu[0].split(":")[1].strip() if cpu else "unknown",
        "cores": len(os.sched_getaffinity(0)),
        "memory_nbytes": min(limit.total_nbytes for limit in host_memory_limits()),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "cuda": torch.version.cuda,
        "kernel": platform.release().split("-")[0],
    }
    if torch.cuda.is_available():
        device = torch.cuda.get_device_properties(torch.cuda.current_device())
        found["gpu"], found["gpu_memory_nbytes"] = device.name, device.total_memory
    return found


def row(cell: Cell) -> str:
    """One line of progress."""
    best = max(cell["batches"], key=lambda batch: batch["tokens_per_second"], default=None)
    limit = f"{cell['limit_gib']:g} GiB" if cell["limit_gib"] else "-"
    figures = f"{best['tokens_per_second']:9.0f} tokens/s at {best['micro_batch']}" if best is not None else ""
    return f"{cell['contender']:>34} {cell['model']:>5} {limit:>7}  {cell['status']}  {figures}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, help="write the figures there as JSON, anew after every cell")
    parser.add_argument("--dry-run", action="store_true", help="tiny sizes on the CPU: shows that the report runs, no figures")
    parser.add_argument("--only", default="", help="contenders to run, by the beginning of their names, comma-separated")
    parser.add_argument("--seconds", type=float, help="the whole run's time, in place of the default")
    parser.add_argument("--micro-batches", default="1,2,4,8,16,32", help="rows of a micro-batch, tried in this order")
    parser.add_argument("--draw-all", action="store_true", help="draw all initial values, not a few rows that are repeated")
    options = parser.parse_args()
    drawn_rows = None if options.draw_all else DRAWN_ROWS
    micro_batches = [1, 2] if options.dry_run else [int(one) for one in options.micro_batches.split(",")]
    began = time.monotonic()
    deadline = began + (options.seconds or (DRY_DEADLINE_SECONDS if options.dry_run else DEADLINE_SECONDS))
    environment = dict(os.environ) | {"PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True"}
    if options.dry_run:
        environment |= {"OFFLOAD_ACCELERATOR": "deferred", "CUDA_VISIBLE_DEVICES": ""}
    machine = describe_machine()
    if not options.dry_run and "gpu" not in machine:
        raise SystemExit("torch finds no CUDA device here: this report needs one (or --dry-run)")
    report: dict[str, Any] = {"dry_run": options.dry_run, "finished": False, "machine": machine, "rates": None, "cells": []}
    report["drawn_rows"], report["micro_batches"] = drawn_rows, micro_batches
    report["models"] = {name: describe(shape) for name, shape in SHAPES.items()}
    for said in Child({"kind": "rates", "tiny": options.dry_run}, environment).said(min(60.0, deadline - time.monotonic())):
        report.update({"rates_status": said["status"]} if "status" in said else said)
    write(options.out, report)
    chosen = [name for name in options.only.split(",") if name]
    for contender, model, limit_gib, seconds in cells(options.dry_run):
        if chosen and not any(contender.startswith(name) for name in chosen):
            continue
        cell: Cell = {"contender": contender, "model": model, "limit_gib": limit_gib, "status": "", "batches": []}
        report["cells"].append(cell)
        remaining = min(seconds, deadline - time.monotonic())
        missing = REQUIRED.get(contender)
        if missing is not None and importlib.util.find_spec(missing) is None:
            cell["status"] = "not installed"
        elif remaining < seconds / 3:
            cell["status"] = "not reached: the time was up"
        elif short := missing_room(contender, model):
            cell["status"] = short
        else:
            arguments = {
                "kind": "train", "name": contender, "model": model, "limit_gib": limit_gib, "seconds": remaining,
                "micro_batches": micro_batches, "steps": 2 if options.dry_run else 4, "drawn_rows": drawn_rows,
            }  # fmt: skip
            run_cell(cell, arguments, remaining, environment)
            complete(cell, report["rates"])
        print(row(cell), flush=True)
        write(options.out, report)
    report["finished"], report["seconds"] = True, time.monotonic() - began
    write(options.out, report)


if __name__ == "__main__":
    main()
