# SPDX-License-Identifier: Apache-2.0
"""Writes the tables and plots of the README and of docs/ from the committed result files.

python benchmarks/render.py            # rewrites what stands between the table markers
python benchmarks/render.py --check    # fails if that would change anything
"""

from __future__ import annotations

import argparse
import json
import re
import sys
from pathlib import Path
from typing import Any

import plots
from forecast_tables import floors, plans, plans_in_short, predicted
from front_tables import frameworks, matrix, overhead, simd, zero_memory
from gpu_report.tables import gpu, gpu_plots
from markdown_text import gib, table

ROOT = Path(__file__).resolve().parent.parent
DOCS = ROOT / "docs"
RESULTS = DOCS / "performance"
PAGES = (
    ROOT / "README.md",
    RESULTS / "README.md",
    *(DOCS / name for name in ("memory.md", "what-fits.md", "compatibility.md", "huggingface.md")),
)
NAMES = {
    "plain": "plain PyTorch, fused AdamW, all in memory",
    "cpu": "offload, parameters and states in CPU memory",
    "nvme": "offload, parameters and states on NVMe",
    "nvme, auto": 'the same, nothing to clip: `update="auto"`',
    "nvme, backward": 'the same, `update="backward"`, nothing to clip',
    "deepspeed cpu": "DeepSpeed ZeRO-3, parameters and states in CPU memory",
    "deepspeed nvme": "DeepSpeed ZeRO-3, parameters and states on NVMe",
    "deepspeed nvme, bf16": "DeepSpeed ZeRO-3, bf16, parameters and states on NVMe",
}
NAMES |= {
    f"nvme, bf16, {form}{more}": f"offload, bf16, {form} states, on NVMe{how}"
    for form in ("fp32", "split", "8bit")
    for more, how in (("", ""), (", backward", ', `update="backward"`'))
}
MARKED = re.compile(r"(<!-- table: ([\w-]+) -->\n).*?(<!-- end -->)", re.DOTALL)


def machine_line(report: dict[str, Any]) -> str:
    machine, rates = report["machine"], report["rates"]
    nvme = rates["nvme"]
    return (
        f"{machine['cores']} cores of {machine['cpu']}, {gib(machine['memory_nbytes'])}, torch {machine['torch']}; memory "
        f"{rates['memory'] / 1e9:.0f} GB/s, NVMe {nvme['read'] / 1e9:.1f} GB/s read, {nvme['write'] / 1e9:.1f} written, "
        f"{nvme['both'] / 1e9:.1f} both at once."
    )


def train_step(report: dict[str, Any]) -> str:
    """The table of benchmarks/train_step.py."""
    introduction = (
        "GPT-2-shaped, one sequence of 64 tokens (125M also of 128), fp32, clip 1.0, no GPU; medians of steps. Rows of a model "
        "may be of several runs, each with the floor of its own; the last run: " + machine_line(report)
    )
    counted = any("cpu_seconds" in result for result in report["results"])
    columns = "| model | how | s/step | x plain | floor s (norm first) | hidden: NVMe read, write, Adam | peak RSS |"
    columns += " bytes per parameter, by formula | CPU s by kind |" if counted else ""
    rows = []
    for result in report["results"]:
        size = f" ({result['parameters'] / 1e6:.0f} M)" if "parameters" in result else ""
        start = f"| {result['shape']}{size} | {NAMES[result['case']]} "
        if "failed" in result:
            rows.append(f"{start}| {result['failed']} | - | - | - | - |" + (" - | - |" if counted else ""))
            continue
        ratio = result.get("ratio_to_plain")
        rows.append(
            f"{start}| {result['median_seconds']:.2f} | {f'{ratio:.2f}' if ratio else '-'} | "
            f"{least_seconds(result)} | {hidden(result)} | {gib(result['peak_rss_nbytes'])} |"
            + (f" {by_formula(result)} | {by_kind(result)} |" if counted else "")
        )
    return introduction + "\n\n" + table(columns, rows)


