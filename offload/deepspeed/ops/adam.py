"""`deepspeed.ops.adam`: torch.optim.AdamW, or Adam where adamw_mode (adam_w_mode) is false."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch

from offload.deepspeed.absent import absent, check_keywords
from offload.deepspeed_config import Maker, make_optimizer

_KEYWORDS = ("lr", "bias_correction", "betas", "eps", "weight_decay", "amsgrad", "set_grad_none", "fp32_optimizer_states")


def DeepSpeedCPUAdam(model_params: Iterable[Any], lr: float = 1e-3, **keywords: Any) -> torch.optim.Optimizer:
    """AdamW without weight decay unless `weight_decay` or `adamw_mode=False` say otherwise."""
    check_keywords("DeepSpeedCPUAdam", keywords, (*_KEYWORDS, "adamw_mode"), {})
    decoupled = keywords.pop("adamw_mode", True)
    return make_optimizer(Maker("Adam", {"lr": lr, "adam_w_mode": decoupled} | keywords), model_params)


def FusedAdam(params: Iterable[Any], lr: float = 1e-3, **keywords: Any) -> torch.optim.Optimizer:
    """AdamW without weight decay unless `weight_decay` or `adam_w_mode=False` say otherwise."""
    check_keywords("FusedAdam", keywords, (*_KEYWORDS, "adam_w_mode"), {})
    return make_optimizer(Maker("Adam", {"lr": lr} | keywords), params)


def __getattr__(name: str) -> Any:
    raise absent("deepspeed.ops.adam", name, ("DeepSpeedCPUAdam", "FusedAdam"))
