"""`deepspeed.ops`: DeepSpeed's optimizers, as torch's with DeepSpeed's default numbers. The engine brings the kernels."""

from __future__ import annotations

from typing import Any

from offload.deepspeed.absent import absent
from offload.deepspeed.ops import adagrad, adam, lion

__all__ = ["adagrad", "adam", "lion"]


def __getattr__(name: str) -> Any:
    raise absent("deepspeed.ops", name, __all__)
