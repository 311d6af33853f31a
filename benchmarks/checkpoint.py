# SPDX-License-Identifier: Apache-2.0
"""What a save costs a training run: memory beside it, and how long the next step is held up.

    python benchmarks/checkpoint.py --out docs/performance/checkpoint.json

A GPT-2-shaped model with parameters and optimizer states on NVMe is saved beside training, and saved while it waits; beside
it, in the same run, torch.save of the same state held in memory, and DeepSpeed's save_checkpoint (ZeRO stage 2) where
it is installed. Every case is a process of its own. "Held up": the time of the save call and of the step after it, less a
step's median. "Extra": by how much the highest resident size of that time is above a step's own. The last case is
the same training without checksums of the scratch records (OFFLOAD_VERIFY=0).
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from machine import describe_machine, status_nbytes
from step_floor import memory_rate, nvme_rates
from train_step import SHAPES, VOCABULARY, build

from offload.device.host_memory.memory_limits import host_memory_limit

SEQUENCE = 128
CASES = ("offload", "torch.save", "offload, waiting", "deepspeed", "offload, not verified")


def peak_nbytes_of(action: Callable[[], None]) -> int:
    """The highest resident size while `action` runs."""
    Path("/proc/self/clear_refs").write_text("5")
    action()
    return status_nbytes("VmHWM")


class Loop:
    """One training, by plain PyTorch or by an engine: `step` and `save`."""

    def __init__(self, case: str, shape: str, folder: str) -> None:
        import torch

        torch.manual_seed(0)
        self.folder = Path(folder) / "saves"
        self.draw = torch.Generator().manual_seed(1)
        self.wait: Callable[[], None] = lambda: None
        self.engine: Any = None
        getattr(self, "_open_" + case.split(",")[0].replace(".", "_"))(case, shape, folder)
        self.numel = sum(parameter.numel() for parameter in self.model.parameters())

    def _open_offload(self, case: str, shape: str, folder: str) -> None:
        import torch

        import offload

        with offload.deferred_init():
            self.model = build(shape, SEQUENCE)
        optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-4)
        config = offload.Config(parameters="nvme", optimizer_states="nvme", nvme=folder)
        self.engine = offload.initialize(self.model, optimizer, config)
        self.optimizer = self.engine.optimizer

        def save() -> None:
            self.wait = self.engine.save_checkpoint(self.folder / "saved", wait="waiting" in case).wait

        self.save: Callable[[], None] = save

    def _open_torch_save(self, case: str, shape: str, folder: str) -> None:
        import torch

        self.model = build(shape, SEQUENCE)
        self.optimizer: Any = torch.optim.AdamW(self.model.parameters(), lr=1e-4, fused=True)

        def save() -> None:
            self.folder.mkdir(exist_ok=True)
            with open(self.folder / "saved.pt", "wb") as file:
                torch.save({"model": self.model.state_dict(), "optimizer": self.optimizer.state_dict()}, file)
                os.fsync(file.fileno())

        self.save = save

    def _open_deepspeed(self, case: str, shape: str, folder: str) -> None:
        os.environ.update(
            RANK="0", LOCAL_RANK="0", WORLD_SIZE="1", LOCAL_SIZE="1", MASTER_ADDR="127.0.0.1", MASTER_PORT="29511"
        )
        import deepspeed
        import torch

        model = build(shape, SEQUENCE)
        config = {"train_batch_size": 1, "zero_optimization": {"stage": 2}, "zero_force_ds_cpu_optimizer": False}
        adamw = torch.optim.AdamW(model.parameters(), lr=1e-4)
        self.model, *_ = deepspeed.initialize(model=model, optimizer=adamw, config=config)
        self.optimizer = None

        def save() -> None:
            self.model.save_checkpoint(str(self.folder), tag="saved")
            os.sync()

        self.save = save

    def step(self) -> None:
        import torch

        tokens = torch.randint(0, VOCABULARY, (1, SEQUENCE), generator=self.draw)
        loss = self.model(input_ids=tokens, labels=tokens).loss
        if self.optimizer is None:
            self.model.backward(loss)
            self.model.step()
            return
        loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad()


def measure(case: str, shape: str, steps: int, nvme: str) -> dict[str, Any]:
    """The body of one child process."""
    loop = Loop(case, shape, nvme)
    seconds: list[float] = []

    def timed_step() -> None:
        start = time.perf_counter()
        loop.step()
        seconds.append(time.perf_counter() - start)

    loop.step()
    loop.step()
    step_peak = peak_nbytes_of(lambda: [timed_step() for _ in range(steps)] and None)
    median = statistics.median(seconds)
    held_up, whole, peaks = [], [], []
    for _ in range(3):

        def save_and_step() -> None:
            start = time.perf_counter()
            loop.save()
            loop.step()
            held_up.append(time.perf_counter() - start - median)
            loop.wait()
            whole.append(time.perf_counter() - start)

        peaks.append(peak_nbytes_of(save_and_step))
        loop.step()
    saved = sum(path.stat().st_size for path in loop.folder.rglob("*") if path.is_file())
    if loop.engine is not None:
        loop.engine.close()
    return {
        "case": case,
        "shape": shape,
        "parameters": loop.numel,
        "step_seconds": median,
        "held_up_seconds": statistics.median(held_up),
        "held_up_share": statistics.median(held_up) / median,
        "save_seconds": statistics.median(whole),
        "saved_nbytes": saved,
        "step_peak_nbytes": step_peak,
        "extra_peak_nbytes": max(peaks) - step_peak,
    }


IN_MEMORY_NBYTES = {"torch.save": 16, "deepspeed": 24}
"""What a peer holds of one parameter: weight, gradient, moments; DeepSpeed also a flat gradient and a partition's copy."""


