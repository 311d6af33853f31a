# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from torch import Tensor

from offload.tiers import HostMemory


@pytest.fixture
def aligned() -> Iterator[Callable[..., Tensor]]:
    """aligned(nbytes, seed=None): page-aligned uint8 memory, zeros or seeded random bytes."""

    def allocate(nbytes: int, seed: int | None = None) -> Tensor:
        tensor = HostMemory(nbytes, "test").tensor
        if seed is not None:
            drawn = torch.empty(-(-nbytes // 8), dtype=torch.int64).random_(generator=torch.Generator().manual_seed(seed))
            tensor.copy_(drawn.view(torch.uint8)[:nbytes])  # eight at a time
        return tensor

    yield allocate


@pytest.fixture
def paths3(tmp_path: Path) -> list[Path]:
    """Three folders, as three drives."""
    return [tmp_path / f"drive{index}" for index in range(3)]
