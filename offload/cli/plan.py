# SPDX-License-Identifier: Apache-2.0
"""Say what training a model would take, without building it: bytes in each tier, the smallest budgets that work, the bytes
that a step moves over each link; and on a machine, this one or another: whether it fits, seconds a step, what bounds them.

  python -m offload plan --model ./config.json --dtype bf16 --parameters nvme --optimizer-states nvme --nvme /mnt/nvme0
  python -m offload plan --hidden 4096 --layers 32 --vocabulary 32000 --dtype bf16 --device-memory 24GiB --cpu-memory 64GiB
  python -m offload plan --hidden 4096 --layers 32 --vocabulary 32000 --dtype bf16 --ranks 4 --stage 3
  python -m offload plan --model ./config.json --dtype bf16 --machine rtx4090 --batch 4 --sequence 2048 --checkpointing full
"""

from __future__ import annotations

import argparse
from dataclasses import replace

import torch

import offload
from offload.cli.arguments import (
    add_config_arguments,
    add_model_arguments,
    add_optimizer_arguments,
    config_of,
    positive,
)
from offload.cli.corpus import BYTE_VOCABULARY_SIZE
from offload.cli.forecast import Work, forecast, forecast_granted
from offload.cli.models import ModelChoice, build_outline, choose_model, make_optimizer
from offload.cli.outline import Outline
from offload.cli.plan_on_machine import add_machine_arguments, as_json, granted, machine_of, page, with_drives
from offload.cli.text import format_count, format_nbytes, table
from offload.cli.what_if import wishes_of
from offload.config import parse_nbytes
from offload.device.virtual.description import Machine, share_of
from offload.device.virtual.machine import VirtualMachine
from offload.errors import BudgetError, ConfigError
from offload.planning.budget import Tier
from offload.planning.deciding import PAIRINGS
from offload.planning.placement import Placement
from offload.planning.traffic import Traffic
from offload.rehearsal.forecast import Forecast, refused

_TIERS: tuple[Tier, ...] = ("device", "cpu", "nvme")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_model_arguments(parser)
    add_optimizer_arguments(parser)
    add_config_arguments(parser)
    step = parser.add_argument_group("a step", "who takes it, and in how many parts")
    step.add_argument("--accumulate", type=positive, default=1, metavar="N", help="micro-batches of a step (default 1)")
    step.add_argument(
        "--ranks",
        type=positive,
        default=1,
        metavar="N",
        help="ranks of one node that train together, each on a device like the machine's (default 1): what each needs",
    )
    add_machine_arguments(parser)
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """The command. Returns 0, or 1 where it does not fit the machine; raises `BudgetError` where the budgets cannot hold the
    placement."""
    config = config_of(args)
    vocabulary = args.vocabulary or (BYTE_VOCABULARY_SIZE if args.model is None else 0)
    choice = choose_model(args, vocabulary, args.sequence)

    model = build_outline(choice, args.lora)
    optimizer = make_optimizer(model, args)  # raises what its flags have wrong
    machine = machine_of(args)
    if args.ranks > 1 and machine.kind == "unified":
        raise ConfigError(f"--ranks {args.ranks}: {machine.name} has one device, which computes on host memory. Leave it out.")
    config = granted(args, config, machine)

    def outline_with(budgets: dict[str, int]) -> Outline:
        return Outline(model, optimizer, replace(config, **budgets), args.ranks)  # type: ignore[arg-type]

    if not args.json:
        with VirtualMachine(machine).running(), outline_with({}) as outline:
            _print_bytes(outline, choice.title, args)
    (found, config), wishes = _forecast(args, config, machine, choice), None
    if found.peak_nbytes:
        granted_nbytes = int(config.cpu_memory) if config.cpu_memory is not None else None
        more = share_of(with_drives(machine, int(machine.nvme_drives) + 1), args.ranks)
        named = int(parse_nbytes(args.device_memory, "device_memory")) if args.device_memory is not None else None
        wishes = wishes_of(
            found, share_of(machine, args.ranks), outline_with, _work(args),
            cpu_memory=granted_nbytes, device_memory=named, more=more,
        )  # fmt: skip
    device_nbytes = int(config.device_memory) if config.device_memory is not None else None
    if args.json:
        print(as_json(found, machine, args.tokens, wishes, device_nbytes))
    else:
        print(f"\n{page(found, machine, args.tokens, wishes, device_nbytes)}")
    return 0 if found.fits else 1


def _work(args: argparse.Namespace) -> Work:
    return Work(args.batch, args.sequence, args.accumulate, args.checkpointing == "full", args.ranks)


