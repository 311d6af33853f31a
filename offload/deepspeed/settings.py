# SPDX-License-Identifier: Apache-2.0
"""`DeepSpeedConfig`: a config in DeepSpeed's keys, read and checked, with what scripts ask of it."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

from offload.config import expanded, read_json, without_doubles
from offload.deepspeed import comm
from offload.deepspeed.absent import AskedWrongly
from offload.deepspeed.zero_config import DeepSpeedZeroConfig, get_zero_config
from offload.deepspeed_config import Batch, Translation, translate
from offload.errors import ConfigError


def read_config(given: Any) -> Mapping[str, Any]:
    """Read a mapping, or a file in JSON or (where hjson is installed) in Hjson."""
    if isinstance(given, Mapping):
        return given
    if not isinstance(given, (str, os.PathLike)):
        raise ConfigError(f"config {given!r} is neither a mapping nor the path of a JSON file.")
    path = expanded(given)
    try:
        return read_json(path)
    except ConfigError as error:
        if not path.is_file():
            raise
        try:
            import hjson
        except ImportError:
            raise ConfigError(f"{error} Install the package hjson to have it read as Hjson.") from None
        try:
            read = hjson.loads(path.read_text(encoding="utf-8"), object_pairs_hook=without_doubles)
        except ValueError as other:
            raise ConfigError(f"config file {str(path)!r} is neither JSON nor Hjson ({other}).") from None
        if not isinstance(read, Mapping):
            raise
        return read


class DeepSpeedConfig:
    """`config` is a mapping or a path. The three batch sizes follow from each other and from the number of ranks."""

    def __init__(self, config: Any, mpu: Any = None, mesh_device: Any = None) -> None:
        if mpu is not None or mesh_device is not None:
            raise AskedWrongly("DeepSpeedConfig(mpu=...) is not done here: every rank computes whole layers.")
        given = read_config(config)
        self._take(translate(given, comm.get_world_size()))

    @staticmethod
    def of(said: Translation) -> DeepSpeedConfig:
        made = DeepSpeedConfig.__new__(DeepSpeedConfig)
        made._take(said)
        return made

    def _take(self, said: Translation) -> None:
        config, self._param_dict = said.config, dict(said.given)
        self.world_size = comm.get_world_size()
        self._set_batch(said.batch)
        self.gradient_clipping = config.max_grad_norm or 0.0
        self.steps_per_print = said.steps_per_print
        self.zero_enabled, self.zero_optimization_stage = config.stage > 0, config.stage
        self.fp16_enabled, self.bfloat16_enabled = config.dtype == "fp16", config.dtype == "bf16"
        self.loss_scale = said.half.loss_scale if said.half is not None else 0.0
        self.optimizer_name = said.optimizer.type.lower() if said.optimizer is not None else None
        self.optimizer_params = dict(said.optimizer.params) if said.optimizer is not None else None
        self.scheduler_name = said.scheduler.type if said.scheduler is not None else None
        self.scheduler_params = dict(said.scheduler.params) if said.scheduler is not None else None
        self.dataloader_drop_last = said.drop_last
        self.checkpoint_tag_validation_enabled = said.tag_validation != "ignore"
        self.checkpoint_tag_validation_fail = said.tag_validation == "fail"
        self.gradient_allreduce_op = "sum" if said.sums_gradients else "mean"
        types = said.data_types
        self.grad_accum_dtype, self.param_dtype, self.buffer_dtype = types.grad_accum, types.param, types.buffer
        self.torch_autocast_enabled, self.torch_autocast_dtype = said.autocast is not None, said.autocast

    def _set_batch(self, batch: Batch) -> None:
        self.train_batch_size, self.gradient_accumulation_steps = batch.train, batch.accumulation
        self.train_micro_batch_size_per_gpu = batch.micro

    @property
    def zero_config(self) -> DeepSpeedZeroConfig:
        """The ZeRO section as given, with DeepSpeed's defaults."""
        return get_zero_config(self._param_dict)

    def _configure_train_batch_size(self) -> None:
        """After the three sizes were set anew, or to None."""
        names = ("train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps")
        keys = {name: getattr(self, name) for name in names if getattr(self, name) is not None}
        try:
            batch = translate(keys, self.world_size).batch
        except ConfigError as error:
            raise AskedWrongly(str(error)) from error
        if batch.train is None:
            raise AskedWrongly("train_batch_size or train_micro_batch_size_per_gpu needs to be provided.")
        self._set_batch(batch)
        if not all((batch.train, batch.micro)):
            raise AskedWrongly(f"the batch sizes {keys} leave nothing for {self.world_size} ranks.")


def get_gradient_clipping(param_dict: Mapping[str, Any]) -> float:
    """Return the clipping of a config: 1.0 if it says nothing."""
    return float(param_dict.get("gradient_clipping", GRADIENT_CLIPPING_DEFAULT))


GRADIENT_CLIPPING_DEFAULT = 1.0
