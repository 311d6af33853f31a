# SPDX-License-Identifier: Apache-2.0
"""The plots of the README and of docs/performance/, each of one question, from the committed result files."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from plot import ADAM, DEEPSPEED, FSDP2, OFFLOAD, OFFLOAD_TOO, PLAIN, TRANSFERS, WRITES, Line, bars, lanes, svg

GIB = 2**30
BESIDE_PEERS = {
    "plain": ("plain PyTorch", PLAIN),
    "nvme": ("offload, NVMe", OFFLOAD),
    "nvme, backward": ('the same, "backward"', OFFLOAD_TOO),
    "deepspeed nvme": ("DeepSpeed, NVMe", DEEPSPEED),
}


def beside_peers(train_step: dict[str, Any], ranks: dict[str, Any]) -> str:
    """The README's: seconds a step and peak memory of a process, by model."""
    names = {"plain": "plain PyTorch, all in memory", "nvme": "offload", "deepspeed nvme": "DeepSpeed"}
    panels: dict[str, dict[str, dict[str, float]]] = {"seconds a step": {}, "peak memory of a process, GiB": {}}
    for shape in ("1B", "2B"):
        for result in train_step["results"]:
            if result["shape"] == shape and result["case"] in names:
                _put(panels, f"{shape}, states on NVMe", names[result["case"]], result)
    own = {"offload stage 3": "offload", "fsdp2": "FSDP2", "deepspeed stage 3": "DeepSpeed"}
    for result in ranks["results"]:
        if result["case"] in own:
            _put(panels, f"{result['shape']}, {result['ranks']} ranks, stage 3", own[result["case"]], result)
    colours = {"plain PyTorch, all in memory": PLAIN, "offload": OFFLOAD, "DeepSpeed": DEEPSPEED, "FSDP2": FSDP2}
    return bars("A training step on a CPU, fp32; shorter is better", panels, colours)


def _put(panels: dict[str, dict[str, dict[str, float]]], group: str, name: str, result: dict[str, Any]) -> None:
    for panel, value in zip(panels.values(), (result["median_seconds"], result["peak_rss_nbytes"] / GIB), strict=True):
        panel.setdefault(group, {})[name] = value


def step_by_size(report: dict[str, Any]) -> str:
    sizes = {result["shape"]: result["parameters"] / 1e9 for result in report["results"] if "parameters" in result}
    lines = []
    for case, (name, colour) in BESIDE_PEERS.items():
        own = [one for one in report["results"] if one["case"] == case and "," not in one["shape"] and "median_seconds" in one]
        lines.append(Line(name, [(sizes[one["shape"]], one["median_seconds"]) for one in own], colour=colour))
    return svg("Seconds of a step against the size of the model", "billions of parameters", "seconds a step", lines)


def hidden(report: dict[str, Any]) -> str:
    names = {"nvme read": "NVMe read", "nvme write": "NVMe write", "adam": "Adam"}
    how = {"nvme": 'update="step"', "nvme, backward": 'update="backward"'}
    panels: dict[str, dict[str, dict[str, float]]] = {title: {} for title in how.values()}
    for result in report["results"]:
        if result["case"] in how and "," not in result["shape"]:
            links = {names[link]: 100 * one["hidden"] for link, one in result["links"].items() if link in names}
            panels[how[result["case"]]][result["shape"]] = {name: links[name] for name in names.values()}
    colours = {"NVMe read": TRANSFERS, "NVMe write": WRITES, "Adam": ADAM}
    return bars("Share of each link's work that nobody waited for, everything on NVMe", panels, colours, " %")


def memory_sweep(report: dict[str, Any]) -> str:
    results = report["results"]
    gib = [result["cpu_memory"] / GIB for result in results]
    measured = list(zip(gib, (result["median_seconds"] for result in results), strict=True))
    floor = list(zip(gib, (result["floor_seconds"] for result in results), strict=True))
    lines = [Line("offload, NVMe", measured, colour=OFFLOAD), Line("floor", floor, dashed=True, colour=PLAIN)]
    title = f"{results[0]['shape']}, everything on NVMe: the step against cpu_memory"
    return svg(title, "cpu_memory, GiB", "seconds a step", lines)


def device_memory(report: dict[str, Any]) -> str:
    """One line for each placement that was asked for."""
    lines: dict[str, list[tuple[float, float]]] = {}
    for row in report["results"]:
        name = f"{row['parameters']}, {row['optimizer_states']}"
        lines.setdefault(name, []).append((row["device_memory"] / 2**20, sum(row["moved_nbytes"]) / 2**20))
    for row in report["without"]:
        name = f"{row['parameters']}, {row['optimizer_states']}: no budget, a device of so much"
        lines.setdefault(name, []).append((row["device_nbytes"] / 2**20, sum(row["moved_nbytes"]) / 2**20))
    title = "Bytes that a step moves against device_memory, over all links"
    # What lies under another line is wider: the last two differ only where little is granted.
    drawn = [
        Line(name, points, width=6.0 if name == "cpu, nvme" else 2.0, dashed="no budget" in name)
        for name, points in lines.items()
    ]
    return svg(title, "device_memory, MiB (parameters, states: the furthest places)", "MiB a step", drawn)


def losses(report: dict[str, Any]) -> str:
    """From where all of them have begun to learn."""
    names = {"fp32": "fp32", "split": "split", "bf16": "bf16", "8bit": "8bit"}
    colours = {"fp32": PLAIN, "split": OFFLOAD, "bf16": "#E69F00", "8bit": "#CC79A7"}
    lines = []
    for run in report["runs"]:
        state = run["state_format"]
        points = [point for point in run["curve"] if point[0] >= report["steps"] / 3]
        name = f"fp32, seed {run['seed']}" if state == "fp32" else names.get(state, state)
        lines.append(Line(name, points, dashed=state == "fp32", colour=colours.get(state, "")))
    return svg("Held-out loss by state format", "steps", "nats per byte", lines, from_zero=False)


def timeline(report: dict[str, Any]) -> str:
    title = f"One step of a {report['model']} model on {report['machine']}: who is at work when (virtual time)"
    names = {"waits": "compute waits for what it needs"}
    rows = {row: {names.get(what, what): shares for what, shares in own.items()} for row, own in report["rows"].items()}
    colours = {
        "forward": OFFLOAD_TOO,
        "backward": OFFLOAD,
        "compute waits for what it needs": DEEPSPEED,
        "transfers": TRANSFERS,
        "updates": ADAM,
    }
    return lanes(title, "seconds", report["seconds"], rows, colours)


def rendered(results: Path) -> dict[Path, str]:
    """Every plot whose result files are there."""

    def read(name: str) -> dict[str, Any]:
        content: dict[str, Any] = json.loads((results / f"{name}.json").read_text())
        return content

    steps = read("train_step")
    return {
        results / "beside_peers.svg": beside_peers(steps, read("ranks")),
        results / "step_by_size.svg": step_by_size(steps),
        results / "hidden.svg": hidden(steps),
        results / "memory_sweep.svg": memory_sweep(read("memory_sweep")),
        results / "device_memory.svg": device_memory(read("device_memory")),
        results / "loss_curves.svg": losses(read("loss_curves")),
        results / "timeline.svg": timeline(read("timeline")),
    }
