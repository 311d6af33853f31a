# SPDX-License-Identifier: Apache-2.0
"""Train a causal language model on text, with parameters and optimizer states on the device, in CPU memory or on NVMe.

The model is a local Hugging Face checkpoint, a config.json, or a new Llama of a given shape. Text is cut into bytes,
or by the tokenizer that lies in the checkpoint's folder. Ctrl-C and SIGTERM end the run after the current step; what was
measured is printed all the same, and with --checkpoints the run is saved: the same command goes on with it, to the bit.

  python -m offload train --data stdlib --steps 20
  python -m offload train --model ./checkpoint --data ./texts --lora --export ./adapter
  python -m offload train --model ./checkpoint --data ./texts --dtype bf16 \\
      --parameters nvme --optimizer-states nvme --nvme /mnt/nvme0 --cpu-memory 8GiB \\
      --checkpoints ./run --save-every 500
"""

from __future__ import annotations

import argparse
import math
import time
from pathlib import Path
from typing import Any

import torch
from torch import nn

import offload
from offload.cli.arguments import (
    add_config_arguments,
    add_model_arguments,
    add_optimizer_arguments,
    check_can_be_written,
    check_file,
    config_of,
    natural,
    positive,
    positive_number,
    seed,
)
from offload.cli.corpus import BYTE_VOCABULARY_SIZE, ByteStream, TokenizedStream, TokenStream, Windows, find_documents
from offload.cli.models import (
    ModelChoice,
    build_model,
    check_sequence,
    choose_model,
    enable_checkpointing,
    first_line,
    make_optimizer,
    require_transformers,
)
from offload.cli.plans.outline import check_room
from offload.cli.progress import ProgressLine
from offload.cli.text import format_count, format_nbytes
from offload.cli.training.checkpoints import Checkpoints, add_checkpoint_arguments, check_arguments
from offload.cli.training.interruption import Interruption
from offload.cli.training.live import JsonLines, StepLine
from offload.cli.training.measuring import EngineMeter, Measurements
from offload.cli.training.report import make_report, print_report
from offload.errors import ConfigError, StorageError
from offload.profiling.profile import Profile

_TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json", "tokenizer.model")
_BYTES = "bytes"
_DEFAULT_STEPS = 100
_FINAL_LR_SHARE = 0.1
_PROFILED = (3, 4)
"""Steps of the run. The first has no updates of one before it, the second is the first that has."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_model_arguments(parser)
    _add_data_arguments(parser)
    add_optimizer_arguments(parser)
    _add_length_arguments(parser)
    add_checkpoint_arguments(parser)
    add_config_arguments(parser)
    group = parser.add_argument_group("results")
    group.add_argument("--export", type=Path, metavar="DIR", help="write the weights (with --lora: the adapter) as safetensors")
    group.add_argument("--merged", action="store_true", help="with --lora and --export: the model with the adapter merged in")
    group.add_argument(
        "--profile", type=Path, metavar="FILE", help=f"write steps {_PROFILED[0]} and {_PROFILED[1]} as a trace, for explain"
    )
    group.add_argument("--json", type=Path, metavar="FILE", help="write a line of JSON for each step, and for the report")
    parser.set_defaults(run=run)


def _add_data_arguments(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("data")
    group.add_argument(
        "--data",
        required=True,
        metavar="PATH",
        help="a text file, a folder, or 'stdlib': the sources of Python's library",
    )
    group.add_argument(
        "--tokenizer", type=Path, metavar="DIR", help="a local tokenizer, or 'bytes' (default: the checkpoint's own)"
    )
    group.add_argument("--sequence", type=_sequence, default=256, metavar="N", help="tokens in a window (default 256)")
    group.add_argument("--batch", type=positive, default=1, metavar="N", help="windows in a micro-batch (default 1)")
    group.add_argument("--accumulate", type=positive, default=1, metavar="N", help="micro-batches in a step (default 1)")
    group.add_argument(
        "--eval-batches",
        type=natural,
        default=8,
        metavar="N",
        help="held-out batches to evaluate at the end (default 8)",
    )
    group.add_argument("--eval-every", type=positive, metavar="N", help="evaluate them after every N steps too")
    group.add_argument(
        "--seed", type=seed, default=0, metavar="N", help="seed of the initial values and of the order of the data (default 0)"
    )


def _add_length_arguments(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("length", "whichever comes first")
    group.add_argument("--steps", type=positive, metavar="N", help=f"steps (default {_DEFAULT_STEPS}, or until --seconds)")
    group.add_argument("--seconds", type=positive_number, metavar="S", help="end after the first step past this time")
    group.add_argument("--warmup", type=natural, default=0, metavar="N", help="steps of linear warm-up (default 0)")
    group.add_argument(
        "--gradient-checkpointing", action="store_true", help="keep only the inputs of blocks, and compute the rest twice"
    )


def _sequence(text: str) -> int:
    value = positive(text)
    if value < 2:
        raise argparse.ArgumentTypeError("a window needs at least 2 tokens")
    return value


def run(args: argparse.Namespace) -> int:
    """The command. Returns 0, also where a signal ended the run after a step."""
    started = time.perf_counter()
    config = config_of(args)
    check_arguments(args)
    _check_export(args)
    _check_profile(args)
    lines = JsonLines(args.json)
    interruption, progress = Interruption(), ProgressLine()
    with interruption.watching():
        documents, tokenizer = find_documents(args.data), _tokenizer(args)
        vocabulary_size = BYTE_VOCABULARY_SIZE if tokenizer is None else len(tokenizer)
        choice = choose_model(args, vocabulary_size, args.sequence)
        measurements = Measurements()
        model, optimizer = _build(args, choice, measurements, progress)
        check_room(model, optimizer, config)
        stream: TokenStream = ByteStream(documents) if tokenizer is None else TokenizedStream(documents, tokenizer)
        windows = Windows(stream, args.sequence, args.batch, args.seed)
        progress.say(_introduction(choice, model, stream, config))
        with measurements.phase("initialize"), progress.showing():
            engine = _initialize(model, optimizer, config, choice.weights)
        with engine:
            meter = EngineMeter(engine, measurements)
            progress.say(_placement_line(meter))
            with interruption.between_steps():
                loop = _Loop(args, engine, windows, meter, interruption, progress, lines)
                loop.run(len(stream))
                progress.close()
                meter.read()
                io = meter.io
                if not interruption.requested:
                    loop.evaluate()
                if args.export is not None and not interruption.requested:
                    with measurements.phase("export"), progress.showing():
                        engine.export(args.export, merged=args.merged)
                meter.read()
                measurements.interrupted = interruption.requested
                with measurements.phase("close"):
                    engine.close()
                measurements.seconds["total"] = time.perf_counter() - started
                report = make_report(args, choice.title, model, stream, config, meter, io)
                print_report(report)
                if args.profile is not None:
                    print(f"\n{_profile_line(args.profile, loop.profile)}")
                lines.write("report", report)
    return 0


# ---- before the first step -------------------------------------------------------------------------------------------


def _check_export(args: argparse.Namespace) -> None:
    folder: Path | None = args.export
    if args.merged and (folder is None or args.lora is None):
        raise ConfigError("--merged says how an adapter is exported: give --lora and --export DIR too.")
    if folder is None:
        return
    if folder.exists() and not (folder.is_dir() and not any(folder.iterdir())):
        raise ConfigError(f"--export {str(folder)!r} is there already: name a folder that is not, or an empty one.")
    check_can_be_written(folder, "--export")


def _check_profile(args: argparse.Namespace) -> None:
    check_file(args.profile, "--profile")
    if args.profile is not None and args.steps is not None and args.steps < _PROFILED[1]:
        raise ConfigError(
            f"--profile records steps {_PROFILED[0]} and {_PROFILED[1]}, and --steps {args.steps} ends before that: give more."
        )


def _tokenizer(args: argparse.Namespace) -> Any:
    """What --tokenizer names, else what lies in the checkpoint's folder; None: text is cut into bytes."""
    folder: Path | None = args.tokenizer
    if folder is None and args.model is not None and any((args.model / name).is_file() for name in _TOKENIZER_FILES):
        folder = args.model
    if folder is None or str(folder) == _BYTES:
        return None
    transformers = require_transformers()
    if not folder.is_dir():
        raise ConfigError(f"--tokenizer {str(folder)!r} is not a folder: name one with a tokenizer.json.")
    if not any((folder / name).is_file() for name in _TOKENIZER_FILES):
        raise ConfigError(f"--tokenizer {str(folder)!r} cannot be read: it holds no {' or '.join(_TOKENIZER_FILES)}.")
    try:
        return transformers.AutoTokenizer.from_pretrained(str(folder), local_files_only=True)
    except (OSError, ValueError, KeyError) as error:
        raise ConfigError(f"--tokenizer {str(folder)!r} cannot be read: {first_line(error)}") from error


