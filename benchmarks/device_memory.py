# SPDX-License-Identifier: Apache-2.0
"""Bytes that a step moves against `device_memory`, from the least with which it works to what holds everything; and without
that budget, on devices of as much memory, where what the model leaves is found out as it runs.

    python benchmarks/device_memory.py --out docs/performance/device_memory.json

A stack of equal blocks in bf16 with fp32 states, on the deferred accelerator, whose device memory is its own and counted:
what is copied to it and from it, what is read and written on NVMe, and the most bytes in use, beside what was planned. The
losses and the weights at the end are the same in every row, or this fails.
"""

from __future__ import annotations

import argparse
import contextlib
import hashlib
import json
import os
import tempfile
from pathlib import Path
from typing import Any

import torch
from torch import nn

import offload
from offload.cli.plans.outline import Outline

BLOCKS, WIDTH, STEPS = 12, 128, 3
FIRST_STEPS = 6
"""Without a budget: until all has come that finds room."""
CASES = (("cpu", "cpu"), ("cpu", "nvme"), ("nvme", "nvme"))


class Blocks(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Linear(WIDTH, WIDTH, bias=False), nn.Tanh(), nn.Linear(WIDTH, WIDTH, bias=False))
            for _ in range(BLOCKS)
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = x + block(x)
        return x


def made(*, apart: bool = False) -> tuple[nn.Module, torch.optim.Optimizer]:
    """`apart`: each block is a unit of its own, as larger ones are."""
    torch.manual_seed(0)
    model = Blocks()
    for block in model.blocks if apart else ():
        offload.unit(block)
    return model, torch.optim.AdamW(model.parameters())


def counters(engine: Any) -> list[int]:
    """Bytes so far: to the device, from it, read, written."""
    device, backend = engine._parts.accelerator, engine._parts.backend
    io = backend.stats() if backend is not None else None
    return [device.copied_in_nbytes, device.copied_out_nbytes, io.read_nbytes if io else 0, io.written_nbytes if io else 0]


def step(engine: Any, index: int, *, counts_activations: bool = False) -> float:
    draw = torch.Generator().manual_seed(index)
    x, y = torch.randn(2, 8, WIDTH, generator=draw)
    with engine._parts.accelerator.counting() if counts_activations else contextlib.nullcontext():
        loss = torch.nn.functional.mse_loss(engine.module(x).float(), y)
        engine.backward(loss)
    engine.step()
    engine.optimizer.zero_grad()
    engine._training.settle()
    for store in (engine._parts.parameter_store, engine._parts.records):
        store.settle_writes()
    return loss.item()


