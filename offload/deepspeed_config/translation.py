"""From DeepSpeed's keys to a `Config`, what makes the optimizer and the scheduler, and what the loop is told about batches."""

from __future__ import annotations

import difflib
import warnings
from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any

from offload.config import Config
from offload.deepspeed_config.keys import OFFLOAD_OPTIMIZER, OFFLOAD_PARAM, SECTIONS, TOP, ZERO
from offload.deepspeed_config.optimizers import Maker
from offload.errors import ConfigError

OWN_KEYS = tuple(field.name for field in fields(Config))
_SUBSECTIONS = ("data_types", "checkpoint", "tensor_parallel", "compile")
_BATCH_KEYS = ("train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps")
_CLIPPING = 1.0
"""Where a config says nothing, since DeepSpeed 0.19.8."""
_TAG_VALIDATIONS = ("ignore", "warn", "fail")
_FILLED_IN = "Hugging Face's Trainer or Accelerate fill it in from their arguments; here nobody does: write the value"


@dataclass(frozen=True, slots=True)
class Batch:
    """train = micro x accumulation x ranks; None: not said, and not to be derived."""

    train: int | None
    micro: int | None
    accumulation: int


@dataclass(frozen=True, slots=True)
class Translation:
    """`without_effect`: keys that were given and make no difference here, as dotted paths."""

    config: Config
    optimizer: Maker | None
    scheduler: Maker | None
    batch: Batch
    steps_per_print: int | None
    drop_last: bool
    ignores_unused: bool
    tag_validation: str
    """"fail", "warn" or "ignore"."""
    without_effect: tuple[str, ...]

    def warn(self, stacklevel: int, besides: tuple[str, ...] = ()) -> None:
        """One warning for all that was given in vain; `besides`: keys that only this caller has no use for."""
        said = []
        if self.without_effect or besides:
            keys = ", ".join((*self.without_effect, *besides))
            said.append(f"{keys}: without effect here, no result depends on them and nothing of it needs tuning.")
        if self.config.dtype == "fp16" and self.config.loss_scale is None:
            said.append(
                "fp16's dynamic loss scale starts at 2**16, halves at every overflow and doubles after 2000 steps without one; "
                "DeepSpeed's has other rules for which steps are left out."
            )
        if said:
            warnings.warn(f"DeepSpeed's config: {' '.join(said)}", UserWarning, stacklevel=stacklevel + 1)


def translate(mapping: Mapping[str, Any], world_size: int) -> Translation:
    """What a mapping with DeepSpeed's keys says. Fields of `Config` that DeepSpeed has no key for may stand beside them.

    Raises `ConfigError` for unknown keys, contradictions, and for what is asked for and not to be had."""
    return _Translator(mapping).run(world_size)


