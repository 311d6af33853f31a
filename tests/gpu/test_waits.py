# SPDX-License-Identifier: Apache-2.0
"""On a GPU: torch sees no synchronisation within a step, once the first step has shown the order of things."""

from __future__ import annotations

import itertools
from pathlib import Path

import pytest
import torch

import offload

from .loops import LENGTH, VOCABULARY, Language

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="torch finds no CUDA device")]
PLACES = ("device", "cpu", "nvme")


@pytest.mark.parametrize("update", ["step", "backward"])
@pytest.mark.parametrize(("parameters", "states"), list(itertools.product(PLACES, PLACES)))
def test_no_synchronisation_that_torch_knows(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, parameters: str, states: str, update: str
) -> None:
    """`.item()`, copies that block and the like raise in every thread. The engine's own waits, by events, are counted in
    tests/device/test_host_waits.py."""
    monkeypatch.setenv("OFFLOAD_ACCELERATOR", "cuda")
    torch.manual_seed(0)
    model = Language(checkpointing="plain")
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    config = {"parameters": parameters, "optimizer_states": states, "nvme": str(tmp_path), "dtype": "bf16", "update": update}
    batches = torch.randint(0, VOCABULARY, (6, 2, LENGTH), device="cuda")
    with offload.initialize(model, optimizer, config | {"max_grad_norm": 0.5}) as engine:
        try:
            for step in range(3):
                for micro in range(2):
                    if micro == 0:
                        with engine.no_sync():
                            engine.backward(model.loss(batches[2 * step]))
                    else:
                        engine.backward(model.loss(batches[2 * step + 1]))
                engine.step()
                engine.zero_grad()
                torch.cuda.set_sync_debug_mode("error")
        finally:
            torch.cuda.set_sync_debug_mode("default")
