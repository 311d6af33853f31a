# SPDX-License-Identifier: Apache-2.0
"""The tables of the pages that newcomers read first: memory by ZeRO stage, what was tested."""

from __future__ import annotations

from typing import Any

from markdown_text import table


def zero_memory(report: dict[str, Any]) -> str:
    """The table of benchmarks/zero_memory.py."""
    shape = report["shape"]
    introduction = (
        f"{report['parameter_numel'] / 1e9:.2f} billion parameters ({shape['num_hidden_layers']} blocks of width "
        f"{shape['hidden_size']}), bf16, AdamW, everything on the device; GiB of each rank."
    )
    rows = []
    for one in report["results"]:
        parts = [one[kind] / 2**30 for kind in ("parameters", "gradients", "optimizer states", "buffers")]
        cells = " | ".join(f"{part:.2f}" for part in (*parts, sum(parts)))
        rows.append(f"| {one['ranks']} | {one['stage'] if one['ranks'] > 1 else 'any'} | {cells} |")
    columns = "| ranks | stage | parameters | gradients | optimizer states | buffers, units in use | together |"
    return introduction + "\n\n" + table(columns, rows)


def overhead(report: dict[str, Any]) -> str:
    """The table of benchmarks/overhead.py."""
    machine, rows = report["machine"], []
    for row in report["rows"]:
        us = row["us_per_unit"]
        parts = " | ".join(f"{us[name]:.0f}" for name in ("forward", "backward", "updates", "together"))
        rows.append(
            f"| {row['case']} | {row['plain_ms']:.1f} | {row['step_ms']:.1f} | {row['ratio']:.2f} | {parts} | "
            f"{row['updates_us_per_chunk']:.0f} | {row['step()_us'] / 1e3:.1f} |"
        )
    columns = (
        "| model, place | plain ms | ms | x plain | us a module: forward | backward | updates | together | us a chunk | "
        "`step()` ms |"
    )
    introduction = f"Processor time of a step, {machine['cpu']}, torch {machine['torch']}; load average {report['load']:.1f}."
    return introduction + "\n\n" + table(columns, rows)


def simd(report: dict[str, Any]) -> str:
    """The table of benchmarks/simd.py."""
    introduction = (
        "The same kernels by instruction set, processor time in ns an element (AdamW, 1 Mi elements). The scalar ones, "
        f"compiled for size, serve processors without AVX2. Measured on {report['machine']['cpu']}, shared."
    )
    sets = list(next(iter(report["results"].values())))
    rows = [f"| {name} | {' | '.join(f'{times[one]:.2f}' for one in sets)} |" for name, times in report["results"].items()]
    return introduction + "\n\n" + table(f"| states | {' | '.join(sets)} |", rows)


def matrix(report: dict[str, Any]) -> str:
    """The table of tests/matrix.py."""
    rows = []
    for one in report["results"]:
        counts = ", ".join(f"{one[word]} {word}" for word in ("passed", "failed", "error", "skipped") if one.get(word))
        trained = "yes" if one["trained"] else "no"
        which = f" ({', '.join(one['tests'])})" if counts else ""
        rows.append(f"| {one['machine']} | {one['python']} | {one['torch']} | {trained} | {counts or 'not run'}{which} |")
    return table("| processor | Python | torch | trains from a drive, saves, loads | tests of the core |", rows)


def frameworks(report: dict[str, Any]) -> str:
    """The table that `make zoo` and `make test-scripts` write."""
    introduction = (
        "Everything on NVMe beside the same script without an engine, fp32: the largest relative difference of a loss or norm "
        "in the logs, and the largest difference of a weight at the end."
    )
    rows = [f"| {name} | {one['steps']} | {one['logged']:.1e} | {one['weight']:.1e} |" for name, one in sorted(report.items())]
    return introduction + "\n\n" + table("| script | figures | logged | weights |", rows)
