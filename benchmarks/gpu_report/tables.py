# SPDX-License-Identifier: Apache-2.0
"""The tables and plots of the report, from its result file; called by `benchmarks/render.py`."""

from __future__ import annotations

from typing import Any

from markdown_text import gib, table


def _limit(cell: dict[str, Any]) -> str:
    return f"{cell['limit_gib']:g} GiB" if cell["limit_gib"] else "all"


def _planned(report: dict[str, Any], cell: dict[str, Any]) -> str:
    """What the engine planned to hold on the host, per parameter; fp32 sums of micro-batches, if any, are a part of it."""
    if "engine" not in cell:
        return ""
    nbytes = sum(line["nbytes"] for line in cell["engine"]["planned"] if line["tier"] == "cpu")
    return f" (planned {nbytes / report['models'][cell['model']]['parameters']:.1f} bytes per parameter)"


def _drive(rates: dict[str, Any]) -> str:
    if not rates["nvme"]:
        return ""
    return f"; drive {rates['nvme']['read'] / 1e9:.1f} GB/s read, {rates['nvme']['write'] / 1e9:.1f} written"


def gpu_machine_line(report: dict[str, Any]) -> str:
    machine, rates = report["machine"], report["rates"]
    links = rates["links"]
    share = links["share_of_bare"]
    return (
        f"{machine['gpu']} ({gib(machine['gpu_memory_nbytes'])}), {machine['cores']} cores of {machine['cpu']}, "
        f"{gib(machine['memory_nbytes'])}, torch {machine['torch']}, CUDA {machine['cuda']}. Links: "
        f"{links['h2d'] / 1e9:.1f} GB/s H2D, {links['d2h'] / 1e9:.1f} D2H, {links['both'] / 1e9:.1f} both at once "
        f"({100 * share['h2d']:.0f}, {100 * share['d2h']:.0f} and {100 * share['both']:.0f} % of bare cudaMemcpyAsync); bf16 "
        "products "
        f"{rates['matrix_flops'] / 1e12:.0f} TFLOP/s; CPU Adam {rates['cpu_adam_numel']['fp32'] / 1e9:.2f} G parameters/s "
        f"({rates['cpu_adam_numel']['split'] / 1e9:.2f} with split states){_drive(rates)}."
    )


def gpu(report: dict[str, Any]) -> str:
    """Each cell at every micro-batch that it reached; the traces of ours. Cells that the time did not reach are counted."""
    introduction = "Llama-shaped, bf16 with fp32 masters, AdamW, clip 1.0, sequence 2048, activation checkpointing. "
    drawn_rows = report.get("drawn_rows")
    introduction += (
        f"Of each matrix {drawn_rows} rows of initial values are drawn and the others repeat them, for every contender: to "
        "draw all takes longer than the starts here say. "
        if drawn_rows
        else "All initial values are drawn. "
    )
    reached = [cell for cell in report["cells"] if not cell["status"].startswith("not reached")]
    tried = ", ".join(map(str, report["micro_batches"]))
    introduction += f"Micro-batches of {tried} rows were tried, in this order. "
    if missing := len(report["cells"]) - len(reached):
        introduction += f"The time that was given did not reach {missing} other cells. "
    columns = (
        "| model | memory | how | micro-batch | tokens/s | TFLOP/s (6N) | % of floor (bound by) | device peak | host peak "
        "| cores busy | start, s | ended |"
    )
    rows = []
    for cell in sorted(reached, key=lambda cell: (cell["model"], -(cell["limit_gib"] or 1e9), cell["contender"])):
        note = f" ({cell['note']})" if cell.get("note") else ""
        head = f"| {cell['model']} | {_limit(cell)} | {cell['contender']}{note} |"
        if not cell["batches"]:
            rows.append(f"{head} {cell['status']} | | | | | | | | |")
        rows += [
            f"{head} {batch['micro_batch']} | {batch['tokens_per_second']:.0f} | {batch['model_tflops']:.1f} | "
            f"{100 * batch['share_of_floor']:.0f} ({batch['bound_by']}) | {gib(batch['peak_device_nbytes'])} | "
            f"{gib(batch['peak_host_nbytes'])}{_planned(report, cell)} | {100 * batch['host_share']:.0f} % | "
            f"{cell['initialize_seconds']:.0f} | {cell['status']} |"
            for batch in cell["batches"]
        ]
    traced = [cell for cell in report["cells"] if "trace" in cell]
    links = []
    for cell in traced:
        for name, link in cell["trace"]["links"].items():
            numel = report["models"][cell["model"]]["parameters"] * cell["trace"]["steps"]
            shares = [f"{link[key]:.0f} %" if link[key] is not None else "-" for key in ("overlap_percent", "duplex_percent")]
            rate = f"{link['bytes_per_second'] / 1e9:.1f}" if link["bytes_per_second"] else "-"
            moved = f"{link['nbytes'] / numel:.2f}"
            traced_is = f"{cell['contender']}, {cell['model']}, {_limit(cell)}"
            links.append(f"| {traced_is} | {name} | {moved} | {rate} | {shares[0]} | {shares[1]} |")
    trained = introduction + gpu_machine_line(report) + "\n\n" + table(columns, rows)
    if not traced:
        return trained
    columns = (
        "| trace of, at the first of these batches | link | bytes per parameter and step | GB/s | beside compute "
        "| beside the other direction |"
    )
    return trained + "\n" + table(columns, links)