def least_seconds(result: dict[str, Any]) -> str:
    """What no step can be shorter than; behind it, what a step whose updates wait for the norm cannot."""
    if "floor_seconds" not in result:
        return "-"
    after = f" ({result['norm_first_seconds']:.2f})" if "norm_first_seconds" in result else ""
    return f"{result['floor_seconds']:.2f}{after}"


def by_formula(result: dict[str, Any]) -> str:
    """Bytes of a parameter between drive and memory, beside those that were moved."""
    told = result.get("nbytes_by_formula")
    if told is None or "read_nbytes_per_step" not in result:
        return "-"
    moved = [result[f"{way}_nbytes_per_step"] / result["parameters"] for way in ("read", "written")]
    most = told["read"] + told["written"] + 2 * told["spilled"]
    return f"{told['read'] + told['written']:.1f} to {most:.1f}; moved {sum(moved):.1f}"


def by_kind(result: dict[str, Any]) -> str:
    """Seconds of processor time of a step, the largest kind first."""
    kinds = result.get("cpu_seconds", {})
    return ", ".join(f"{kind} {seconds:.2f}" for kind, seconds in sorted(kinds.items(), key=lambda one: -one[1])) or "-"


def hidden(result: dict[str, Any]) -> str:
    """Shares of the links' work that nobody waited for."""
    links = result.get("links", {})
    shares = [links.get(name, {}).get("hidden") for name in ("nvme read", "nvme write", "adam")]
    return ", ".join("-" if share is None else f"{100 * share:.0f} %" for share in shares) if links else "-"


def memory_sweep(report: dict[str, Any]) -> str:
    """The table of benchmarks/train_step.py --memory-sweep."""
    results = report["results"]
    introduction = (
        f"{results[0]['shape']}, batch 1 x 128, fp32, everything asked to lie on NVMe; losses bitwise the same in every row. "
        + machine_line(report)
    )
    columns = "| cpu_memory | s/step | floor s | NVMe GB a step | hidden: NVMe read, write, Adam | peak RSS |"
    rows = []
    for result in results:
        moved = result.get("read_nbytes_per_step", 0) + result.get("written_nbytes_per_step", 0)
        rows.append(
            f"| {gib(result['cpu_memory'])} | {result['median_seconds']:.2f} | {result['floor_seconds']:.2f} | "
            f"{moved / 1e9:.2f} | {hidden(result)} | {gib(result['peak_rss_nbytes'])} |"
        )
    return introduction + "\n\n" + table(columns, rows)


def device_memory(report: dict[str, Any]) -> str:
    """The table of benchmarks/device_memory.py."""
    introduction = (
        f"{report['blocks']} blocks of two linear layers of width {report['width']}, bf16 with fp32 states, the deferred "
        "accelerator; bytes of a step in MiB as counted, which are those planned (and 8 bytes for each 4096 gradients); losses "
        "and weights bitwise the same in every row."
    )
    columns = "| asked for | device_memory | kept there: parameters, states | to it | from it | NVMe | in use, planned |"
    rows = []
    for result in report["results"]:
        places = f"{result['parameters']}, {result['optimizer_states']}"
        to_device, from_device, read, written = result["moved_nbytes"]
        rows.append(
            f"| {places} | {mib(result['device_memory'])} | {mib(result['parameters_kept_nbytes'])}, "
            f"{mib(result['states_kept_nbytes'])} | {mib(to_device)} | {mib(from_device)} | {mib(read + written)} | "
            f"{mib(result['device_peak_nbytes'])}, {mib(result['device_planned_nbytes'])} |"
        )
    without = (
        "Without the budget, on devices of so many MiB, of which a tenth of what the model's own tensors leave stays free. "
        "Each block is a unit; the losses are the same. Records that visit lie on the device between steps:"
    )
    more_columns = "| asked for | the device has | records that visit | to it | from it | NVMe | in use |"
    more = []
    for result in report["without"]:
        to_device, from_device, read, written = result["moved_nbytes"]
        more.append(
            f"| {result['parameters']}, {result['optimizer_states']} | {mib(result['device_nbytes'])} | "
            f"{mib(result['visiting_nbytes'])} | {mib(to_device)} | {mib(from_device)} | {mib(read + written)} | "
            f"{mib(result['device_peak_nbytes'])} |"
        )
    return "\n\n".join((introduction, table(columns, rows), without, table(more_columns, more)))


