# SPDX-License-Identifier: Apache-2.0
"""What `initialize` costs for each parameter of a model whose values are there, beside a copy of the bytes that it writes.

    python benchmarks/startup.py --out docs/performance/startup.json

Each row is a process of its own: linear layers with constant values, AdamW, parameters and states in CPU memory. Figures are
the medians of the processes' processor time (all threads, page faults included) and of the time on the clock, also as a
ratio to the copy's in the same process. Moments are not written at start-up: memory that nobody has written reads as zeros.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
WRITTEN = {"fp32": 4, "bf16 and fp32 masters": 6, "split": 4, "8bit": 4}
"""Bytes that start-up writes for a parameter: parameter, master or remainder."""
CONFIGS: dict[str, dict[str, str]] = {
    "fp32": {},
    "bf16 and fp32 masters": {"dtype": "bf16"},
    "split": {"dtype": "bf16", "state_format": "split"},
    "8bit": {"dtype": "bf16", "state_format": "8bit"},
}


def measured(work: Callable[[], Any]) -> dict[str, float]:
    """Seconds of `work` on the clock and of all cores."""
    before, start = resource.getrusage(resource.RUSAGE_SELF), time.perf_counter()
    kept = work()
    wall, after = time.perf_counter() - start, resource.getrusage(resource.RUSAGE_SELF)
    del kept
    return {"wall": wall, "core": after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime}


def one(case: str, layers: int, width: int, threads: int) -> dict[str, Any]:
    """One process's figures in seconds: of `initialize`, and of a copy of as many bytes into fresh memory."""
    import torch
    from torch import nn

    import offload

    torch.set_num_threads(threads)
    torch.ones(8).add_(1)
    with torch.device("meta"):
        model = nn.Sequential(*(nn.Linear(width, width, bias=False) for _ in range(layers)))
    model.to_empty(device="cpu")
    for parameter in model.parameters():
        parameter.data.fill_(0.01)
    numel = sum(parameter.numel() for parameter in model.parameters())
    source = torch.full((numel * WRITTEN[case],), 7, dtype=torch.uint8)
    copied = measured(source.clone)
    del source
    optimizer = torch.optim.AdamW(model.parameters())
    config = offload.Config(parameters="cpu", optimizer_states="cpu", **CONFIGS[case])  # type: ignore[arg-type]
    engines: list[offload.Engine] = []
    started = measured(lambda: engines.append(offload.initialize(model, optimizer, config)))
    engines[0].close()
    return {"numel": numel, "initialize": started, "copy": copied}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, help="the result file (default: print)")
    parser.add_argument("--layers", type=int, default=16)
    parser.add_argument("--width", type=int, default=3072)
    parser.add_argument("--rounds", type=int, default=3, help="processes for each row")
    parser.add_argument("--threads", type=int, default=1, help="of torch")
    parser.add_argument("--quick", action="store_true", help="a small model, one round")
    parser.add_argument("--case", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.quick:
        options.layers, options.width, options.rounds = 2, 256, 1
    if options.case:
        print(json.dumps(one(options.case, options.layers, options.width, options.threads)))
        return 0
    sizes = ["--layers", str(options.layers), "--width", str(options.width), "--threads", str(options.threads)]
    environment = os.environ | {"OFFLOAD_ACCELERATOR": "cpu", "PYTHONPATH": str(ROOT)}
    turns: dict[str, list[dict[str, Any]]] = {case: [] for case in CONFIGS}
    for _ in range(options.rounds):
        for case in CONFIGS:
            command = [sys.executable, __file__, "--case", case, *sizes]
            done = subprocess.run(command, env=environment, stdout=subprocess.PIPE, check=True, text=True)
            turns[case].append(json.loads(done.stdout))
            print(f"{case}: {turns[case][-1]}", file=sys.stderr)
    sys.path.insert(0, str(Path(__file__).parent))
    from machine import describe_machine

    report = {"machine": describe_machine(), "threads": options.threads, "results": [row(*item) for item in turns.items()]}
    text = json.dumps(report, indent=2) + "\n"
    if options.out:
        options.out.write_text(text)
    else:
        print(text)
    return 0


def row(case: str, turns: list[dict[str, Any]]) -> dict[str, Any]:
    """Medians in nanoseconds for each parameter."""

    def median(what: str, clock: str) -> float:
        return round(statistics.median(turn[what][clock] / turn["numel"] for turn in turns) * 1e9, 2)

    return {
        "case": case,
        "parameters": turns[0]["numel"],
        "written_nbytes": WRITTEN[case],
        "wall_ratio": round(statistics.median(turn["initialize"]["wall"] / turn["copy"]["wall"] for turn in turns), 1),
        **{f"{what}_{clock}_ns": median(what, clock) for what in ("initialize", "copy") for clock in ("core", "wall")},
    }


if __name__ == "__main__":
    raise SystemExit(main())
