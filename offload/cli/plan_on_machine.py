# SPDX-License-Identifier: Apache-2.0
"""`plan` on a machine: how fast a step would be there, what bounds it, whether it fits, and what more of each would buy."""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import offload
from offload.cli.arguments import paths_of, positive, positive_number
from offload.cli.text import format_count, format_nbytes, format_seconds, table
from offload.cli.this_machine import measure_machine
from offload.cli.what_if import Wishes
from offload.config import parse_nbytes
from offload.device.virtual.description import Machine, changed, described, read_machine
from offload.rehearsal.forecast import Forecast

_MEASURE_SECONDS = 0.1
_DAY_SECONDS = 86400.0
_YEAR_DAYS = 365.25


def add_machine_arguments(parser: argparse.ArgumentParser) -> None:
    """--machine, and the work of a step on it."""
    group = parser.add_argument_group(
        "machine",
        "the engine runs there in virtual time: seconds a step, what bounds them, peak bytes with activations. Where "
        "--cpu-memory or --device-memory is more than the machine has, the plan is for a machine that has so much",
    )
    group.add_argument(
        "--machine",
        default="this",
        metavar="NAME",
        help="which: 'this' one (the default, measured in some seconds), "
        f"{', '.join(described())}, or a JSON file (probe writes one)",
    )
    group.add_argument(
        "--batch", type=positive, default=1, metavar="N", help="sequences of a micro-batch, of each rank (default 1)"
    )
    group.add_argument("--sequence", type=positive, default=2048, metavar="N", help="tokens of each (default 2048)")
    group.add_argument(
        "--checkpointing",
        choices=("none", "full"),
        default="none",
        help="of activations: full computes each block's twice and keeps its inputs alone (default none)",
    )
    group.add_argument("--tokens", type=positive_number, metavar="N", help="also say how many days N tokens take")
    group.add_argument("--drives", type=positive, metavar="N", help="N drives like the machine's, striped")
    for flag, what in (
        ("nvme-read", "read from all drives"),
        ("nvme-write", "written to all drives"),
        ("h2d", "host to device"),
        ("d2h", "device to host"),
    ):
        group.add_argument(f"--{flag}", type=positive_number, metavar="GB/S", help=f"instead of the machine's rate: {what}")
    group.add_argument("--trace", type=Path, metavar="FILE", help="write the step as a trace (see explain)")
    group.add_argument("--json", action="store_true", help="print one JSON object")


def machine_of(args: argparse.Namespace) -> Machine:
    """The machine that the flags name, with what they say otherwise. Measures where it is this one. Raises `ConfigError`."""
    if args.machine == "this":
        machine = measure_machine(paths_of(args.nvme) or [], _MEASURE_SECONDS).machine
    else:
        machine = read_machine(args.machine)
    if args.drives is not None:
        machine = with_drives(machine, args.drives)
    rates = {name: getattr(args, name) for name in ("nvme_read", "nvme_write", "h2d", "d2h")}
    asked = {name: rate * 1e9 for name, rate in rates.items() if rate is not None}
    if "nvme_read" in asked or "nvme_write" in asked:
        faster = max(asked.get("nvme_read", machine.nvme_read), asked.get("nvme_write", machine.nvme_write))
        asked["nvme_both"] = min(faster, machine.nvme_both * faster / max(machine.nvme_read, machine.nvme_write))
    for field, size in (("cpu_nbytes", args.cpu_memory), ("device_nbytes", args.device_memory)):
        if size is not None:
            asked[field] = max(float(parse_nbytes(size, field)), getattr(machine, field))
    return changed(machine, **asked)


def granted(args: argparse.Namespace, config: offload.Config, machine: Machine) -> offload.Config:
    """The configuration of the forecast. A machine that is described is there to be used: its memory is granted."""
    if args.machine == "this":
        return config
    cpu_memory = config.cpu_memory if config.cpu_memory is not None else int(machine.cpu_nbytes)
    return replace(config, nvme=config.nvme if config.nvme is not None else ".", cpu_memory=cpu_memory)  # nothing is opened


def with_drives(machine: Machine, count: int) -> Machine:
    """The same with so many drives."""
    fields = ("nvme_read", "nvme_write", "nvme_both", "nvme_nbytes", "nvme_endurance")
    return changed(
        machine, nvme_drives=float(count), **{field: getattr(machine, field) * count / machine.nvme_drives for field in fields}
    )