def mib(nbytes: int) -> str:
    return f"{nbytes / 2**20:.2f}"


def checkpoint(report: dict[str, Any]) -> str:
    """The table of benchmarks/checkpoint.py."""
    introduction = "A save beside training, against a step of the same run; fp32, batch 1 x 128, no GPU. "
    columns = "| model | how | s/step | next step held up, s (share of a step) | whole save, s | extra peak RSS |"
    rows = []
    for result in report["results"]:
        rows.append(
            f"| {result['shape']} ({result['parameters'] / 1e6:.0f} M) | {result['case']} | {result['step_seconds']:.2f} "
            f"| {result['held_up_seconds']:.2f} ({100 * result['held_up_share']:.0f} %) | {result['save_seconds']:.2f} "
            f"| {result['extra_peak_nbytes'] / 2**20:.0f} MiB |"
        )
    return introduction + machine_line(report) + "\n\n" + table(columns, rows)


def io(report: dict[str, Any]) -> str:
    """The table of benchmarks/io.py: GB/s, share of the best, processor seconds for each GB."""
    machine, rows = report["machine"], report["rows"]
    names = list(dict.fromkeys(row["contender"] for row in rows))
    columns = [(count, column) for count in (1, 2) for column in ("read", "write", "both")]
    cells = {(row["contender"], row["files"], row["column"]): row for row in rows}
    best = {key: max(cells[(name, *key)]["bytes_per_second"] for name in names) for key in columns}
    introduction = (
        f"{machine['cores']} cores of {machine['cpu']}, kernel {machine['kernel']}; files of {report['size_mib']} MiB, medians "
        f"of {report['rounds']} rounds in turns; huge pages of fio: {report['fio_huge']}. GB/s, share of the column's best, "
        "processor seconds for each GB."
    )
    header = "| | " + " | ".join(f"{column}, {count} file{'s' * (count > 1)}" for count, column in columns) + " |"
    rows = []
    for name in names:
        values = []
        for key in columns:
            row = cells[(name, *key)]
            rate = row["bytes_per_second"]
            values.append(f"{rate / 1e9:.2f} ({100 * rate / best[key]:.0f} %) {row['cpu_seconds_per_gb']:.4f}")
        rows.append(f"| {name} | " + " | ".join(values) + " |")
    return introduction + "\n\n" + table(header, rows)


def ranks(report: dict[str, Any]) -> str:
    """The table of benchmarks/ranks.py."""
    machine = report["machine"]
    measured = [one for one in report["results"] if "missing" not in one]
    introduction = (
        f"{measured[0]['ranks']} ranks of one core each, gloo; GPT-2-shaped, batch 1 x 128 on each rank, fp32, clip 1.0, in "
        f"CPU memory; medians of one run, in turns. {machine['cpu']}, torch {machine['torch']}. Floor: the larger of compute "
        "and wire, at rates of the same run."
    )
    columns = "| model | how | s/step | offload stage 3 to it | floor s (compute, wire) | peak RSS of a rank |"
    rows = []
    for one in measured:
        rows.append(
            f"| {one['shape']} ({one['parameters'] / 1e6:.0f} M) | {one['case']} | {one['median_seconds']:.2f} "
            f"| {one['ours_to_it']:.2f} | {one['floor_seconds']:.2f} ({one['compute_seconds']:.2f}, {one['wire_seconds']:.2f}) "
            f"| {gib(one['peak_rss_nbytes'])} |"
        )
    return introduction + "\n\n" + table(columns, rows)


