"""The optimizer that the user's loop sees, and what is read out of the one the user made."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable
from typing import Any, Protocol

import torch

from offload.device.kernels import AdamHyper
from offload.errors import ConfigError, UsageError

_SUPPORTED = {torch.optim.Adam: False, torch.optim.AdamW: True}
_REFUSED_OPTIONS = {"amsgrad": False, "maximize": False, "differentiable": False}


class Stepper(Protocol):
    """What the facade needs of the engine."""

    def step(self) -> None: ...

    def zero_grad(self, set_to_none: bool = True) -> None: ...


def check_optimizer(optimizer: torch.optim.Optimizer) -> None:
    """Raise `ConfigError` for an optimizer that has no exact counterpart here."""
    if type(optimizer) not in _SUPPORTED:
        names = " or ".join(f"torch.optim.{kind.__name__}" for kind in _SUPPORTED)
        raise ConfigError(
            f"optimizer {type(optimizer).__module__}.{type(optimizer).__qualname__} is not supported: pass {names} "
            "(foreach, fused and capturable make no difference and are accepted)."
        )
    for index, group in enumerate(optimizer.param_groups):
        for option, neutral in _REFUSED_OPTIONS.items():
            if group.get(option, neutral) != neutral:
                raise ConfigError(
                    f"optimizer option {option}={group[option]!r} of parameter group {index} is not supported: pass "
                    f"{option}={neutral}."
                )


def hyper_of(optimizer: torch.optim.Optimizer, group: dict[str, Any]) -> AdamHyper:
    """The numbers of one parameter group, as they stand now."""
    decoupled = bool(group.get("decoupled_weight_decay", _SUPPORTED[_kind(optimizer)])) or _SUPPORTED[_kind(optimizer)]
    beta1, beta2 = group["betas"]
    return AdamHyper(
        lr=float(group["lr"]),
        beta1=float(beta1),
        beta2=float(beta2),
        eps=float(group["eps"]),
        weight_decay=float(group["weight_decay"]),
        decoupled=decoupled,
    )


def _kind(optimizer: torch.optim.Optimizer) -> type:
    return optimizer.source_class if isinstance(optimizer, OffloadOptimizer) else type(optimizer)


class _StateInTiers(defaultdict[torch.Tensor, Any]):
    """Empty, and says why where somebody asks for a parameter's state."""

    def __missing__(self, key: torch.Tensor) -> Any:
        raise UsageError(
            "optimizer.state holds nothing: moments and step counts lie in the engine's tiers. "
            "engine.save_checkpoint(dir) writes them."
        )


class OffloadOptimizer(torch.optim.Optimizer):
    """A `torch.optim.Optimizer` over the user's own `param_groups`, whose state lies in the engine's tiers.

    Learning-rate schedulers work on it as on any other; `step()` and `zero_grad()` are the engine's. `param_groups` is
    the very list of the optimizer that was passed to `initialize`, so a scheduler built on that one works too.
    """

    # GradScaler hands an optimizer with this flag its scale instead of reading `p.grad`: then `step` can say what to
    # do.
    _step_supports_amp_scaling = True

    def __init__(self, source: torch.optim.Optimizer, stepper: Stepper) -> None:
        super().__init__([torch.nn.Parameter(torch.empty(0))], dict(source.defaults))
        self.state = _StateInTiers()
        self.param_groups = source.param_groups
        self.defaults = source.defaults
        self.source_class = type(source)
        self._stepper = stepper

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Begin the update of every parameter that has a gradient. It runs on under the next forward."""
        if getattr(self, "grad_scale", None) is not None:
            raise UsageError(
                "torch.amp.GradScaler cannot scale gradients that the engine took over: drop the scaler, set "
                "Config(dtype='fp16') "
                "(loss_scale defaults to dynamic) and call engine.backward(loss)."
            )
        result = None
        if closure is not None:
            with torch.enable_grad():
                result = closure()
        self._stepper.step()
        return result

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Drop all gradients; with `set_to_none=False` those that were there become zeros, which a step then applies."""
        self._stepper.zero_grad(set_to_none)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Only during construction: the engine's layout is fixed by `initialize`."""
        if hasattr(self, "_stepper"):
            raise UsageError("a param_group was added after initialize: make all groups first, then call offload.initialize.")
        super().add_param_group(param_group)

    def state_dict(self) -> dict[str, Any]:
        """Not to be had in one piece: the state lies in the tiers."""
        raise UsageError(
            "optimizer.state_dict() would gather every moment in memory at once: use engine.save_checkpoint(dir), "
            "which streams "
            "weights, moments and step counts."
        )

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """See `state_dict`."""
        raise UsageError(
            "optimizer.load_state_dict() cannot reach state that lies in the tiers: load it into the torch "
            "optimizer before "
            "offload.initialize (its moments and step counts are taken over), or use engine.load_checkpoint(dir)."
        )