def as_json(found: Forecast, machine: Machine, tokens: float | None, wishes: Wishes | None, device_nbytes: int | None) -> str:
    """The object that `plan --json` prints. `device_nbytes`: the budget for the device that the forecast is made with."""
    values: dict[str, Any] = {"machine": machine.name, "device_memory": device_nbytes, **found.as_json()}
    values["days"] = tokens / found.tokens_per_second / _DAY_SECONDS if tokens and found.tokens_per_second else None
    values["nvme_written_per_day"], values["nvme_years"] = wear(found, machine)
    values["largest"] = wishes.largest if wishes is not None else {}
    values["buys"] = [line.as_json() for line in wishes.buys] if wishes is not None else []
    return json.dumps(values)


def wear(found: Forecast, machine: Machine) -> tuple[float | None, float | None]:
    """Bytes written to the drives in a day of training, and the years until they are worn as their makers rate them."""
    if not found.moved_nbytes.get("nvme_write"):
        return None, None
    written = found.ranks * found.moved_nbytes["nvme_write"] / found.step_seconds * _DAY_SECONDS
    return written, machine.nvme_endurance / written / _YEAR_DAYS


def _time(years: float) -> str:
    return f"{years:.1f} years" if years >= 1 else f"{years * _YEAR_DAYS:.0f} days"


def page(found: Forecast, machine: Machine, tokens: float | None, wishes: Wishes | None, device_nbytes: int | None) -> str:
    """What a person reads. `device_nbytes`: as `as_json` has it."""
    if not found.peak_nbytes:
        return f"It does not fit: {found.reason}"
    places = ", ".join(f"{what.replace('_', ' ')} on {tier}" for what, tier in found.placement.items())
    verdict = "It fits." if found.fits else f"It does not fit ({found.reason})."
    lines = [
        f"On {machine.name}: {verdict} {places[0].upper()}{places[1:]}",
        f"{format_seconds(found.step_seconds)} a step, {found.tokens_per_second:,.0f} tokens/s{_days(found, tokens)}; the "
        f"floor is {format_seconds(found.floor_seconds)} ({found.bottleneck})",
        *([f"with --device-memory {format_nbytes(device_nbytes).replace(' ', '')}"] if device_nbytes is not None else []),
        "",
        table(("needs", "seconds"), [(name, f"{seconds:.3f}") for name, seconds in found.floors.items() if seconds > 0]),
        "",
        _memory_table(found),
        "",
        _link_table(found),
    ]
    written, years = wear(found, machine)
    if written is not None and years is not None:
        lines += [
            "",
            f"Written to the drives: {format_nbytes(written)} a day; at that rate their rated endurance lasts {_time(years)}",
        ]
    if wishes is not None:
        lines += ["", _wishes_text(wishes)]
    if found.values_read:
        lines += [
            "",
            f"A forecast has no values, and the model's code asked for {found.values_read} (conditions, numbers): conditions "
            "were taken to hold, numbers to be 1, and the experts of a layer that routes to share the tokens equally.",
        ]
    return "\n".join(lines)


def _days(found: Forecast, tokens: float | None) -> str:
    if tokens is None:
        return ""
    return f", {tokens / found.tokens_per_second / _DAY_SECONDS:,.1f} days for {format_count(tokens)} tokens"


def _memory_table(found: Forecast) -> str:
    rows: list[Sequence[str]] = []
    for tier, nbytes in found.peak_nbytes.items():
        if nbytes:
            own = found.own_nbytes if tier == found.model_tier else 0
            of_all = [format_nbytes(found.peak_nbytes_of_all[tier])] if found.ranks > 1 else []
            rows.append((tier, format_nbytes(nbytes), format_nbytes(nbytes - own), format_nbytes(own) if own else "-", *of_all))
    of_all = [f"of all {found.ranks} ranks"] if found.ranks > 1 else []
    return table(("memory", "peak", "the engine's", "activations and gradients", *of_all), rows)


_LINKS = {
    "h2d": "host to device",
    "d2h": "device to host",
    "nvme_read": "NVMe read",
    "nvme_write": "NVMe write",
    "collectives": "between ranks",
}


def _link_table(found: Forecast) -> str:
    rows = [
        (_LINKS.get(link, link), format_nbytes(nbytes), f"{share:.0%}", format_seconds(found.exposed_seconds[link]))
        for link, nbytes in found.moved_nbytes.items()
        if (share := found.hidden[link]) is not None
    ]
    return table(("link", "moved a step", "hidden", "not hidden"), rows) if rows else "Nothing moves over a link."


def _wishes_text(wishes: Wishes) -> str:
    lines = []
    if wishes.largest:
        largest = ", ".join(
            f"{format_count(size) + ' parameters' if what == 'parameters' else f'{what} {size}'}"
            for what, size in wishes.largest.items()
        )
        lines.append(f"About the largest that fit, each alone: {largest}")
    lines += [f"{line.what}: the floor from {line.before:.2f} to {line.after:.2f} s" for line in wishes.buys]
    return "\n".join(lines)
