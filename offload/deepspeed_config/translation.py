# SPDX-License-Identifier: Apache-2.0
"""From DeepSpeed's keys to a `Config`, what makes the optimizer and the scheduler, and what the loop is told about batches."""

from __future__ import annotations

import math
import os
import sys
from collections.abc import Mapping
from dataclasses import fields
from enum import Enum
from typing import Any

import torch

from offload.config import Config, nearest, with_internal_settings
from offload.deepspeed_config.data_types import read as read_data_types
from offload.deepspeed_config.keys import LEAF_MODULE, OFFLOAD_OPTIMIZER, OFFLOAD_PARAM, SECTIONS, TOP, ZERO
from offload.deepspeed_config.optimizers import Maker
from offload.deepspeed_config.translated import Batch, Half, Translation
from offload.errors import ConfigError

OWN_KEYS = tuple(field.name for field in fields(Config))
_SUBSECTIONS = ("data_types", "checkpoint", "tensor_parallel", "compile", "activation_checkpointing")
_BATCH_KEYS = ("train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps")
_CLIPPING = 1.0
"""Where a config says nothing, since DeepSpeed 0.19.8."""
_PERSISTENCE_THRESHOLD = 100_000
_AUTOCAST_DTYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16}
_TAG_VALIDATIONS = ("ignore", "warn", "fail")
_AUTOCAST_SCALING = Half(loss_scale_window=2000, hysteresis=1)
"""What torch.amp.GradScaler does."""
_AUTO: Mapping[str, Any] = {
    "gradient_clipping": 1.0,
    "gradient_accumulation_steps": 1,
    "lr": 1e-3,
    "weight_decay": 0.0,
    "warmup_min_lr": 0.0,
    "warmup_num_steps": 1,
}
"""What Accelerate puts in the place of "auto" where its caller says nothing of it."""
_LEFT_OUT = ("betas", "eps", "torch_adam", "adam_w_mode", "momentum", "warmup_max_lr", "warmup_type")
"""Params that have a default, or follow from the optimizer's."""
_FILLED_IN = "Hugging Face's Trainer or Accelerate fill it in from their arguments; here nobody does: write the value"


def translate(mapping: Mapping[str, Any], world_size: int) -> Translation:
    """What a mapping with DeepSpeed's keys says. Fields of `Config` that DeepSpeed has no key for may stand beside them.

    Raises `ConfigError` for unknown keys, contradictions, and for what is asked for and not to be had."""
    return _Translator(mapping).run(world_size)


