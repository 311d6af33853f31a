# SPDX-License-Identifier: Apache-2.0
"""Numbered checkpoints of a `train` run: written every few steps and at its end, and what a later run takes up again.

A checkpoint holds beside the engine's own state how many steps are done, which is the position in the data, the scheduler's
state, and the flags that the coming steps depend on: a run that goes on with others would be neither the one nor the other.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

import offload
from offload.cli.arguments import check_can_be_written, looking_at_paths, positive
from offload.errors import ConfigError

_KEPT_FLAGS = (
    *("sequence", "batch", "accumulate", "seed", "warmup", "clip", "gradient_checkpointing", "lora"),
    *("lr", "weight_decay", "beta1", "beta2", "eps"),
)
"""Flags that a resumed run must repeat. --steps and --seconds may differ: they are how a run is made longer."""


def add_checkpoint_arguments(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("checkpoints", "a run goes on from the newest one; Ctrl-C and SIGTERM save one more")
    group.add_argument(
        "--checkpoints", type=Path, metavar="DIR", help="resume from the newest in DIR, and save one there at the end"
    )
    group.add_argument("--save-every", type=positive, metavar="N", help="save every N steps too, beside training")
    group.add_argument("--keep-last", type=positive, metavar="N", help="remove all but the newest N (default: keep all)")


def check_arguments(args: argparse.Namespace) -> None:
    """Raise `ConfigError` for flags that say nothing without a folder, and for a folder that is none."""
    folder: Path | None = args.checkpoints
    if folder is None:
        for flag in ("save_every", "keep_last"):
            if getattr(args, flag) is not None:
                raise ConfigError(f"--{flag.replace('_', '-')} needs a folder for checkpoints: give --checkpoints DIR.")
        return
    if folder.exists() and not folder.is_dir():
        raise ConfigError(f"--checkpoints {str(folder)!r} is not a folder: name one, or one to be made.")
    check_can_be_written(folder, "--checkpoints")


class Checkpoints:
    """The checkpoints of one run; without `--checkpoints` all methods do nothing."""

    def __init__(
        self,
        args: argparse.Namespace,
        engine: offload.Engine,
        scheduler: torch.optim.lr_scheduler.LRScheduler,
        token_count: int,
    ) -> None:
        """`token_count`: of the data, which a resumed run must find as long as it was."""
        self._engine, self._scheduler = engine, scheduler
        self._folder: Path | None = args.checkpoints
        self._every, self._keep_last = args.save_every, args.keep_last
        self._flags = {name: getattr(args, name) for name in _KEPT_FLAGS}
        self._token_count = token_count
        self._saved_step = 0
        self._wait: Callable[[], None] = lambda: None  # for the newest save

    def resume(self) -> int:
        """Take up the newest checkpoint; returns the steps that it had done, 0 where there is none.

        Raises `ConfigError` where this run's flags or data are others, `UsageError` where its model is."""
        if self._folder is None:
            return 0
        with looking_at_paths():
            state = self._engine.resume_or_start(self._folder)
        if state is None:
            return 0
        if not {"step", "scheduler", "flags", "token_count"} <= set(state):
            raise ConfigError(
                f"--checkpoints {str(self._folder)!r} holds checkpoints that `train` did not write: name another."
            )
        for name, value in self._flags.items():
            before = state["flags"].get(name)
            if before != value:
                raise ConfigError(
                    f"--{name.replace('_', '-')} is {value!r}, and was {before!r} in the run that --checkpoints "
                    f"{str(self._folder)!r} holds: give it as it was, or start anew in an empty folder."
                )
        if state["token_count"] != self._token_count:
            raise ConfigError(
                f"the data holds {self._token_count} tokens, and held {state['token_count']} in the run that --checkpoints "
                f"{str(self._folder)!r} holds: give the same data and tokenizer, or start anew in an empty folder."
            )
        self._scheduler.load_state_dict(state["scheduler"])
        self._saved_step = int(state["step"])
        return self._saved_step

    def after_step(self, step: int) -> None:
        """Where it is due, begin a save that goes on beside training."""
        if self._every is not None and step % self._every == 0:
            self._save(step)

    def at_end(self, step: int) -> None:
        """Save what is not saved yet. When this returns the newest checkpoint is durable."""
        if self._folder is None:
            return
        if step != self._saved_step:
            self._save(step)
        self._wait()

    def _save(self, step: int) -> None:
        assert self._folder is not None
        state: dict[str, Any] = {
            "step": step,
            "scheduler": self._scheduler.state_dict(),
            "flags": self._flags,
            "token_count": self._token_count,
        }
        path = self._folder / f"step-{step}"
        self._wait = self._engine.save_checkpoint(path, client_state=state, keep_last=self._keep_last, wait=False).wait
        self._saved_step = step
