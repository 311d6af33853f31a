# SPDX-License-Identifier: Apache-2.0
"""The tables of what the engine says beforehand: steps in virtual time, and what of them was measured."""

from __future__ import annotations

from typing import Any

from markdown_text import gib, table

PUBLISHED = {"7 B": "8 B 3,142 tokens/s", "32 B": "32 B 740 tokens/s"}
"""Of RoundPipe, by the nearest size here."""
_WORST = 3
"""Cells that are told of on changed machines."""


def floors(report: dict[str, Any]) -> str:
    """The table of benchmarks/floors.py."""
    fitting = [one for one in report["results"] if one["fits"]]
    near = sum(one["ratio"] <= 1.15 for one in fitting)
    introduction = (
        "Llama-shaped, bf16, split masters, checkpointing, clip 1.0, all of the machine's memory granted; in virtual time. The "
        "floor is the largest of computing, each link, and host memory with all who use it. In order: the first forward, the "
        "other micro-batches, the last backward, each as long as its computing or what the planner's cost has move in it. "
        "Where a step takes more than 1.15 "
        "of the floor: the seconds in which the model stood still, by what it waited for and what that was a matter of, as "
        "`explain` counts them in the step's trace, and what the ratio would be were that not there to be waited for: the same "
        "step in the same places, run again without clipping, or with a host memory, a drive, a link or Python's calls that "
        "take no time; together (+), until it is within 1.15. "
        f"Within 1.15: {near} of {len(fitting)} cells that fit."
    )
    compared = [one for one in fitting if one.get("on_device_seconds")]
    if compared:
        introduction += (
            " On the h100 the same steps of 7 B with everything in device memory, were there enough of it, take "
            + ", ".join(
                f"{one['on_device_seconds']:.2f} s ({one['tokens']} x {one['micro_batches']}: here "
                f"{one['step_seconds'] / one['on_device_seconds']:.2f} times as long)"
                for one in compared
            )
            + "."
        )
    best = {
        size: max(one["tokens_per_second"] for one in fitting if (one["size"], one["machine"]) == (size, "rtx4090"))
        for size in PUBLISHED
    }
    introduction += " Published for one RTX 4090 by RoundPipe, updates one step stale and nothing clipped: " + "; ".join(
        f"{published}, here {size} {best[size]:,.0f}" for size, published in PUBLISHED.items()
    )
    introduction += ", in the best of these cells, with exact updates that are clipped." + _twice_as_fast(fitting)
    columns = "| model | machine | tokens x micro-batches | states on | s/step | floor (of) | ratio | in order | waits for |"
    rows = []
    for one in report["results"]:
        start = f"| {one['size']} | {one['machine']} | {one['tokens']} x {one['micro_batches']} |"
        if not one["fits"]:
            rows.append(f"{start} does not fit | - | - | - | - | - |")
            continue
        bound = _waits(one) if one["ratio"] > 1.15 else "-"
        rows.append(
            f"{start} {one['placement']['optimizer_states']} | {one['step_seconds']:.2f} | {one['floor_seconds']:.2f} "
            f"({one['bottleneck']}) | {one['ratio']:.2f} "
            f"| {one['step_seconds'] / one['in_order_seconds']:.2f} | {bound} |"
        )
    return introduction + "\n\n" + table(columns, rows)


def _twice_as_fast(fitting: list[dict[str, Any]]) -> str:
    """The furthest from their floors, where what they wait for most is doubled."""
    told = []
    for one in sorted(fitting, key=lambda one: -float(one["ratio"]))[:_WORST]:
        faster = one.get("twice_as_fast")
        if faster:
            gone = next(way["ratio"] for way in one["without"] if way["without"] == [faster["what"]])
            told.append(
                f"{one['size']} on the {one['machine']} with {one['tokens']} x {one['micro_batches']} tokens, {faster['what']} "
                f"twice as high: {one['step_seconds']:.2f} -> {faster['step_seconds']:.2f} s, {one['ratio']:.2f} -> "
                f"{faster['ratio']:.2f} of the floor above ({gone:.2f} where it takes no time), {faster['ratio_there']:.2f} of "
                "the floor there"
            )
    return f" The {len(told)} worst on machine files that differ in what bounds them: {'; '.join(told)}." if told else ""


