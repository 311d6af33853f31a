"""Hooks that `torch.compile` leaves alone: where a compiled part of the model calls one, its graph ends, and goes on after."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch._C._dynamo.eval_frame import get_eval_frame_callback
from torch._dynamo.decorators import skip


class Uncompiled:
    """Calls `report`. `torch._dynamo.disable` around it costs as much as what most hooks do: it is taken only where something
    is being compiled."""

    __slots__ = ("_disabled", "_report")

    def __init__(self, report: Callable[..., Any]) -> None:
        self._report = report
        self._disabled: Callable[..., Any] = torch._dynamo.disable(report)

    @skip
    def __call__(self, *arguments: Any) -> Any:
        return (self._report if get_eval_frame_callback() is None else self._disabled)(*arguments)
