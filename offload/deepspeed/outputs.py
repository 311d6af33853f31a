# SPDX-License-Identifier: Apache-2.0
"""What a forward gives back, so that a backward from it counts as one micro-batch of several.

Each tensor comes as an alias whose gradient is divided on its way into the model: whatever the loop computes from however many
outputs, each path is divided once.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from typing import Any

import torch


class _Divided(torch.autograd.Function):
    generate_vmap_rule = True  # torch.func's transforms go through it

    @staticmethod
    def forward(value: torch.Tensor, divisor: Callable[[], float]) -> torch.Tensor:
        # Not a view of it to autograd, so that loops may write to it in place, as they do to a loss.
        return value.clone() if value.numel() == 1 else value.detach()

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        ctx.divisor = inputs[1]

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor, None]:
        divisor = ctx.divisor()
        return (gradients[0] if divisor == 1 else gradients[0] / divisor), None


def divided(outputs: Any, divisor: Callable[[], float]) -> Any:
    """The outputs, in tuples, lists and mappings too, with gradients divided by what `divisor` says when they come."""
    if isinstance(outputs, torch.Tensor):
        return _Divided.apply(outputs, divisor) if outputs.grad_fn is not None else outputs  # type: ignore[no-untyped-call]
    if isinstance(outputs, tuple):
        made = [divided(one, divisor) for one in outputs]
        return type(outputs)(*made) if hasattr(outputs, "_fields") else type(outputs)(made)
    if isinstance(outputs, list):
        return [divided(one, divisor) for one in outputs]
    if isinstance(outputs, Mapping):
        changed = {name: divided(one, divisor) for name, one in outputs.items()}
        if all(changed[name] is one for name, one in outputs.items()):
            return outputs
        result: Any = copy.copy(outputs)
        for name, one in changed.items():
            result[name] = one
        return result
    return outputs


def move_to_device(item: Any, device: Any, criterion_func: Callable[[Any], bool] | None = None) -> Any:
    """Tensors in tuples, lists and mappings moved to the device, where `criterion_func` says so."""
    if isinstance(item, torch.Tensor) and (criterion_func is None or criterion_func(item)):
        return item.to(device)
    if isinstance(item, (list, tuple)):  # a tuple of a class with names of its own becomes a plain one, as there
        return (list if isinstance(item, list) else tuple)(move_to_device(one, device, criterion_func) for one in item)
    if isinstance(item, dict):
        return {name: move_to_device(one, device, criterion_func) for name, one in item.items()}
    return item