def _waits(one: dict[str, Any]) -> str:
    """The longest, until they are what the goal is missed by, or three; and what each of them costs."""
    missed, told = one["step_seconds"] - 1.15 * one["floor_seconds"], []
    for name, seconds in list(one["waits"].items())[:3]:
        told.append(f"{name} {seconds:.2f}")
        missed -= seconds
        if missed <= 0:
            break
    told_of = [way for way in one["without"] if way["ratio"] < one["ratio"] - 0.01 or way["without"] == ["exact clipping"]]
    ways = [f"{' + '.join(way['without'])} {way['ratio']:.2f}" for way in told_of]
    return f"{', '.join(told)}. Without {', '.join(ways)}"


def predicted(report: dict[str, Any]) -> str:
    """The table of benchmarks/predicted.py."""
    columns = "| width x layers | tokens x micro-batches | settings | s/step: measured, said | peak CPU | peak NVMe | moved |"
    rows = []
    for result in report["results"]:
        case, was, said = result["case"], result["measured"], result["predicted"]
        settings = ", ".join(f"{name}={value}" for name, value in case["fields"].items())
        moved = all(said["moved_nbytes"][link] == nbytes for link, nbytes in was["moved_nbytes"].items())
        rows.append(
            f"| {case['width']} x {case['layers']} | {case['batch'] * case['sequence']} x {case['micro_batches']} "
            f"| {settings} | "
            f"{_seconds(was, said)} | {_peaks(was, said, 'cpu')} | "
            f"{_peaks(was, said, 'nvme')} | {'equal' if moved else 'not equal'} |"
        )
    counted = [one["measured"] for one in report["results"] if {"cpu"} <= one["measured"]["peak_nbytes"].keys()]
    besides = max((one["resident_nbytes"] / one["peak_nbytes"]["cpu"] - 1 for one in counted), default=0.0)
    introduction = (
        f"Measured on {report['machine']['cpu']}, fp32, no GPU. Peak CPU is memory in use; by its defaults glibc keeps up to "
        f"{besides:.0%} of it besides, in holes."
    )
    return introduction + "\n\n" + table(columns, rows)


def _seconds(was: dict[str, Any], said: dict[str, Any]) -> str:
    if "step_seconds" not in was:
        return "not measured"
    error = said["step_seconds"] / was["step_seconds"] - 1
    return f"{was['step_seconds']:.2f}, {said['step_seconds']:.2f} ({error:+.0%})"


def _peaks(was: dict[str, Any], said: dict[str, Any], tier: str) -> str:
    if tier not in was["peak_nbytes"]:
        return "not counted"
    there, told = was["peak_nbytes"][tier], said["peak_nbytes"][tier]
    return f"{gib(there)}, {gib(told)} ({told / there - 1:+.1%})" if there and told else "-"


def plans(report: dict[str, Any]) -> str:
    """The table of benchmarks/plans.py."""
    introduction = (
        f"`python -m offload {report['command']}`, in virtual time on machines as described in `device/virtual/machines`: "
        "24 GB on the card and 64 GB on the host (rtx3090, rtx4090), 80 GB and 512 GB (h100)."
    )
    columns = "| model | machine | s/step (floor) | tokens/s | bounded by | states at furthest on | peak device, CPU, NVMe |"
    rows = []
    for one in report["results"]:
        start = f"| {one['model']} | {one['machine']} "
        if one["step_seconds"] is None:
            rows.append(f"{start}| does not fit | - | - | - | - |")
            continue
        peaks = ", ".join(gib(one["peak_nbytes"][tier]) for tier in ("device", "cpu", "nvme"))
        rows.append(
            f"{start}| {one['step_seconds']:.1f} ({one['floor_seconds']:.1f}){'' if one['fits'] else ', does not fit'} "
            f"| {one['tokens_per_second']:,.0f} | {one['bottleneck']} | {one['placement']['optimizer_states']} | {peaks} |"
        )
    return introduction + "\n\n" + table(columns, rows)


def plans_in_short(report: dict[str, Any]) -> str:
    """Those of benchmarks/plans.py, for who asks whether it fits at all."""
    machines = {"rtx3090": "RTX 3090, 64 GB, one drive", "rtx4090": "RTX 4090, 64 GB, one drive", "h100": "H100, 512 GB"}
    found = {(one["model"], one["machine"]): one for one in report["results"]}
    rows = []
    for model in dict.fromkeys(one["model"] for one in report["results"]):
        cells = [_answer(found.get((model, machine))) for machine in machines]
        rows.append(f"| {model} | {' | '.join(cells)} |")
    return table(f"| tokens/s, trained in full | {' | '.join(machines.values())} |", rows)


def _answer(plan: dict[str, Any] | None) -> str:
    if plan is None:
        return "not run"
    return f"{plan['tokens_per_second']:,.0f}" if plan["fits"] else "does not fit"
