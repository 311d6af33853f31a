# SPDX-License-Identifier: Apache-2.0
"""Say what a trace shows: what each link did and how much of it was hidden, who waited for what, and what to change.

The trace is what engine.profile("trace.json") writes, or plan --machine NAME --trace trace.json.

  python -m offload explain trace.json
  python -m offload explain trace.json --json
"""

from __future__ import annotations

import argparse
from pathlib import Path

from offload.cli.text import format_nbytes, format_rate, format_seconds, json_text, table
from offload.device.recording import COMPUTE
from offload.profiling.advice import WORTH
from offload.profiling.explanation import Explanation, explain
from offload.profiling.trace_events import read_trace

_LONGEST = 8
"""Waits that are listed."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("trace", type=Path, help="the file that a profile, or plan --trace, wrote")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """The command. Returns 0."""
    found = explain(read_trace(args.trace))
    print(json_text(found.as_json()) if args.json else _text(found))
    return 0


def _text(found: Explanation) -> str:
    share = found.compute_seconds / found.step_seconds
    phases = ", ".join(f"{name} {format_seconds(seconds)}" for name, seconds in found.phases.items())
    floor = f"{format_seconds(found.floor_seconds)} ({found.floor_of})"
    lines = [
        f"{format_seconds(found.step_seconds)} a step ({found.steps} recorded), in {share:.0%} of it the model computes",
        f"by phase: {phases}" if phases else "nothing of the model ran",
        f"bottleneck: {found.bottleneck}; the step cannot be shorter than {floor}",
    ]
    if found.work:
        header = ("link or lane", "busy", "hidden", "waited for", "moved", "at")
        lines += ["", "A step", table(header, [_row(found, name) for name in found.work])]
    rows = [
        (f"{one.seconds * 1e3:.1f} ms", one.what, one.unit or "-", one.on)
        for one in found.waits[:_LONGEST]
        if one.seconds * 1e3 >= 0.05
    ]
    if rows:
        lines += ["", "Compute stood still, a step", table(("for", "waiting for", "of unit", "because of"), rows)]
    if found.advice:
        lines += ["", "What would help, at most"]
        lines += [
            f"  {'' if one.saves_seconds is None else '-' + format_seconds(one.saves_seconds) + '  '}{one.change}: {one.why}"
            for one in found.advice
        ]
    elif found.bottleneck == COMPUTE and share > 1 - WORTH:
        lines += ["", "Nothing that moves is waited for: what is left is compute."]
    return "\n".join(lines)


def _row(found: Explanation, name: str) -> tuple[str, ...]:
    one = found.work[name]
    return (
        name,
        format_seconds(one.busy_seconds),
        "-" if one.hidden is None else f"{one.hidden:.0%}",
        format_seconds(one.exposed_seconds),
        format_nbytes(round(one.nbytes)) if one.nbytes else "-",
        format_rate(one.bytes_per_second, 1.0) if one.bytes_per_second else "-",
    )
