"""The engine on a CUDA device: every placement gives the bits of the run with everything on the device."""

from __future__ import annotations

import contextlib
import itertools
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import offload

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="torch finds no CUDA device"),
]

PLACES = ("device", "cpu", "nvme")


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up = nn.Linear(width, 4 * width)
        self.down = nn.Linear(4 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(F.gelu(self.up(self.norm(x))))


class Model(nn.Module):
    def __init__(self, width: int = 128, depth: int = 4, vocabulary: int = 256) -> None:
        super().__init__()
        self.embed = nn.Embedding(vocabulary, width)
        self.blocks = nn.ModuleList(Block(width) for _ in range(depth))
        self.head = nn.Linear(width, vocabulary, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embed(tokens)
        for block in self.blocks:
            x = block(x)
        return F.cross_entropy(self.head(x).flatten(0, 1).float(), tokens.flatten())


def train(nvme: Path, parameters: str, states: str, dtype: str, update: str) -> tuple[list[float], dict[str, torch.Tensor]]:
    torch.manual_seed(0)
    model = Model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, weight_decay=0.1)
    places = {"parameters": parameters, "optimizer_states": states, "nvme": nvme}
    generator = torch.Generator().manual_seed(1)
    losses = []
    with offload.initialize(model, optimizer, {**places, "dtype": dtype, "update": update, "max_grad_norm": 0.5}) as engine:
        assert engine.optimizer is not None
        for _ in range(20):
            for last in (False, True):
                tokens = torch.randint(0, 256, (2, 64), generator=generator).cuda()
                with contextlib.nullcontext() if last else engine.no_sync():
                    loss = model(tokens)
                    engine.backward(loss / 2)
                losses.append(loss.item())
            engine.optimizer.step()
            engine.optimizer.zero_grad()
        return losses, engine.state_dict()


@pytest.mark.parametrize("update", ["step", "backward"])
@pytest.mark.parametrize("dtype", ["fp32", "bf16", "fp16"])
def test_every_placement_gives_the_same_bits(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, dtype: str, update: str) -> None:
    monkeypatch.setenv("OFFLOAD_ACCELERATOR", "cuda")
    losses, weights = train(tmp_path, "device", "device", dtype, "step")
    for parameters, states in itertools.product(PLACES, PLACES):
        other_losses, other_weights = train(tmp_path, parameters, states, dtype, update)
        assert other_losses == losses, (parameters, states)
        assert all(torch.equal(other_weights[name], weights[name]) for name in weights), (parameters, states)