def child(arguments: dict[str, Any]) -> dict[str, Any] | None:
    """Run `measure` in a process of its own; None where it cannot be had here (not installed, not enough memory)."""
    shape, case = arguments["shape"], arguments["case"]
    width = SHAPES[shape]["n_embd"]
    numel = 12 * SHAPES[shape]["n_layer"] * width**2 + VOCABULARY * width
    needed_nbytes = IN_MEMORY_NBYTES.get(case, 0) * numel
    if needed_nbytes > host_memory_limit().free_nbytes:
        print(f"{shape} {case}: no figure, it holds {needed_nbytes / 2**30:.1f} GiB", file=sys.stderr, flush=True)
        return None
    environment = os.environ | ({"OFFLOAD_VERIFY": "0"} if "not verified" in arguments["case"] else {})
    command = [sys.executable, __file__, "--child", json.dumps(arguments)]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, env=environment)
    if done.returncode != 0:
        print(f"{arguments['case']}: no figure, it ended with {done.returncode}", file=sys.stderr, flush=True)
        return None
    return dict(json.loads(done.stdout.strip().splitlines()[-1]))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, help="write the figures there as JSON")
    parser.add_argument("--nvme", help="folder on the drive to use; default: a temporary one in the current folder")
    parser.add_argument("--shapes", default="125M,1B", help="which models, of " + ", ".join(SHAPES))
    parser.add_argument("--steps", type=int, default=6, help="steps whose median and peak the saves are compared with")
    options = parser.parse_args()
    results: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory(dir=options.nvme or ".", prefix="bench-") as folder:
        rates = {"memory": memory_rate(), "nvme": nvme_rates(folder)}
        report = {"machine": describe_machine(), "rates": rates, "batch": 1, "sequence": SEQUENCE, "results": results}
        for shape in options.shapes.split(","):
            for case in CASES:
                result = child({"case": case, "shape": shape, "steps": options.steps, "nvme": folder})
                shutil.rmtree(Path(folder) / "saves", ignore_errors=True)
                if result is None:
                    continue
                results.append(result)
                print(row(result), flush=True)
                if options.out is not None:  # after every case: a run that is stopped keeps what it has
                    options.out.parent.mkdir(parents=True, exist_ok=True)
                    options.out.write_text(json.dumps(report, indent=1) + "\n")


def row(result: dict[str, Any]) -> str:
    """One line of the table."""
    return (
        f"{result['shape']:>5} {result['case']:>22}  step {result['step_seconds']:7.3f} s  held up "
        f"{result['held_up_seconds']:7.3f} s ({100 * result['held_up_share']:5.1f} %)  whole save "
        f"{result['save_seconds']:7.3f} s  extra {result['extra_peak_nbytes'] / 2**20:7.1f} MiB"
    )


if __name__ == "__main__":
    if sys.argv[1:2] == ["--child"]:
        print(json.dumps(measure(**json.loads(sys.argv[2]))))
    else:
        main()
