# SPDX-License-Identifier: Apache-2.0
"""DeepSpeed's modules and what of them is here: `deepspeed.ops.adam.FusedAdam` and the like, as modules made from one table."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from types import ModuleType
from typing import Any

import torch

from offload.deepspeed import (
    checkpointing,
    fragments,
    hidden_states,
    launching,
    lr_schedules,
    moe,
    ops,
    outputs,
    recovery,
    settings,
    utils,
    zero,
    zero_config as zero_sections,
)
from offload.deepspeed.absent import absent
from offload.deepspeed.accelerator import Accelerator, get_accelerator, is_current_accelerator_supported
from offload.deepspeed.engine import DeepSpeedEngine
from offload.deepspeed.installing import ALIAS, ROOT
from offload.deepspeed.layer_drop import ProgressiveLayerDrop
from offload.deepspeed.loss_scaler import LossScaler
from offload.deepspeed.owners import ZeroParamStatus
from offload.deepspeed.refused import LayerSpec, PipelineModule, TiedLayerSpec
from offload.deepspeed.tiling import TiledLinear
from offload.errors import UsageError


def _public(module: ModuleType) -> dict[str, Any]:
    own = module.__name__
    return {
        name: value
        for name, value in vars(module).items()
        if not name.startswith("_") and (getattr(value, "__module__", own) == own or isinstance(value, (str, list, float)))
    }


def _torch_version(min_version: Any = None, max_version: Any = None) -> bool:
    """Whether torch's version lies between the two, both included."""

    def numbers(version: Any) -> tuple[int, ...]:
        return tuple(int(part) for part in str(version).split("+")[0].split(".")[:2])

    found = numbers(torch.__version__)
    return (min_version is None or found >= numbers(min_version)) and (max_version is None or found <= numbers(max_version))


_STATES = {name: value for name, value in _public(fragments).items() if name.startswith("safe_")}
_ENUMS = {name: getattr(fragments, name) for name in ("OffloadDeviceEnum", "OffloadStateTypeEnum")}
_ZERO = _public(zero) | {"ZeroParamStatus": ZeroParamStatus, "TiledLinear": TiledLinear}
_RECOVERY = _public(recovery)
_SECTIONS = {name: value for name, value in _public(zero_sections).items() if name != "ConfigSection"}
_OFFLOADS = {name: value for name, value in _SECTIONS.items() if name.startswith("DeepSpeedZeroOffload")}
_LEAF_CONFIG = {name: value for name, value in _SECTIONS.items() if "LeafModule" in name or "LEAF_MODULE" in name}
_SCHEDULES = _public(lr_schedules) | {name.upper(): name for name in lr_schedules.PARAMS}
_HIDDEN_STATES = {name: value for name, value in _public(hidden_states).items() if name != "SavedTensor"}
_LEAVES = {name: value for name, value in _public(utils).items() if "z3_leaf" in name}
_CONFIG = _public(settings) | {f"{name.upper()}_OPTIMIZER": name for name in ("adam", "adamw", "lamb", "lion")}
_OP_MODULE = {"__compatible_ops__": ops.COMPATIBLE, "__installed_ops__": ops.COMPATIBLE}