def _build(
    args: argparse.Namespace, choice: ModelChoice, measurements: Measurements, progress: ProgressLine
) -> tuple[nn.Module, torch.optim.Optimizer]:
    with measurements.phase("build"), progress.counting_modules("building the model"):
        model = build_model(choice, args.seed, args.lora)
    check_sequence(model, choice, args.sequence)
    if args.gradient_checkpointing:
        enable_checkpointing(model, gradient_checkpointing_kwargs={"use_reentrant": False})
    optimizer = make_optimizer(model, args)
    return model, optimizer


def _initialize(
    model: nn.Module, optimizer: torch.optim.Optimizer, config: offload.Config, weights: Path | None
) -> offload.Engine:
    try:
        return offload.initialize(model, optimizer, config, weights=weights)
    except StorageError as error:
        raise ConfigError(str(error)) from error  # before the first step it is the path that cannot be used


def _introduction(choice: ModelChoice, model: nn.Module, stream: TokenStream, config: offload.Config) -> str:
    numel = sum(parameter.numel() for parameter in model.parameters())
    trained = sum(parameter.numel() for parameter in model.parameters() if parameter.requires_grad)
    share = f" ({format_count(trained)} of them trained)" if trained < numel else ""
    values = f"weights of {choice.weights}" if choice.weights is not None else "new weights"
    budget = f", host budget {format_nbytes(int(config.cpu_memory))}" if config.cpu_memory is not None else ""
    return (
        f"model: {choice.title}, {format_count(numel)} parameters{share}, {values}\n"
        f"data:  {stream.document_count} documents, {format_count(len(stream))} tokens, vocabulary of "
        f"{stream.vocabulary_size}\n"
        f"filling the tiers{budget} ..."
    )


def _profile_line(path: Path, profile: Profile | None) -> str:
    if profile is None:
        return f"--profile: the run ended before step {_PROFILED[0]}, so nothing was written to {path}"
    return f"a trace of the run's steps from {_PROFILED[0]} on: {path}; what it says: python -m offload explain {path}"


def _placement_line(meter: EngineMeter) -> str:
    placement = meter.latest["placement"]
    planned = {tier: meter.planned_nbytes(tier) for tier in ("device", "cpu", "nvme")}
    totals = ", ".join(f"{tier} {format_nbytes(nbytes)}" for tier, nbytes in planned.items() if nbytes)
    return (
        f"parameters on {placement['parameters']}, optimizer states on {placement['optimizer_states']}, gradients on "
        f"{placement['gradients']}; planned: {totals}"
    )


# ---- the steps -------------------------------------------------------------------------------------------------------


