# SPDX-License-Identifier: Apache-2.0
"""One step on a described machine, from a trace in virtual time: which share of each moment every link and lane was at work.

python benchmarks/timeline.py --out docs/performance/timeline.json
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from plans import WORK, flags

from offload.device.recording import COMPUTE, D2H, H2D, NVME_READ, NVME_WRITE, TRANSFER, USE, WAIT
from offload.profiling.trace_events import Event, Trace, read_trace

MOMENTS = 300
LINKS = {"host to device": H2D, "device to host": D2H, "NVMe read": NVME_READ, "NVMe write": NVME_WRITE}
Span = tuple[int, int]


def union(spans: Iterable[Span]) -> list[Span]:
    """The same time, in spans that are apart."""
    found: list[Span] = []
    for start, end in sorted(spans):
        if found and start <= found[-1][1]:
            found[-1] = (found[-1][0], max(end, found[-1][1]))
        else:
            found.append((start, end))
    return found


def without(spans: Sequence[Span], others: Sequence[Span]) -> list[Span]:
    """What of `spans` is in none of `others`; both are apart and in order."""
    found = []
    for start, end in spans:
        for begins, ends in others:
            if ends > start and begins < end:
                if begins > start:
                    found.append((start, begins))
                start = max(start, ends)
        if start < end:
            found.append((start, end))
    return found


def shares(spans: Iterable[Span], duration_ns: int) -> list[float]:
    """Of each moment the share that lies in the spans."""
    width = duration_ns / MOMENTS
    found = [0.0] * MOMENTS
    for start, end in spans:
        for index in range(int(start / width), min(int(end / width), MOMENTS - 1) + 1):
            found[index] += max(0.0, min(end, (index + 1) * width) - max(start, index * width)) / width
    return [round(one, 2) for one in found]


def rows(trace: Trace) -> dict[str, dict[str, list[float]]]:
    """By row, and of a row by what went on there."""

    def spans(events: Iterable[Event]) -> list[Span]:
        return union((event.start_ns, event.end_ns) for event in events)

    compute = [event for event in trace.events if event.row == COMPUTE]
    stood_still = spans(event for event in compute if event.kind == WAIT)
    backward = without(spans(event for event in compute if event.kind == USE and event.name == "backward"), stood_still)
    uses = spans(event for event in compute if event.kind == USE)
    parts = {"compute": {"forward": without(without(uses, stood_still), backward), "backward": backward, "waits": stood_still}}
    for name, link in LINKS.items():
        parts[name] = {"transfers": spans(event for event in trace.events if event.link == link)}
    adam = (event for event in trace.events if event.name == "adam" and event.kind not in (WAIT, TRANSFER))
    parts["CPU Adam"] = {"updates": spans(adam)}
    return {row: {what: shares(one, trace.duration_ns) for what, one in own.items()} for row, own in parts.items()}


def measure(model: str, machine: str) -> dict[str, Any]:
    """The result file's content."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "trace.json")
        command = [sys.executable, "-m", "offload", "plan", *flags(model), "--machine", machine, "--trace", str(path), "--json"]
        said = json.loads(subprocess.run(command, capture_output=True, text=True, check=True).stdout)
        trace = read_trace(path)
    return {
        "model": model,
        "machine": machine,
        "work": " ".join(WORK),
        "placement": said["placement"],
        "seconds": trace.duration_ns / 1e9,
        "rows": rows(trace),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="7 B")
    parser.add_argument("--machine", default="rtx4090")
    parser.add_argument("--out", type=Path, required=True)
    args = parser.parse_args()
    args.out.write_text(json.dumps(measure(args.model, args.machine)) + "\n")


if __name__ == "__main__":
    main()