# ---- plots

_COLOURS = ("#1b6ca8", "#d1495b", "#66a182", "#edae49", "#7d5ba6", "#444444")


def plot(title: str, across: str, up: str, curves: dict[str, list[tuple[float, float]]]) -> str:
    """An SVG of a few curves: name -> points (x, y)."""
    points = [point for curve in curves.values() for point in curve]
    low_x, high_x = min(x for x, _ in points), max(x for x, _ in points)
    low_y, high_y = min(y for _, y in points), max(y for _, y in points)

    def at(x: float, y: float) -> tuple[float, float]:
        return 70 + 440 * (x - low_x) / ((high_x - low_x) or 1), 250 - 210 * (y - low_y) / ((high_y - low_y) or 1)

    parts = [
        '<svg xmlns="http://www.w3.org/2000/svg" width="760" height="300" font-family="sans-serif" font-size="12">',
        f'<text x="70" y="20" font-size="14">{title}</text>',
        '<path d="M70 40V250H510" fill="none" stroke="#888"/>',
        f'<text x="290" y="285" text-anchor="middle">{across}</text>',
        f'<text x="15" y="145" text-anchor="middle" transform="rotate(-90 15 145)">{up}</text>',
    ]
    for value, y in ((low_y, 250), (high_y, 44)):
        parts.append(f'<text x="64" y="{y}" text-anchor="end">{value:.4g}</text>')
    for value, x in ((low_x, 70), (high_x, 510)):
        parts.append(f'<text x="{x}" y="266" text-anchor="middle">{value:g}</text>')
    for index, (name, curve) in enumerate(curves.items()):
        colour = _COLOURS[index % len(_COLOURS)]
        line = " ".join(f"{x:.1f},{y:.1f}" for x, y in (at(*point) for point in curve))
        parts.append(f'<polyline points="{line}" fill="none" stroke="{colour}" stroke-width="2"/>')
        parts.append(f'<text x="525" y="{50 + 18 * index}" fill="{colour}">{name}</text>')
    return "\n".join([*parts, "</svg>"]) + "\n"


def gpu_plots(report: dict[str, Any]) -> dict[str, str]:
    """File name -> SVG: for each model tokens/s over micro-batches, and losses of the same batches."""
    found: dict[str, str] = {}
    for model in report["models"]:
        mine = [cell for cell in report["cells"] if cell["model"] == model and cell["batches"]]
        if not mine:
            continue
        named = {f"{cell['contender']}{', ' + _limit(cell) if cell['limit_gib'] else ''}": cell["batches"] for cell in mine}
        rates = {
            name: [(batch["micro_batch"], batch["tokens_per_second"]) for batch in batches] for name, batches in named.items()
        }
        losses = {name: list(enumerate(batches[0]["losses"], 1)) for name, batches in named.items()}
        found[f"gpu-{model}-rate.svg"] = plot(f"{model}: tokens per second", "micro-batch", "tokens/s", rates)
        found[f"gpu-{model}-loss.svg"] = plot(f"{model}: loss on the same text", "step", "loss", losses)
    return found
