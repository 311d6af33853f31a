# SPDX-License-Identifier: Apache-2.0
"""Which optimizers have an exact counterpart here, and what is read out of the one that the user made."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from types import NoneType
from typing import Any

import torch

from offload.device.arithmetic.rules import MOMENTS, Hyper, Rule
from offload.errors import ConfigError, UsageError
from offload.model.lion import Lion
from offload.model.own_optimizer import own_optimizer


@dataclass(frozen=True, slots=True)
class OptimizerKind:
    """One kind of optimizer. `state_names`: moment -> its key in the optimizer's own state. `refused`: options (of a
    group, or attributes of the optimizer) with no counterpart, and the value that they must have."""

    rule: Rule
    state_names: Mapping[str, str]
    decoupled: bool = False
    counter_names: tuple[str, ...] = ("step",)
    refused: Mapping[str, Any] = field(default_factory=dict)


_ADAM = {name: name for name in MOMENTS}
_KINDS: dict[type, OptimizerKind] = {
    torch.optim.AdamW: OptimizerKind(Rule.ADAM, _ADAM, decoupled=True, refused={"amsgrad": False, "differentiable": False}),
    torch.optim.Adam: OptimizerKind(Rule.ADAM, _ADAM, refused={"amsgrad": False, "differentiable": False}),
    torch.optim.Adagrad: OptimizerKind(Rule.ADAGRAD, {"exp_avg_sq": "sum"}, refused={"differentiable": False}),
    torch.optim.SGD: OptimizerKind(
        Rule.SGD, {"exp_avg": "momentum_buffer"}, counter_names=(), refused={"differentiable": False}
    ),
}
_LION = OptimizerKind(
    Rule.LION,
    {"exp_avg": "exp_avg"},
    decoupled=True,
    counter_names=(),
    # Of lion-pytorch and of timm: variants that compute something else.
    refused={"decoupled_wd": False, "cautious_factor": 1.0, "caution": False, "corrected_weight_decay": False},
)
_LION_PACKAGES = ("lion_pytorch", "timm")


def kind_of(optimizer_class: type) -> OptimizerKind | None:
    """The kind of a class of optimizers: torch's own, or a Lion: `offload.Lion`, lion-pytorch's, timm's."""
    package = optimizer_class.__module__.partition(".")[0]
    if optimizer_class is Lion or (optimizer_class.__name__ == "Lion" and package in _LION_PACKAGES):
        return _LION
    return _KINDS.get(optimizer_class)


def _kind(optimizer: torch.optim.Optimizer) -> OptimizerKind:
    """Raises `ConfigError` for one that neither has a counterpart nor can be called on parts of parameters."""
    kind = kind_of(type(optimizer))
    if kind is None:
        own = own_optimizer(optimizer)
        kind = OptimizerKind(Rule.OWN, own.names, counter_names=tuple(own.counters))
    return kind


def kind_name(optimizer: torch.optim.Optimizer) -> str:
    """By which checkpoints know it; of one with its own arithmetic with the arrays that it keeps."""
    kind = _kind(optimizer)
    return type(optimizer).__name__ + (f"({', '.join(kind.state_names)})" if kind.rule is Rule.OWN else "")


def state_names(optimizer: torch.optim.Optimizer) -> tuple[str, ...]:
    """What it calls its state of one parameter."""
    kind = _kind(optimizer)
    return *kind.state_names.values(), *kind.counter_names


def check_optimizer(optimizer: torch.optim.Optimizer, state_format: str) -> None:
    """Raise `ConfigError` for an optimizer that has no exact counterpart here, and cannot be called on parts of parameters.
    foreach, fused and capturable make no difference and are accepted."""
    kind = _kind(optimizer)
    if kind.rule is Rule.OWN and state_format in ("bf16", "8bit"):
        raise ConfigError(
            f"state_format={state_format!r} rounds what Adam, Adagrad, Lion and SGD keep, and nobody here knows how "
            f"{type(optimizer).__qualname__}'s state may be rounded: set state_format to 'fp32' or 'split'."
        )
    for index, group in enumerate(optimizer.param_groups):
        for option, neutral in kind.refused.items():
            value = group.get(option, getattr(optimizer, option, neutral))
            if value != neutral:
                raise ConfigError(
                    f"optimizer option {option}={value!r} of parameter group {index} is not supported: pass {option}={neutral}."
                )


def hyper_of_group(optimizer: torch.optim.Optimizer, group: Mapping[str, Any]) -> Hyper:
    """The numbers of one parameter group of it, as they stand now."""
    kind = _kind(optimizer)
    if kind.rule is Rule.OWN:
        return Hyper(Rule.OWN, lr=0.0, own=own_optimizer(optimizer).step_of(group))
    if kind.rule is Rule.SGD:
        beta1, beta2 = group["momentum"], group["dampening"]
    else:
        beta1, beta2 = group.get("betas", (0.0, 0.0))
    return Hyper(
        rule=kind.rule,
        lr=float(group["lr"]),
        beta1=float(beta1),
        beta2=float(beta2),
        eps=float(group.get("eps", 0.0)),
        weight_decay=float(group["weight_decay"]),
        lr_decay=float(group.get("lr_decay", 0.0)),
        decoupled=kind.decoupled or bool(group.get("decoupled_weight_decay", False)),
        nesterov=bool(group.get("nesterov", False)),
        maximize=bool(group.get("maximize", False)),
    )


