# SPDX-License-Identifier: Apache-2.0
"""One parameter's fp32 value, gradient or moment, whole or the part that DeepSpeed's stage 3 gives this rank.

All are copies, on the parameter's device, and collective. Gradients are in the parameter's dtype and multiplied by the loss
scale, as there. A part is the rank's share of the elements end to end, padded with zeros to equal lengths.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from enum import Enum
from typing import Any

import torch
from torch import nn

import offload
from offload.deepspeed import comm
from offload.deepspeed.owners import owner_of
from offload.errors import ConfigError, UsageError


class OffloadDeviceEnum(str, Enum):
    none = "none"
    cpu = "cpu"
    nvme = "nvme"


class OffloadStateTypeEnum(str, Enum):
    """The states that `engine.offload_states(include=...)` may name."""

    optim_states = "optim_states"
    hp_params = "hp_params"
    lp_params = "lp_params"
    lp_grads = "lp_grads"
    contiguous_grad_buffer = "contiguous_grad_buffer"


def check_states(include: Any, device: Any) -> None:
    """Raise `ConfigError` for states, or a device, that DeepSpeed does not know."""
    known = [one.value for one in OffloadStateTypeEnum]
    unknown = [one for one in include or () if getattr(one, "value", one) not in known]
    if unknown:
        raise ConfigError(f"offload_states(include=...) names {unknown!r}: there are {', '.join(known)}.")
    if getattr(device, "value", device) not in ("cpu", "none"):
        raise ConfigError(f"offload_states(device={device!r}): only 'cpu' is a place to move to.")


_OLD_NAMES = {"momentum_buffer": "exp_avg"}


def _engine(param: nn.Parameter) -> offload.Engine:
    engine = owner_of([param])
    if engine is None:
        raise UsageError("the parameter belongs to no engine that is open: call deepspeed.initialize first.")
    return engine


def _read(param: nn.Parameter, what: str) -> torch.Tensor | None:
    if not param.requires_grad:
        return None
    engine = _engine(param)
    value = engine.read(param, _OLD_NAMES.get(what, what))
    if what == "gradient" and value is not None:
        value = (value * engine.loss_scale).to(param.dtype)
    return value.to(param.device) if value is not None else None


def _write(param: nn.Parameter, what: str, value: torch.Tensor) -> None:
    engine = _engine(param)
    given = value.reshape(param.shape).float()
    engine.write(param, _OLD_NAMES.get(what, what), given / engine.loss_scale if what == "gradient" else given)


def _share(param: nn.Parameter, whole: torch.Tensor | None) -> torch.Tensor | None:
    if whole is None:
        return None
    ranks = comm.get_world_size()
    count = -(-param.numel() // ranks)
    padded = torch.zeros(count * ranks, dtype=whole.dtype, device=whole.device)
    padded[: whole.numel()] = whole.reshape(-1)
    return padded[comm.get_rank() * count :][:count].clone()


def _whole(param: nn.Parameter, share: torch.Tensor) -> torch.Tensor:
    parts = comm.gathered_objects(share.detach().cpu())
    return torch.cat([part.reshape(-1) for part in parts])[: param.numel()].reshape(param.shape)


def safe_get_full_fp32_param(param: nn.Parameter) -> torch.Tensor | None:
    """Return the fp32 master; None for a parameter that is not trained."""
    return _read(param, "value")


def safe_get_full_grad(param: nn.Parameter) -> torch.Tensor | None:
    return _read(param, "gradient")


def safe_get_full_optimizer_state(param: nn.Parameter, optim_state_key: str) -> torch.Tensor | None:
    return _read(param, optim_state_key)


def safe_set_full_fp32_param(param: nn.Parameter, value: torch.Tensor) -> None:
    _write(param, "value", value)


def safe_set_full_grad(param: nn.Parameter, value: torch.Tensor) -> None:
    _write(param, "gradient", value)


def safe_set_full_optimizer_state(param: nn.Parameter, value: torch.Tensor, optim_state_key: str) -> None:
    _write(param, optim_state_key, value)


def safe_get_local_fp32_param(param: nn.Parameter) -> torch.Tensor | None:
    return _share(param, safe_get_full_fp32_param(param))


def safe_get_local_grad(param: nn.Parameter) -> torch.Tensor | None:
    return _share(param, safe_get_full_grad(param))


def safe_get_local_optimizer_state(param: nn.Parameter, optim_state_key: str) -> torch.Tensor | None:
    return _share(param, safe_get_full_optimizer_state(param, optim_state_key))


def safe_set_local_fp32_param(param: nn.Parameter, value: torch.Tensor) -> None:
    _write(param, "value", _whole(param, value))


def safe_set_local_grad(param: nn.Parameter, value: torch.Tensor) -> None:
    _write(param, "gradient", _whole(param, value))


def safe_set_local_optimizer_state(param: nn.Parameter, value: torch.Tensor, optim_state_key: str) -> None:
    _write(param, optim_state_key, _whole(param, value))


def safe_update_full_grad_vectorized(
    param_list: Sequence[nn.Parameter], update_func: Callable[[torch.Tensor | None, nn.Parameter], Any]
) -> None:
    """Set each gradient to update_func(gradient, parameter). Where that is None the gradient stays."""
    for param in param_list:
        value = update_func(safe_get_full_grad(param), param)
        if value is not None:
            safe_set_full_grad(param, value)
