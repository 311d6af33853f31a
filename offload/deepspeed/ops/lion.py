"""`deepspeed.ops.lion`: `offload.Lion` with DeepSpeed's default numbers."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch

from offload.deepspeed.absent import absent, check_keywords
from offload.deepspeed_config import Maker, make_optimizer


def DeepSpeedCPULion(model_params: Iterable[Any], lr: float = 1e-3, **keywords: Any) -> torch.optim.Optimizer:
    check_keywords("DeepSpeedCPULion", keywords, ("betas", "weight_decay", "set_grad_none", "fp32_optimizer_states"), {})
    return make_optimizer(Maker("Lion", {"lr": lr} | keywords), model_params)


FusedLion = DeepSpeedCPULion


def __getattr__(name: str) -> Any:
    raise absent("deepspeed.ops.lion", name, ("DeepSpeedCPULion", "FusedLion"))
