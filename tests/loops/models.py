# SPDX-License-Identifier: Apache-2.0
"""Small models of every kind that users train, put together from blocks; their data, optimizers and fuses."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.utils import parametrizations
from torch.utils.checkpoint import checkpoint

import offload

from .programs import Model

ROWS = 3


def device() -> torch.device:
    """Where batches lie, and the plain model: what `Stage` was told, in each of its processes."""
    return torch.device(os.environ.get("LOOPS_DEVICE", "cpu"))


class Boom(ValueError):
    """The user's own error."""


class Fuse:
    """Raises once where it is armed: before the block of that number in forward, or behind it in backward."""

    def __init__(self) -> None:
        self.forward_at = self.backward_at = -1
        self.error: type[BaseException] = Boom

    def reaches(self, where: str, number: int) -> None:
        if getattr(self, where) == number:
            setattr(self, where, -1)
            raise self.error("the fuse")


class _Watched(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, fuse: Fuse, number: int) -> torch.Tensor:
        ctx.fuse, ctx.number = fuse, number
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        ctx.fuse.reaches("backward_at", ctx.number)
        return gradient, None, None


class Block(nn.Module):
    """What every block has: a weight that another may share. `inner` is what its kind adds."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.mix = nn.Linear(width, width)

    def forward(self, x: torch.Tensor, batch: int) -> torch.Tensor:
        return x + torch.tanh(self.mix(x)) + 0.5 * self.inner(x, batch)

    def inner(self, x: torch.Tensor, batch: int) -> torch.Tensor:
        return torch.zeros_like(x)


class Mlp(Block):
    def __init__(self, width: int) -> None:
        super().__init__(width)
        self.norm = nn.LayerNorm(width)
        self.up = nn.Linear(width, 3 * width)
        self.down = nn.Linear(3 * width, width)

    def inner(self, x: torch.Tensor, batch: int) -> torch.Tensor:
        return self.down(torch.tanh(self.up(self.norm(x))))


class Large(Block):
    """More elements than one chunk of the tests holds, so that its states and gradients are in many."""

    def __init__(self, width: int) -> None:
        super().__init__(width)
        self.up = nn.Linear(width, 1500)
        self.down = nn.Linear(1500, width, bias=False)

    def inner(self, x: torch.Tensor, batch: int) -> torch.Tensor:
        return self.down(torch.tanh(self.up(x)))


class Attention(Block):
    """Reads the weight of a child that it does not call."""

    def __init__(self, width: int) -> None:
        super().__init__(width)
        self.heads = nn.MultiheadAttention(width, 1)

    def inner(self, x: torch.Tensor, batch: int) -> torch.Tensor:
        # Without a key of zero the keys' bias changes nothing: its gradient is rounding, which Adam makes large.
        self.heads.add_zero_attn = self.training
        return self.heads(x, x, x, need_weights=False)[0]


class Experts(Block):
    """A mixture: which experts are used, and in which order, depends on the batch."""

    def __init__(self, width: int) -> None:
        super().__init__(width)
        self.experts = nn.ModuleList(nn.Linear(width, width) for _ in range(3))

    def inner(self, x: torch.Tensor, batch: int) -> torch.Tensor:
        for index in ((0, 1), (2,), (1, 0, 2), ())[batch % 4]:
            x = x + torch.tanh(self.experts[index](x))
        return x


class Lora(Block):
    """A frozen base with a trained product beside it."""

    def __init__(self, width: int) -> None:
        super().__init__(width)
        self.base = nn.Linear(width, width).requires_grad_(False)
        self.a = nn.Parameter(torch.randn(width, 1))
        self.b = nn.Parameter(torch.zeros(1, width))

    def inner(self, x: torch.Tensor, batch: int) -> torch.Tensor:
        return self.base(x) + x @ self.a @ self.b


class Parametrised(Block):
    """Its weight is computed from two parameters whenever it is read."""

    def __init__(self, width: int) -> None:
        super().__init__(width)
        self.normed = parametrizations.weight_norm(nn.Linear(width, width))

    def inner(self, x: torch.Tensor, batch: int) -> torch.Tensor:
        return torch.tanh(self.normed(x))


class Odd(Block):
    """A scalar, one that is used with some batches, and one that never is."""

    def __init__(self, width: int) -> None:
        super().__init__(width)
        self.scale = nn.Parameter(torch.tensor(0.5))
        self.sometimes = nn.Parameter(torch.ones(1, width))
        self.never = nn.Parameter(torch.ones(3, 5, 1))

    def inner(self, x: torch.Tensor, batch: int) -> torch.Tensor:
        x = x * self.scale
        return x * self.sometimes if batch % 2 else x


class Normed(Block):
    """Running statistics: buffers that every forward in training mode changes."""

    def __init__(self, width: int) -> None:
        super().__init__(width)
        self.norm = nn.BatchNorm1d(width)

    def inner(self, x: torch.Tensor, batch: int) -> torch.Tensor:
        return self.norm(x)


class Dropping(Block):
    def inner(self, x: torch.Tensor, batch: int) -> torch.Tensor:
        return F.dropout(self.mix(x), 0.25, self.training)


class Half(Block):
    """A layer of another dtype than its block."""

    def __init__(self, width: int) -> None:
        super().__init__(width)
        self.narrow = nn.Linear(width, width).to(torch.bfloat16)

    def inner(self, x: torch.Tensor, batch: int) -> torch.Tensor:
        return self.narrow(x.to(self.narrow.weight.dtype)).to(x.dtype)


BLOCKS: dict[str, type[Block]] = {
    "mlp": Mlp, "large": Large, "attention": Attention, "experts": Experts, "lora": Lora, "parametrised": Parametrised,
    "odd": Odd, "normed": Normed, "dropping": Dropping, "half": Half,
}  # fmt: skip


class Subject(nn.Module):
    """The model of a program."""

    def __init__(self, spec: Model) -> None:
        super().__init__()
        self.fuse, self.checkpointing, self.reused = Fuse(), spec.checkpointing, spec.reused
        self.inlet = nn.Linear(spec.width, spec.width)
        self.blocks = nn.ModuleList(BLOCKS[kind](spec.width) for kind in spec.blocks)
        self.outlet = nn.Linear(spec.width, spec.width, bias=False)
        if spec.tie == "leaf":
            self.outlet.weight = self.inlet.weight
        if spec.tie == "blocks":
            self.blocks[-1].mix.weight = self.blocks[0].mix.weight
        for number in spec.frozen:
            if number < len(self.blocks):
                self.blocks[number].requires_grad_(False)

    def forward(self, x: torch.Tensor, batch: int) -> torch.Tensor:
        x = self.inlet(x)
        order = [*range(len(self.blocks)), *([0] if self.reused else [])]
        for number in order:
            self.fuse.reaches("forward_at", number)
            block = self.blocks[number]
            if self.checkpointing and torch.is_grad_enabled():
                x = checkpoint(block, x, batch, use_reentrant=self.checkpointing == "reentrant")
            else:
                x = block(x, batch)
            x = _Watched.apply(x, self.fuse, number)
        return self.outlet(x)


def build(spec: Model, seed: int = 1) -> Subject:
    torch.manual_seed(seed)
    return Subject(spec)


def mark(model: Subject, which: str) -> None:
    """Mark units of the user's own; see `Setup`."""
    chosen: dict[str, list[nn.Module]] = {
        "": [],
        "mixes": [block.mix for block in model.blocks],
        "second": list(model.blocks[1:2]),
        "outlet": [model.outlet],
        "inner": [
            one
            for block in model.blocks
            for one in block.children()
            if one is not block.mix and not isinstance(one, nn.ModuleList)
        ],
    }
    for module in chosen[which]:
        offload.unit(module)