class _Translator:
    def __init__(self, mapping: Mapping[str, Any]) -> None:
        self._given = mapping
        self._without_effect: list[str] = []
        self._ignores_unused = True
        self._half: Half | None = None
        self._persistent_numel = (0, 0)
        self._leaf_modules: dict[str, Any] = {}
        self._own = {key: value for key, value in mapping.items() if key in OWN_KEYS}
        foreign = {key: _plain(value) for key, value in mapping.items() if key not in OWN_KEYS and value is not None}
        if "bfloat16" in foreign:
            foreign.setdefault("bf16", foreign["bfloat16"])
        _check_sums(foreign)
        self._top = self._sorted(TOP, foreign)

    def run(self, world_size: int) -> Translation:
        sections = {name: self._section(name, self._top.get(name)) for name in _SUBSECTIONS}
        fields_: dict[str, Any] = self._placement() | self._precision()
        clipping = _number("gradient_clipping", self._top, 0 if "max_grad_norm" in self._own else _CLIPPING)
        if clipping:
            fields_["max_grad_norm"] = clipping
        defaults: dict[str, Any] = {"stage": 0, "parameters": "device", "optimizer_states": "device"}
        for key in fields_:
            if key in self._own:
                raise ConfigError(f"{key} is set twice: by {key}={self._own[key]!r} and by DeepSpeed's keys. Leave one out.")
        said = defaults | self._own | fields_
        on_device = said.pop("states_on_device", 0.0)
        config = with_internal_settings(Config(**said), states_on_device=on_device)
        return Translation(
            given=self._given,
            config=config,
            autocast=self._autocast(),
            layer_drop=self._layer_drop(),
            half=self._half,
            optimizer=self._maker("optimizer"),
            scheduler=self._maker("scheduler"),
            batch=self._batch(world_size),
            manages_accumulation=_flag("managed_gradient_accumulation", self._top, True),
            sums_gradients=self._sums(config.stage),
            steps_per_print=self._printing(),
            drop_last=_flag("dataloader_drop_last", self._top),
            ignores_unused=self._ignores_unused,
            allows_untested=self._allows_untested(),
            tag_validation=self._tag_validation(sections["checkpoint"]),
            loads_universal=_flag("checkpoint.load_universal", sections["checkpoint"]),
            activation_checkpointing=sections["activation_checkpointing"],
            data_types=read_data_types(sections["data_types"], config.dtype, config.stage),
            persistent_numel=self._persistent_numel,
            leaf_modules=self._leaf_modules,
            without_effect=tuple(self._without_effect),
        )

    # ---- what there is ---------------------------------------------------------------------------------------------

    def _sorted(self, name: str, mapping: Mapping[str, Any]) -> dict[str, Any]:
        """The translated keys of a section; of the others it is noted, or said, what they are."""
        section = SECTIONS[name]
        found: dict[str, Any] = {}
        for key, value in mapping.items():
            path = f"{name}.{key}" if name else key
            if value is None:
                continue
            if key in section.translated:
                found[key] = value
            elif key in section.refused:
                if value != "auto" and not section.refused[key].is_harmless(value):
                    raise ConfigError(
                        f"{path}={value!r} of DeepSpeed's config is not done here; {section.refused[key].instead}."
                    )
            elif key in section.without_effect or section.is_open:
                self._without_effect.append(path)
            else:
                known = (*section.known, *OWN_KEYS) if name == TOP else section.known
                raise ConfigError(f"{path} is no key of DeepSpeed's config{nearest(key, known)}: correct it, or leave it out.")
        return found

    def _section(self, name: str, value: Any) -> dict[str, Any]:
        if value is None:
            return {}
        if not isinstance(value, Mapping):
            raise ConfigError(f"{name}={value!r} is of type {type(value).__name__}: expected an object with keys.")
        return self._sorted(name, value)

    # ---- the parts -------------------------------------------------------------------------------------------------

    def _placement(self) -> dict[str, Any]:
        value = self._top.get(ZERO)
        if value is None:
            return {}
        if isinstance(value, bool):  # the oldest form
            return {"stage": int(value)}
        zero = self._section(ZERO, value)
        self._ignores_unused = _flag(f"{ZERO}.ignore_unused_parameters", zero, True)
        self._leaf_modules = self._section(LEAF_MODULE, zero.get("leaf_module"))
        stage = zero.get("stage", 0)
        if isinstance(stage, bool) or stage not in (0, 1, 2, 3):
            raise ConfigError(f"{ZERO}.stage={stage!r} is unknown: expected 0, 1, 2 or 3.")
        found: dict[str, Any] = {"stage": int(stage)}
        paths: list[str] = []
        states = self._device(OFFLOAD_OPTIMIZER, zero, ("cpu_offload",), paths)
        if states is not None:
            found["optimizer_states"] = states
        found |= self._share(zero.get("offload_optimizer"), stage == 3 and states != "device")
        if stage == 3:
            parameters = self._device(OFFLOAD_PARAM, zero, ("cpu_offload_params", "cpu_offload_param"), paths)
            if parameters is not None:
                found["parameters"] = parameters
            self._persistent_numel = (
                self._threshold(zero, "param_persistence_threshold", _PERSISTENCE_THRESHOLD),
                self._threshold(zero, "model_persistence_threshold", sys.maxsize),
            )
        else:  # as in DeepSpeed, below stage 3 parameters stay on the device
            given = ("offload_param", "cpu_offload_params", "cpu_offload_param")
            self._without_effect.extend(f"{ZERO}.{key}" for key in given if key in zero)
        if paths:
            found["nvme"] = paths[0] if len(paths) == 1 else paths
        return found

    def _device(self, name: str, zero: Mapping[str, Any], older: tuple[str, ...], paths: list[str]) -> str | None:
        """Config's word for an offload section's device; its nvme_path is added to `paths`."""
        section = self._section(name, zero.get(name.rpartition(".")[2]))
        if not section:
            return "cpu" if any(_flag(f"{ZERO}.{key}", zero) for key in older) else None
        device = section.get("device", "none")
        if device not in ("none", "cpu", "nvme"):
            raise ConfigError(f"{name}.device={device!r} is unknown: expected 'none', 'cpu' or 'nvme'.")
        if device == "nvme":
            path = section.get("nvme_path", self._own.get("nvme"))
            if path is None:
                raise ConfigError(f"{name}.device='nvme' needs a folder: set {name}.nvme_path.")
            if "nvme_path" in section and str(path) not in paths:
                paths.append(str(path))
        return "device" if device == "none" else str(device)

    def _threshold(self, zero: Mapping[str, Any], name: str, default: int) -> int:
        value = zero.get(f"stage3_{name}", zero.get(name, "auto"))
        return default if value == "auto" else _whole(f"{ZERO}.{name}", value, least=0)

    def _share(self, section: Any, counts: bool) -> dict[str, float]:
        """Of the optimizer states, what of them stays on the device."""
        path = f"{OFFLOAD_OPTIMIZER}.ratio"
        if not isinstance(section, Mapping) or section.get("ratio") is None:
            return {}
        offloaded = _number(path, section)
        if offloaded > 1:
            raise ConfigError(f"{path}={section['ratio']!r} is not a share: expected a number from 0 to 1.")
        if not counts:  # as in DeepSpeed
            self._without_effect.append(path)
            return {}
        return {"states_on_device": round(1 - offloaded, 9)} if offloaded < 1 else {}

    def _precision(self) -> dict[str, Any]:
        given = {name: self._enabled(name) for name in ("fp16", "bf16")}
        half, brain = given["fp16"], given["bf16"]
        if half is not None and brain is not None:
            raise ConfigError("fp16.enabled and bf16.enabled contradict each other: choose one.")
        if brain is not None:
            skips = _flag("bf16.check_grad_overflow", brain, True)
            return {"dtype": "bf16"} | ({"loss_scale": "skip"} if skips else {}) | self._narrower_states(brain)
        if half is None:
            return {}
        self._half = self._scaling(half)
        return {"dtype": "fp16"} | ({"loss_scale": self._half.loss_scale} if self._half.loss_scale else {})

    def _narrower_states(self, brain: Mapping[str, Any]) -> dict[str, Any]:
        names = ("bf16_master_weights_and_grads", "bf16_optimizer_states")
        masters, moments = (_flag(f"bf16.{name}", brain) for name in names)
        if moments and not masters:
            raise ConfigError(f"bf16.{names[1]} needs bf16.{names[0]}, as in DeepSpeed: set both to true.")
        return {"state_format": "bf16" if moments else "split"} if masters else {}

    def _layer_drop(self) -> tuple[float, float] | None:
        name = "progressive_layer_drop"
        section = self._enabled(name)
        if section is None:
            return None
        return _number(f"{name}.theta", section, 1.0), _number(f"{name}.gamma", section, 0.001)

    def _autocast(self) -> torch.dtype | None:
        section = self._enabled("torch_autocast")
        if section is None:
            return None
        said = section.get("dtype", "bfloat16")
        name = str(said).removeprefix("torch.")
        if name not in _AUTOCAST_DTYPES:
            raise ConfigError(f"torch_autocast.dtype={said!r} is unknown: expected {' or '.join(_AUTOCAST_DTYPES)}.")
        if name == "float16" and self._half is None:
            self._half = _AUTOCAST_SCALING
        return _AUTOCAST_DTYPES[name]

    def _enabled(self, name: str) -> dict[str, Any] | None:
        """The section, where it is on; of one that is off no key counts."""
        value = self._top.get(name)
        if isinstance(value, Mapping):
            is_auto = value.get("enabled") == "auto"
            said_by_accelerate = os.environ.get("ACCELERATE_MIXED_PRECISION", "no") == name
            if not (said_by_accelerate if is_auto else _flag(f"{name}.enabled", value)):
                return None
        return self._section(name, value) if value is not None else None

    def _scaling(self, given: Mapping[str, Any]) -> Half:
        said: dict[str, Any] = {}
        is_static = given.get("loss_scale", "auto") not in ("auto", 0)  # the rule of the dynamic one is not read, as there
        for field in fields(Half):
            path, value = f"fp16.{field.name}", given.get(field.name, "auto")
            if value == "auto" or (is_static and field.name != "loss_scale"):
                continue
            if isinstance(field.default, bool):
                said[field.name] = _flag(path, given)
            elif isinstance(field.default, int):
                said[field.name] = _whole(path, value, least=0 if field.name == "initial_scale_power" else 1)
            else:
                said[field.name] = _number(path, given)
        if said.get("min_loss_scale") == 0:
            raise ConfigError("fp16.min_loss_scale=0: a dynamic loss scale needs a least one above 0.")
        return Half(**said)

    def _allows_untested(self) -> bool:
        key = "zero_allow_untested_optimizer"
        value = self._top.get(key)
        return bool(value) if value in (0, 1) else _flag(key, self._top)  # DeepSpeed's own configs say 1

    def _tag_validation(self, checkpoint: Mapping[str, Any]) -> str:
        mode = checkpoint.get("tag_validation", "warn")
        if not isinstance(mode, str) or mode.lower() not in _TAG_VALIDATIONS:
            raise ConfigError(f"checkpoint.tag_validation={mode!r} is unknown: expected 'Ignore', 'Warn' or 'Fail'.")
        return mode.lower()

    def _maker(self, name: str) -> Maker | None:
        section = self._section(name, self._top.get(name))
        kind, params = section.get("type"), section.get("params", {})
        if kind is None:
            return None
        if not isinstance(kind, str) or not isinstance(params, Mapping):
            raise ConfigError(f"{name} needs a type, which is text, and params, an object: {kind!r} and {params!r} are not.")
        said = {key: _AUTO.get(key, value) if value == "auto" else value for key, value in params.items()}
        for key, value in said.items():
            if value == "auto" and key not in _LEFT_OUT:
                raise ConfigError(f"{name}.params.{key}='auto': {_FILLED_IN}.")
        return Maker(kind, {key: value for key, value in said.items() if value is not None and value != "auto"})

    def _batch(self, world_size: int) -> Batch:
        said = {key: self._count(key) for key in _BATCH_KEYS}
        train, micro, accumulation = (said[key] for key in _BATCH_KEYS)
        if accumulation is None:
            accumulation = train // (micro * world_size) if train is not None and micro is not None else 1
        if micro is None and train is not None:
            micro = train // (world_size * max(accumulation, 1))
        if train is None and micro is not None:
            train = micro * accumulation * world_size
        if train is not None and micro is not None and train != micro * accumulation * world_size:
            raise ConfigError(
                f"train_batch_size={train} is not train_micro_batch_size_per_gpu={micro} x "
                f"gradient_accumulation_steps={accumulation} x {world_size} ranks: correct one, or leave one out."
            )
        return Batch(train, micro, accumulation)

    # ---- values ----------------------------------------------------------------------------------------------------

    def _count(self, key: str) -> int | None:
        value = self._top.get(key)
        if value is None or value == "auto":
            return None
        if not _is_whole(value) or value < 1:
            raise ConfigError(f"{key}={value!r} is not a count: expected 1, 2, ...")
        return int(value)

    def _sums(self, stage: int) -> bool:
        word = str(self._top.get("gradient_allreduce_op", "mean")).lower()
        if word not in ("mean", "sum"):
            raise ConfigError(f"Invalid gradient_allreduce_op={word!r}: expected 'mean' or 'sum'.")
        if word == "sum" and stage == 3:
            raise ConfigError(
                "gradient_allreduce_op='sum' is not supported with ZeRO stage 3, as in DeepSpeed: use stage 0 to 2."
            )
        return word == "sum"

    def _printing(self) -> int | None:
        """None: never."""
        value = self._top.get("steps_per_print")
        return None if isinstance(value, float) and math.isinf(value) else self._count("steps_per_print")


