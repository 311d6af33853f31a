# SPDX-License-Identifier: Apache-2.0
"""The optimizers that DeepSpeed makes from its config: torch's (or `offload.Lion`) with DeepSpeed's default numbers."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from offload.config import nearest
from offload.errors import ConfigError
from offload.model.lion import Lion


@dataclass(frozen=True, slots=True)
class Maker:
    """A section {type, params} of the config: "optimizer" or "scheduler"."""

    type: str
    params: Mapping[str, Any]


_ADAM: Mapping[str, Any] = {"lr": 1e-3, "betas": (0.9, 0.999), "eps": 1e-8, "weight_decay": 0.0}
_TORCH_ADAM: Mapping[str, Any] = {"lr": 1e-3, "betas": (0.9, 0.999), "eps": 1e-8}  # the rest is torch's default
_LION: Mapping[str, Any] = {"lr": 1e-3, "betas": (0.9, 0.999), "weight_decay": 0.0}
_OTHERS: Mapping[str, tuple[Callable[..., torch.optim.Optimizer], Mapping[str, Any]]] = {
    "adagrad": (torch.optim.Adagrad, {}),
    "lion": (Lion, _LION),
    "sgd": (torch.optim.SGD, {}),
}
_NAMES = ("Adam", "AdamW", "Adagrad", "Lion", "SGD")
_NOT_BY_ELEMENT = {
    "lamb": "it scales an update by norms of the whole tensor",
    "onebitlamb": "it scales an update by norms of the whole tensor",
    "muon": "it orthogonalises whole matrices",
}
"""Why an optimizer is no rule here: a chunk, which may be a part of a tensor, is updated apart from all others."""
_WITHOUT_EFFECT = ("torch_adam", "adam_w_mode", "adamw_mode", "foreach", "fused", "set_grad_none", "fp32_optimizer_states")
"""`fp32_optimizer_states`: false keeps moments in the parameters' dtype, which of fp32 masters is fp32."""
_REFUSED = {
    "amsgrad": (False, "leave it out"),
    "bias_correction": (True, "leave it out"),
    "capturable": (False, "leave it out"),
}


def make_optimizer(maker: Maker, parameters: Iterable[Any]) -> torch.optim.Optimizer:
    """The optimizer over the parameters (those of them that are trained), or over groups of them.

    "Adam" is AdamW unless adam_w_mode is false, as in DeepSpeed. Raises `ConfigError` for what has no counterpart."""
    given = list(parameters)
    if given and not isinstance(given[0], Mapping):
        given = [parameter for parameter in given if parameter.requires_grad]
    make, defaults = _class_of(maker)
    numbers = {name: value for name, value in maker.params.items() if name not in _WITHOUT_EFFECT and name not in _REFUSED}
    for name, (neutral, instead) in _REFUSED.items():
        value = maker.params.get(name, neutral)
        if value != neutral:
            raise ConfigError(f"optimizer.params.{name}={value!r} is not supported: {instead}.")
    if "max_grad_norm" in numbers:
        raise ConfigError("optimizer.params.max_grad_norm is no parameter of an optimizer: set gradient_clipping.")
    for name in ("lr", "weight_decay", "eps"):
        if name in numbers and (isinstance(numbers[name], bool) or not isinstance(numbers[name], (int, float))):
            raise ConfigError(f"optimizer.params.{name}={numbers[name]!r} is not a number.")
    if "betas" in numbers:
        numbers["betas"] = tuple(numbers["betas"])
    try:
        return make(given, **(dict(defaults) | numbers))
    except (TypeError, ValueError) as error:
        raise ConfigError(f"optimizer.params {dict(maker.params)!r} cannot be those of {maker.type}: {error}.") from error


def _class_of(maker: Maker) -> tuple[Callable[..., torch.optim.Optimizer], Mapping[str, Any]]:
    name = maker.type.lower()
    if name in ("adam", "adamw"):
        decoupled = name == "adamw" or maker.params.get("adam_w_mode", True)
        defaults = _TORCH_ADAM if maker.params.get("torch_adam", False) else _ADAM
        return (torch.optim.AdamW if decoupled else torch.optim.Adam), defaults
    if name not in _OTHERS:
        reason = _NOT_BY_ELEMENT.get(name)
        why = f" ({reason}, of which a chunk holds a part)" if reason is not None else nearest(maker.type, _NAMES)
        raise ConfigError(f"optimizer.type={maker.type!r} is not supported{why}: expected one of {', '.join(_NAMES)}.")
    return _OTHERS[name]
