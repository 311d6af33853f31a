# SPDX-License-Identifier: Apache-2.0
"""What `offload.initialize` is given as its config, in this project's keys or in DeepSpeed's."""

from __future__ import annotations

import difflib
import os
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from torch import nn

from offload.config import Config, read_json
from offload.deepspeed_config.keys import SECTIONS, TOP
from offload.deepspeed_config.optimizers import make_optimizer
from offload.deepspeed_config.translated import Half, Translation
from offload.deepspeed_config.translation import OWN_KEYS, translate
from offload.errors import ConfigError

_NEAR = 0.8


def speaks_deepspeed(mapping: Mapping[str, Any]) -> bool:
    """Whether a config's keys are DeepSpeed's: one of them is; or none is ours, and one looks like DeepSpeed's."""
    known = SECTIONS[TOP].known
    if any(key in known for key in mapping):
        return True
    return not any(key in OWN_KEYS for key in mapping) and any(
        difflib.get_close_matches(str(key), known, n=1, cutoff=_NEAR) for key in mapping
    )


def read_settings(
    config: Config | Mapping[str, Any] | str | os.PathLike[str] | None,
    model: nn.Module,
    optimizer: torch.optim.Optimizer | None,
    world_size: int,
) -> tuple[Config, torch.optim.Optimizer | None]:
    """The `Config`, and the optimizer: the given one, else the one that DeepSpeed's keys describe.

    What DeepSpeed's engine does around the step and `offload.initialize` leaves to the loop is a `ConfigError`."""
    if isinstance(config, (str, os.PathLike)):
        config = read_json(Path(config))
    if not isinstance(config, Mapping) or not speaks_deepspeed(config):
        return Config.of(config), optimizer
    said = translate(config, world_size)
    _refuse_what_its_engine_does(said)
    loops_own = tuple(key for key in ("steps_per_print", "dataloader_drop_last") if config.get(key) is not None)
    superseded = ("optimizer",) if optimizer is not None and said.optimizer is not None else ()
    said.warn(5, (*loops_own, *superseded))  # where offload.initialize was called
    if optimizer is None and said.optimizer is not None:
        optimizer = make_optimizer(said.optimizer, model.parameters())
    return said.config, optimizer


def _refuse_what_its_engine_does(said: Translation) -> None:
    if said.scheduler is not None:
        raise _done_there("scheduler", "which returns it, or make the scheduler yourself and leave the section out", "stepped")
    if said.batch.accumulation > 1:
        what = f"gradient_accumulation_steps={said.batch.accumulation}"
        raise _done_there(what, "or divide the loss and step every so many backwards in your loop, and leave it out")
    if said.autocast is not None:
        raise _done_there("torch_autocast", "or put torch.autocast around the forward in your loop, and leave it out")
    if said.layer_drop is not None:
        instead = "or pass it to the model in your loop, and leave it out"
        raise _done_there("progressive_layer_drop", instead, "told to the model")
    scaling = [
        f"fp16.{name}={value!r}"
        for name, value in asdict(said.half or Half()).items()
        if name != "loss_scale" and value != getattr(Half(), name)
    ]
    if scaling:
        raise ConfigError(
            f"{', '.join(scaling)} of the config: offload.deepspeed.initialize follows its rule for the loss scale; here "
            "the dynamic one is Config's own, loss_scale='dynamic'. Leave it out, or set fp16.loss_scale."
        )


def _done_there(what: str, instead: str, how: str = "done") -> ConfigError:
    return ConfigError(f"{what} of DeepSpeed's config is {how} by its engine: use offload.deepspeed.initialize, {instead}.")