MODULES: Mapping[str, Mapping[str, Any]] = {
    "accelerator": {
        "get_accelerator": get_accelerator,
        "is_current_accelerator_supported": is_current_accelerator_supported,
        "DeepSpeedAccelerator": Accelerator,
    },
    "checkpoint": {"UNIVERSAL_CHECKPOINT_INFO": "universal_checkpoint_info"},
    "checkpoint.ds_to_universal": {"main": recovery.convert_to_universal},
    "checkpoint.utils": {"clone_tensors_for_torch_save": recovery.clone_tensors_for_torch_save},
    "launcher": {},
    "launcher.runner": {"DEEPSPEED_ENVIRONMENT_NAME": ".deepspeed_env", "main": launching.launch},
    "git_version_info": {"torch_info": {"version": "0.0", "cuda_version": "0.0", "nccl_version": "0.0"}},
    "moe": {},
    "moe.layer": {"MoE": moe.MoE},
    "moe.utils": {one.__name__: one for one in (moe.has_moe_layers, moe.split_params_into_different_moe_groups_for_optimizer)},
    "ops": _OP_MODULE,
    "ops.adagrad": {"DeepSpeedCPUAdagrad": ops.DeepSpeedCPUAdagrad},
    "ops.adam": {"DeepSpeedCPUAdam": ops.DeepSpeedCPUAdam, "FusedAdam": ops.FusedAdam},
    "ops.aio": {"AsyncIOBuilder": ops.BUILDERS["AsyncIOBuilder"]},
    "ops.lion": {"DeepSpeedCPULion": ops.DeepSpeedCPULion, "FusedLion": ops.FusedLion},
    "ops.op_builder": ops.BUILDERS,
    "pipe": {"PipelineModule": PipelineModule, "LayerSpec": LayerSpec, "TiedLayerSpec": TiedLayerSpec},
    "runtime": {},
    "runtime.activation_checkpointing": {},
    "runtime.activation_checkpointing.checkpointing": _public(checkpointing),
    "runtime.activation_checkpointing.offload_activations": _HIDDEN_STATES,
    "runtime.base_optimizer": {"DeepSpeedOptimizer": ops.DeepSpeedOptimizer, "ZeROOptimizer": ops.ZeROOptimizer},
    "runtime.config": _CONFIG,
    "runtime.constants": {"GRADIENT_CLIPPING_DEFAULT": settings.GRADIENT_CLIPPING_DEFAULT},
    "runtime.dataloader": {"RepeatingLoader": utils.RepeatingLoader},
    "runtime.engine": {"DeepSpeedEngine": DeepSpeedEngine},
    "runtime.fp16": {},
    "runtime.fp16.loss_scaler": {"DynamicLossScaler": LossScaler, "LossScaler": LossScaler},
    "runtime.lr_schedules": _SCHEDULES,
    "runtime.pipe": {},
    "runtime.pipe.module": {"PipelineModule": PipelineModule, "LayerSpec": LayerSpec},
    "runtime.progressive_layer_drop": {"ProgressiveLayerDrop": ProgressiveLayerDrop},
    "runtime.swap_tensor": {"MIN_SWAPPABLE_BYTES": 2**20},
    "runtime.utils": {"see_memory_usage": utils.see_memory_usage, "move_to_device": outputs.move_to_device},
    "runtime.zero": _ZERO,
    "runtime.zero.config": _SECTIONS,
    "runtime.zero.leaf_module_config": _LEAF_CONFIG,
    "runtime.zero.offload_config": _ENUMS | _OFFLOADS,
    "runtime.zero.partition_parameters": _ZERO | {"_orig_torch_arange": torch.arange, "get_accelerator": get_accelerator},
    "runtime.zero.tiling": {"TiledLinear": TiledLinear},
    "runtime.zero.utils": {"ZeRORuntimeException": UsageError},
    "utils": _public(utils) | _STATES | {"logger": utils.logger},
    "utils.logging": {name: getattr(utils, name) for name in ("logger", "log_dist", "set_log_level_from_string")},
    "utils.nvtx": {"instrument_w_nvtx": utils.instrument_w_nvtx},
    "utils.tensor_fragment": _STATES,
    "utils.torch": {"required_torch_version": _torch_version},
    "utils.z3_leaf_module": _LEAVES,
    "utils.zero_to_fp32": _RECOVERY,
}
"""By dotted path below `deepspeed`. `zero`, `comm`, `checkpointing` are modules of their own."""

_INSTEAD = {"ops.adam": {"OnebitAdam": "gradients are averaged whole: take FusedAdam"}}


def make_modules() -> None:
    """Have every module of the table, below `offload.deepspeed`, so that it is found by import and by attribute."""
    for path, content in MODULES.items():
        name = f"{ROOT}.{path}"
        if name not in sys.modules:
            sys.modules[name] = ModuleType(name)
            vars(sys.modules[name])["__path__"] = []
        for key, value in content.items():
            vars(sys.modules[name]).setdefault(key, value)
        parent, _, last = name.rpartition(".")
        vars(sys.modules[parent]).setdefault(last, sys.modules[name])  # some are named as a function in it
    for path in (*MODULES, "zero", "comm", "checkpointing"):
        _add_absence(sys.modules[f"{ROOT}.{path}"], path)


def _add_absence(module: ModuleType, path: str) -> None:
    def lacking(name: str) -> Any:
        raise absent(f"{ALIAS}.{path}", name, vars(module), _INSTEAD.get(path))

    vars(module).setdefault("__getattr__", lacking)