def _is_whole(value: Any) -> bool:
    return (isinstance(value, int) and not isinstance(value, bool)) or (isinstance(value, float) and value.is_integer())


def _whole(path: str, value: Any, least: int) -> int:
    if not _is_whole(value) or value < least:
        raise ConfigError(f"{path}={value!r} is not a whole number of at least {least}.")
    return int(value)


def _number(path: str, section: Mapping[str, Any], default: float | None = None) -> float:
    value = _said(path, section, default)
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 <= value < float("inf"):
        raise ConfigError(f"{path}={value!r} is not a number of at least 0.")
    return float(value)


def _flag(path: str, section: Mapping[str, Any], default: bool = False) -> bool:
    value = _said(path, section, default)
    if not isinstance(value, bool):
        raise ConfigError(f"{path}={value!r} is neither true nor false.")
    return value


def _said(path: str, section: Mapping[str, Any], default: Any) -> Any:
    """Under the last name of `path`."""
    value = section.get(path.rpartition(".")[2])
    if value == "auto" and path not in _AUTO:
        raise ConfigError(f"{path}='auto': {_FILLED_IN}.")
    return default if value is None else _AUTO[path] if value == "auto" else value


def _check_sums(given: Mapping[str, Any]) -> None:
    """Of `gradient_allreduce_op`: "sum" what DeepSpeed refuses beside it, before that is refused for itself."""
    if str(given.get("gradient_allreduce_op", "mean")).lower() != "sum":
        return
    zero, compiling = given.get(ZERO), given.get("compile")
    found = {
        "ZenFlow": isinstance(zero, Mapping) and zero.get("zenflow") is not None,
        "DeepCompile": isinstance(compiling, Mapping) and compiling.get("deepcompile") is True,
    }
    for name, is_there in found.items():
        if is_there:
            raise ConfigError(
                f"gradient_allreduce_op='sum' is not supported with {name}, nor is {name} here at all: leave it out."
            )


def _plain(value: Any) -> Any:
    """Enumerations of text as their text, in sections too."""
    if isinstance(value, Enum):
        return value.value
    return {key: _plain(one) for key, one in value.items()} if isinstance(value, Mapping) else value
