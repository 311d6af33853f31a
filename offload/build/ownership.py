"""What an engine takes into its hands of the user's model: which parameters are whose, their guards, the buffers' device."""

from __future__ import annotations

import weakref
from collections.abc import Callable

import torch
from torch import nn
from torch.utils.weak import WeakIdKeyDictionary

from offload.errors import ConfigError, UsageError
from offload.model.guard import ParameterGuard
from offload.model.optimizer import OffloadOptimizer
from offload.step.parts import Parts
from offload.step.training import Training

_owned = WeakIdKeyDictionary()
"""Parameters that an open engine owns."""


def check_free(model: object, optimizer: object) -> None:
    """Raise where `model` and `optimizer` are not what an engine can be made of, or belong to one already."""
    if not isinstance(model, nn.Module):
        raise ConfigError(f"model is of type {type(model).__name__}: expected a torch.nn.Module.")
    if optimizer is not None and not isinstance(optimizer, torch.optim.Optimizer):
        raise ConfigError(f"optimizer is of type {type(optimizer).__name__}: expected a torch.optim.Optimizer, or None.")
    for fqn, parameter in model.named_parameters():
        if parameter in _owned:
            raise UsageError(
                f"parameter {fqn!r} is in an engine already: initialize was called before on this model or a part of "
                "it. Close that engine first, or keep using it."
            )
    if isinstance(optimizer, OffloadOptimizer):
        raise ConfigError(
            "optimizer is an engine's own: pass the torch.optim optimizer that was made from the model to initialize."
        )


def take(parts: Parts) -> None:
    """The parameters belong to an engine from now on."""
    for info in parts.parameters:
        _owned[info.parameter] = True


def let_go(parts: Parts) -> None:
    """They belong to none any more."""
    for info in parts.parameters:
        _owned.pop(info.parameter, None)


def guard_parameters(parts: Parts, training: Training) -> None:
    """Put a guard before every parameter, none of which is guarded: from now on its value is there during uses only."""
    for info in parts.parameters:
        info.guard = ParameterGuard(info.fqn, info.parameter, _bringer(training, info.index))
    for unit in parts.units:
        parts.residency.close_off(unit.index)


def _bringer(training: Training, parameter_index: int) -> Callable[[], None]:
    # Guards are found through a table of the process: it must not keep the engine, or its memory, alive.
    training_reference = weakref.ref(training)

    def bring_in() -> None:
        training = training_reference()
        if training is None:
            raise UsageError("the engine of this parameter is gone without close(): its value cannot be read any more.")
        training.bring_in(parameter_index)

    return bring_in


def move_buffers(model: nn.Module, device: torch.device) -> None:
    """Every buffer of the model to the device it computes on. Raises `ConfigError` for one without a value."""
    for module in model.modules():
        for name, buffer in module._buffers.items():
            if buffer is not None and buffer.device != device:
                if buffer.is_meta:
                    raise ConfigError(f"buffer {name!r} of {type(module).__name__} is on the meta device and has no value.")
                module._buffers[name] = buffer.to(device)
