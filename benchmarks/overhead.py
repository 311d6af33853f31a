# SPDX-License-Identifier: Apache-2.0
"""What the engine's own Python costs: processor time of a step beside plain PyTorch with foreach AdamW, on small tensors.

    python benchmarks/overhead.py --out docs/performance/overhead.json

Each row is a process of its own, with one thread for torch. `step` is the median processor time (all threads) of steps as a
loop makes them; the rest is what each part of a step takes more than plain PyTorch's, for each unit: forward, backward, and
the updates that a step begins, which are waited for here (`engine.gathered([])`) to tell them from the next forward; the
three together, and the updates for each chunk. A block has 12 parameters. Beside a device a row has each block as a unit of
its own, fetched twice, its gradients sent back and updated on the host; what the device would do costs nothing there.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from machine import describe_machine
from stub_device import stub_device

CASES = {
    "48 blocks of 64": ("blocks", "cpu"),
    "200 linears of 64": ("linears", "cpu"),
    "48 blocks on NVMe": ("blocks", "nvme"),
    "48 blocks, stub device": ("blocks", "stub"),
}
"""By name: the model, and the tier of parameters and states; "stub": in CPU memory, of a device whose verbs cost nothing, each
block a unit of its own, as large blocks are."""
PARTS = ("forward", "backward", "step()", "updates")


def built(kind: str) -> Any:
    """The model: its units are its blocks, or its linears."""
    from torch import nn

    class Block(nn.Module):
        def __init__(self, width: int = 64) -> None:
            super().__init__()
            self.first, self.second = nn.LayerNorm(width), nn.LayerNorm(width)
            self.mix, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
            self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

        def forward(self, x: Any) -> Any:
            query, key, value = self.mix(self.first(x)).chunk(3, dim=-1)
            x = x + self.out(query * key.tanh() + value)
            return x + self.down(self.up(self.second(x)).relu())

    class Stack(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            make: Callable[[], nn.Module] = Block if kind == "blocks" else lambda: nn.Linear(64, 64)
            self.layers = nn.ModuleList(make() for _ in range(48 if kind == "blocks" else 200))

        def forward(self, x: Any) -> Any:
            for layer in self.layers:
                x = layer(x)
            return x

    return Stack()


def timed(work: Callable[[], Any], seconds: list[float]) -> Any:
    start = time.process_time()
    result = work()
    seconds.append(time.process_time() - start)
    return result


def steps(model: Any, optimizer: Any, settle: Callable[[], None] | None, count: int) -> dict[str, float]:
    """Median seconds of processor time: of whole steps; with `settle` of their parts instead."""
    import torch

    batch = torch.ones(4, 64)
    found: dict[str, list[float]] = {name: [] for name in (*PARTS, "step")}

    def one() -> None:
        loss = timed(lambda: model(batch).square().mean(), found["forward"])
        timed(loss.backward, found["backward"])
        timed(optimizer.step, found["step()"])
        if settle is not None:
            timed(settle, found["updates"])
        optimizer.zero_grad()

    for _ in range(count + 3):
        timed(one, found["step"])
    return {name: statistics.median(seconds[3:]) for name, seconds in found.items() if seconds}


def one(case: str, count: int, folder: str) -> dict[str, Any]:
    import torch

    import offload

    torch.set_num_threads(1)
    kind, tier = CASES[case]
    torch.manual_seed(0)
    plain = built(kind)
    expected = steps(plain, torch.optim.AdamW(plain.parameters(), foreach=True), None, count)
    model = built(kind)
    has_stub = tier == "stub"
    home = "cpu" if has_stub else tier
    where: dict[str, Any] = {"parameters": home, "optimizer_states": home, "nvme": folder if tier == "nvme" else None}
    if has_stub:
        for layer in model.layers:
            offload.unit(layer)
    with (
        stub_device() if has_stub else contextlib.nullcontext(),
        offload.initialize(model, torch.optim.AdamW(model.parameters()), offload.Config(**where)) as engine,
    ):
        whole = steps(model, engine.optimizer, None, count)

        def settle() -> None:
            with engine.gathered([]):
                pass

        parts = steps(model, engine.optimizer, settle, count)
        chunk_count = sum(len(flat.chunks) for unit in engine._parts.layout.units for flat in unit.flats)
    unit_count = len(model.layers)
    beyond = {name: (parts[name] - expected[name]) / unit_count for name in ("forward", "backward")}
    us_per_unit = {name: seconds * 1e6 for name, seconds in {**beyond, "updates": parts["updates"] / unit_count}.items()}
    return {
        "plain_ms": expected["step"] * 1e3,
        "step_ms": whole["step"] * 1e3,
        "ratio": whole["step"] / expected["step"],
        "us_per_unit": us_per_unit | {"together": sum(us_per_unit.values())},
        "updates_us_per_chunk": parts["updates"] / chunk_count * 1e6,
        "step()_us": parts["step()"] * 1e6,
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, help="the result file (default: print)")
    parser.add_argument("--steps", type=int, default=30)
    parser.add_argument("--rounds", type=int, default=3, help="processes for each row; the one with the median ratio counts")
    parser.add_argument("--nvme", help="folder on the drive (default: a temporary one)")
    parser.add_argument("--quick", action="store_true", help="few steps, one round")
    parser.add_argument("--case", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.quick:
        options.steps, options.rounds = 5, 1
    if options.case is not None:
        with tempfile.TemporaryDirectory(dir=options.nvme) as folder:
            print(json.dumps(one(options.case, options.steps, folder)))
        return 0
    rows = []
    for case in CASES:
        again = [sys.executable, __file__, "--case", case, "--steps", str(options.steps)]
        again += ["--nvme", options.nvme] if options.nvme else []
        figures = [
            json.loads(subprocess.run(again, check=True, capture_output=True, text=True).stdout) for _ in range(options.rounds)
        ]
        rows.append({"case": case, **sorted(figures, key=lambda one: one["ratio"])[len(figures) // 2]})
        row = rows[-1]
        told = ", ".join(f"{name} {us:.0f} us" for name, us in row["us_per_unit"].items())
        print(
            f"{case:18} {row['plain_ms']:7.1f} ms plain, {row['step_ms']:7.1f} ms, {row['ratio']:.2f} x; by unit {told}; "
            f"chunk {row['updates_us_per_chunk']:.0f} us, step() {row['step()_us']:.0f} us",
            flush=True,
        )
    if options.out is not None:
        report = {"machine": describe_machine(), "load": os.getloadavg()[0], "steps": options.steps, "rows": rows}
        options.out.write_text(json.dumps(report, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
