# SPDX-License-Identifier: Apache-2.0
"""How much of each link's time lies beside compute, from a trace of torch.profiler (its Chrome JSON)."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

LINKS = {"HtoD": "h2d", "DtoH": "d2h"}
Span = tuple[float, float]


def united(spans: Iterable[Span]) -> list[Span]:
    """The union of intervals, as disjoint ones in order."""
    found: list[Span] = []
    for start, stop in sorted(spans):
        if found and start <= found[-1][1]:
            found[-1] = (found[-1][0], max(found[-1][1], stop))
        else:
            found.append((start, stop))
    return found


def length(spans: Iterable[Span]) -> float:
    return sum(stop - start for start, stop in spans)


def common(first: list[Span], second: list[Span]) -> float:
    """Length of the intersection of two unions."""
    total, i, j = 0.0, 0, 0
    while i < len(first) and j < len(second):
        total += max(0.0, min(first[i][1], second[j][1]) - max(first[i][0], second[j][0]))
        if first[i][1] <= second[j][1]:
            i += 1
        else:
            j += 1
    return total


def summarize(trace: dict[str, Any]) -> dict[str, Any]:
    """Of the device's events: seconds of kernels, and for each link its seconds, bytes and overlap in per cent.

    overlap_percent    of the link's time during which some kernel ran
    duplex_percent     of the link's time during which the other direction was busy as well
    pageable_nbytes    bytes that did not come from, or go to, pinned memory: should be small change
    """
    kernels: list[Span] = []
    copies: dict[str, list[Span]] = {link: [] for link in LINKS.values()}
    nbytes = dict.fromkeys(LINKS.values(), 0)
    pageable = dict.fromkeys(LINKS.values(), 0)
    for event in trace.get("traceEvents", ()):
        if event.get("ph") != "X":
            continue
        span = (float(event["ts"]), float(event["ts"]) + float(event["dur"]))
        if event.get("cat") == "kernel":
            kernels.append(span)
        elif event.get("cat") == "gpu_memcpy":
            link = next((link for word, link in LINKS.items() if word in event["name"]), None)
            if link is not None:
                copies[link].append(span)
                moved = int(event.get("args", {}).get("bytes", 0))
                nbytes[link] += moved
                if "Pageable" in event["name"]:
                    pageable[link] += moved
    computing = united(kernels)
    busy = {link: united(spans) for link, spans in copies.items()}
    links = {}
    for link, spans in busy.items():
        other = busy["d2h" if link == "h2d" else "h2d"]
        seconds = length(spans)
        links[link] = {
            "seconds": seconds / 1e6,
            "nbytes": nbytes[link],
            "pageable_nbytes": pageable[link],
            "bytes_per_second": nbytes[link] / (seconds / 1e6) if seconds else None,
            "overlap_percent": 100 * common(spans, computing) / seconds if seconds else None,
            "duplex_percent": 100 * common(spans, other) / seconds if seconds else None,
        }
    everything = [*computing, *busy["h2d"], *busy["d2h"]]
    whole = max(stop for _, stop in everything) - min(start for start, _ in everything) if everything else 0.0
    return {
        "seconds": whole / 1e6,
        "kernel_seconds": length(computing) / 1e6,
        "idle_seconds": (whole - length(united(everything))) / 1e6,
        "links": links,
    }
