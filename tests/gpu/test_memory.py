# SPDX-License-Identifier: Apache-2.0
"""On a GPU: peak device memory is what the plan said, plus what the model itself takes."""

from __future__ import annotations

import gc
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

import offload
from offload.device.arithmetic import compiled_kernels
from tests.inside import sums_on_device_of

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="torch finds no CUDA device")]
WIDTH, BLOCKS, ROWS = 2048, 8, 64


class Stack(nn.Module):
    """Equal blocks of 64 MB (bf16) and activations that are small beside them."""

    def __init__(self, checkpointing: str | None = None) -> None:
        super().__init__()
        self.checkpointing = checkpointing
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Linear(WIDTH, 4 * WIDTH, bias=False), nn.ReLU(), nn.Linear(4 * WIDTH, WIDTH, bias=False))
            for _ in range(BLOCKS)
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            if self.checkpointing is None:
                x = x + block(x)
            else:
                x = x + checkpoint(block, x.requires_grad_(), use_reentrant=self.checkpointing == "reentrant")
        return x


def plain_nbytes(checkpointing: str | None) -> int:
    """Peak of forward and backward beside the parameters, each gradient dropped as soon as it is there."""
    model = Stack(checkpointing).to("cuda", torch.bfloat16)
    for parameter in model.parameters():
        parameter.register_post_accumulate_grad_hook(lambda parameter: setattr(parameter, "grad", None))
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    F.mse_loss(
        model(torch.randn(ROWS, WIDTH, device="cuda", dtype=torch.bfloat16)).float(), torch.zeros(1, device="cuda")
    ).backward()
    return torch.cuda.max_memory_allocated() - before


@pytest.mark.parametrize("budget", ["the least", None])
@pytest.mark.parametrize("checkpointing", [None, "reentrant", "plain"])
@pytest.mark.parametrize(("parameters", "states"), [("cpu", "cpu"), ("device", "cpu"), ("cpu", "device"), ("device", "device")])
def test_peak_is_within_three_percent_of_the_formula(
    monkeypatch: pytest.MonkeyPatch, parameters: str, states: str, checkpointing: str | None, budget: str | None
) -> None:
    """Also of the units that are there at once: a reentrant checkpoint runs a backward within backward. Without a budget units
    stay in what the model leaves free, and records visit: then it is what the engine says that they took."""
    monkeypatch.setenv("OFFLOAD_ACCELERATOR", "cuda")
    compiled_kernels.prepare(torch.device("cuda", torch.cuda.current_device()))
    assert compiled_kernels.of(torch.device("cuda", torch.cuda.current_device())) is not None, "torch's own forms take more"
    plain_nbytes(checkpointing)  # workspaces of the libraries, once
    own = plain_nbytes(checkpointing)
    gc.collect()
    before = torch.cuda.memory_allocated()
    model = Stack(checkpointing)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    config: dict[str, Any] = {"parameters": parameters, "optimizer_states": states, "dtype": "bf16", "max_grad_norm": 1.0}
    if budget is not None:
        with pytest.raises(offload.BudgetError) as refused:
            offload.initialize(model, optimizer, config | {"device_memory": 1})
        config["device_memory"] = refused.value.smallest_nbytes
    with offload.initialize(model, optimizer, config) as engine:
        target = torch.zeros(1, device="cuda")
        for step in range(4):
            if step == 2:
                torch.cuda.reset_peak_memory_stats()
            x = torch.randn(ROWS, WIDTH, device="cuda", dtype=torch.bfloat16)
            engine.backward(F.mse_loss(model(x).float(), target))
            engine.step()
            engine.zero_grad()
        stats = engine.stats()
        lines = {line["purpose"]: line["nbytes"] for line in stats["planned"] if line["tier"] == "device"}
        planned = sum(lines.values())
        if "parameters in use" in lines and budget is not None:
            assert stats["resident_peak_nbytes"] <= lines["parameters in use"]
        elif "parameters in use" in lines:
            assert stats["resident_peak_nbytes"] > lines["parameters in use"], "nothing stayed"
            planned += stats["resident_peak_nbytes"] - lines["parameters in use"]
        if budget is None and states == "cpu":
            assert stats["visiting_peak_nbytes"] > 0, "no record came"
            planned += stats["visiting_peak_nbytes"] + sums_on_device_of(engine).peak_nbytes
        peak = torch.cuda.max_memory_allocated() - before
    formula = planned + own
    assert abs(peak - formula) <= 0.03 * formula, f"peak {peak}, planned {planned}, the model's own {own}"
