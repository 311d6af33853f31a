# SPDX-License-Identifier: Apache-2.0
"""What a user can set: `Config`, from keywords, a mapping or a JSON file, checked as a whole before anything is made."""

from __future__ import annotations

import dataclasses
import difflib
import json
import math
import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, cast

from offload.errors import ConfigError

Placement = Literal["auto", "device", "cpu", "nvme"]

_PLACEMENTS = ("auto", "device", "cpu", "nvme")
_DTYPES = ("bf16", "fp16", "fp32")
_UPDATES = ("auto", "step", "backward")
_STATE_FORMATS = ("fp32", "split", "bf16", "8bit")
_UNITS = {"": 1, "b": 1, "kb": 10**3, "mb": 10**6, "gb": 10**9, "tb": 10**12}
_UNITS.update({"kib": 2**10, "mib": 2**20, "gib": 2**30, "tib": 2**40, "k": 2**10, "m": 2**20, "g": 2**30, "t": 2**40})


def parse_nbytes(value: int | float | str, field: str) -> int:
    """Bytes from a number, or from text such as "16GiB" or "500 MB" (KiB = 1024, KB = 1000)."""
    nbytes = math.nan
    if isinstance(value, str):
        match = re.fullmatch(r"\s*([0-9]+(?:\.[0-9]*)?)\s*([A-Za-z]*)\s*", value)
        if match is not None and match[2].lower() in _UNITS:
            nbytes = float(match[1]) * _UNITS[match[2].lower()]
    elif isinstance(value, (int, float)) and not isinstance(value, bool):
        nbytes = value
    if not -math.inf < nbytes < math.inf:
        raise ConfigError(f"{field}={value!r} is not a size: expected bytes as a number, or text such as '16GiB' or '500MB'.")
    if int(nbytes) <= 0:
        raise ConfigError(f"{field}={value!r} must be more than zero bytes.")
    return int(nbytes)


