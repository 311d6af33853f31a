# SPDX-License-Identifier: Apache-2.0
"""Hooks that `torch.compile` leaves alone: where a compiled part of the model calls one, its graph ends, and goes on after."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch._C._dynamo.eval_frame import get_eval_frame_callback


class Uncompiled:
    """Calls `report`. `torch.compiler.disable` around it costs as much as what most hooks do: it is taken only where something
    is being compiled."""

    __slots__ = ("_disabled", "_report")

    def __init__(self, report: Callable[..., Any]) -> None:
        _skip_calls()
        self._report = report
        self._disabled: Callable[..., Any] = torch._dynamo.disable(report)

    def __call__(self, *arguments: Any) -> Any:
        return (self._report if get_eval_frame_callback() is None else self._disabled)(*arguments)


@functools.cache
def _skip_calls() -> None:
    """Let the compiler pass over `Uncompiled.__call__`. Importing it takes as long as importing torch: where there are no hooks
    nobody waits for it, and where there are an optimizer of torch's has imported it already."""
    from torch._dynamo.decorators import skip

    skip(Uncompiled.__call__)