def measure(config: offload.Config) -> dict[str, Any]:
    model, optimizer = made()
    with Outline(model, optimizer, config) as outline:
        placement = outline.placement()
        planned = outline.traffic(placement, 1, scheduled=True)
    with offload.initialize(model, optimizer, config) as engine:
        losses = [step(engine, 0)]  # planned from a guess of the order
        before = counters(engine)
        losses += [step(engine, 1 + index) for index in range(STEPS)]
        moved = [(after - first) // STEPS for after, first in zip(counters(engine), before, strict=True)]
        digest = hashlib.sha256()
        for value in engine.state_dict().values():
            digest.update(value.contiguous().view(torch.uint8).numpy().tobytes())
        peak = engine.stats()["device_peak_nbytes"]
    lines = [line for line in placement.plan.lines if line.tier == "device"]
    kept = [sum(line.nbytes for line in lines if line.purpose.startswith(state)) for state in ("parameters kept", "optimizer")]
    return {
        "device_memory": config.device_memory,
        "moved_nbytes": moved,
        "planned_nbytes": [
            planned.to_device_nbytes, planned.from_device_nbytes, planned.read_nbytes, planned.written_nbytes,
        ],
        "parameters_kept_nbytes": kept[0], "states_kept_nbytes": kept[1],
        "device_planned_nbytes": sum(line.nbytes for line in lines), "device_peak_nbytes": peak,
        "losses": losses, "weights": digest.hexdigest(),
    }  # fmt: skip


def measure_without(fields: dict[str, Any], device_nbytes: int) -> dict[str, Any]:
    """On a device of so much memory, with no budget."""
    os.environ["OFFLOAD_DEVICE_NBYTES"] = str(device_nbytes)
    model, optimizer = made(apart=True)
    with offload.initialize(model, optimizer, offload.Config(**fields)) as engine:
        losses = [step(engine, index, counts_activations=True) for index in range(FIRST_STEPS)]
        before = counters(engine)
        losses += [step(engine, FIRST_STEPS + index, counts_activations=True) for index in range(STEPS)]
        moved = [(after - first) // STEPS for after, first in zip(counters(engine), before, strict=True)]
        stats = engine.stats()
    del os.environ["OFFLOAD_DEVICE_NBYTES"]
    return {
        "device_nbytes": device_nbytes, "moved_nbytes": moved, "losses": losses,
        "resident_peak_nbytes": stats["resident_peak_nbytes"], "visiting_nbytes": stats["visiting_nbytes"],
        "device_peak_nbytes": stats["device_peak_nbytes"],
    }  # fmt: skip


def least_without(fields: dict[str, Any]) -> int:
    """What the first step takes, which keeps as little as it can, with the model's own tensors."""
    os.environ["OFFLOAD_DEVICE_NBYTES"] = str(1 << 40)
    model, optimizer = made(apart=True)
    with offload.initialize(model, optimizer, offload.Config(**fields)) as engine:
        step(engine, 0, counts_activations=True)
        return int(engine.stats()["device_peak_nbytes"])


def sweep_without(case: tuple[str, str], count: int, folder: str) -> list[dict[str, Any]]:
    fields: dict[str, Any] = {"parameters": case[0], "optimizer_states": case[1], "nvme": folder, "dtype": "bf16"}
    (_, everything), bare, rows = limits(fields), least_without(fields), list[dict[str, Any]]()
    for index in range(count):
        row = measure_without(fields, bare + everything * 5 * index // (4 * max(count - 1, 1)))
        assert row["device_peak_nbytes"] <= row["device_nbytes"]
        rows.append({"parameters": case[0], "optimizer_states": case[1]} | row)
        print(case, f"a device of {row['device_nbytes'] / 2**20:6.2f} MiB", row["moved_nbytes"], flush=True)
    return rows


def limits(fields: dict[str, Any]) -> tuple[int, int]:
    """The least device_memory, and what everything takes, with the sums of micro-batches that are left room for."""
    model, optimizer = made()
    with Outline(model, optimizer, offload.Config(**fields, device_memory=1 << 40)) as outline:
        placement = outline.placement()
        smallest = outline.smallest_nbytes(placement, "device_memory")
        assert smallest is not None
        return smallest, placement.with_sums().plan.total_nbytes("device")


def sweep(case: tuple[str, str], count: int, folder: str) -> list[dict[str, Any]]:
    fields: dict[str, Any] = {"parameters": case[0], "optimizer_states": case[1], "nvme": folder, "dtype": "bf16"}
    smallest, everything = limits(fields)
    rows = []
    for index in range(count):
        budget = smallest + (everything - smallest) * index // max(count - 1, 1)
        row = measure(offload.Config(**fields, device_memory=budget))
        assert row["device_peak_nbytes"] <= row["device_planned_nbytes"] <= budget
        rows.append({"parameters": case[0], "optimizer_states": case[1]} | row)
        print(case, f"{budget / 2**20:6.2f} MiB", row["moved_nbytes"], row["planned_nbytes"], flush=True)
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, help="the figures as JSON")
    parser.add_argument("--points", type=int, default=14, metavar="N", help="budgets for each placement")
    options = parser.parse_args()
    os.environ["OFFLOAD_ACCELERATOR"] = "deferred"
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory(prefix="bench-", dir=".") as folder:
        rows = [row for case in CASES for row in sweep(case, options.points, folder)]
        without = [row for case in CASES for row in sweep_without(case, options.points, folder)]
    assert len({tuple(row["losses"]) for row in without}) == 1, "a device's size changed a bit"
    assert without[0]["losses"][: STEPS + 1] == rows[0]["losses"], "a budget changed a bit"
    assert len({(tuple(row["losses"]), row["weights"]) for row in rows}) == 1, "a budget changed a bit"
    if options.out is not None:
        report = {"blocks": BLOCKS, "width": WIDTH, "results": rows, "without": without}
        options.out.write_text(json.dumps(report, indent=1) + "\n")


if __name__ == "__main__":
    main()