@dataclass(frozen=True)
class Config:
    """All settings. Every field has a default that suits most; an unknown key or a contradiction is a `ConfigError`.

    stage             ZeRO stage 0 to 3: what is partitioned across ranks. On one rank all are the same.
    parameters        the furthest place where parameters live between uses: "auto", "device", "cpu" or "nvme"
    optimizer_states  the furthest place where master weights and moments live, of the same four
    nvme              a folder, or several on different drives (then striped); needed for "nvme"
    device_memory     the most bytes that the engine may hold on the device: parameters, gradients and states; activations are
                      the model's own. All of it is used: what may lie further away stays on the device as far as this reaches.
                      None: on one rank and a device with a memory of its own, what the model leaves free, less a tenth, as it
                      is seen at every use of a unit: fetched units stay there, then gradients, then records, with which units
                      are updated there. Else one unit in use and `prefetch` more
    cpu_memory        the most bytes of host memory that the engine may hold. All of it is used before NVMe. None: the least
                      that the placements need
    dtype             what forward and backward run in: "bf16", "fp16", "fp32"; None: the parameters' own dtypes, as
                      normalisations with running statistics (BatchNorm) keep in any case
    state_format      "fp32": fp32 master weights and moments; "split": the same numbers in less memory (the bf16 parameter and
                      a 16-bit remainder are the master). These change results, within the noise of a seed: "bf16": moments
                      in bf16, rounded stochastically; "8bit": moments in 8 bits. All but "fp32" need bf16 parameters.
    max_grad_norm     clip the global gradient norm to this; None: no clipping
    update            when updates begin. "auto": when backward has left a unit, if the update can be undone and seldom has to
                      be; else at step(). "backward": the same, but what undoes updates may take all the room on the drives,
                      of which "auto" leaves some for checkpoints, and of host memory without a budget what is free, of which
                      "auto" takes nothing. "step": at step(), under the next forward. Any loop is right with any of them
    prefetch          how many units are fetched ahead
    loss_scale        a number; "dynamic" (default for fp16); "skip": no scaling, steps with non-finite gradients are left out;
                      None: "dynamic" for fp16, else non-finite gradients raise
    """

    stage: int = 3
    parameters: Placement = "auto"
    optimizer_states: Placement = "auto"
    nvme: str | os.PathLike[str] | Sequence[str | os.PathLike[str]] | None = None
    device_memory: int | str | None = None
    cpu_memory: int | str | None = None
    dtype: Literal["bf16", "fp16", "fp32"] | None = None
    state_format: Literal["fp32", "split", "bf16", "8bit"] = "fp32"
    max_grad_norm: float | None = None
    update: Literal["auto", "step", "backward"] = "auto"
    prefetch: int = 1
    loss_scale: float | Literal["dynamic", "skip"] | None = None

    @property
    def states_on_device(self) -> float:
        """The share of the optimizer states, 0 to 1, that lies on the device and is updated there whether a budget leads to it
        or not: what DeepSpeed's keys may ask for."""
        return 0.0

    @property
    def persistent_numel(self) -> tuple[int, int]:
        """Units whose parameters have no more elements than the first number stay whole on every rank between steps, where they
        may be read, up to the second number of elements in all: what DeepSpeed's keys may ask for."""
        return 0, 0

    @property
    def sums_are_narrow(self) -> bool:
        """Whether the gradients of several micro-batches are summed in the parameters' dtype, as PyTorch and DeepSpeed do, and
        not in fp32."""
        return False

    @property
    def masters_begin_rounded(self) -> bool:
        """Whether fp32 masters begin as the values that `dtype` has, as DeepSpeed's do: it makes them of the parameters after
        their cast to 16 bits."""
        return False

    @property
    def micro_batches(self) -> int:
        """How many backwards a step is expected to have: where states lie is decided for so many. Any number is right."""
        return 1

    @property
    def tokens(self) -> int:
        """Of one micro-batch of each rank, which say how long the model computes; 0: not known."""
        return 0

    @property
    def keeps_wide_gradients(self) -> bool:
        """Whether there is room for gradients in fp32 alone, as several micro-batches are expected."""
        return self.micro_batches > 1 and not self.sums_are_narrow

    def expecting(self, micro_batches: int, tokens: int = 0) -> Config:
        """This config for a loop that accumulates the gradients of so many micro-batches before each step, each of so many
        tokens on each rank. Places are then decided for that loop; else the engine learns the number of micro-batches from the
        first step. Without the tokens the model's computing counts as what launching it takes, as in a step of few tokens."""
        return with_internal_settings(self, micro_batches=max(int(micro_batches), 1), tokens=max(int(tokens), 0) or self.tokens)

    def __post_init__(self) -> None:
        checks = (self._check_choices, self._check_state_format, self._check_numbers, self._check_paths, self._check_loss_scale)
        for check in checks:
            check()

    def _check_choices(self) -> None:
        choices: dict[str, Sequence[Any]] = {
            "parameters": _PLACEMENTS,
            "optimizer_states": _PLACEMENTS,
            "dtype": (*_DTYPES, None),
            "state_format": _STATE_FORMATS,
            "update": _UPDATES,
            "stage": (0, 1, 2, 3),
        }
        for field, allowed in choices.items():
            value = getattr(self, field)
            if isinstance(value, bool) or value not in allowed:
                listed = ", ".join(repr(choice) for choice in allowed)
                raise ConfigError(f"{field}={value!r} is unknown: expected one of {listed}{nearest(value, allowed)}.")

    def _check_state_format(self) -> None:
        if self.state_format != "fp32" and self.dtype not in ("bf16", None):
            raise ConfigError(
                f"state_format={self.state_format!r} contradicts dtype={self.dtype!r}: the bf16 parameter is the upper half of "
                "the master there. Set dtype='bf16', or state_format='fp32'."
            )

    def _check_numbers(self) -> None:
        for field in ("device_memory", "cpu_memory"):
            value = getattr(self, field)
            if value is not None:
                object.__setattr__(self, field, parse_nbytes(value, field))
        if isinstance(self.prefetch, bool) or not isinstance(self.prefetch, int) or self.prefetch < 0:
            raise ConfigError(f"prefetch={self.prefetch!r} is not a count of units: expected 0, 1, 2, ...")
        norm = self.max_grad_norm
        if norm is not None and (isinstance(norm, bool) or not isinstance(norm, (int, float)) or not norm > 0):
            raise ConfigError(f"max_grad_norm={norm!r} is not a norm: expected a number above 0, or None for no clipping.")

    def _check_paths(self) -> None:
        if self.nvme is not None:
            single = isinstance(self.nvme, (str, os.PathLike))
            given: Any = [self.nvme] if single else self.nvme
            if not isinstance(given, Sequence) or not all(map(_is_path, given)):
                raise ConfigError(f"nvme={self.nvme!r} is not a path: expected a folder, or a list of folders.")
            folders = [str(expanded(path)) for path in given]
            object.__setattr__(self, "nvme", folders[0] if single else folders)
        paths = self.nvme_paths
        if "nvme" in (self.parameters, self.optimizer_states) and not paths:
            field = "parameters" if self.parameters == "nvme" else "optimizer_states"
            raise ConfigError(
                f"{field}='nvme' needs a folder: set nvme='/path/on/the/drive', or a list of folders to stripe over."
            )
        if len({os.path.realpath(path) for path in paths}) != len(paths):
            raise ConfigError(f"nvme={self.nvme!r} names one folder twice: name each drive's folder once.")

    @property
    def needs_norm_first(self) -> bool:
        """Whether what a gradient is multiplied by, and whether it counts at all, depends on all gradients of the step."""
        skips = self.loss_scale in ("dynamic", "skip") or (self.loss_scale is None and self.dtype == "fp16")
        return skips or self.max_grad_norm is not None

    def _check_loss_scale(self) -> None:
        scale = self.loss_scale
        if scale is None or scale == "skip":
            return
        if isinstance(scale, str):
            if scale != "dynamic":
                raise ConfigError(f"loss_scale={scale!r} is unknown: expected a number, 'dynamic', 'skip' or None.")
        elif isinstance(scale, bool) or not isinstance(scale, (int, float)) or not 0 < scale < float("inf"):
            raise ConfigError(f"loss_scale={scale!r} is not a scale: expected a number above 0, 'dynamic', 'skip' or None.")
        if self.dtype != "fp16" and scale != 1:
            raise ConfigError(
                f"loss_scale={scale!r} contradicts dtype={self.dtype!r}: only fp16 gradients underflow. Set "
                "dtype='fp16', or leave "
                "loss_scale out ('skip' leaves non-finite steps out in any dtype)."
            )

    @property
    def nvme_paths(self) -> tuple[Path, ...]:
        """`nvme` as paths, in order."""
        if self.nvme is None:
            return ()
        return (Path(self.nvme),) if isinstance(self.nvme, (str, os.PathLike)) else tuple(map(Path, self.nvme))

    @staticmethod
    def of(value: Config | Mapping[str, Any] | str | os.PathLike[str] | None) -> Config:
        """A `Config` from itself, a mapping, a JSON file, or nothing (all defaults)."""
        if value is None:
            return Config()
        if isinstance(value, Config):
            return value
        if isinstance(value, (str, os.PathLike)):
            return Config.of(read_json(Path(value)))
        if not isinstance(value, Mapping):
            raise ConfigError(f"config {value!r} is not a Config, a mapping or the path of a JSON file.")
        known = [field.name for field in dataclasses.fields(Config)]
        for key in value:
            if key not in known:
                raise ConfigError(f"config key {key!r} is unknown{nearest(key, known)}. Known keys: {', '.join(known)}.")
        return Config(**cast(dict[str, Any], dict(value)))