class _Loop:
    """The training loop: an ordinary PyTorch one, with a stopwatch around each of its calls."""

    def __init__(
        self,
        args: argparse.Namespace,
        engine: offload.Engine,
        windows: Windows,
        meter: EngineMeter,
        interruption: Interruption,
        progress: ProgressLine,
        lines: JsonLines,
    ) -> None:
        self._args, self._engine, self._model, self._optimizer = args, engine, engine.module, engine.optimizer
        self._windows, self._meter, self._measurements = windows, meter, meter.measurements
        self._interruption, self._progress, self._lines = interruption, progress, lines
        self.profile: Profile | None = None
        """Of `--profile`, from when it began."""
        self._last_count = args.steps or (_DEFAULT_STEPS if args.seconds is None else None)
        self._scheduler = torch.optim.lr_scheduler.LambdaLR(engine.optimizer, self._lr_factor)
        self._device = next(engine.module.parameters()).device

    def run(self, token_count: int) -> None:
        """Steps until their number, the time, or a signal says stop."""
        self._model.train()
        measurements = self._measurements
        checkpoints = Checkpoints(self._args, self._engine, self._scheduler, token_count)
        with self._progress.showing():
            measurements.resumed_step_count = checkpoints.resume()
        if measurements.resumed_step_count:
            self._lines.goes_on = True
            self._progress.say(f"going on after step {measurements.resumed_step_count}")
        self._batches = self._windows.training_batches(measurements.resumed_step_count * self._args.accumulate)
        line = StepLine(self._meter, self._progress, self._lines, self._last_count)
        started = time.perf_counter()
        while not (self._interruption.requested or self._is_over(started)):
            if self._args.profile is not None and measurements.step_count == _PROFILED[0] - 1:
                self.profile = self._engine.profile(self._args.profile, steps=len(_PROFILED))
            lr = float(self._optimizer.param_groups[0]["lr"])
            self._step()
            line.step_ended(lr, self._engine.grad_norm)
            checkpoints.after_step(measurements.total_step_count)
            self._evaluate_if_due()
        measurements.seconds["training"] = time.perf_counter() - started - measurements.seconds.get("evaluation", 0.0)
        line.show()
        with measurements.phase("save"), self._progress.showing():
            checkpoints.at_end(measurements.total_step_count)

    def _is_over(self, started: float) -> bool:
        if self._last_count is not None and self._measurements.total_step_count >= self._last_count:
            return True
        long_enough = self._args.seconds is not None and time.perf_counter() - started >= self._args.seconds
        return long_enough and self._measurements.step_count > 0

    def _step(self) -> None:
        measurements, count = self._measurements, self._args.accumulate
        losses = []
        for index in range(count):
            if index == count - 1:
                losses.append(self._micro_batch())
            else:
                with self._engine.no_sync():
                    losses.append(self._micro_batch())
        with measurements.phase("step"):
            self._optimizer.step()
            self._scheduler.step()
            self._optimizer.zero_grad()
        measurements.losses.append(math.fsum(losses) / count)

    def _micro_batch(self) -> float:
        measurements = self._measurements
        with measurements.phase("data"):
            batch = next(self._batches).to(self._device)
        with measurements.phase("forward"):
            loss: torch.Tensor = self._model(input_ids=batch, labels=batch).loss
        with measurements.phase("backward"):
            self._engine.backward(loss / self._args.accumulate)
            value: float = loss.detach().item()
        measurements.token_count += batch.numel()
        return value

    def evaluate(self) -> float | None:
        """Mean loss per token over the held-out batches, without gradients; over fewer of them where a signal comes, and None
        where it comes before the first, or --eval-batches is 0."""
        measurements, total, count = self._measurements, 0.0, 0
        self._model.eval()
        with measurements.phase("evaluation"), torch.no_grad():
            for batch in self._windows.held_out_batches(self._args.eval_batches):
                if self._interruption.requested:
                    break
                batch = batch.to(self._device)
                predicted = batch.numel() - batch.shape[0]
                total += float(self._model(input_ids=batch, labels=batch).loss) * predicted
                count += predicted
        if not count:
            return None
        measurements.held_out_loss, measurements.held_out_tokens = total / count, count
        return measurements.held_out_loss

    def _evaluate_if_due(self) -> None:
        step, every = self._measurements.total_step_count, self._args.eval_every
        if every is None or step % every or step == self._last_count or self._interruption.requested:
            return
        loss = self.evaluate()
        self._model.train()
        if loss is None:
            return
        self._lines.write("evaluation", {"step": step, "held_out_loss": loss})
        self._progress.say(f"held-out loss after step {step}: {loss:.4f}")

    def _lr_factor(self, step: int) -> float:
        """Linear warm-up; then, where the number of steps is known, half a cosine down to a tenth."""
        if step < self._args.warmup:
            return (step + 1) / float(self._args.warmup)
        if self._last_count is None:
            return 1.0
        share = min(1.0, (step - self._args.warmup) / max(1, self._last_count - self._args.warmup))
        return _FINAL_LR_SHARE + (1 - _FINAL_LR_SHARE) * 0.5 * (1 + math.cos(math.pi * share))
