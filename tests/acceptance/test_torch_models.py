# SPDX-License-Identifier: Apache-2.0
"""Models that users bring: against plain PyTorch with torch.optim, in fp32."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from .models import (
    ALL_SETUPS,
    ON_CPU,
    ON_NVME,
    STEP_SETUPS,
    Block,
    Setup,
    Stack,
    byte_batches,
    gpt2,
    llama,
    vector_batches,
)
from .runs import Run, assert_same_bits, compare, simple_loop, token_loop

anywhere = pytest.mark.parametrize("setup", ALL_SETUPS, ids=lambda s: s.name)
at_step = pytest.mark.parametrize("setup", STEP_SETUPS, ids=lambda s: s.name)
few = pytest.mark.parametrize("setup", (ON_CPU, ON_NVME), ids=lambda s: s.name)


@anywhere
def test_llama(opened: Any, setup: Setup) -> None:
    compare(llama, token_loop(), setup, opened)


@anywhere
def test_gpt2_with_tied_embeddings(opened: Any, setup: Setup) -> None:
    _, weights = compare(gpt2, token_loop(), setup, opened)
    assert_same_bits(weights["lm_head.weight"], weights["transformer.wte.weight"])


@few
def test_generate(opened: Any, setup: Setup) -> None:
    """Greedy generation, with its key-value cache, between steps."""
    batches = byte_batches(4)

    def loop(run: Run) -> list[Any]:
        seen: list[Any] = []
        for tokens in batches:
            made = run.model.generate(
                tokens[:, :8], attention_mask=torch.ones(2, 8), max_new_tokens=6, do_sample=False, pad_token_id=0
            )
            assert made.shape == (2, 14)
            seen.append(made.tolist())
            loss = run.model(input_ids=tokens, labels=tokens).loss
            loss.backward()
            run.optimizer.step()
            run.optimizer.zero_grad()
            seen.append(loss.item())
        return seen

    compare(gpt2, loop, setup, opened)


@anywhere
def test_lora(opened: Any, setup: Setup) -> None:
    peft = pytest.importorskip("peft")

    def build() -> nn.Module:
        torch.manual_seed(1)
        options = peft.LoraConfig(r=4, lora_alpha=8, target_modules=["q_proj", "v_proj"], init_lora_weights=False)
        return peft.get_peft_model(llama(), options)

    start, weights = compare(build, token_loop(), setup, opened)
    for name in start:
        assert torch.equal(start[name], weights[name]) == ("lora_" not in name), name


class Attention(nn.Module):
    """nn.MultiheadAttention reads out_proj.weight itself; out_proj is never called."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.MultiheadAttention(16, 4, batch_first=True) for _ in range(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x[:, None, :] + torch.arange(3.0)[:, None]
        for layer in self.layers:
            x = x + layer(x, x, x, need_weights=False)[0]
        return x.mean(1)


@anywhere
def test_multihead_attention(opened: Any, setup: Setup) -> None:
    compare(Attention, simple_loop(), setup, opened, atol=1e-5)


@anywhere
def test_transformer_encoder_layer(opened: Any, setup: Setup) -> None:
    """In eval its fast path reads every weight of its children without calling any of them."""

    def build() -> nn.Module:
        torch.manual_seed(1)
        layer = nn.TransformerEncoderLayer(16, 4, 32, dropout=0.0, batch_first=True)
        return nn.TransformerEncoder(layer, 3, enable_nested_tensor=False)

    batches = vector_batches(6)

    def loop(run: Run) -> list[float]:
        seen = []
        for x, y in batches:
            run.model.eval()
            with torch.no_grad():
                seen.append(run.model(x[None]).sum().item())
            run.model.train()
            loss = F.mse_loss(run.model(x[None]), y[None])
            loss.backward()
            run.optimizer.step()
            run.optimizer.zero_grad()
            seen.append(loss.item())
        return seen

    compare(build, loop, setup, opened, atol=1e-5)


class ReadsItsChild(nn.Module):
    """The head is the embedding's weight, read by the root; `scale` is read of a block that is not running."""

    def __init__(self) -> None:
        super().__init__()
        self.wte = nn.Embedding(300, 64)
        self.blocks = nn.ModuleList(Block(64) for _ in range(3))
        self.head = nn.Linear(64, 300)  # never called, only read

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.wte(tokens)
        for block in self.blocks:
            x = block(x) + F.linear(x, self.blocks[0].down.weight[:, :64])
        return x @ self.wte.weight.T + F.linear(x, self.head.weight, self.head.bias)


@anywhere
def test_a_parent_that_reads_a_childs_weight(opened: Any, setup: Setup) -> None:
    batches = byte_batches(6)

    def loop(run: Run) -> list[float]:
        losses = []
        for tokens in batches:
            logits = run.model(tokens)
            loss = F.cross_entropy(logits[:, :-1].flatten(0, 1), tokens[:, 1:].flatten())
            loss.backward()
            run.optimizer.step()
            run.optimizer.zero_grad()
            losses.append(loss.item())
        return losses

    compare(ReadsItsChild, loop, setup, opened, atol=5e-6)


class Experts(nn.Module):
    """Top-1 routing by the data, over experts that are sometimes not chosen at all, in an order of their own."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList()
        for _ in range(2):
            layer = nn.Module()
            layer.gate = nn.Linear(16, 6)
            layer.experts = nn.ModuleList(Block() for _ in range(6))
            self.layers.append(layer)

    def forward(self, x: torch.Tensor, order: list[int]) -> torch.Tensor:
        for layer in self.layers:
            share, chosen = layer.gate(x).softmax(-1).max(-1)
            out = torch.zeros_like(x)
            for index in order:
                rows = (chosen == index).nonzero()[:, 0]
                if rows.numel():
                    out = out.index_add(0, rows, layer.experts[index](x[rows]) * share[rows, None])
            x = x + out
        return x


@anywhere
def test_mixture_of_experts(opened: Any, setup: Setup) -> None:
    batches = vector_batches(12, rows=4)
    orders = [torch.randperm(6, generator=torch.Generator().manual_seed(n)).tolist() for n in range(12)]

    def loop(run: Run) -> list[float]:
        losses = []
        for (x, y), order in zip(batches, orders, strict=True):
            loss = F.mse_loss(run.model(x, order), y)
            loss.backward()
            run.optimizer.step()
            run.optimizer.zero_grad()
            losses.append(loss.item())
        return losses

    compare(Experts, loop, setup, opened)


@few
def test_depth_that_changes_every_step(opened: Any, setup: Setup) -> None:
    """Stochastic depth and a reversed order: the traced order is never the next one."""

    class Skips(Stack):
        def forward(self, x: torch.Tensor, order: tuple[int, ...] = (0, 1, 2)) -> torch.Tensor:
            for index in order:
                x = self.blocks[index](x)
            return x

    batches = vector_batches(6)
    orders = [(0, 1, 2), (2, 1, 0), (1,), (0, 0, 2, 2), (), (2, 0)]

    def loop(run: Run) -> None:
        for (x, y), order in zip(batches, orders, strict=True):
            x = x.clone().requires_grad_()
            F.mse_loss(run.model(x, order), y).backward()
            run.optimizer.step()
            run.optimizer.zero_grad()

    compare(Skips, loop, setup, opened)