def _forecast(
    args: argparse.Namespace, config: offload.Config, machine: Machine, choice: ModelChoice
) -> tuple[Forecast, offload.Config]:
    """And the configuration that it is made with."""

    def make() -> tuple[torch.nn.Module, torch.optim.Optimizer]:
        model = build_outline(choice, args.lora)
        if args.dtype in ("bf16", "fp16"):
            model.to(torch.bfloat16 if args.dtype == "bf16" else torch.float16)
        return model, make_optimizer(model, args)

    work = _work(args)
    try:
        if args.machine == "this":
            return forecast(*make(), config, machine, work, args.trace), config
        return forecast_granted(make, config, machine, work, args.trace)
    except BudgetError as error:
        return refused(error), config


def _print_bytes(outline: Outline, title: str, args: argparse.Namespace) -> None:
    """What lies where, and what moves at most."""
    print(f"model: {title}, {format_count(outline.parameter_numel)} parameters in {outline.unit_count} units")
    ranks = "one rank" if args.ranks == 1 else f"{args.ranks} ranks, stage {args.stage}; bytes are those of one rank"
    print(f"device: {outline.device_name}, {ranks}\n")
    try:
        placement = outline.placement()
    except BudgetError:
        print(_alternatives_table(outline, None), flush=True)
        raise
    print(_plan_table(placement, outline.parameter_numel))
    print("\n" + _smallest_table(outline, placement, args.ranks))
    if args.ranks == 1:  # what goes over the wire is counted by the engine: stats()["ranks"]
        print("\n" + _traffic_table(outline, placement, args.accumulate))
    print("\n" + _alternatives_table(outline, placement))


def _plan_table(placement: Placement, parameter_numel: int) -> str:
    lines = sorted(placement.plan.lines, key=lambda line: _TIERS.index(line.tier))

    def row(tier: str, purpose: str, nbytes: int) -> tuple[str, ...]:
        return tier, purpose, format_nbytes(nbytes), f"{nbytes / parameter_numel:.2f}", f"{nbytes}"

    rows = [row(line.tier, line.purpose, line.nbytes) for line in lines]
    for tier in _TIERS:
        total = placement.plan.total_nbytes(tier)
        if total:
            rows.append(row(tier, "TOTAL", total))
    title = (
        f"Parameters on {placement.parameters}, optimizer states on {placement.optimizer_states}, gradients on "
        f"{placement.gradients}, prefetch {placement.prefetch}"
    )
    return f"{title}\n{table(('tier', 'purpose', 'size', 'B/parameter', 'bytes'), rows, left_columns=(0, 1))}"


def _smallest_table(outline: Outline, placement: Placement, rank_count: int) -> str:
    rows = []
    for field in ("device_memory", "cpu_memory"):
        smallest = outline.smallest_nbytes(placement, field)
        if smallest is not None:
            rows.append((f"--{field.replace('_', '-')}", format_nbytes(smallest), f"{smallest}"))
    if not rows:
        return "This placement holds nothing that a budget bounds."
    whose = "" if rank_count == 1 else f" (--cpu-memory: of all {rank_count} ranks together)"
    return f"Smallest budgets with which this placement works{whose}\n" + table(("", "size", "bytes"), rows)


def _traffic_table(outline: Outline, placement: Placement, micro_batches: int) -> str:
    def row(name: str, traffic: int) -> tuple[str, ...]:
        return name, format_nbytes(traffic), f"{traffic / outline.parameter_numel:.2f}", f"{traffic}"

    traffic: Traffic = outline.traffic(placement, micro_batches)
    rows = [row("NVMe read", traffic.read_nbytes), row("NVMe written", traffic.written_nbytes)]
    if traffic.spilled_nbytes:
        rows.append(row("  gradients in each of them", traffic.spilled_nbytes))
    if not outline.unified:
        between = [row("host to device", traffic.to_device_nbytes), row("device to host", traffic.from_device_nbytes)]
        rows = between + rows
    plural = "micro-batch" if micro_batches == 1 else "micro-batches"
    return (
        f"Bytes that a step of {micro_batches} {plural} moves, at most (units that stay between uses are not moved again)\n"
        + table(("link", "size", "B/parameter", "bytes"), rows)
    )


def _alternatives_table(outline: Outline, chosen: Placement | None) -> str:
    rows = []
    for parameters, states in PAIRINGS:
        try:
            other = outline.placement(parameters, states)
        except ConfigError:
            continue  # below stage 3 parameters stay on the devices of all ranks
        mark = "*" if chosen is not None and (parameters, states) == (chosen.parameters, chosen.optimizer_states) else ""
        totals = [other.plan.total_nbytes(tier) for tier in _TIERS]
        rows.append((mark, parameters, states, *(format_nbytes(total) if total else "-" for total in totals)))
    header = ("", "parameters", "optimizer states", *_TIERS)
    return "Placements, without budgets (* the one above)\n" + table(header, rows, left_columns=(0, 1, 2))