def startup(report: dict[str, Any]) -> str:
    """The table of benchmarks/startup.py."""
    machine, results = report["machine"], report["results"]
    introduction = (
        f"{results[0]['parameters'] / 1e6:.0f} M parameters with constant values, AdamW, parameters and states in CPU memory; "
        f"processor time of all threads, and time on the clock over that of the copy in the same process; medians. "
        f"{machine['cpu']}, {machine['cores']} cores shared with other work, torch {machine['torch']} on {report['threads']} "
        "thread."
    )
    rows = [
        f"| {one['case']} | {one['initialize_core_ns']:.1f} | {one['copy_core_ns']:.1f} | {one['wall_ratio']:.1f} | "
        f"{one['written_nbytes']} |"
        for one in results
    ]
    columns = (
        "| states | `initialize`, ns per parameter | a copy of what it writes, ns per parameter | clock, `initialize` / copy "
        "| bytes written |"
    )
    return introduction + "\n\n" + table(columns, rows)


ADAM_NAMES = {
    "fp32": "fp32 parameters and states",
    "mixed": "bf16 parameters, fp32 states",
    "split": "bf16 parameters, split",
    "bf16": "bf16 parameters, bf16 moments",
    "8bit": "bf16 parameters, 8-bit moments",
}
PEERS = {"torch_foreach": "torch foreach", "torch_fused": "torch fused", "deepspeed": "DeepSpeed"}


def adam(report: dict[str, Any]) -> str:
    """The table of benchmarks/adam.py."""
    machine, results = report["machine"], report["results"]
    peers = [name for name in PEERS if name in results[0]["formats"]["fp32"]["ratio_to_peers"]]
    where = f"{machine['cores']} cores of {machine['cpu']}, {gib(machine['memory_nbytes'])}, torch {machine['torch']}"
    introduction = (
        f"{where}; AdamW, medians in turns; flat: {results[0]['numel'] / 1e6:.0f} M elements; "
        f"GPT-2: {results[1]['numel'] / 1e6:.0f} M in {results[1]['tensors']} tensors."
    )
    columns = (
        "| threads, shape | states | ms | B moved | % of stream | x fp32 | "
        + " | ".join(f"x {PEERS[peer]}" for peer in peers)
        + f" | whole step, x {PEERS[results[0]['whole_peer']]}'s |"
    )
    rows = []
    for result in results:
        for name, one in result["formats"].items():
            ratios = " | ".join(f"{one['ratio_to_peers'][peer]:.2f}" for peer in peers)
            whole = f"{one['whole_ratio']:.2f}" if one["whole_ratio"] is not None else "-"
            rows.append(
                f"| {result['threads']}, {'GPT-2' if result['shape'] == 'gpt2' else 'flat'} | {ADAM_NAMES[name]} "
                f"| {1e3 * result['median_seconds'][name]:.1f} | {one['nbytes_per_parameter']:.0f} "
                f"| {100 * one['share_of_stream']:.0f} | {one['ratio_to_fp32']:.2f} | {ratios} | {whole} |"
            )
    return introduction + "\n\n" + table(columns, rows)


def loss_curves(report: dict[str, Any]) -> str:
    """The table of benchmarks/loss_curves.py."""
    summary, runs = report["summary"], report["runs"]
    losses, noise = summary["final_loss"], summary["noise"]
    introduction = (
        f"A Llama of {runs[0]['parameters'] / 1e6:.1f} M parameters in bf16, AdamW, {report['steps']} steps of "
        f"{report['model']['batch']} x {report['model']['sequence']} bytes of the sources of Python's library; held-out loss, "
        "nats per byte. The noise is the largest difference between two seeds with fp32 states; a format's distance is from "
        "the fp32 run with its seed."
    )
    columns = "| run | loss at the end | distance at the end | mean distance, second half |"
    rows = []
    for name, loss in losses.items():
        apart = summary.get(name)
        distance = f"{apart['last']:.4f} | {apart['mean']:.4f}" if apart is not None else "- | -"
        rows.append(f"| {name} | {loss:.4f} | {distance} |")
    rows.append(f"| noise between seeds | | {noise['last']:.4f} | {noise['mean']:.4f} |")
    return introduction + "\n\n" + table(columns, rows)