def data(width: int, batch: int, rank: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Inputs and targets [ROWS, width] fp32, of each rank its own."""
    draw = torch.Generator().manual_seed(1000 * batch + rank)
    x, y = (torch.randn(ROWS, width, generator=draw).to(device()) for _ in range(2))
    return x, y


def loss_of(model: nn.Module, width: int, batch: int, rank: int) -> torch.Tensor:
    x, y = data(width, batch, rank)
    return F.mse_loss(model(x, batch).float(), y)


# eps is large: a gradient that is nothing but rounding must not move a weight by a whole learning rate.
_OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "adamw": lambda groups: torch.optim.AdamW(groups, lr=1e-2, betas=(0.8, 0.95), eps=1e-4, weight_decay=0.1, foreach=False),
    "adam": lambda groups: torch.optim.Adam(groups, lr=1e-2, eps=1e-4, weight_decay=0.01, foreach=False),
    "sgd": lambda groups: torch.optim.SGD(groups, lr=1e-2, momentum=0.9, foreach=False),
    "adagrad": lambda groups: torch.optim.Adagrad(groups, lr=1e-2, eps=1e-4, foreach=False),
    "lion": lambda groups: offload.Lion(groups, lr=1e-3, weight_decay=0.1),
}


def optimizer_of(spec: Model, model: nn.Module) -> torch.optim.Optimizer:
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad or spec.all_in_groups]
    groups: list[dict[str, Any]] = [{"params": trained}]
    if spec.groups == 2:
        groups = [{"params": trained[::2]}, {"params": trained[1::2], "lr": 3e-3, "weight_decay": 0.0}]
    return _OPTIMIZERS[spec.optimizer]([group for group in groups if group["params"]])