@dataclass(frozen=True)
class _InternalConfig(Config):
    """A `Config` with what others than the user say of a run."""

    states_on_device: float = 0.0
    persistent_numel: tuple[int, int] = (0, 0)
    sums_are_narrow: bool = False
    masters_begin_rounded: bool = False
    micro_batches: int = 1
    tokens: int = 0


def with_internal_settings(config: Config, **values: Any) -> Config:
    """The same config with other values of its internal settings: those properties that are no fields of `Config`."""
    if all(getattr(config, name) == value for name, value in values.items()):
        return config
    return _InternalConfig(
        **({field.name: getattr(config, field.name) for field in dataclasses.fields(_InternalConfig)} | values)
    )


def _is_path(given: object) -> bool:
    name = os.fspath(given) if isinstance(given, (str, os.PathLike)) else None
    return isinstance(name, str) and bool(name) and "\0" not in name


def nearest(value: object, allowed: Sequence[Any]) -> str:
    """What an error adds of the allowed word that a wrong one is most like; nothing where it is like none."""
    texts = [str(choice) for choice in allowed if isinstance(choice, str)]
    close = difflib.get_close_matches(value, texts, n=1, cutoff=0.5) if isinstance(value, str) else ()
    return f" (did you mean {close[0]!r}?)" if close else ""


def expanded(path: str | os.PathLike[str]) -> Path:
    """A path that the user gave, as it is from now on: absolute, as the working directory may change, and "~" the home."""
    return Path(os.path.abspath(os.path.expanduser(path)))


def without_doubles(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """An object of JSON. Raises `ValueError` where a key is in it twice, of which readers would take the last."""
    found = dict(pairs)
    if len(found) < len(pairs):
        names = [name for name, _ in pairs]
        raise ValueError(f"given twice: {', '.join(sorted({one for one in names if names.count(one) > 1}))}")
    return found


def read_json(path: Path) -> Mapping[str, Any]:
    """The object in a JSON file of settings."""
    path = expanded(path)
    try:
        content = json.loads(path.read_text(encoding="utf-8"), object_pairs_hook=without_doubles)
    except OSError as error:
        raise ConfigError(f"config file {str(path)!r} cannot be read ({error.strerror}): expected a JSON file.") from error
    except ValueError as error:
        raise ConfigError(f"config file {str(path)!r} is not JSON ({error}).") from error
    if not isinstance(content, Mapping):
        raise ConfigError(f"config file {str(path)!r} holds {type(content).__name__}: expected an object with Config's keys.")
    return content
