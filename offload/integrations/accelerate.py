# SPDX-License-Identifier: Apache-2.0
"""Accelerate's own loop on an engine.

    engine = offload.initialize(model, optimizer, config)
    model, optimizer, loader = accelerator.prepare(engine.module, engine.optimizer, loader)

From there on the script is Accelerate's: `backward`, `accumulate`, `clip_grad_norm_`, `save_state`, `load_state`, `save_model`,
`unwrap_model`. `accelerator.prepare` finds the engine by the model (`offload.integrations.prepared`).

With `prepare(accelerator, model, optimizer, config)` in place of the first line the model runs in the config's `dtype`, or else
in that of the accelerator's `mixed_precision`, with fp32 masters, instead of under autocast. `attach(accelerator, engine)` is
for a model that the accelerator had prepared before there was an engine.
"""

from __future__ import annotations

import os
import weakref
from contextlib import AbstractContextManager
from typing import Any

import torch
from accelerate import Accelerator
from torch import nn

import offload
from offload import Engine, UsageError
from offload.integrations.prepared import mark_as_prepared
from offload.integrations.settings import Settings, settings_of

_KNOWN = "_offload_engines"
FOLDER = "offload"
"""What an engine saves, in the folder of what a framework does."""


def prepare(
    accelerator: Accelerator,
    model: nn.Module,
    optimizer: torch.optim.Optimizer | None,
    config: Settings = None,
    *,
    weights: str | os.PathLike[str] | None = None,
) -> Engine:
    """`offload.initialize`, and the accelerator told: the model is not wrapped or moved, saves and loads are the engine's."""
    settings = settings_of(config, precision=accelerator.mixed_precision, micro_batches=accelerator.gradient_accumulation_steps)
    engine = offload.initialize(model, optimizer, settings, weights=weights)
    attach(accelerator, engine)
    return engine


def attach(accelerator: Accelerator, engine: Engine) -> None:
    """Have this accelerator use the engine wherever its model is meant. Nothing but the accelerator itself changes.

    Raises `UsageError` where the accelerator's `mixed_precision` is none that the engine runs in."""
    if not _runs_in(engine, accelerator.mixed_precision):
        raise UsageError(
            f"Accelerator(mixed_precision={accelerator.mixed_precision!r}) does not fit an engine with "
            f"dtype={engine.config.dtype!r}: make it with Config(dtype={accelerator.mixed_precision!r}), or by "
            "offload.integrations.accelerate.prepare."
        )
    _Attached(accelerator, engine).take()


def meet(accelerator: Any, engine: Engine) -> bool:
    """An accelerator is about to prepare the engine's model. Whether it is prepared then; if not, the accelerator puts autocast
    around it, and knows the engine for what it saves and loads."""
    if not isinstance(accelerator, Accelerator):
        return False
    is_new = not any(known is engine for known in _known(accelerator))
    if accelerator.num_processes == 1 and not _runs_in(engine, accelerator.mixed_precision):
        if is_new:
            _Attached(accelerator, engine).take_saves()
        return False
    if is_new:
        attach(accelerator, engine)
    return True


def _known(accelerator: Accelerator) -> list[Engine]:
    """The engines that it was told of, as long as they are open."""
    found = (known() for known in vars(accelerator).get(_KNOWN, ()))
    return [engine for engine in found if engine is not None and not engine.closed]


def _runs_in(engine: Engine, precision: str) -> bool:
    wanted = {"bf16": torch.bfloat16, "fp16": torch.float16}.get(precision)
    return precision == "no" or any(parameter.dtype == wanted for parameter in engine.module.parameters())


class _Attached:
    def __init__(self, accelerator: Accelerator, engine: Engine) -> None:
        self._accelerator, self._engine = accelerator, engine
        self._no_sync, self._get_state_dict = accelerator.no_sync, accelerator.get_state_dict
        self._save_state, self._clip_grad_norm = accelerator.save_state, accelerator.clip_grad_norm_
        self._parameter_ids = {id(parameter) for parameter in engine.module.parameters()}
        self._saves_state = False
        self._no_weights: dict[str, Any] = {}
        count = len(_known(accelerator))
        self._folder = f"{FOLDER}_{count}" if count else FOLDER

    def take(self) -> None:
        accelerator = self._accelerator
        mark_as_prepared(self._engine)
        accelerator.native_amp, accelerator.scaler = False, None
        for name in ("backward", "clip_grad_norm_", "no_sync"):
            setattr(accelerator, name, getattr(self, name))
        self.take_saves()

    def take_saves(self) -> None:
        accelerator = self._accelerator
        vars(accelerator).setdefault(_KNOWN, []).append(weakref.ref(self._engine))
        for name in ("get_state_dict", "save_state"):
            setattr(accelerator, name, getattr(self, name))
        accelerator.register_save_state_pre_hook(self._save)
        accelerator.register_load_state_pre_hook(self._load)

    def backward(self, loss: torch.Tensor, **keywords: Any) -> None:
        keywords.pop("learning_rate", None)  # meant for optimizers that step in backward
        self._engine.backward(loss / self._accelerator.gradient_accumulation_steps, **keywords)

    def clip_grad_norm_(self, parameters: Any, max_norm: float, norm_type: float = 2) -> Any:
        given = [parameters] if isinstance(parameters, torch.Tensor) else list(parameters)
        if norm_type == 2 and {id(one) for one in given} == self._parameter_ids:
            return self._engine.clip_grad_norm_(max_norm)
        return self._clip_grad_norm(given, max_norm, norm_type=norm_type)

    def no_sync(self, model: Any) -> AbstractContextManager[None]:
        found: AbstractContextManager[None] = self._engine.no_sync() if self._is_ours(model) else self._no_sync(model)
        return found

    def get_state_dict(self, model: Any, unwrap: bool = True) -> Any:
        if not self._is_ours(model):
            return self._get_state_dict(model, unwrap=unwrap)
        return self._no_weights if self._saves_state else self._engine.state_dict()

    def save_state(self, *args: Any, **keywords: Any) -> Any:
        self._saves_state = True  # the weights are in the engine's checkpoint
        try:
            return self._save_state(*args, **keywords)
        finally:
            self._saves_state = False

    def _is_ours(self, model: Any) -> bool:
        return self._accelerator.unwrap_model(model) is self._engine.module

    def _save(self, models: list[Any], weights: list[Any], folder: str) -> None:
        weights[:] = [one for one in weights if one is not self._no_weights]
        self._engine.save_checkpoint(os.path.join(folder, self._folder))

    def _load(self, models: list[Any], folder: str) -> None:
        place = next(index for index, model in enumerate(models) if self._is_ours(model))
        del models[place]
        self._engine.load_checkpoint(os.path.join(folder, self._folder))
