# SPDX-License-Identifier: Apache-2.0
"""One model and one loop for all tests of this folder. No host synchronisation but where a test asks for numbers."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

import offload

from .conftest import Where

VOCABULARY = 128
LENGTH = 16


class Block(nn.Module):
    """Attention by hand (every step of it has a deterministic backward) and a gated unit."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.qkv = nn.Linear(width, 3 * width, bias=False)
        self.out = nn.Linear(width, width)
        self.up = nn.Linear(width, 3 * width)
        self.down = nn.Linear(3 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        query, key, value = self.qkv(self.norm(x)).chunk(3, dim=-1)
        scores = query @ key.transpose(-1, -2) / query.shape[-1] ** 0.5
        hidden = torch.ones(scores.shape[-2:], dtype=torch.bool, device=x.device).triu(1)
        x = x + self.out(torch.softmax(scores.masked_fill(hidden, -1e4), dim=-1) @ value)
        return x + self.down(F.gelu(self.up(x)))


class Adapted(nn.Module):
    """A frozen linear layer with a low-rank addition that is trained."""

    def __init__(self, base: nn.Linear, rank: int = 4) -> None:
        super().__init__()
        self.base = base.requires_grad_(False)
        self.into = nn.Linear(base.in_features, rank, bias=False)
        self.back = nn.Linear(rank, base.out_features, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.base(x) + self.back(self.into(x))


class Language(nn.Module):
    """A causal language model whose input and output embeddings are one parameter.

    checkpointing: None, "reentrant" or "plain". on_host: activations that backward needs go to pinned host memory.
    """

    def __init__(
        self, width: int = 32, depth: int = 3, checkpointing: str | None = None, on_host: bool = False, adapted: bool = False
    ) -> None:
        super().__init__()
        self.checkpointing, self.on_host = checkpointing, on_host
        self.embed = nn.Embedding(VOCABULARY, width)
        self.blocks = nn.ModuleList(Block(width) for _ in range(depth))
        self.head = nn.Linear(width, VOCABULARY, bias=False)
        self.head.weight = self.embed.weight
        if adapted:
            self.requires_grad_(False)
            for block in self.blocks:
                block.up, block.down = Adapted(block.up), Adapted(block.down)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embed(tokens)
        if self.checkpointing == "reentrant" and not x.requires_grad:
            x.requires_grad_(torch.is_grad_enabled())
        for block in self.blocks:
            with torch.autograd.graph.save_on_cpu(pin_memory=x.is_cuda) if self.on_host else contextlib.nullcontext():
                if self.checkpointing is not None and torch.is_grad_enabled():
                    x = checkpoint(block, x, use_reentrant=self.checkpointing == "reentrant")
                else:
                    x = block(x)
        return self.head(x)

    def loss(self, tokens: torch.Tensor) -> torch.Tensor:
        logits = self(tokens)[:, :-1].float()
        return F.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())

    def generate(self, tokens: torch.Tensor, count: int) -> torch.Tensor:
        """Greedily."""
        with torch.no_grad():
            for _ in range(count):
                tokens = torch.cat([tokens, self(tokens)[:, -1:].argmax(dim=-1)], dim=1)
        return tokens


@dataclass
class Result:
    """Losses and generated tokens in the order they came, and the weights at the end."""

    numbers: list[Any] = field(default_factory=list)
    weights: dict[str, torch.Tensor] = field(default_factory=dict)


def train(
    where: Where,
    nvme: Path,
    parameters: str,
    states: str,
    *,
    build: Callable[[], Language] = Language,
    prepare: Callable[[Language], None] = lambda model: None,
    steps: int = 3,
    evaluate: bool = False,
    stream: torch.cuda.Stream | None = None,
    **fields: Any,
) -> Result:
    """Two micro-batches a step, two groups of parameters; `evaluate`: a loss and a few generated tokens between steps.

    On `stream`, which nothing orders after the one that `initialize` was called on; None: on the current one.
    """
    torch.manual_seed(0)
    model = build()
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    groups = [
        {"params": [parameter for parameter in trained if parameter.dim() > 1], "weight_decay": 0.1},
        {"params": [parameter for parameter in trained if parameter.dim() < 2], "weight_decay": 0.0, "lr": 2e-3},
    ]
    optimizer = torch.optim.AdamW([group for group in groups if group["params"]], lr=1e-3)
    config = {"parameters": parameters, "optimizer_states": states, "nvme": str(nvme), "max_grad_norm": 0.5} | fields
    draw = torch.Generator().manual_seed(1)
    batches = torch.randint(0, VOCABULARY, (2 * steps, 2, LENGTH), generator=draw).to(where.device)
    kept: list[torch.Tensor] = []
    with offload.initialize(model, optimizer, config) as engine, torch.cuda.stream(stream):
        prepare(model)
        for step in range(steps):
            for micro in range(2):
                with contextlib.nullcontext() if micro else engine.no_sync():
                    loss = model.loss(batches[2 * step + micro])
                    engine.backward(loss / 2)
                kept.append(loss.detach())
            engine.optimizer.step()
            engine.optimizer.zero_grad()
            if evaluate:
                with torch.no_grad():
                    kept.append(model.loss(batches[0]))
                kept.append(model.generate(batches[0][:, :4], 3))
        return Result([value.tolist() for value in kept], engine.state_dict())


def assert_same_bits(ours: Result, reference: Result) -> None:
    assert ours.numbers == reference.numbers
    assert ours.weights.keys() == reference.weights.keys()
    differing = [name for name, value in reference.weights.items() if not torch.equal(ours.weights[name], value)]
    assert not differing