def lora(report: dict[str, Any]) -> str:
    """The table of benchmarks/lora.py."""
    formula, later = report["formula"], report["steps"][1:]
    moved = {name: sum(step[f"{name}_nbytes"] for step in later) / len(later) for name in ("read", "written")}
    more = max(report["process_nbytes_after_initialize"], 0) / 2**20
    introduction = (
        f"A Llama of {report['parameters'] / 1e9:.2f} billion bf16 parameters, {report['frozen_nbytes'] / 1e9:.2f} GB, "
        f"with {report['trained'] / 1e6:.2f} million in adapters; everything on NVMe, {report['tokens']} tokens. The engine "
        f"holds {gib(report['engine_peak_nbytes'])} at most; once the model is there the process has "
        f"{f'{more:.0f} MiB' if more else 'no'} more than before."
    )
    rows = [f"| {name} | {moved[name]:,.0f} | {formula[f'{name}_nbytes']:,} |" for name in moved]
    return introduction + "\n\n" + table("| a step, from and to NVMe | bytes moved, mean | by the formula |", rows)


def deepspeed_training(report: dict[str, Any]) -> str:
    """The table of benchmarks/deepspeed_training.py."""
    shape, machine = report["shape"], report["machine"]
    introduction = (
        f"The same training by DeepSpeed {report['deepspeed']} and by the drop-in, fp32 on a CPU, one rank, one thread: "
        f"{shape['depth']} blocks of width {shape['width']}, AdamW, clipping, two micro-batches a step, WarmupDecayLR, "
        f"{report['steps']} steps. Losses are compared step for step. CPU time is the median step's, as a ratio; peaks are "
        f"of the whole process. {machine['cores']} cores of {machine['cpu']}, torch {machine['torch']}."
    )
    rows = [
        f"| {one['stage']} | {one['largest_relative_difference']:.1e} | "
        f"{one['offload']['cpu_seconds'] / one['deepspeed']['cpu_seconds']:.2f} | {gib(one['deepspeed']['peak_nbytes'])} | "
        f"{gib(one['offload']['peak_nbytes'])} |"
        for one in report["results"]
    ]
    columns = (
        "| stage | losses differ by, at most | CPU time of a step, x DeepSpeed | peak RSS, DeepSpeed | peak RSS, drop-in |"
    )
    return f"{introduction}\n\n{table(columns, rows)}"


TABLES = {
    "deepspeed_training": deepspeed_training,
    "ranks": ranks,
    "startup": startup,
    "adam": adam,
    "simd": simd,
    "loss_curves": loss_curves,
    "lora": lora,
    "train_step": train_step,
    "train_step_elsewhere": train_step,
    "overhead": overhead,
    "memory_sweep": memory_sweep,
    "device_memory": device_memory,
    "io": io,
    "checkpoint": checkpoint,
    "gpu": gpu,
    "floors": floors,
    "predicted": predicted,
    "plans": plans,
    "plans-in-short": plans_in_short,
    "matrix": matrix,
    "zero_memory": zero_memory,
    "frameworks": frameworks,
}


def every_plot() -> dict[Path, str]:
    """Of the committed result files; those of the report for GPUs, where it was measured."""
    found = plots.rendered(RESULTS)
    results = RESULTS / "gpu.json"
    if results.exists():
        report = json.loads(results.read_text())
        assert not report["dry_run"], "the figures of a dry run are none"
        found |= {RESULTS / name: svg for name, svg in gpu_plots(report).items()}
    return found


def rendered(page: Path) -> str:
    """The page with every marked table made anew from its result file."""

    def made(match: re.Match[str]) -> str:
        results = RESULTS / f"{match[2].split('-')[0]}.json"
        if not results.exists():
            return match[0]  # not measured yet
        report = json.loads(results.read_text())
        return match[1] + TABLES[match[2]](report) + match[3]

    return MARKED.sub(made, page.read_text())


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true", help="change nothing; exit 1 if something would change")
    options = parser.parse_args()
    wanted = {page: rendered(page) for page in PAGES} | every_plot()
    stale = [path for path, text in wanted.items() if not path.exists() or path.read_text() != text]
    for path in stale:
        if options.check:
            print(f"{path.relative_to(ROOT)} does not show its result files: run python benchmarks/render.py", file=sys.stderr)
        else:
            path.write_text(wanted[path])
    return 1 if stale and options.check else 0


if __name__ == "__main__":
    raise SystemExit(main())
