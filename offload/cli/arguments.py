# SPDX-License-Identifier: Apache-2.0
"""Flags that several commands share, and what they mean: the model, the engine's configuration."""

from __future__ import annotations

import argparse
import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import offload
from offload.errors import CheckpointError, ConfigError, UsageError

PLACES = ("auto", "device", "cpu", "nvme")
SHAPE_FLAGS = ("hidden", "layers", "heads", "kv_heads", "intermediate", "vocabulary")


class _StoreWhatIsThere(argparse.Action):
    """Of an argument that a flag may give instead: what the flag stored stays where this one is left out."""

    def __call__(self, parser: Any, namespace: argparse.Namespace, values: Any, option_string: str | None = None) -> None:
        if values is not None:
            setattr(namespace, self.dest, values)


def add_model_arguments(parser: argparse.ArgumentParser) -> None:
    """The path of a model, or the shape of one of the Llama architecture; and what of it is trained."""
    group = parser.add_argument_group("model", "a local model, or the shape of a new one of the Llama architecture")
    model = group.add_mutually_exclusive_group()
    model.add_argument(
        "model",
        type=Path,
        nargs="?",
        action=_StoreWhatIsThere,
        metavar="MODEL",
        help="a local Hugging Face checkpoint (folder), or a config.json for a new model",
    )
    model.add_argument("--model", type=Path, metavar="MODEL", help="the same")
    group.add_argument("--hidden", type=positive, metavar="N", help="width (default 512)")
    group.add_argument("--layers", type=positive, metavar="N", help="number of blocks (default 8)")
    group.add_argument("--heads", type=positive, metavar="N", help="attention heads (default hidden / 64)")
    group.add_argument("--kv-heads", type=positive, metavar="N", help="key and value heads (default: as many as heads)")
    group.add_argument(
        "--intermediate", type=positive, metavar="N", help="width of the MLP (default 8/3 hidden, rounded up to 256)"
    )
    group.add_argument(
        "--vocabulary",
        type=positive,
        metavar="N",
        help="tokens (default: as many as the tokenizer has, or 257 for bytes)",
    )
    group.add_argument(
        "--lora",
        type=positive,
        nargs="?",
        const=16,
        metavar="RANK",
        help="train LoRA adapters of this rank on all linear layers (without a number: 16)",
    )


def add_optimizer_arguments(parser: argparse.ArgumentParser) -> None:
    """The numbers of AdamW."""
    group = parser.add_argument_group("optimizer", "AdamW; weight decay is not applied to 1-D parameters")
    group.add_argument("--lr", type=positive_number, default=3e-4, help="peak learning rate (default 3e-4)")
    group.add_argument("--weight-decay", type=number_from_0, default=0.1, metavar="X", help="weight decay (default 0.1)")
    group.add_argument("--beta1", type=float, default=0.9, metavar="X", help="decay of the first moment (default 0.9)")
    group.add_argument("--beta2", type=float, default=0.95, metavar="X", help="decay of the second moment (default 0.95)")
    group.add_argument("--eps", type=float, default=1e-8, metavar="X", help="added to the denominator (default 1e-8)")


def add_config_arguments(parser: argparse.ArgumentParser) -> None:
    """The fields of `offload.Config`."""
    group = parser.add_argument_group("placement and budgets", "sizes are bytes, or text such as 16GiB or 500MB")
    group.add_argument(
        "--parameters",
        choices=PLACES,
        default="auto",
        help="the furthest place where parameters live between uses (default auto)",
    )
    group.add_argument(
        "--optimizer-states",
        choices=PLACES,
        default="auto",
        help="the furthest place where master weights and moments live (default auto)",
    )
    group.add_argument(
        "--nvme", metavar="PATH[,PATH...]", help="a folder on the drive, or one on each of several drives (striped)"
    )
    group.add_argument("--cpu-memory", metavar="SIZE", help="the most host memory that the engine may hold")
    group.add_argument("--device-memory", metavar="SIZE", help="the most device memory that the engine may hold")
    group.add_argument("--stage", type=int, default=3, metavar="N", help="ZeRO stage, 0 to 3 (default 3)")
    group.add_argument(
        "--dtype", choices=("bf16", "fp16", "fp32"), help="what forward and backward run in (default: the model's own)"
    )
    group.add_argument(
        "--state-format",
        choices=("fp32", "split", "bf16", "8bit"),
        default="fp32",
        help="how states are kept: split has the bits of fp32 in fewer bytes; bf16 and 8bit change results (default fp32)",
    )
    group.add_argument(
        "--update",
        choices=("auto", "step", "backward"),
        default=offload.Config.update,
        help=f"when updates begin: at step(), in backward, or as early as they can be undone (default {offload.Config.update})",
    )
    group.add_argument("--prefetch", type=int, default=1, metavar="N", help="units fetched ahead (default 1)")
    group.add_argument("--clip", type=positive_number, metavar="NORM", help="clip the global gradient norm to this")


