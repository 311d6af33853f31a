# SPDX-License-Identifier: Apache-2.0
"""A seed, and the cpu accelerator."""

from __future__ import annotations

import pytest
import torch


@pytest.fixture(autouse=True)
def settled(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OFFLOAD_ACCELERATOR", "cpu")
    torch.manual_seed(0)
