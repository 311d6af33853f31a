# SPDX-License-Identifier: Apache-2.0
"""`deepspeed.runtime.zero.config`: the ZeRO section of a config as DeepSpeed shows it, with its defaults.

docs/deepspeed.md says what becomes of each key. Most numbers tune buffers, and can only be read here.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from enum import Enum
from typing import Any, ClassVar

from offload.config import nearest
from offload.deepspeed.absent import AskedWrongly
from offload.deepspeed.fragments import OffloadDeviceEnum
from offload.deepspeed.utils import logger
from offload.deepspeed_config.keys import LEAF_MODULE, OFFLOAD_OPTIMIZER, OFFLOAD_PARAM, SECTIONS, ZERO
from offload.errors import ConfigError

DEFAULT_LEAF_MODULE_CLASSES = [
    "transformers.models.mixtral.modeling_mixtral.MixtralSparseMoeBlock",
    "transformers.models.qwen2_moe.modeling_qwen2_moe.Qwen2MoeSparseMoeBlock",
    "transformers.models.qwen3_moe.modeling_qwen3_moe.Qwen3MoeSparseMoeBlock",
]
DEFAULT_LEAF_MODULE_NAMES: list[str] = []
DEFAULT_LEAF_MODULE_NAME_SUFFIXES: list[str] = []
_OLDER = {
    "cpu_offload_params": "cpu_offload_param",
    "stage3_gather_fp16_weights_on_model_save": "gather_16bit_weights_on_model_save",
}


class ZeroStageEnum(int, Enum):
    disabled = 0
    optimizer_states = 1
    gradients = 2
    weights = 3


class ConfigSection:
    """The keys of a section as attributes: what was given, else the default; None where DeepSpeed has no value. It raises
    `ConfigError` for a key that is none of the section's."""

    name: ClassVar[str]
    defaults: ClassVar[Mapping[str, Any]]

    def __init__(self, **given: Any) -> None:
        known = SECTIONS[self.name].known
        for key in given:
            if key not in known and key not in self.defaults:
                hint = nearest(key, known)
                raise ConfigError(f"{self.name}.{key} is no key of DeepSpeed's config{hint}: correct it, or leave it out.")
        self._take(dict(self.defaults) | {_OLDER.get(key, key).removeprefix("stage3_"): one for key, one in given.items()})

    def _take(self, values: dict[str, Any]) -> None:
        vars(self).update(values)

    def __repr__(self) -> str:
        return f"{type(self).__name__}({', '.join(f'{key}={value!r}' for key, value in vars(self).items())})"


class DeepSpeedZeroOffloadParamConfig(ConfigSection):
    name = OFFLOAD_PARAM
    defaults: ClassVar = {
        **{"device": "none", "nvme_path": None, "buffer_count": 5, "buffer_size": 100_000_000, "max_in_cpu": 1_000_000_000},
        "pin_memory": True,
    }

    def _take(self, values: dict[str, Any]) -> None:
        super()._take(values | {"device": OffloadDeviceEnum(values["device"])})


class DeepSpeedZeroOffloadOptimizerConfig(ConfigSection):
    name = OFFLOAD_OPTIMIZER
    defaults: ClassVar = {
        **{"device": "none", "nvme_path": None, "buffer_count": 4, "pin_memory": True, "pipeline_read": False},
        **{"pipeline_write": False, "fast_init": False, "ratio": 1.0, "super_offload": False, "cpuadam_cores_perc": 0.8},
    }
    ratio: float

    def _take(self, values: dict[str, Any]) -> None:
        if not 0 <= values["ratio"] <= 1:
            raise ConfigError(f"{self.name}.ratio={values['ratio']!r} is no share: expected 0 to 1.")
        pipeline = values["pipeline_read"] or values["pipeline_write"]
        super()._take(values | {"device": OffloadDeviceEnum(values["device"]), "pipeline": pipeline})


