# SPDX-License-Identifier: Apache-2.0
"""The setups, data, models and optimizers that the acceptance tests share. Everything is tiny and seeded."""

from __future__ import annotations

import sysconfig
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

PLACES = ("device", "cpu", "nvme")
PLACEMENTS = tuple((parameters, states) for parameters in PLACES for states in PLACES)


@dataclass(frozen=True)
class Setup:
    """Where the states lie, on which accelerator, and when updates run."""

    parameters: str = "device"
    optimizer_states: str = "device"
    accelerator: str = "cpu"
    update: str = "auto"

    @property
    def name(self) -> str:
        return f"{self.parameters}+{self.optimizer_states}-{self.accelerator}-{self.update}"

    def fields(self, directory: Path | list[Path], **more: Any) -> dict[str, Any]:
        """The fields of a Config; the nvme path is given only where something lies there."""
        fields: dict[str, Any] = {
            "parameters": self.parameters,
            "optimizer_states": self.optimizer_states,
            "update": self.update,
        }
        if "nvme" in (self.parameters, self.optimizer_states):
            fields["nvme"] = [str(one) for one in directory] if isinstance(directory, list) else str(directory)
        return fields | more


IN_MEMORY = Setup()
ON_CPU = Setup("cpu", "cpu", "deferred")
ON_CPU_IN_PLACE = Setup("cpu", "cpu", "cpu")
ON_NVME = Setup("nvme", "nvme", "deferred")
ON_NVME_IN_PLACE = Setup("nvme", "nvme", "cpu")
ON_NVME_AT_STEP = Setup("nvme", "nvme", "deferred", "step")
ON_NVME_IN_BACKWARD = Setup("nvme", "nvme", "deferred", "backward")
IN_MEMORY_IN_BACKWARD = Setup(update="backward")
ON_CPU_IN_BACKWARD = Setup("cpu", "cpu", "deferred", "backward")
IN_PLACE_IN_BACKWARD = Setup("nvme", "nvme", "cpu", "backward")

STEP_SETUPS = (IN_MEMORY, ON_CPU, ON_CPU_IN_PLACE, ON_NVME)
ALL_SETUPS = (*STEP_SETUPS, ON_NVME_AT_STEP, ON_NVME_IN_BACKWARD)


@cache
def source_text(nbytes: int = 1 << 16) -> bytes:
    """Real text: the first bytes of the standard library's own sources."""
    parts, held = [], 0
    for path in sorted(Path(sysconfig.get_paths()["stdlib"]).glob("*.py")):
        parts.append(path.read_bytes())
        held += len(parts[-1])
        if held >= nbytes:
            break
    return b"".join(parts)[:nbytes]


def byte_batches(count: int, batch: int = 2, length: int = 16, seed: int = 0) -> list[torch.Tensor]:
    """`count` tensors [batch, length] int64 of bytes of text, all different."""
    text = torch.frombuffer(bytearray(source_text()), dtype=torch.uint8).long()
    draw = torch.Generator().manual_seed(seed)
    starts = torch.randint(0, text.numel() - length, (count, batch), generator=draw)
    return [torch.stack([text[s : s + length] for s in row.tolist()]) for row in starts]


def vector_batches(count: int, width: int = 16, rows: int = 6, seed: int = 0) -> list[tuple[torch.Tensor, torch.Tensor]]:
    draw = torch.Generator().manual_seed(seed)
    return [(torch.randn(rows, width, generator=draw), torch.randn(rows, width, generator=draw)) for _ in range(count)]


def llama(layers: int = 3, width: int = 32, vocabulary: int = 256) -> nn.Module:
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(1)
    return LlamaForCausalLM(
        LlamaConfig(
            vocab_size=vocabulary,
            hidden_size=width,
            intermediate_size=2 * width,
            num_hidden_layers=layers,
            num_attention_heads=4,
            num_key_value_heads=2,
            max_position_embeddings=64,
            use_cache=False,
        )
    )


def gpt2(layers: int = 3, width: int = 32) -> nn.Module:
    """Tied input and output embeddings; transposed (Conv1D) weights; no dropout, so that runs are repeatable."""
    from transformers import GPT2Config, GPT2LMHeadModel

    torch.manual_seed(1)
    return GPT2LMHeadModel(
        GPT2Config(
            vocab_size=256,
            n_positions=64,
            n_embd=width,
            n_layer=layers,
            n_head=4,
            resid_pdrop=0.0,
            embd_pdrop=0.0,
            attn_pdrop=0.0,
        )
    )