def config_of(args: argparse.Namespace) -> offload.Config:
    """The `Config` that the flags ask for. Raises `ConfigError`."""
    fields: dict[str, Any] = {
        "stage": args.stage,
        "parameters": args.parameters,
        "optimizer_states": args.optimizer_states,
        "nvme": paths_of(args.nvme),
        "cpu_memory": args.cpu_memory,
        "device_memory": args.device_memory,
        "dtype": args.dtype,
        "state_format": args.state_format,
        "max_grad_norm": args.clip,
        "update": args.update,
        "prefetch": args.prefetch,
    }
    return offload.Config(**fields).expecting(args.accumulate, args.batch * args.sequence)


def add_drive_arguments(parser: argparse.ArgumentParser) -> None:
    """On how large a file a drive is measured."""
    parser.add_argument(
        "--size", default="1GiB", metavar="SIZE", help="size of the scratch file (default 1GiB; at most half of what is free)"
    )


def paths_of(text: str | None) -> list[str] | None:
    """`--nvme a,b` as a list."""
    if text is None:
        return None
    paths = [part.strip() for part in text.split(",") if part.strip()]
    if not paths:
        raise ConfigError("--nvme is empty: name a folder on the drive.")
    return paths


def what_there_is_of(path: Path) -> Path:
    """The path, or the nearest above it that exists."""
    path = path.absolute()
    return next(one for one in (path, *path.parents) if os.path.exists(one))


def check_is_folder(path: str, flag: str) -> Path:
    """What there is of a folder that is there or may be made. Raises `ConfigError` where something else lies there."""
    there = what_there_is_of(Path(path).expanduser())
    if not there.is_dir():
        raise ConfigError(f"{flag} {path!r}: {str(there)!r} is no folder that can be written to: name one on the drive.")
    check_can_be_written(there, flag)
    return there


def check_file(path: Path | None, flag: str) -> None:
    """Raise `ConfigError` for the path of a file to be made, where it cannot be one."""
    if path is None:
        return
    if not path.absolute().parent.is_dir():
        raise ConfigError(f"{flag} {str(path)!r}: its folder does not exist: make it, or name another file.")
    if path.is_dir():
        raise ConfigError(f"{flag} {str(path)!r} is a folder: name a file.")
    check_can_be_written(path.parent, flag)


@contextmanager
def looking_at_paths() -> Iterator[None]:
    """Inside, before anything is done, a folder that is not what the command takes is the user's mistake."""
    try:
        yield
    except CheckpointError as error:
        raise UsageError(str(error)) from error


def check_can_be_written(folder: Path, flag: str) -> None:
    """Raise `ConfigError` where nothing can be written to what there is of the path: at once, not after hours."""
    there = what_there_is_of(folder)
    try:
        tempfile.TemporaryFile(dir=there).close()
    except OSError as error:
        raise ConfigError(
            f"{flag} {str(folder)!r} cannot be written to: {str(there)!r} says {error.strerror!r}. Name another folder."
        ) from None


def positive(text: str) -> int:
    """A count of at least 1 (for argparse)."""
    return _whole_number(text, 1)


def natural(text: str) -> int:
    """A count of at least 0 (for argparse)."""
    return _whole_number(text, 0)


def seed(text: str) -> int:
    """A seed for torch's generators, with room for an epoch's number (for argparse)."""
    value = natural(text)
    if value >= 2**63:
        raise argparse.ArgumentTypeError(f"{value} is not below 2^63")
    return value


def _whole_number(text: str, least: int) -> int:
    try:
        value = int(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number") from None
    if value < least:
        raise argparse.ArgumentTypeError(f"{value} is not at least {least}")
    return value


def positive_number(text: str) -> float:
    """A number above 0 (for argparse)."""
    value = _number(text)
    if not 0 < value < float("inf"):
        raise argparse.ArgumentTypeError(f"{value} is not above 0" if value < float("inf") else f"{value} is not finite")
    return value


def number_from_0(text: str) -> float:
    """A number that is not negative (for argparse)."""
    value = _number(text)
    if not 0 <= value < float("inf"):
        raise argparse.ArgumentTypeError(f"{value} is below 0" if value < 0 else f"{value} is not finite")
    return value


def _number(text: str) -> float:
    try:
        return float(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number") from None
