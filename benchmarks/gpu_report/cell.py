# SPDX-License-Identifier: Apache-2.0
"""One cell of the report, in a process of its own: one model, one contender, one limit of device memory, growing batches.

Every result is printed as a line of JSON as soon as it is there, so that a cell that is stopped has said what it knew.
"""

from __future__ import annotations

import json
import os
import sys
import tempfile
import time
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import torch

from offload.errors import BudgetError

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


def _limit_nbytes(limit_gib: float | None) -> float | None:
    """What may be taken of the device's memory; None without a device."""
    if not torch.cuda.is_available():
        return None
    total = float(torch.cuda.get_device_properties(torch.cuda.current_device()).total_memory)
    return min(total, limit_gib * 2**30) if limit_gib is not None else total


def _visiting_share(stats: dict[str, Any]) -> float:
    """Of the records, what is on the device between steps in what the model leaves: nothing of such units moves."""
    records = sum(line["nbytes"] for line in stats.get("planned", ()) if line["purpose"].startswith("optimizer states"))
    return min(stats["visiting_nbytes"] / records, 1.0) if records else 0.0


def _measure(contender: Contender, shape: Shape, micro_batch: int, steps: int, device: torch.device) -> dict[str, Any]:
    per_step = contender.micro_batches_per_step
    tokens = [batch.to(device) for batch in batches(shape, micro_batch, (WARM_STEPS + steps) * per_step)]
    given = [tokens[start : start + per_step] for start in range(0, len(tokens), per_step)]
    losses = [contender.step(one) for one in given[:WARM_STEPS]]
    _synchronize()
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats()
    start, start_of_host = time.perf_counter(), time.process_time()
    losses += [contender.step(one) for one in given[WARM_STEPS:]]
    _synchronize()
    seconds, host_seconds = time.perf_counter() - start, time.process_time() - start_of_host
    return {
        "micro_batch": micro_batch,
        "step_seconds": seconds / steps,
        "tokens_per_second": micro_batch * per_step * shape.sequence * steps / seconds,
        # Of all cores' time, what this process took: Python, launches, the update.
        "host_share": host_seconds / (seconds * len(os.sched_getaffinity(0))),
        "peak_device_nbytes": torch.cuda.max_memory_allocated() if device.type == "cuda" else None,
        "rest_device_nbytes": torch.cuda.memory_allocated() if device.type == "cuda" else None,
        "reserved_device_nbytes": torch.cuda.max_memory_reserved() if device.type == "cuda" else None,
        "peak_host_nbytes": status_nbytes("VmHWM"),
        "losses": [loss.item() for loss in losses],
        "visiting_share": _visiting_share(contender.stats()),
    }


def _traced(contender: Contender, shape: Shape, micro_batch: int, device: torch.device) -> dict[str, Any]:
    """Two steps under torch.profiler; the trace is read and dropped."""
    steps, per_step = 2, contender.micro_batches_per_step
    tokens = [batch.to(device) for batch in batches(shape, micro_batch, steps * per_step)]
    kinds = [torch.profiler.ProfilerActivity.CUDA if device.type == "cuda" else torch.profiler.ProfilerActivity.CPU]
    with tempfile.TemporaryDirectory() as folder:
        with torch.profiler.profile(activities=kinds) as profiler:
            for start in range(0, len(tokens), per_step):
                contender.step(tokens[start : start + per_step])
            _synchronize()
        path = Path(folder) / "trace.json"
        profiler.export_chrome_trace(str(path))
        return summarize(json.loads(path.read_text())) | {"steps": steps}


def expected_nbytes(last: dict[str, Any], micro_batch: int) -> float | None:
    """Device memory that a larger batch takes at its peak: what is there between steps does not grow, the rest does with the
    batch. (Gradients under way and units in use are part of what grows, so it is a little too much.) None: no device."""
    if last["peak_device_nbytes"] is None:
        return None
    rest: int = last["rest_device_nbytes"]
    return rest + (last["peak_device_nbytes"] - rest) * micro_batch / last["micro_batch"]


def is_out_of_memory(error: BaseException | None) -> bool:
    """Whether the device's memory ended, or a budget: here, or in what this failure came of (the engine's own, a lane's)."""
    seen: set[int] = set()
    while error is not None and id(error) not in seen:
        seen.add(id(error))
        if isinstance(error, (torch.OutOfMemoryError, BudgetError)) or "CUDA out of memory" in str(error):
            return True
        error = error.__cause__ or error.__context__
    return False


class _Grower:
    """Measures batches, each twice the last, until larger ones bring nothing, would not fit, or most of the time is gone."""

    def __init__(self, contender: Contender, shape: Shape, steps: int, seconds: float, began: float) -> None:
        self._contender, self._shape, self._steps = contender, shape, steps
        self._stop = began + 0.8 * seconds
        self.last: dict[str, Any] | None = None

    def run(self, micro_batches: list[int], device: torch.device, limit_nbytes: float | None) -> str:
        """How it ended."""
        best = 0.0
        for micro_batch in micro_batches:
            if self.last is not None:
                if time.monotonic() + 2 * self.last["step_seconds"] * (WARM_STEPS + self._steps) > self._stop:
                    return f"ok, no time for {micro_batch}"
                needed = expected_nbytes(self.last, micro_batch)
                if needed is not None and limit_nbytes is not None and needed > limit_nbytes:
                    return f"ok, {micro_batch} would need {needed / 2**30:.1f} GiB"
            try:
                self.last = _measure(self._contender, self._shape, micro_batch, self._steps, device)
            except Exception as error:
                if not is_out_of_memory(error):
                    raise
                return "out of memory" if self.last is None else f"ok, out of memory at {micro_batch}"
            say(batch=self.last)
            if self.last["tokens_per_second"] < SATURATED * best:
                break
            best = max(best, self.last["tokens_per_second"])
        return "ok"


def train(
    name: str,
    model: str,
    limit_gib: float | None,
    micro_batches: list[int],
    steps: int,
    seconds: float,
    drawn_rows: int | None = None,
) -> None:
    """Say one result for each micro-batch, what the engine says of itself, and a trace."""
    began = time.monotonic()
    shape = replace(SHAPES[model], drawn_rows=drawn_rows)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    _limit(limit_gib)
    torch.manual_seed(0)
    try:
        contender = CONTENDERS[name](shape)
    except Unavailable as reason:
        return say(status=str(reason))
    except Exception as error:
        if not is_out_of_memory(error):
            raise
        return say(status="out of memory")
    traffic = asdict(contender.traffic) if contender.traffic is not None else None
    say(initialize_seconds=time.monotonic() - began, note=contender.note, traffic=traffic)
    say(micro_batches_per_step=contender.micro_batches_per_step, recomputes=contender.recomputes)
    grower = _Grower(contender, shape, steps, seconds, began)
    status = grower.run(micro_batches, device, _limit_nbytes(limit_gib))
    say(status=status)
    if name.startswith("offload"):
        stats = contender.stats()
        say(engine={key: stats[key] for key in ("placement", "planned", "host_nbytes", "host_peak_nbytes", "seconds")})
    if grower.last is None or "out of memory" in status:
        return  # what failed is not trained or closed in order: the process ends
    if name.startswith("offload") and time.monotonic() - began + 6 * grower.last["step_seconds"] < seconds:
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