_AT_LEAST_0 = ("lr", "eps", "weight_decay", "momentum", "lr_decay")
_FP32_MAX = torch.finfo(torch.float32).max


def check_group(optimizer: torch.optim.Optimizer, group: Mapping[str, Any], group_index: int) -> None:
    """Raise `UsageError` where a number of the group, as it stands now, is none to step with: what torch's constructors refuse,
    and what is not finite in fp32."""
    kind = _kind(optimizer)
    given = group.get("betas", (0.0, 0.0))
    betas = given if isinstance(given, (tuple, list)) else ()
    named = {name: group[name] for name in (*_AT_LEAST_0, "dampening") if name in group}
    named |= {f"betas[{index}]": betas[index] if index < len(betas) else None for index in range(2)}
    if kind.rule is Rule.OWN:  # which knows what its options mean, where they are no numbers
        named = {name: value for name, value in named.items() if name == "lr" or not isinstance(value, (tuple, list, NoneType))}
    for name, value in named.items():
        try:
            number = float(value)
        except (TypeError, ValueError, RuntimeError):  # of a tensor with several elements
            number = math.nan
        too_large = name.startswith("betas") and (number > 1 or (number == 1 and kind.rule is Rule.ADAM))
        if not abs(number) <= _FP32_MAX or (number < 0 and name != "dampening") or too_large:
            raise UsageError(
                f"{name}={value!r} of parameter group {group_index} is no number to step with; nothing was updated. Set it in "
                "optimizer.param_groups (a learning rate perhaps in the scheduler that computes it) and call step() again."
            )
    for option, neutral in kind.refused.items():
        if group.get(option, neutral) != neutral:
            raise UsageError(
                f"{option}={group[option]!r} of parameter group {group_index} was set after initialize and is not supported: "
                f"set {option}={neutral}."
            )


def moments_of(optimizer: torch.optim.Optimizer | None) -> tuple[str, ...]:
    """What records keep for this optimizer: the moments of all its groups."""
    if optimizer is None:
        return ()
    used = {name for group in optimizer.param_groups for name in hyper_of_group(optimizer, group).moments}
    return tuple(name for name in MOMENTS if name in used)


def moments_saved_by(kind_name: str, groups: Sequence[Mapping[str, Any]]) -> tuple[str, ...]:
    """What a checkpoint of an optimizer whose class has this name holds of every trained parameter."""
    kinds = {one.__name__: kind for one, kind in _KINDS.items()} | {Lion.__name__: _LION}
    _, parenthesis, kept = kind_name.removesuffix(")").partition("(")
    if parenthesis:
        return tuple(name for name in MOMENTS if name in kept.split(", "))
    kind = kinds.get(kind_name)
    if kind is None:
        return MOMENTS
    if kind.rule is Rule.SGD and not any(group.get("momentum") for group in groups):
        return ()
    return tuple(kind.state_names)


@dataclass(frozen=True, slots=True)
class InitialState:
    """What the user's optimizer holds for one parameter already: moments in the parameter's shape, and a step count."""

    moments: Mapping[str, torch.Tensor]
    step: int


def initial_state(optimizer: torch.optim.Optimizer, parameter: torch.Tensor, fqn: str) -> InitialState:
    """Raises `ConfigError` where the state is incomplete."""
    kind = _kind(optimizer)
    state: Mapping[str, Any] = optimizer.state.get(parameter, {})
    found = {moment: state[name] for moment, name in kind.state_names.items() if state.get(name) is not None}
    if not state or (kind.rule is Rule.SGD and not found):
        return InitialState({}, 0)
    names = state_names(optimizer)
    missing = [name for name in names if state.get(name) is None]
    if missing:
        raise ConfigError(f"the optimizer's state of {fqn!r} has no {', '.join(missing)}: expected {', '.join(names)}.")
    foreign = next((name for name in names if isinstance(state[name], bytes)), None)
    if foreign is not None:
        raise ConfigError(f"the optimizer's {foreign} of {fqn!r} says: {state[foreign].decode()}")
    if kind.rule is Rule.ADAGRAD and found["exp_avg_sq"].is_meta:
        # Adagrad makes its sums when it is made; of a parameter on the meta device only their value is known.
        value = next(
            group["initial_accumulator_value"]
            for group in optimizer.param_groups
            if any(one is parameter for one in group["params"])
        )
        return InitialState(
            {"exp_avg_sq": torch.full((), float(value), dtype=torch.float32, device="cpu").expand(parameter.shape)}
            if value
            else {},
            0,
        )
    for moment, tensor in found.items():
        if tensor.is_meta or tensor.shape != parameter.shape:
            what = "on the meta device" if tensor.is_meta else f"of shape {list(tensor.shape)}"
            raise ConfigError(
                f"the optimizer's {kind.state_names[moment]} of {fqn!r} is {what}: expected values of shape "
                f"{list(parameter.shape)}. Load the state of this very model's optimizer."
            )
    return InitialState(found, int(state[kind.counter_names[0]]) if kind.counter_names else 1)
