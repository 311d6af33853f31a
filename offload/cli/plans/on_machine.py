# SPDX-License-Identifier: Apache-2.0
"""`plan` on a machine: how fast a step would be there, what bounds it, whether it fits, and what more of each would buy."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import offload
from offload.cli.arguments import paths_of, positive, positive_number
from offload.cli.plans.forecast import Work
from offload.cli.plans.this_machine import measure_machine
from offload.cli.plans.what_if import Wishes
from offload.cli.text import format_count, format_nbytes, format_rate, format_seconds, json_text, table
from offload.config import parse_nbytes
from offload.device.virtual.description import Machine, changed, described, read_machine, share_of
from offload.forecast import Forecast, room_of
from offload.planning.purposes import GRADIENTS, OPTIMIZER_STATES, PARAMETERS

_MEASURE_SECONDS = 0.1
_DAY_SECONDS = 86400.0
_YEAR_DAYS = 365.25
_WORTH = 0.001
"""Of a floor: what lowers it by less is said not to."""


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
    if args.machine == "this" or config.cpu_memory is not None:
        return config
    return replace(config, cpu_memory=int(machine.cpu_nbytes))


def with_drives(machine: Machine, count: int) -> Machine:
    """The same with so many drives."""
    fields = ("nvme_read", "nvme_write", "nvme_both", "nvme_nbytes", "nvme_endurance")
    return changed(
        machine, nvme_drives=float(count), **{field: getattr(machine, field) * count / machine.nvme_drives for field in fields}
    )


@dataclass(frozen=True, slots=True)
class Seen:
    """What a forecast was made for. `tokens`: that are to be trained on in all. `device_nbytes`: the budget for the device."""

    machine: Machine
    tokens: float | None
    device_nbytes: int | None
    work: Work

    def days(self, found: Forecast) -> float | None:
        """That the tokens take."""
        return self.tokens / found.tokens_per_second / _DAY_SECONDS if self.tokens and found.tokens_per_second else None

    def notes(self, found: Forecast) -> list[str]:
        """What was assumed rather than known."""
        told = []
        if found.values_read:
            told.append(
                f"No data went through the model for this plan. In a step ({found.values_read} x) the model's code looks at "
                "a value that it computed, and goes on by what it finds. Here the plan assumes: a condition is true, a number "
                "is 1, and each expert of a layer has an equal share of the tokens. With data that say otherwise the model may "
                "do other work than was planned."
            )
        if self.work.ranks > 1 and not self.machine.peer:
            known = "is not measured" if self.machine.name == "this" else "is none in the machine's description"
            rate = format_rate(share_of(self.machine, self.work.ranks).exchange, 1.0)
            told.append(
                f"A link of the devices' own {known}: what ranks send each other was counted over host memory, at most {rate} "
                'each. Where there is one (NVLink), write its bytes a second as "peer" into a machine file (probe '
                "--machine-file makes one)."
            )
        return told


def as_json(found: Forecast, seen: Seen, wishes: Wishes) -> str:
    """The object that `plan --json` prints."""
    values: dict[str, Any] = {"machine": seen.machine.name, "device_memory": seen.device_nbytes, **found.as_json()}
    values["days"] = seen.days(found)
    values["nvme_written_per_day"], values["nvme_years"] = wear(found, seen.machine)
    values["largest"] = wishes.largest
    values["buys"] = [line.as_json() for line in wishes.buys]
    values["notes"] = seen.notes(found)
    return json_text(values)


def wear(found: Forecast, machine: Machine) -> tuple[float | None, float | None]:
    """Bytes written to the drives in a day of training, and the years until they are worn as their makers rate them."""
    if not found.moved_nbytes.get("nvme_write"):
        return None, None
    written = found.ranks * found.moved_nbytes["nvme_write"] / found.step_seconds * _DAY_SECONDS
    return written, machine.nvme_endurance / written / _YEAR_DAYS


def _time(years: float) -> str:
    return f"{years:.1f} years" if years >= 1 else f"{years * _YEAR_DAYS:.0f} days"


def answer(found: Forecast, seen: Seen, title: str, wishes: Wishes) -> list[str]:
    """What a person asked, in five lines. `title`: the model."""
    machine, work = seen.machine, seen.work
    name = "this machine" if machine.name == "this" else machine.name
    of_ranks = f", {work.ranks} ranks" if work.ranks > 1 else ""
    first = f"{'It fits' if found.fits else 'It does not fit'}. {title} on {name}{of_ranks}"
    if not found.peak_nbytes:
        return [first, f"because {found.reason}"]
    days = seen.days(found)
    lasting = f", {days:,.1f} days for {format_count(seen.tokens or 0)} tokens" if days is not None else ""
    ratio = found.step_seconds / found.floor_seconds
    budget = format_nbytes(seen.device_nbytes).replace(" ", "") if seen.device_nbytes is not None else ""
    of_each = " of each rank" if work.ranks > 1 else ""
    last = f"{'; '.join(_places(found))}{f'; with --device-memory {budget}' if budget else ''}"
    if not found.fits and wishes.largest:
        last = f"about the largest that fit, each alone: {_largest_text(wishes)}"
    return [
        first,
        f"{'' if found.fits else 'were there room: '}{format_seconds(found.step_seconds)} a step of {work.tokens} tokens, "
        f"{found.tokens_per_second:,.0f} tokens/s{lasting}",
        f"bottleneck: {found.bottleneck}, which alone needs {format_seconds(found.floor_seconds)} (the floor; the step takes "
        f"{ratio:.2f} of it)",
        f"at most{of_each} in {', '.join(_peaks(found, machine))}{'' if found.fits else ': too much'}",
        last,
    ]


def _places(found: Forecast) -> list[str]:
    """Where each state lies: the furthest tier that it may lie in says less."""
    told = []
    for state in (PARAMETERS, OPTIMIZER_STATES, GRADIENTS):
        purposes = (state.furthest, state.kept, state.near)
        parts = [
            f"{format_nbytes(nbytes)} on {tier}"
            for tier in found.peak_nbytes
            if (nbytes := sum(one["nbytes"] for one in found.planned if one["tier"] == tier and one["purpose"] in purposes))
        ]
        told += [f"{state.furthest} {' and '.join(parts)}"] if parts else []
    return told


def _peaks(found: Forecast, machine: Machine) -> list[str]:
    room = room_of(machine, found.ranks)
    return [
        f"{tier} memory {format_nbytes(nbytes)} of {format_nbytes(room[tier])}".replace("nvme memory", "nvme")
        for tier, nbytes in found.peak_nbytes.items()
        if nbytes
    ]


def sections(found: Forecast, seen: Seen, wishes: Wishes) -> list[str]:
    """What stands below the answer."""
    if not found.peak_nbytes:
        return []
    needs = [(name, f"{seconds:.3f}") for name, seconds in found.floors.items() if seconds > 0]
    told = [table(("needs", "seconds"), needs), _memory_table(found), _link_table(found)]
    written, years = wear(found, seen.machine)
    if written is not None and years is not None:
        told.append(
            f"Written to the drives: {format_nbytes(written)} a day; at that rate their rated endurance lasts {_time(years)}"
        )
    return [*told, _wishes_text(wishes)]


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


def _largest_text(wishes: Wishes) -> str:
    return ", ".join(
        f"{format_count(size)} parameters" if what == "parameters" else f"{what} {size}"
        for what, size in wishes.largest.items()
    )


def _wishes_text(wishes: Wishes) -> str:
    lines = []
    if wishes.largest:
        lines.append(f"About the largest that fit, each alone: {_largest_text(wishes)}")
    lines += [
        f"{line.what}: the floor from {format_seconds(line.before)} to {format_seconds(line.after)}"
        if line.after < line.before * (1 - _WORTH)
        else f"{line.what}: no lower floor"
        for line in wishes.buys
    ]
    return "\n".join(lines)
