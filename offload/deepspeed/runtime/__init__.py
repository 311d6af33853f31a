"""`deepspeed.runtime`: the learning-rate schedules."""

from __future__ import annotations

from typing import Any

from offload.deepspeed.absent import absent
from offload.deepspeed.runtime import lr_schedules

__all__ = ["lr_schedules"]


def __getattr__(name: str) -> Any:
    raise absent("deepspeed.runtime", name, __all__)
