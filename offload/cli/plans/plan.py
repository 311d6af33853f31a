# SPDX-License-Identifier: Apache-2.0
"""Say what training a model would take, without building it, on this machine or another: whether it fits, seconds a step, what
bounds them; then what lies where, the smallest budgets that work, and what a step moves over each link.

  python -m offload plan ./config.json --dtype bf16 --parameters nvme --optimizer-states nvme --nvme /mnt/nvme0
  python -m offload plan --hidden 4096 --layers 32 --vocabulary 32000 --dtype bf16 --device-memory 24GiB --cpu-memory 64GiB
  python -m offload plan --hidden 4096 --layers 32 --vocabulary 32000 --dtype bf16 --ranks 4 --stage 3
  python -m offload plan ./config.json --dtype bf16 --machine rtx4090 --batch 4 --sequence 2048 --checkpointing full
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import torch

import offload
from offload.cli.arguments import (
    add_config_arguments,
    add_model_arguments,
    add_optimizer_arguments,
    check_file,
    config_of,
    positive,
)
from offload.cli.corpus import BYTE_VOCABULARY_SIZE
from offload.cli.models import ModelChoice, build_outline, check_sequence, choose_model, make_optimizer
from offload.cli.plans.forecast import Work, forecast, forecast_granted
from offload.cli.plans.on_machine import (
    Seen,
    add_machine_arguments,
    answer,
    as_json,
    granted,
    machine_of,
    sections,
    with_drives,
)
from offload.cli.plans.outline import Outline
from offload.cli.plans.tables import tables_of
from offload.cli.plans.what_if import Wishes, wishes_of
from offload.cli.text import format_count
from offload.device.virtual.description import Machine, share_of
from offload.device.virtual.machine import VirtualMachine
from offload.errors import BudgetError, ConfigError
from offload.forecast import Forecast, refused


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
    """The command. Returns 0, or 1 where it does not fit: the machine, or the budgets."""
    if args.machine != "this" and args.nvme is None:
        args.nvme = "."  # a described machine has its drives, and nothing is opened
    asked, work = config_of(args), _work(args)
    check_file(args.trace, "--trace")
    vocabulary = args.vocabulary or (BYTE_VOCABULARY_SIZE if args.model is None else 0)
    choice = choose_model(args, vocabulary, args.sequence)

    model = build_outline(choice, args.lora)
    check_sequence(model, choice, args.sequence)
    optimizer = make_optimizer(model, args)  # raises what its flags have wrong
    machine = machine_of(args)
    if args.ranks > 1 and machine.kind == "unified":
        raise ConfigError(f"--ranks {args.ranks}: {machine.name} has one device, which computes on host memory. Leave it out.")
    with _said_on_a_terminal(f"running the engine on {machine.name} in virtual time ..."), _on_one_core():
        found, config = _forecast(args, granted(args, asked, machine), machine, choice, work)

    def outline_with(budgets: dict[str, int]) -> Outline:
        return Outline(model, optimizer, replace(config, **budgets), args.ranks)  # type: ignore[arg-type]

    share, wishes = share_of(machine, args.ranks), Wishes()
    if found.peak_nbytes:
        more = share_of(with_drives(machine, int(machine.nvme_drives) + 1), args.ranks)
        budgets = {"cpu_memory": _nbytes(config.cpu_memory), "device_memory": _nbytes(asked.device_memory)}
        wishes = wishes_of(found, share, outline_with, work, **budgets, more=more)
    seen = Seen(machine, args.tokens, _nbytes(config.device_memory), work)
    if args.json:
        print(as_json(found, seen, wishes))
        return 0 if found.fits else 1
    with VirtualMachine(share, args.ranks).running(), outline_with({}) as outline:
        title = f"{format_count(outline.parameter_numel)} parameters ({choice.title})"
        tables = [*sections(found, seen, wishes), *tables_of(outline, found, args.stage), *seen.notes(found)]
    print("\n\n".join(("\n".join(answer(found, seen, title, wishes)), *tables)))
    return 0 if found.fits else 1


@contextmanager
def _on_one_core() -> Iterator[None]:
    """Inside, for threads that take turns: to hand over to one on another core takes thrice the time. That core is the one that
    this thread runs on now."""
    stat = Path("/proc/thread-self/stat")
    if not hasattr(os, "sched_setaffinity") or not stat.exists():
        yield
        return
    before, core = os.sched_getaffinity(0), int(stat.read_text(encoding="ascii").rpartition(")")[2].split()[36])
    os.sched_setaffinity(0, {core})
    try:
        yield
    finally:
        os.sched_setaffinity(0, before)


@contextmanager
def _said_on_a_terminal(text: str) -> Iterator[None]:
    """Inside, for who waits and looks: it takes seconds, of large models a minute."""
    if sys.stderr.isatty():
        sys.stderr.write(text)
        sys.stderr.flush()
    try:
        yield
    finally:
        if sys.stderr.isatty():
            sys.stderr.write("\r\x1b[2K")
            sys.stderr.flush()


def _work(args: argparse.Namespace) -> Work:
    return Work(args.batch, args.sequence, args.accumulate, args.checkpointing == "full", args.ranks)


def _nbytes(budget: int | str | None) -> int | None:
    """Of a `Config`, which has it as a number."""
    return int(budget) if budget is not None else None


def _forecast(
    args: argparse.Namespace, config: offload.Config, machine: Machine, choice: ModelChoice, work: Work
) -> tuple[Forecast, offload.Config]:
    """And the configuration that it is made with."""

    def make() -> tuple[torch.nn.Module, torch.optim.Optimizer]:
        model = build_outline(choice, args.lora)
        if args.dtype in ("bf16", "fp16"):
            model.to(torch.bfloat16 if args.dtype == "bf16" else torch.float16)
        return model, make_optimizer(model, args)

    try:
        if args.machine == "this":
            return forecast(*make(), config, machine, work, args.trace), config
        return forecast_granted(make, config, machine, work, args.trace)
    except BudgetError as error:
        return refused(error), config