class Block(nn.Module):
    def __init__(self, width: int = 16) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up = nn.Linear(width, 3 * width)
        self.down = nn.Linear(3 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(torch.tanh(self.up(self.norm(x))))


class Stack(nn.Module):
    """The plain case: a list of blocks between two linear layers."""

    def __init__(self, width: int = 16, blocks: int = 3) -> None:
        super().__init__()
        self.inlet = nn.Linear(width, width)
        self.blocks = nn.ModuleList(Block(width) for _ in range(blocks))
        self.outlet = nn.Linear(width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.inlet(x)
        for block in self.blocks:
            x = block(x)
        return self.outlet(x)


def stack(width: int = 16, blocks: int = 3) -> Stack:
    torch.manual_seed(1)
    return Stack(width, blocks)


class Sometimes(nn.Module):
    """`sometimes` is used when asked, `never` not at all; both lie in one unit with parameters that always are."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(2))
        for block in self.blocks:
            block.sometimes = nn.Parameter(torch.randn(16))
            block.never = nn.Parameter(torch.randn(7, 3))
        self.alone = nn.ModuleList([Block(), Block()])  # whole units that are sometimes not used

    def forward(self, x: torch.Tensor, use: bool) -> torch.Tensor:
        for block, alone in zip(self.blocks, self.alone, strict=True):
            x = block(x)
            if use:
                x = alone(x * block.sometimes)
        return x


class Tied(nn.Module):
    """Ties of every kind: one Parameter under two names, in two blocks, and one module in two places."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(3))
        self.blocks[2].up.weight = self.blocks[0].up.weight
        self.first = nn.Linear(16, 16)
        self.last = nn.Linear(16, 16)
        self.last.weight = self.first.weight
        self.again = self.blocks[1]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.first(x)
        for block in self.blocks:
            x = block(x)
        return self.last(self.again(x))


class Normalized(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        # No bias before a normalisation: its gradient is nothing but rounding, which Adam would make steps of.
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(16, 16, bias=False), nn.BatchNorm1d(16)) for _ in range(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = torch.tanh(block(x))
        return x


class ByteModel(nn.Module):
    """A language model on bytes that is called as Hugging Face's are, for workers that would import those for long."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.embedding = nn.Embedding(256, width)
        self.blocks = nn.ModuleList(Block(width) for _ in range(4))
        self.head = nn.Linear(width, 256, bias=False)

    def forward(self, input_ids: torch.Tensor, labels: torch.Tensor) -> SimpleNamespace:
        x = self.embedding(input_ids)
        x = x + x.roll(1, dims=1)
        for block in self.blocks:
            x = block(x)
        logits = self.head(x).float()
        return SimpleNamespace(loss=F.cross_entropy(logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten()))


# eps is large on purpose. It makes a wrong *scale* of a gradient visible (Adam alone forgives a factor), and it keeps
# gradients that are mathematically zero, and numerically noise, from moving weights by a whole learning rate.
ADAM_OPTIONS: dict[str, Any] = {"lr": 1e-2, "betas": (0.8, 0.95), "eps": 1e-4, "weight_decay": 0.1, "foreach": False}


def adamw(model: nn.Module, **options: Any) -> torch.optim.Optimizer:
    parameters = [p for p in model.parameters() if p.requires_grad]
    return torch.optim.AdamW(parameters, **(ADAM_OPTIONS | options))


def two_groups(model: nn.Module, kind: type[torch.optim.Optimizer] = torch.optim.AdamW, **options: Any) -> Any:
    """Matrices decay, the rest does not and learns faster: two groups that differ in every option that may differ."""
    trained = [p for p in model.parameters() if p.requires_grad]
    return kind(
        [
            {"params": [p for p in trained if p.dim() >= 2], "weight_decay": 0.1},
            {"params": [p for p in trained if p.dim() < 2], "weight_decay": 0.0, "lr": 2e-2, "betas": (0.7, 0.9)},
        ],
        **(ADAM_OPTIONS | options),
    )


class MasterOptimizer:
    """Plain PyTorch's mixed precision: fp32 masters under torch's own AdamW, low-precision weights copied from them."""

    def __init__(self, model: nn.Module, **options: Any) -> None:
        self.low = {name: p for name, p in model.named_parameters() if p.requires_grad}
        self.masters = {name: p.detach().float().clone().requires_grad_() for name, p in self.low.items()}
        self.inner = torch.optim.AdamW(list(self.masters.values()), **(ADAM_OPTIONS | options))

    def step(self) -> None:
        for name, p in self.low.items():
            self.masters[name].grad = None if p.grad is None else p.grad.float()
        self.inner.step()
        for name, p in self.low.items():
            with torch.no_grad():
                p.copy_(self.masters[name])

    def zero_grad(self) -> None:
        for p in self.low.values():
            p.grad = None
