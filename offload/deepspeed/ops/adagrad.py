"""`deepspeed.ops.adagrad`: torch.optim.Adagrad."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch

from offload.deepspeed.absent import absent, check_keywords
from offload.deepspeed_config import Maker, make_optimizer


def DeepSpeedCPUAdagrad(model_params: Iterable[Any], lr: float = 1e-2, **keywords: Any) -> torch.optim.Optimizer:
    check_keywords("DeepSpeedCPUAdagrad", keywords, ("eps", "weight_decay", "amsgrad", "fp32_optimizer_states"), {})
    return make_optimizer(Maker("Adagrad", {"lr": lr} | keywords), model_params)


def __getattr__(name: str) -> Any:
    raise absent("deepspeed.ops.adagrad", name, ("DeepSpeedCPUAdagrad",))
