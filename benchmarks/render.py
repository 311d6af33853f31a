"""Writes the tables of the README and of docs/performance/ from the committed result files.

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

ROOT = Path(__file__).resolve().parent.parent
RESULTS = ROOT / "docs" / "performance"
PAGES = (ROOT / "README.md", RESULTS / "README.md")
NAMES = {
    "plain": "plain PyTorch, fused AdamW, all in memory",
    "cpu": "offload, parameters and states in CPU memory",
    "nvme": "offload, parameters and states on NVMe",
}
MARKED = re.compile(r"(<!-- table: (\w+) -->\n).*?(<!-- end -->)", re.DOTALL)


def gib(nbytes: float) -> str:
    return f"{nbytes / 2**30:.2f} GiB"


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
    lines = [
        "GPT-2-shaped, batch 1 x 128, fp32, clip 1.0, no GPU; median of the steps of one run. " + machine_line(report),
        "",
        "| model | how | s/step | x plain | floor s | peak RSS |",
        "|---|---|---|---|---|---|",
    ]
    for result in report["results"]:
        ratio = result["ratio_to_plain"]
        lines.append(
            f"| {result['shape']} ({result['parameters'] / 1e6:.0f} M) | {NAMES[result['case']]} "
            f"| {result['median_seconds']:.2f} | "
            f"{f'{ratio:.2f}' if ratio else '-'} | {result['floor_seconds']:.2f} | {gib(result['peak_rss_nbytes'])} |"
        )
    return "\n".join(lines) + "\n"


TABLES = {"train_step": train_step}


def rendered(page: Path) -> str:
    """The page with every marked table made anew from its result file."""

    def table(match: re.Match[str]) -> str:
        report = json.loads((RESULTS / f"{match[2]}.json").read_text())
        return match[1] + TABLES[match[2]](report) + match[3]

    return MARKED.sub(table, page.read_text())


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true", help="change nothing; exit 1 if something would change")
    options = parser.parse_args()
    stale = [page for page in PAGES if rendered(page) != page.read_text()]
    for page in stale:
        if options.check:
            print(f"{page.relative_to(ROOT)} does not show its result files: run python benchmarks/render.py", file=sys.stderr)
        else:
            page.write_text(rendered(page))
    return 1 if stale and options.check else 0


if __name__ == "__main__":
    raise SystemExit(main())
