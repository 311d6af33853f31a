# SPDX-License-Identifier: Apache-2.0
"""A recording as a file that Perfetto and chrome://tracing open, and back.

The format is Chrome's trace events, JSON: an object with `traceEvents`, complete events (`ph` "X") with `ts` and `dur` in
microseconds, `pid` the rank, `tid` the row, and metadata events (`ph` "M") that name them
(https://perfetto.dev/docs/getting-started/other-formats).

What lies on one row does not overlap, as the format asks, but for what nests. Transfers that are in flight at once are drawn
one after the other, each from where the one before it ended; `args` has when it began. What would not nest goes to a second
row of the name.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from offload.device.recording import COMPUTE, LINKS, MAIN, TRANSFER, Op, named
from offload.errors import ConfigError

FORMAT = 1
_MARK = "offload_trace"


@dataclass(frozen=True, slots=True)
class Event:
    """One op as the file has it; times are nanoseconds from the beginning of the recording."""

    row: str
    kind: str
    name: str
    unit: str
    start_ns: int
    end_ns: int
    nbytes: int = 0
    awaits: tuple[str, ...] = ()

    @property
    def link(self) -> str:
        """The row, whichever drive's."""
        return self.row.split(",")[0]


@dataclass(frozen=True, slots=True)
class Trace:
    """`facts`: what was recorded, where, with which settings (`offload.profiling.profile`)."""

    events: tuple[Event, ...]
    facts: Mapping[str, Any]

    @property
    def duration_ns(self) -> int:
        return int(self.facts["duration_ns"])

    @property
    def step_count(self) -> int:
        return max(1, int(self.facts["steps"]))


def events_of(ops: Iterable[Op], start_ns: int, unit_of: Callable[[object], str]) -> tuple[Event, ...]:
    """In the order of their beginning. `unit_of`: the unit that lies at an op's place."""
    return _in_order(
        Event(
            op.row,
            op.kind,
            op.name,
            named(op.about) or (unit_of(op.place) if op.place is not None else ""),
            op.start_ns - start_ns,
            op.end_ns - start_ns,
            op.nbytes,
            op.awaits,
        )
        for op in ops
    )


def _in_order(events: Iterable[Event]) -> tuple[Event, ...]:
    """By their beginning; what encloses others comes before them."""
    return tuple(sorted(events, key=lambda event: (event.start_ns, -event.end_ns)))


# ---- writing -------------------------------------------------------------------------------------------------------------


def write_trace(trace: Trace, path: Path) -> None:
    """Write the file; it is there whole, or not at all. Raises `OSError`."""
    beside = path.with_name(path.name + ".part")
    try:
        beside.write_text(json.dumps(as_json(trace)), encoding="utf-8")
        beside.replace(path)
    except BaseException:
        beside.unlink(missing_ok=True)
        raise


def as_json(trace: Trace) -> dict[str, Any]:
    """The object that the file holds."""
    rank = int(trace.facts["rank"])
    found: list[dict[str, Any]] = [_named(rank, 0, "process_name", name=f"offload, rank {rank}")]
    for number, (row, events) in enumerate(_rows(trace.events), start=1):
        found.append(_named(rank, number, "thread_name", name=row))
        found.append(_named(rank, number, "thread_sort_index", sort_index=number))
        found += [_complete(rank, number, event, start_ns, end_ns) for event, start_ns, end_ns in events]
    return {"traceEvents": found, "displayTimeUnit": "ms", "otherData": {_MARK: FORMAT, **trace.facts}}


def _named(rank: int, number: int, what: str, **args: Any) -> dict[str, Any]:
    return {"ph": "M", "pid": rank, "tid": number, "name": what, "args": args}


def _complete(rank: int, number: int, event: Event, start_ns: int, end_ns: int) -> dict[str, Any]:
    args: dict[str, Any] = {"row": event.row, "op": event.name, "began_us": event.start_ns / 1e3}
    if event.unit:
        args["unit"] = event.unit
    if event.nbytes:
        args["bytes"] = event.nbytes
        if end_ns > start_ns:
            args["GB/s"] = round(event.nbytes / (end_ns - start_ns), 3)
    if event.awaits:
        args["awaits"] = list(event.awaits)
    return {
        "ph": "X",
        "pid": rank,
        "tid": number,
        "cat": event.kind,
        "name": f"{'wait: ' if event.awaits else ''}{event.name} {event.unit}".rstrip(),
        "ts": start_ns / 1e3,
        "dur": (end_ns - start_ns) / 1e3,
        "args": args,
    }