class _Translator:
    def __init__(self, mapping: Mapping[str, Any]) -> None:
        self._without_effect: list[str] = []
        self._ignores_unused = True
        self._own = {key: value for key, value in mapping.items() if key in OWN_KEYS}
        foreign = {key: value for key, value in mapping.items() if key not in OWN_KEYS and value is not None}
        if "bfloat16" in foreign:
            foreign.setdefault("bf16", foreign["bfloat16"])
        self._top = self._sorted(TOP, foreign)

    def run(self, world_size: int) -> Translation:
        sections = {name: self._section(name, self._top.get(name)) for name in _SUBSECTIONS}
        fields_: dict[str, Any] = self._placement() | self._precision()
        clipping = self._number(
            "gradient_clipping", self._top.get("gradient_clipping", 0 if "max_grad_norm" in self._own else _CLIPPING)
        )
        if clipping:
            fields_["max_grad_norm"] = clipping
        defaults: dict[str, Any] = {"stage": 0, "parameters": "device", "optimizer_states": "device"}
        for key in fields_:
            if key in self._own:
                raise ConfigError(f"{key} is set twice: by {key}={self._own[key]!r} and by DeepSpeed's keys. Leave one out.")
        return Translation(
            config=Config(**(defaults | self._own | fields_)),
            optimizer=self._maker("optimizer"),
            scheduler=self._maker("scheduler"),
            batch=self._batch(world_size),
            steps_per_print=self._count("steps_per_print"),
            drop_last=self._flag("dataloader_drop_last", self._top.get("dataloader_drop_last", False)),
            ignores_unused=self._ignores_unused,
            tag_validation=self._tag_validation(sections["checkpoint"]),
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
                close = difflib.get_close_matches(key, known, n=1, cutoff=0.5)
                hint = f" (did you mean {close[0]!r}?)" if close else ""
                raise ConfigError(f"{path} is no key of DeepSpeed's config{hint}: correct it, or leave it out.")
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
        self._ignores_unused = self._flag(f"{ZERO}.ignore_unused_parameters", zero.get("ignore_unused_parameters", True))
        stage = zero.get("stage", 0)
        if isinstance(stage, bool) or stage not in (0, 1, 2, 3):
            raise ConfigError(f"{ZERO}.stage={stage!r} is unknown: expected 0, 1, 2 or 3.")
        found: dict[str, Any] = {"stage": int(stage)}
        paths: list[str] = []
        states = self._device(OFFLOAD_OPTIMIZER, zero, ("cpu_offload",), paths)
        if states is not None:
            found["optimizer_states"] = states
        if stage == 3:
            parameters = self._device(OFFLOAD_PARAM, zero, ("cpu_offload_params", "cpu_offload_param"), paths)
            if parameters is not None:
                found["parameters"] = parameters
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
            return "cpu" if any(self._flag(f"{ZERO}.{key}", zero.get(key, False)) for key in older) else None
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

    def _precision(self) -> dict[str, Any]:
        half, brain = (self._section(name, self._top.get(name)) for name in ("fp16", "bf16"))
        on = {
            name: self._flag(f"{name}.enabled", section.get("enabled", False))
            for name, section in (("fp16", half), ("bf16", brain))
        }
        if on["fp16"] and on["bf16"]:
            raise ConfigError("fp16.enabled and bf16.enabled contradict each other: choose one.")
        if on["bf16"]:
            skips = self._flag("bf16.check_grad_overflow", brain.get("check_grad_overflow", True))
            return {"dtype": "bf16"} | ({"loss_scale": "skip"} if skips else {})
        if not on["fp16"]:
            return {}
        scale = self._number("fp16.loss_scale", half.get("loss_scale", 0))
        return {"dtype": "fp16"} | ({"loss_scale": scale} if scale else {})

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
        for key, value in params.items():
            if value == "auto":
                raise ConfigError(f"{name}.params.{key}='auto': {_FILLED_IN}.")
        return Maker(kind, {key: value for key, value in params.items() if value is not None})

    def _batch(self, world_size: int) -> Batch:
        said = {key: self._count(key) for key in _BATCH_KEYS}
        train, micro, accumulation = (said[key] for key in _BATCH_KEYS)
        if accumulation is None and (train is None or micro is None) and self._top.get(_BATCH_KEYS[2]) == "auto":
            raise ConfigError(f"{_BATCH_KEYS[2]}='auto': {_FILLED_IN}.")
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
        whole = isinstance(value, int) or (isinstance(value, float) and value.is_integer())
        if isinstance(value, bool) or not whole or value < 1:
            raise ConfigError(f"{key}={value!r} is not a count: expected 1, 2, ...")
        return int(value)

    def _number(self, path: str, value: Any) -> float:
        if value == "auto":
            raise ConfigError(f"{path}='auto': {_FILLED_IN}.")
        if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 <= value < float("inf"):
            raise ConfigError(f"{path}={value!r} is not a number of at least 0.")
        return float(value)

    def _flag(self, path: str, value: Any) -> bool:
        if value == "auto":
            raise ConfigError(f"{path}='auto': {_FILLED_IN}.")
        if not isinstance(value, bool):
            raise ConfigError(f"{path}={value!r} is neither true nor false.")
        return value
