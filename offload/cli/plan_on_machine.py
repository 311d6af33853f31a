"""`plan --machine`: how fast a step would be on a machine, what bounds it, and whether it fits."""

from __future__ import annotations

import argparse
import json
from pathlib import Path

import torch

from offload.cli.arguments import config_of, positive
from offload.cli.corpus import BYTE_VOCABULARY_SIZE
from offload.cli.forecast import Work, forecast
from offload.cli.models import build_outline, choose_model, make_optimizer
from offload.cli.text import format_count, format_nbytes, format_seconds, table
from offload.device.virtual.description import described, read_machine
from offload.errors import BudgetError, ConfigError
from offload.rehearsal.forecast import Forecast, refused


def add_machine_arguments(parser: argparse.ArgumentParser) -> None:
    """--machine, and the work of a step on it."""
    group = parser.add_argument_group(
        "machine", "the engine is run there in virtual time: seconds a step, what bounds them, peak bytes with activations"
    )
    group.add_argument("--machine", metavar="NAME", help=f"{', '.join(described())}, or a JSON file")
    group.add_argument("--batch", type=positive, default=1, metavar="N", help="sequences of a micro-batch (default 1)")
    group.add_argument("--sequence", type=positive, default=2048, metavar="N", help="tokens of each (default 2048)")
    group.add_argument("--checkpointing", choices=("none", "full"), default="none", help="of activations (default none)")
    group.add_argument("--nvme-read", type=float, metavar="GB/S", help="another drive than the machine's")
    group.add_argument("--nvme-write", type=float, metavar="GB/S", help="the same")
    group.add_argument("--trace", type=Path, metavar="FILE", help="write the step as a trace (see explain)")
    group.add_argument("--json", action="store_true", help="print one JSON object")


def run_on_machine(args: argparse.Namespace) -> int:
    """The command. Returns 0 where it fits, else 1."""
    if args.ranks != 1:
        raise ConfigError("--machine forecasts one rank: leave --ranks out.")
    args.nvme = args.nvme or "."  # nothing is opened there
    giga = {"nvme_read": args.nvme_read, "nvme_write": args.nvme_write}
    machine = read_machine(args.machine, **{name: None if rate is None else rate * 1e9 for name, rate in giga.items()})
    choice = choose_model(args, args.vocabulary or (BYTE_VOCABULARY_SIZE if args.model is None else 0), args.sequence)
    model = build_outline(choice)
    if args.dtype in ("bf16", "fp16"):
        model.to(torch.bfloat16 if args.dtype == "bf16" else torch.float16)
    work = Work(args.batch, args.sequence, args.accumulate, args.checkpointing == "full")
    try:
        found = forecast(model, make_optimizer(model, args), config_of(args), machine, work, args.trace)
    except BudgetError as error:
        found = refused(error)
    if args.json:
        print(json.dumps(found.as_json()))
    else:
        print(f"model: {choice.title}, {format_count(sum(one.numel() for one in model.parameters()))} parameters")
        print(f"machine: {machine.name}; {work.tokens} tokens a step\n")
        print(_text(found))
    return 0 if found.fits else 1


def _text(found: Forecast) -> str:
    if not found.peak_nbytes:
        return f"It does not fit: {found.reason}"
    places = ", ".join(f"{what.replace('_', ' ')} on {tier}" for what, tier in found.placement.items())
    verdict = "It fits." if found.fits else f"It does not fit ({found.reason})."
    lines = [
        f"{verdict} {places[0].upper()}{places[1:]}",
        f"{format_seconds(found.step_seconds)} a step, {found.tokens_per_second:,.0f} tokens/s; the floor is "
        f"{format_seconds(found.floor_seconds)} ({found.bottleneck})",
        "",
        table(("needs", "seconds"), [(name, f"{seconds:.3f}") for name, seconds in found.floors.items() if seconds > 0]),
        "",
        table(("memory", "peak"), [(tier, format_nbytes(nbytes)) for tier, nbytes in found.peak_nbytes.items() if nbytes]),
        "",
        table(
            ("link", "moved a step", "under compute"),
            [
                (link.replace("_", " "), format_nbytes(nbytes), f"{share:.0%}")
                for link, nbytes in found.moved_nbytes.items()
                if (share := found.hidden[link]) is not None
            ],
        ),
    ]
    if found.values_read:
        lines.append(
            f"\nThe model read {found.values_read} values of its own, which a forecast has none of: conditions were taken to "
            "hold, numbers to be 1."
        )
    return "\n".join(lines)
