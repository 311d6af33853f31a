# SPDX-License-Identifier: Apache-2.0
"""What `DeepSpeedEngine` says about itself: settings and counts, by DeepSpeed's names."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

import offload
from offload.deepspeed import comm
from offload.deepspeed.layer_drop import ProgressiveLayerDrop
from offload.deepspeed.loss_scaler import LossScaler
from offload.deepspeed.settings import DeepSpeedConfig
from offload.deepspeed_config import Batch, Translation
from offload.errors import ConfigError


class Config(dict[str, Any]):
    """See `Numbers.config`."""

    def __init__(self, given: Mapping[str, Any], of_model: Any) -> None:
        super().__init__(given)
        self._of_model = of_model

    def __getattr__(self, name: str) -> Any:
        return getattr(self._of_model, name)


class Numbers:
    """A part of `DeepSpeedEngine`."""

    offload_engine: offload.Engine
    _said: Translation
    optimizer: Any
    loss_scaler: LossScaler
    progressive_layer_drop: ProgressiveLayerDrop | None

    @property
    def _config(self) -> DeepSpeedConfig:
        return DeepSpeedConfig.of(self._said)

    @property
    def config(self) -> Config:
        """The mapping that was given, as in DeepSpeed. Its attributes are those of the model's own config."""
        return Config(self._said.given, getattr(self.offload_engine.module, "config", None))

    def gradient_accumulation_steps(self) -> int:
        return self._said.batch.accumulation

    def train_micro_batch_size_per_gpu(self) -> int:
        assert self._said.batch.micro is not None
        return self._said.batch.micro

    def train_batch_size(self) -> int:
        assert self._said.batch.train is not None
        return self._said.batch.train

    def set_train_batch_size(self, train_batch_size: int) -> None:
        """Change the number of micro-batches of a step from now on; their size stays."""
        micro, ranks = self.train_micro_batch_size_per_gpu(), comm.get_world_size()
        if train_batch_size % (micro * ranks):
            raise ConfigError(
                f"train_batch_size={train_batch_size} must be divisible by the {micro * ranks} examples of a micro-batch of "
                "all ranks."
            )
        self._take(Batch(train_batch_size, micro, train_batch_size // (micro * ranks)))

    def set_train_micro_batch_size(self, micro_batch_size: int) -> None:
        """Say how large micro-batches are from now on; their number stays. The loader of `initialize` stays as it is."""
        count = self.gradient_accumulation_steps()
        self._take(Batch(micro_batch_size * count * comm.get_world_size(), micro_batch_size, count))

    def _take(self, batch: Batch) -> None:
        self._said = dataclasses.replace(self._said, batch=batch)

    def get_batch_info(self) -> tuple[int, int, int]:
        return self.train_batch_size(), self.train_micro_batch_size_per_gpu(), self.gradient_accumulation_steps()

    def get_pld_theta(self) -> float | None:
        """Return the share of layers that is kept now; None without "progressive_layer_drop"."""
        return self.progressive_layer_drop.get_theta() if self.progressive_layer_drop is not None else None

    def gradient_clipping(self) -> float:
        return self._config.gradient_clipping

    def steps_per_print(self) -> int | None:
        return self._said.steps_per_print

    def zero_optimization(self) -> bool:
        return self._said.config.stage > 0

    def zero_optimization_stage(self) -> int:
        return self._said.config.stage

    def zero_optimization_partition_gradients(self) -> bool:
        return self._said.config.stage >= 2

    def zero_optimization_partition_weights(self) -> bool:
        return self._said.config.stage == 3

    def zero_cpu_offload(self) -> bool:
        return self._said.config.optimizer_states == "cpu"

    def zero_offload_optimizer(self) -> bool:
        return self._said.config.optimizer_states != "device"

    def zero_offload_param(self) -> bool:
        return self._said.config.parameters != "device"

    def zero_gather_16bit_weights_on_model_save(self) -> bool:
        return True

    def fp16_enabled(self) -> bool:
        return self._said.config.dtype == "fp16"

    def bfloat16_enabled(self) -> bool:
        return self._said.config.dtype == "bf16"

    def get_global_grad_norm(self) -> float | None:
        """Return the norm of the last update's gradients before clipping; None before the first update."""
        return self.offload_engine.grad_norm

    def get_lr(self) -> list[float]:
        return [group["lr"] for group in self.optimizer.param_groups] if self.optimizer is not None else []

    def get_mom(self) -> list[Any]:
        """Return the momentum, or the betas, of each group."""
        groups = self.optimizer.param_groups if self.optimizer is not None else []
        return [group["momentum"] if "momentum" in group else group.get("betas") for group in groups]

    def loss_scale(self) -> float:
        """Return the loss scale of the config, where 0 means dynamic. `cur_scale` is what the loss is multiplied by now."""
        return self._said.half.loss_scale if self._said.half is not None else 0.0

    def dynamic_loss_scale(self) -> bool:
        return self.loss_scaler.dynamic

    @property
    def cur_scale(self) -> float:
        return self.loss_scaler.cur_scale
