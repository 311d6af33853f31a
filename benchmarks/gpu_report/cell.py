"""One cell of the report, in a process of its own: one model, one contender, one limit of device memory, growing batches.

Every result is printed as a line of JSON as soon as it is there, so that a cell that is stopped has said what it knew.
"""

from __future__ import annotations

import json
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch

from . import rates
from .contenders import CONTENDERS, Contender, Unavailable
from .model import SHAPES, Shape, batches
from .overlap import summarize

WARM_STEPS = 2
SATURATED = 1.03
"""A larger batch that brings less than this factor is the last."""


def say(**what: Any) -> None:
    print(json.dumps(what), flush=True)


def status_nbytes(field: str) -> int:
    """A field of /proc/self/status in bytes."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(field + ":"):
            return int(line.split()[1]) * 1024
    raise RuntimeError(f"/proc/self/status has no {field}")


def _synchronize() -> None:
    if torch.cuda.is_available():
        torch.cuda.synchronize()


def _limit(limit_gib: float | None) -> None:
    if limit_gib is not None and torch.cuda.is_available():
        total = torch.cuda.get_device_properties(torch.cuda.current_device()).total_memory
        torch.cuda.set_per_process_memory_fraction(min(1.0, limit_gib * 2**30 / total))


def _measure(contender: Contender, shape: Shape, micro_batch: int, steps: int, device: torch.device) -> dict[str, Any]:
    tokens = [batch.to(device) for batch in batches(shape, micro_batch, WARM_STEPS + steps)]
    losses = [contender.step(batch) for batch in tokens[:WARM_STEPS]]
    _synchronize()
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats()
    start = time.perf_counter()
    losses += [contender.step(batch) for batch in tokens[WARM_STEPS:]]
    _synchronize()
    step_seconds = (time.perf_counter() - start) / steps
    count = micro_batch * shape.sequence
    return {
        "micro_batch": micro_batch,
        "step_seconds": step_seconds,
        "tokens_per_second": count / step_seconds,
        "peak_device_nbytes": torch.cuda.max_memory_allocated() if device.type == "cuda" else None,
        "reserved_device_nbytes": torch.cuda.max_memory_reserved() if device.type == "cuda" else None,
        "peak_host_nbytes": status_nbytes("VmHWM"),
        "losses": [loss.item() for loss in losses],
    }


def _traced(contender: Contender, shape: Shape, micro_batch: int, device: torch.device) -> dict[str, Any]:
    """Two steps under torch.profiler; the trace is read and dropped."""
    tokens = [batch.to(device) for batch in batches(shape, micro_batch, 2)]
    kinds = [torch.profiler.ProfilerActivity.CUDA if device.type == "cuda" else torch.profiler.ProfilerActivity.CPU]
    with tempfile.TemporaryDirectory() as folder:
        with torch.profiler.profile(activities=kinds) as profiler:
            for batch in tokens:
                contender.step(batch)
            _synchronize()
        path = Path(folder) / "trace.json"
        profiler.export_chrome_trace(str(path))
        return summarize(json.loads(path.read_text())) | {"steps": len(tokens)}


def train(name: str, model: str, limit_gib: float | None, micro_batches: list[int], steps: int, seconds: float) -> None:
    """Say one result for each micro-batch, until larger ones bring nothing, memory ends, or most of the time is gone."""
    began = time.monotonic()
    shape = SHAPES[model]
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    _limit(limit_gib)
    torch.manual_seed(0)
    try:
        contender = CONTENDERS[name](shape)
    except Unavailable as reason:
        return say(status=str(reason))
    say(built_seconds=time.monotonic() - began, note=contender.note, nbytes_per_parameter=contender.nbytes_per_parameter)
    best, last = 0.0, None
    try:
        for micro_batch in micro_batches:
            expected = 2 * (last["step_seconds"] * (WARM_STEPS + steps)) if last is not None else 0.0
            if time.monotonic() - began + expected > 0.8 * seconds:
                break
            last = _measure(contender, shape, micro_batch, steps, device)
            say(batch=last)
            if last["tokens_per_second"] < SATURATED * best:
                break
            best = max(best, last["tokens_per_second"])
    except torch.cuda.OutOfMemoryError:
        say(status="out of device memory" if last is None else "ok, until device memory ended")
    else:
        say(status="ok")
    if last is not None and name.startswith("offload"):
        stats = contender.stats()
        say(engine={key: stats[key] for key in ("placement", "planned", "host_nbytes", "host_peak_nbytes", "seconds")})
        if time.monotonic() - began + 6 * last["step_seconds"] < seconds:
            say(trace=_traced(contender, shape, micro_batches[0], device))
    contender.close()


def main(arguments: dict[str, Any]) -> None:
    """The body of a child process."""
    kind = arguments.pop("kind")
    if kind == "rates":
        say(rates=rates.measure(**arguments))
    else:
        train(**arguments)


if __name__ == "__main__":
    main(json.loads(sys.argv[1]))