_Drawn = tuple[Event, int, int]


def _rows(events: Sequence[Event]) -> list[tuple[str, list[_Drawn]]]:
    by_row: dict[str, list[Event]] = {}
    for event in events:
        by_row.setdefault(event.row, []).append(event)
    order = (MAIN, COMPUTE, *LINKS)

    def place(row: str) -> tuple[int, str]:
        link = by_row[row][0].link
        return (order.index(link) if link in order else len(order)), row

    found: list[tuple[str, list[_Drawn]]] = []
    for row in sorted(by_row, key=place):
        if all(event.kind == TRANSFER for event in by_row[row]):
            found.append((row, _one_after_another(by_row[row])))
            continue
        for number, nested in enumerate(_nesting(by_row[row]), start=1):
            found.append((row if number == 1 else f"{row} ({number})", nested))
    return found


def _one_after_another(events: Sequence[Event]) -> list[_Drawn]:
    drawn, last_ns = [], 0
    for event in sorted(events, key=lambda event: (event.end_ns, event.start_ns)):
        drawn.append((event, max(event.start_ns, min(last_ns, event.end_ns)), event.end_ns))
        last_ns = event.end_ns
    return drawn


def _nesting(events: Sequence[Event]) -> list[list[_Drawn]]:
    """Rows on which every two are apart, or one inside the other."""
    rows: list[list[_Drawn]] = []
    open_until: list[list[int]] = []
    for event in events:  # in the order of their beginning
        number = next((index for index, ends in enumerate(open_until) if _has_room(ends, event)), len(rows))
        if number == len(rows):
            rows.append([])
            open_until.append([])
        rows[number].append((event, event.start_ns, event.end_ns))
        open_until[number].append(event.end_ns)
    return rows


def _has_room(ends: list[int], event: Event) -> bool:
    """Whether all that goes on is over, or lasts longer. `ends`: of what goes on, the innermost last."""
    while ends and ends[-1] <= event.start_ns:
        ends.pop()
    return not ends or event.end_ns <= ends[-1]


# ---- reading -------------------------------------------------------------------------------------------------------------


def read_trace(path: Path) -> Trace:
    """What `write_trace` wrote. Raises `ConfigError` where the file is something else."""
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(f"{str(path)!r} cannot be read: {error.strerror or error}.") from error
    except ValueError as error:
        raise ConfigError(f"{str(path)!r} is no trace: it is no JSON ({error}). {_EXPECTED}") from error
    facts = content.get("otherData") if isinstance(content, dict) else None
    if not isinstance(facts, dict) or _MARK not in facts:
        whose = "another program's trace" if isinstance(content, dict) and "traceEvents" in content else "no trace"
        raise ConfigError(f"{str(path)!r} is {whose}. {_EXPECTED}")
    if facts[_MARK] != FORMAT:
        raise ConfigError(f"{str(path)!r} is a trace of format {facts[_MARK]!r}; this version reads {FORMAT}. Record it anew.")
    try:
        trace = Trace(_in_order(_event(one) for one in content["traceEvents"] if one["ph"] == "X"), facts)
        if trace.duration_ns <= 0 or trace.step_count <= 0:
            raise ValueError("it lasted no time")
        if missing := _READ_FACTS - facts.keys():
            raise ValueError(f"it does not say its {min(missing)}")
    except (KeyError, TypeError, ValueError) as error:
        raise ConfigError(f"{str(path)!r} is a damaged trace ({error}). Record it anew.") from error
    return trace


_READ_FACTS = {"settings", "planned", "dtypes", "unified"}
"""Beside those of `Trace`, what advice follows from."""
_EXPECTED = "Expected: what engine.profile(path) or `python -m offload plan --machine NAME --trace path` wrote."


def _event(one: Mapping[str, Any]) -> Event:
    args = one["args"]
    return Event(
        row=str(args["row"]),
        kind=str(one["cat"]),
        name=str(args["op"]),
        unit=str(args.get("unit", "")),
        start_ns=round(args["began_us"] * 1e3),
        end_ns=round((one["ts"] + one["dur"]) * 1e3),
        nbytes=int(args.get("bytes", 0)),
        awaits=tuple(args.get("awaits", ())),
    )
