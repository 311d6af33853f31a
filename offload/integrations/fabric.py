# SPDX-License-Identifier: Apache-2.0
"""Lightning Fabric on an engine.

    fabric = Fabric(strategy=OffloadStrategy({"parameters": "nvme", ...}), devices=1)
    fabric.launch()
    model, optimizer = fabric.setup(model, optimizer)

`fabric.backward`, `clip_gradients`, `no_backward_sync`, `save` and `load` work as ever. A checkpoint is a folder that
holds the engine's beside Fabric's. Set up one model and one optimizer at once. The model runs in the config's `dtype`.
"""

from __future__ import annotations

import os
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

import torch
from lightning.fabric.strategies.ddp import DDPStrategy
from lightning.fabric.strategies.strategy import _BackwardSyncControl
from torch import nn

import offload
from offload import Engine, UsageError
from offload.integrations.accelerate import FOLDER
from offload.integrations.lightning_ranks import EngineStrategy
from offload.integrations.settings import Settings

STATE = "state.ckpt"


class OffloadStrategy(EngineStrategy, DDPStrategy):
    """On several ranks the model is partitioned instead of wrapped. `config`: as that of `offload.initialize`."""

    engine: Engine | None = None
    """Made by `fabric.setup(model, optimizer)`."""

    def __init__(self, config: Settings = None, **keywords: Any) -> None:
        super().__init__(config, **keywords)
        self._backward_sync_control = _NoSync(self)

    def setup_environment(self) -> None:
        if self.is_shared:
            super().setup_environment()
        else:  # no process group
            assert self.accelerator is not None
            self.accelerator.setup_device(self.root_device)

    @property
    def distributed_sampler_kwargs(self) -> dict[str, Any] | None:  # type: ignore[override]
        """One process has the data in the script's own order, as without a strategy."""
        return super().distributed_sampler_kwargs if self.is_shared else None

    def module_to_device(self, module: nn.Module) -> None:
        """Where parameters lie is the engine's."""

    def setup_module(self, module: nn.Module) -> Any:
        """Of a model without an optimizer: for evaluation and generation."""
        return self._engaged(module, None).module

    def setup_module_and_optimizers(self, module: nn.Module, optimizers: list[torch.optim.Optimizer], *more: Any) -> Any:
        if len(optimizers) != 1:
            raise UsageError(
                f"fabric.setup was given {len(optimizers)} optimizers for one model: give it one, with several groups."
            )
        engine = self._engaged(module, optimizers[0])
        return engine.module, [engine.optimizer], *more  # a scheduler, where Lightning has it

    def setup_optimizer(self, optimizer: torch.optim.Optimizer) -> torch.optim.Optimizer:
        raise UsageError("an engine is made of a model and its optimizer at once: fabric.setup(model, optimizer).")

    def _engaged(self, module: nn.Module, optimizer: torch.optim.Optimizer | None) -> Engine:
        if self.engine is not None and not self.engine.closed:
            raise UsageError("this strategy has an engine: close fabric.strategy.engine first, or make another Fabric.")
        self._check_precision(self.precision)
        self.engine = offload.initialize(module, optimizer, self._config)
        return self.engine

    def backward(self, tensor: torch.Tensor, module: nn.Module | None, *args: Any, **keywords: Any) -> None:
        self._open().backward(tensor, **keywords)

    def clip_gradients_norm(
        self,
        module: nn.Module,
        optimizer: torch.optim.Optimizer,
        max_norm: float | int,
        norm_type: float | int = 2.0,
        error_if_nonfinite: bool = True,
    ) -> torch.Tensor:
        """Of all parameters, in the L2 norm. A step whose norm is not finite is left out (fp16), or raises."""
        if norm_type != 2:
            return super().clip_gradients_norm(module, optimizer, max_norm, norm_type, error_if_nonfinite)
        return self._open().clip_grad_norm_(max_norm)

    def save_checkpoint(self, path: str | os.PathLike[str], state: dict[str, Any], *args: Any, **keywords: Any) -> None:
        folder = Path(self.broadcast(path))
        folder.mkdir(parents=True, exist_ok=True)
        super().save_checkpoint(folder / STATE, state, *args, **keywords)
        self._open().save_checkpoint(folder / FOLDER)

    def load_checkpoint(self, path: str | os.PathLike[str], *args: Any, **keywords: Any) -> dict[str, Any]:
        folder = Path(self.broadcast(path))
        self._open().load_checkpoint(folder / FOLDER)
        return super().load_checkpoint(folder / STATE, *args, **keywords)

    def get_module_state_dict(self, module: nn.Module) -> dict[str, Any]:
        return {} if module is self._open().module else super().get_module_state_dict(module)

    def load_module_state_dict(self, module: nn.Module, state_dict: dict[str, Any], strict: bool = True) -> None:
        if module is not self._open().module:
            super().load_module_state_dict(module, state_dict, strict)

    def _open(self) -> Engine:
        if self.engine is None:
            raise UsageError("there is no engine yet: call fabric.setup(model, optimizer) first.")
        return self.engine


class _NoSync(_BackwardSyncControl):
    def __init__(self, strategy: OffloadStrategy) -> None:
        self._strategy = strategy

    def no_backward_sync(self, module: nn.Module, enabled: bool) -> AbstractContextManager[None]:
        return self._strategy._open().no_sync() if enabled else nullcontext()
