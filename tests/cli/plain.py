# SPDX-License-Identifier: Apache-2.0
"""What `train` computes, in ordinary PyTorch: the oracle of its losses."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import torch
from torch import nn

from offload.cli.corpus import ByteStream, Windows, find_documents


def new_model(config_path: Path, seed: int = 0) -> nn.Module:
    from transformers import AutoConfig, AutoModelForCausalLM

    torch.manual_seed(seed)
    return AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(str(config_path)))


def windows(data: Path, sequence: int, batch: int) -> Windows:
    return Windows(ByteStream(find_documents(str(data))), sequence, batch, seed=0)


def adamw(model: nn.Module, lr: float) -> torch.optim.Optimizer:
    matrices = [parameter for parameter in model.parameters() if parameter.dim() >= 2]
    vectors = [parameter for parameter in model.parameters() if parameter.dim() < 2]
    groups = [{"params": matrices, "weight_decay": 0.1}, {"params": vectors, "weight_decay": 0.0}]
    return torch.optim.AdamW(groups, lr=lr, betas=(0.9, 0.95), eps=1e-8)


def losses(model: nn.Module, data: Windows, *, steps: int, accumulate: int, lr: float, warmup: int, clip: float) -> list[float]:
    """The mean loss of each step, with a linear warm-up and half a cosine down to a tenth of `lr`."""
    optimizer, batches = adamw(model, lr), data.training_batches()
    result = []
    for step in range(steps):
        share = (step - warmup) / (steps - warmup)
        factor = (step + 1) / warmup if step < warmup else 0.1 + 0.9 * 0.5 * (1 + math.cos(math.pi * share))
        for group in optimizer.param_groups:
            group["lr"] = lr * factor
        total = 0.0
        for _ in range(accumulate):
            batch = next(batches)
            loss = model(input_ids=batch, labels=batch).loss
            (loss / accumulate).backward()
            total += loss.item()
        torch.nn.utils.clip_grad_norm_(model.parameters(), clip)
        optimizer.step()
        optimizer.zero_grad()
        result.append(total / accumulate)
    return result


def held_out_loss(model: nn.Module, data: Windows, count: int) -> float:
    values: list[Any] = []
    with torch.no_grad():
        for batch in data.held_out_batches(count):
            logits = model(input_ids=batch).logits[:, :-1].flatten(0, 1)
            values.append(nn.functional.cross_entropy(logits, batch[:, 1:].flatten(), reduction="none"))
    return torch.cat(values).mean().item()
