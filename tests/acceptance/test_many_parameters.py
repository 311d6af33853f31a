# SPDX-License-Identifier: Apache-2.0
"""What a step costs the engine in Python grows with the number of parameters, and no faster: blocks may have many experts."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Any

import pytest
import torch
from torch import nn

import offload
from tests.small_sizes import small

from .models import ON_CPU, ON_CPU_IN_PLACE, ON_NVME, ON_NVME_IN_PLACE, Setup, adamw

PACKAGE = str(Path(offload.__file__).parent)
COUNTS = (80, 160)  # of both a unit has more than gradients that may wait for each other (1 MiB), where chunks are one each


class Experts(nn.Module):
    def __init__(self, count: int, width: int) -> None:
        super().__init__()
        self.scales = nn.ParameterList(torch.ones(width) for _ in range(count))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for scale in self.scales:
            x = torch.tanh(x * scale)
        return x


@contextmanager
def lines_counted() -> Iterator[list[int]]:
    """How many lines of the package this thread runs, turns of loops included."""
    found = [0]

    def count(frame: FrameType, event: str, argument: Any) -> Any:
        found[0] += event == "line"
        return count

    def enter(frame: FrameType, event: str, argument: Any) -> Any:
        return count if frame.f_code.co_filename.startswith((PACKAGE, "<string>")) else None

    sys.settrace(enter)
    try:
        yield found
    finally:
        sys.settrace(None)


@pytest.mark.parametrize("setup", [ON_CPU_IN_PLACE, ON_CPU, ON_NVME_IN_PLACE, ON_NVME], ids=lambda setup: setup.name)
@pytest.mark.parametrize("width", [64, 4096], ids=["in one chunk", "a chunk each"])
def test_twice_the_parameters_take_twice_the_work(
    opened: Any, monkeypatch: pytest.MonkeyPatch, setup: Setup, width: int
) -> None:
    small(monkeypatch, chunk_numel=4096 * (1 if width == 4096 else 64))
    lines = []
    for count in COUNTS:
        model = nn.Sequential(Experts(count, width), Experts(count, width))
        engine = opened(model, adamw(model), setup)
        with lines_counted() as found:
            for _ in range(2):
                model(torch.ones(1, width)).sum().backward()
                engine.step()
                engine.zero_grad()
            engine.state_dict()
        lines.append(found[0])
    assert lines[0] > 2 * 2 * 50 * COUNTS[0]
    assert lines[1] <= 2.2 * lines[0]