class DeepSpeedZeroLeafModuleConfig(ConfigSection):
    name = LEAF_MODULE
    defaults: ClassVar = {
        "classes": DEFAULT_LEAF_MODULE_CLASSES,
        "names": DEFAULT_LEAF_MODULE_NAMES,
        "name_suffixes": DEFAULT_LEAF_MODULE_NAME_SUFFIXES,
    }
    classes: list[str]
    names: list[str]
    name_suffixes: list[str]

    def _take(self, values: dict[str, Any]) -> None:
        listed = {key: [one] if isinstance(one, str) else one for key, one in values.items()}
        super()._take({key: list(dict.fromkeys(map(str, many))) for key, many in listed.items()})


class DeepSpeedZeroConfig(ConfigSection):
    name = ZERO
    defaults: ClassVar = {
        **{"stage": 0, "contiguous_gradients": True, "reduce_scatter": True, "reduce_bucket_size": 500_000_000},
        **{"use_multi_rank_bucket_allreduce": True, "allgather_partitions": True, "allgather_bucket_size": 500_000_000},
        **{"overlap_comm": None, "load_from_fp32_weights": True, "elastic_checkpoint": False, "offload_param": None},
        **{"offload_optimizer": None, "zenflow": None, "sub_group_size": 1_000_000_000, "cpu_offload_param": None},
        **{"cpu_offload_use_pin_memory": None, "cpu_offload": None, "prefetch_bucket_size": 50_000_000},
        **{"param_persistence_threshold": 100_000, "model_persistence_threshold": sys.maxsize, "leaf_module": None},
        **{"max_live_parameters": 1_000_000_000, "max_reuse_distance": 1_000_000_000, "legacy_stage1": False},
        **{"gather_16bit_weights_on_model_save": False, "module_granularity_threshold": 0, "allgather_sequential": False},
        **{"use_all_reduce_for_fetch_params": False, "ignore_unused_parameters": True, "round_robin_gradients": False},
        **{"zero_hpz_partition_size": 1, "zero_quantized_weights": False, "zero_quantized_nontrainable_weights": False},
        **{"zero_quantized_gradients": False, "zeropp_loco_param": None, "mics_shard_size": -1},
        **{"mics_hierarchical_params_gather": False, "memory_efficient_linear": True, "pipeline_loading_checkpoint": False},
        **{"override_module_apply": True, "log_trace_cache_warnings": False, "enable_sanity_checks": False},
        "save_muon_momentum_buffer_in_memory": False,
    }

    def _take(self, values: dict[str, Any]) -> None:
        values["stage"] = ZeroStageEnum(values["stage"])
        if values["elastic_checkpoint"] and values["stage"] == ZeroStageEnum.weights:
            logger.warning("elastic checkpointing is deprecated: a checkpoint loads on any number of ranks; leave it out.")
        if values["overlap_comm"] is None:
            values["overlap_comm"] = values["stage"] == ZeroStageEnum.weights
        values["leaf_module"] = DeepSpeedZeroLeafModuleConfig(**(values["leaf_module"] or {}))
        parts = (
            ("offload_param", "cpu_offload_param", DeepSpeedZeroOffloadParamConfig),
            ("offload_optimizer", "cpu_offload", DeepSpeedZeroOffloadOptimizerConfig),
        )
        for key, older, kind in parts:
            if values[key] is None and values[older]:
                values[key] = {"device": "cpu"}
            if isinstance(values[key], Mapping):
                values[key] = kind(**values[key])
        states = values["offload_optimizer"]
        if states is not None and states.ratio < 1 and values["stage"] != ZeroStageEnum.weights:
            raise AskedWrongly("offload_optimizer.ratio: Partial offloading only supported for ZeRO Stage 3, as in DeepSpeed.")
        super()._take(values)


def get_zero_config(param_dict: Mapping[str, Any]) -> DeepSpeedZeroConfig:
    """Return the ZeRO section of a whole config, in which `true` is stage 1."""
    section = param_dict.get(ZERO, {})
    return DeepSpeedZeroConfig(**({"stage": int(section)} if isinstance(section, bool) else section))
