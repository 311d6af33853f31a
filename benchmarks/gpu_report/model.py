# SPDX-License-Identifier: Apache-2.0
"""A Llama-shaped model, the same code for every contender, and real text for it."""

from __future__ import annotations

import sysconfig
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint


@dataclass(frozen=True)
class Shape:
    width: int
    layers: int
    heads: int
    inner: int
    vocabulary: int
    sequence: int
    drawn_rows: int | None = None
    """How many rows of each matrix are drawn at random, the others repeating them; None: all, on one thread."""

    @property
    def numel(self) -> int:
        """Parameters."""
        layer = 4 * self.width**2 + 3 * self.width * self.inner + 2 * self.width
        return self.layers * layer + 2 * self.vocabulary * self.width + self.width


SHAPES = {
    "tiny": Shape(64, 2, 4, 128, 256, 64),
    "1B": Shape(2048, 18, 16, 5632, 32000, 2048),
    "3B": Shape(3072, 26, 24, 8192, 32000, 2048),
    "7B": Shape(4096, 32, 32, 11008, 32000, 2048),
}


def _repeat(weight: torch.Tensor, drawn_rows: int | None, draw: Callable[[torch.Tensor], Any]) -> None:
    """`Shape.drawn_rows` of weight [rows, columns]."""
    with torch.no_grad():
        drawn = weight[: drawn_rows or weight.shape[0]]
        draw(drawn)
        if drawn.shape[0] < weight.shape[0]:
            weight.view(-1, *drawn.shape)[1:].copy_(drawn)


class _Linear(nn.Linear):
    def __init__(self, shape: Shape, into: int, out: int) -> None:
        self.drawn_rows = shape.drawn_rows
        super().__init__(into, out, bias=False)

    def reset_parameters(self) -> None:
        limit = self.in_features**-0.5
        _repeat(self.weight, self.drawn_rows, lambda drawn: nn.init.uniform_(drawn, -limit, limit))


class _Embedding(nn.Embedding):
    def __init__(self, shape: Shape) -> None:
        self.drawn_rows = shape.drawn_rows
        super().__init__(shape.vocabulary, shape.width)

    def reset_parameters(self) -> None:
        _repeat(self.weight, self.drawn_rows, nn.init.normal_)


def _rotated(x: torch.Tensor, cosine: torch.Tensor, sine: torch.Tensor) -> torch.Tensor:
    first, second = x.chunk(2, dim=-1)
    return torch.cat([first * cosine - second * sine, second * cosine + first * sine], dim=-1)


class Layer(nn.Module):
    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.heads = shape.heads
        self.before_attention, self.before_mlp = nn.RMSNorm(shape.width), nn.RMSNorm(shape.width)
        self.query, self.key, self.value, self.out = (_Linear(shape, shape.width, shape.width) for _ in range(4))
        self.gate, self.up = _Linear(shape, shape.width, shape.inner), _Linear(shape, shape.width, shape.inner)
        self.down = _Linear(shape, shape.inner, shape.width)

    def forward(self, x: torch.Tensor, cosine: torch.Tensor, sine: torch.Tensor) -> torch.Tensor:
        batch, length, width = x.shape
        normed = self.before_attention(x)
        split = (batch, length, self.heads, width // self.heads)
        query, key, value = (one(normed).view(split).transpose(1, 2) for one in (self.query, self.key, self.value))
        query, key = _rotated(query, cosine, sine), _rotated(key, cosine, sine)
        attended = F.scaled_dot_product_attention(query, key, value, is_causal=True)
        x = x + self.out(attended.transpose(1, 2).reshape(batch, length, width))
        normed = self.before_mlp(x)
        return x + self.down(F.silu(self.gate(normed)) * self.up(normed))


class Llama(nn.Module):
    """Every layer is an activation checkpoint, unless `recomputes` is False."""

    def __init__(self, shape: Shape, *, recomputes: bool = True) -> None:
        super().__init__()
        self.shape, self.recomputes = shape, recomputes
        self.embedding = _Embedding(shape)
        self.layers = nn.ModuleList(Layer(shape) for _ in range(shape.layers))
        self.norm = nn.RMSNorm(shape.width)
        self.head = _Linear(shape, shape.width, shape.vocabulary)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        """The mean loss of every next token. tokens: int64 [batch, sequence]."""
        x = self.embedding(tokens)
        half = self.shape.width // self.shape.heads // 2
        rates = 10000.0 ** (-torch.arange(half, device=tokens.device) / half)
        angles = torch.arange(tokens.shape[1], device=tokens.device)[:, None] * rates
        cosine, sine = angles.cos().to(x.dtype), angles.sin().to(x.dtype)
        for layer in self.layers:
            x = checkpoint(layer, x, cosine, sine, use_reentrant=False) if self.recomputes else layer(x, cosine, sine)
        logits = self.head(self.norm(x))
        # In pieces: the fp32 logits of a whole batch would be larger than anything else.
        targets = tokens.roll(-1, dims=1)
        total = torch.zeros((), device=tokens.device)
        for row, target in zip(logits, targets, strict=True):
            total = total + F.cross_entropy(row[:-1].float(), target[:-1], reduction="sum")
        return total / (tokens.shape[0] * (tokens.shape[1] - 1))


def batches(shape: Shape, micro_batch: int, count: int) -> list[torch.Tensor]:
    """`count` batches of bytes of the standard library's sources: int64 [micro_batch, sequence], the same every time."""
    needed = count * micro_batch * shape.sequence
    text = bytearray()
    for path in sorted(Path(sysconfig.get_paths()["stdlib"]).rglob("*.py")):
        if len(text) >= needed:
            break
        text += path.read_bytes()
    while len(text) < needed:
        text += text
    tokens = torch.frombuffer(text[:needed], dtype=torch.uint8).long()
    return list(tokens.view(count, micro_batch, shape.sequence))


def flops_of_step(shape: Shape, tokens: int, factor: int = 6) -> float:
    """`factor` 6: forward and backward; 8: with the forward that activation checkpointing does again. Attention left out."""
    return float(factor) * shape.numel * tokens


def describe(shape: Shape) -> dict[str, Any]:
    return {"parameters": shape.numel, "sequence": shape.sequence, "width": shape.width, "layers": shape.layers}
