# SPDX-License-Identifier: Apache-2.0
"""Models of the Llama architecture on described machines, as `python -m offload plan` sees them."""

from __future__ import annotations

import argparse
import contextlib
import itertools
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

MODELS: dict[str, tuple[int, int, int, int, int]] = {  # width, layers, heads, heads of keys and values, width of the MLP
    "7 B": (4096, 32, 32, 32, 11008),
    "13 B": (5120, 40, 40, 40, 13824),
    "70 B": (8192, 80, 64, 8, 28672),
}
MACHINES = ("rtx3090", "rtx4090", "h100")
WORK = ("--batch", "4", "--sequence", "2048", "--accumulate", "4", "--checkpointing", "full", "--clip", "1.0")


def flags(model: str) -> list[str]:
    """Of `plan`."""
    names = ("--hidden", "--layers", "--heads", "--kv-heads", "--intermediate")
    shape = [text for name, size in zip(names, MODELS[model], strict=True) for text in (name, str(size))]
    return [*shape, "--vocabulary", "32000", "--dtype", "bf16", "--state-format", "split", *WORK]


def plan(model: str, machine: str) -> dict[str, Any]:
    """What the command says."""
    command = [sys.executable, "-m", "offload", "plan", *flags(model), "--machine", machine, "--json"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    with contextlib.suppress(json.JSONDecodeError):
        found: dict[str, Any] = json.loads(done.stdout)
        keep = (
            "fits",
            "reason",
            "step_seconds",
            "floor_seconds",
            "bottleneck",
            "tokens_per_second",
            "peak_nbytes",
            "placement",
        )
        return {"model": model, "machine": machine, **{name: found[name] for name in keep}}
    raise SystemExit(f"plan of {model} on {machine} said: {done.stderr[-2000:]}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--models", nargs="*", default=list(MODELS), choices=list(MODELS))
    parser.add_argument("--machines", nargs="*", default=list(MACHINES))
    parser.add_argument("--out", type=Path, help="the result file; what it has and is not asked for stays")
    args = parser.parse_args()
    found: dict[tuple[str, str], dict[str, Any]] = {}
    if args.out is not None and args.out.exists():
        found = {(one["model"], one["machine"]): one for one in json.loads(args.out.read_text(encoding="utf-8"))["results"]}
    for pair in itertools.product(args.models, args.machines):
        before = os.times()
        found[pair] = plan(*pair)
        after = os.times()
        found[pair]["cpu_seconds"] = sum(after[2:4]) - sum(before[2:4])
        print(json.dumps(found[pair]), file=sys.stderr, flush=True)
        if args.out is not None:
            results = [found[one] for one in itertools.product(MODELS, MACHINES) if one in found]
            content = {"command": "plan " + " ".join(flags("7 B")[14:]), "results": results}
            args.out.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
