# SPDX-License-Identifier: Apache-2.0
"""Lightning's Trainer on an engine.

    trainer = lightning.Trainer(strategy=OffloadStrategy({"parameters": "nvme", ...}), devices=1)

A checkpoint is Lightning's file, without weights, and the engine's folder beside it ("<file>.offload"): training goes on to the
bit. One with `weights_only` is the file alone, with the weights, which takes their memory. The model runs in the config's
`dtype`. For Fabric: `offload.integrations.fabric`.
"""

from __future__ import annotations

import os
import shutil
import warnings
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch.strategies import DDPStrategy
from lightning.pytorch.trainer.states import TrainerFn
from lightning.pytorch.utilities.seed import isolate_rng

import offload
from offload import Engine, UsageError
from offload.integrations.lightning_ranks import EngineStrategy
from offload.integrations.settings import settings_of


class OffloadStrategy(EngineStrategy, DDPStrategy):
    """On several ranks the model is partitioned instead of wrapped. `config`: as that of `offload.initialize`."""

    engine: Engine | None = None
    """Made when a run begins; closed where its Trainer runs another model."""
    _checkpoint: str | None = None
    _accumulates = False
    _random_states: ExitStack | None = None
    """Of the checkpoint that a run goes on from, as it was loaded; until training begins."""
    _prepared: tuple[list[torch.optim.Optimizer], list[Any]]

    def setup_distributed(self) -> None:
        if self.is_shared:  # else: no process group
            super().setup_distributed()

    def model_to_device(self) -> None:
        """Where parameters lie is the engine's."""

    def setup(self, trainer: Any) -> None:
        assert self.accelerator is not None and self.model is not None
        self._check_precision(self.precision_plugin)
        self.accelerator.setup(trainer)
        if not self.is_shared:  # one process has the data in the script's own order, as without a strategy
            trainer._accelerator_connector.use_distributed_sampler = False
        if self._is_new:  # "bf16-true"
            self.model = self.precision_plugin.convert_module(self.model)
        if trainer.state.fn == TrainerFn.FITTING or self._is_new:
            self.setup_optimizers(trainer)
        self.setup_precision_plugin()

    @property
    def _is_new(self) -> bool:
        return self.engine is None or self.engine.module is not self.model

    def setup_optimizers(self, trainer: Any) -> None:
        """Before an evaluation too, so that training may follow it."""
        if not self._is_new:
            assert self.engine is not None
            if self.engine.stats()["steps"]:
                raise UsageError("this model was trained already: go on with a new Trainer, fit(ckpt_path=...).")
            self.optimizers, self.lr_scheduler_configs = self._prepared
            return
        if self.engine is not None:
            self.engine.close()
        super().setup_optimizers(trainer)
        if len(self.optimizers) > 1:
            count = len(self.optimizers)
            raise UsageError(f"configure_optimizers gave {count} optimizers: an engine has one, with several groups.")
        optimizer = next(iter(self.optimizers), None)
        assert self.model is not None
        settings = settings_of(self._config, micro_batches=trainer.accumulate_grad_batches)
        self.engine = offload.initialize(self.model, optimizer, settings)
        if optimizer is not None:  # else Lightning takes it for one that undoes a scale by itself, and does not clip by it
            vars(self.engine.optimizer)["_step_supports_amp_scaling"] = False
        self.optimizers = [self.engine.optimizer] if optimizer is not None else []
        self._prepared = self.optimizers, self.lr_scheduler_configs

    def teardown(self) -> None:
        """The model stays with its engine."""
        assert self.accelerator is not None
        self.precision_plugin.teardown()
        self.accelerator.teardown()
        self.checkpoint_io.teardown()

    def backward(self, closure_loss: torch.Tensor, *args: Any, **keywords: Any) -> torch.Tensor:
        assert self.engine is not None
        self.engine.backward(closure_loss)
        return closure_loss

    @contextmanager
    def block_backward_sync(self) -> Iterator[None]:
        assert self.engine is not None
        self._accumulates = True
        with self.engine.no_sync():
            yield

    def optimizer_step(self, *args: Any, **keywords: Any) -> Any:
        self._accumulates = False
        return super().optimizer_step(*args, **keywords)

    # ---- checkpoints ---------------------------------------------------------------------------------------------

    @property
    def restore_checkpoint_after_setup(self) -> bool:
        return True

    def lightning_module_state_dict(self) -> dict[str, Any]:
        return {}

    def save_checkpoint(self, checkpoint: dict[str, Any], filepath: str | Path, *args: Any, **keywords: Any) -> None:
        assert self.engine is not None
        if self._accumulates:  # Lightning does so after the first of them that follows a resume
            warnings.warn(f"{filepath} is not written: gradients wait for a step, which no checkpoint holds.", stacklevel=2)
            return
        if "optimizer_states" not in checkpoint:  # weights_only
            checkpoint["state_dict"] = self.engine.state_dict()
            super().save_checkpoint(checkpoint, filepath, *args, **keywords)
            return
        super().save_checkpoint(checkpoint, filepath, *args, **keywords)
        self.engine.save_checkpoint(_folder(filepath))

    def remove_checkpoint(self, filepath: str | Path) -> None:
        super().remove_checkpoint(filepath)
        if self.is_global_zero:
            shutil.rmtree(_folder(filepath), ignore_errors=True)

    def load_checkpoint(self, checkpoint_path: str | Path, *args: Any, **keywords: Any) -> dict[str, Any]:
        self._checkpoint = _folder(checkpoint_path)
        found: dict[str, Any] = super().load_checkpoint(checkpoint_path, *args, **keywords)
        return found

    def load_model_state_dict(self, checkpoint: Mapping[str, Any], strict: bool = True) -> None:
        assert self.engine is not None and self._checkpoint is not None
        if checkpoint.get("state_dict"):
            self.engine.load_state_dict(checkpoint["state_dict"])
        else:
            self.engine.load_checkpoint(self._checkpoint)
            self._random_states = ExitStack()
            self._random_states.enter_context(isolate_rng())

    def on_train_start(self) -> None:
        """Between the load and here Lightning begins the data loader, which draws random numbers. So does the uninterrupted run
        where an epoch begins; within one it has done so before the save."""
        assert self.lightning_module is not None
        states, self._random_states = self._random_states, None
        within = self.lightning_module.trainer.fit_loop.epoch_loop.batch_progress
        if states is not None and within.current.ready and not within.is_last_batch:
            states.close()


def _folder(file: str | Path) -> str:
    return f"{os.fspath(file)}.offload"
