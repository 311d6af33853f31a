# SPDX-License-Identifier: Apache-2.0
"""A training that the real DeepSpeed and the drop-in both run, word for word: one JSON argument, one JSON result.

    python deepspeed_peer.py '{"config": {...}, "steps": 4}'                         by whatever `import deepspeed` is
    python -m offload.deepspeed deepspeed_peer.py '{"config": {...}, "steps": 4}'    by the drop-in

The model has what checkpoints stumble over: a tied head, a frozen layer, a buffer, two groups, sizes that no number of ranks
divides.
"""

from __future__ import annotations

import json
import os
import resource
import sys
import time
from typing import Any

os.environ.setdefault("DS_ACCELERATOR", "cpu")

import deepspeed
import torch
from torch import nn

VOCABULARY = 29


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(width), nn.Linear(width, 3 * width), nn.Linear(3 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(torch.tanh(self.up(self.norm(x))))


class Tower(nn.Module):
    """tokens [batch, length] -> logits [batch, length, VOCABULARY]"""

    def __init__(self, width: int, depth: int) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, width)
        nn.init.normal_(self.embed.weight, std=0.02)  # a training that diverges makes much of every rounding
        self.blocks = nn.ModuleList([Block(width) for _ in range(depth)])
        self.adapter = nn.Linear(width, width)
        self.adapter.requires_grad_(False)
        self.head = nn.Linear(width, VOCABULARY, bias=False)
        self.head.weight = self.embed.weight
        self.register_buffer("seen", torch.zeros(3))

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embed(tokens)
        for block in self.blocks:
            x = block(x)
        with torch.no_grad():
            self.seen += 1
        return self.head(self.adapter(x))


def groups(model: nn.Module, one_decay: bool) -> list[dict[str, Any]]:
    named = [(name, one) for name, one in model.named_parameters() if one.requires_grad]
    plain = [one for name, one in named if "norm" in name or name.endswith("bias")]
    return [
        {"params": [one for _, one in named if not any(one is other for other in plain)], "weight_decay": 0.1},
        {"params": plain, "weight_decay": 0.1 if one_decay else 0.0},
    ]


def _peak_nbytes() -> int:
    return 1024 * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss


def main(given: dict[str, Any]) -> dict[str, Any]:
    """given: config; width, depth; steps; first (the number of the first step); load, save: [folder, tag];
    load_keywords; threads; one_decay: both groups have the first one's weight decay."""
    torch.set_num_threads(given.get("threads", 1))
    torch.manual_seed(0)
    imported_nbytes = _peak_nbytes()
    model = Tower(given.get("width", 9), given.get("depth", 2))
    engine, _, _, _ = deepspeed.initialize(
        model=model,
        model_parameters=groups(model, given.get("one_decay", False)),
        config=given["config"],
        dist_init_required=None,
    )
    rank, ranks = torch.distributed.get_rank(), torch.distributed.get_world_size()
    if "load" in given:
        folder, tag = given["load"]
        path, _ = engine.load_checkpoint(folder, tag=tag, **given.get("load_keywords", {}))
        assert path is not None, given["load"]
    losses, seconds, rates, norms = [], [], [], []
    first = given.get("first", 0)
    for step in range(first, first + given["steps"]):
        begun, summed = time.process_time(), 0.0
        for micro in range(engine.gradient_accumulation_steps()):
            drawn = torch.Generator().manual_seed(1000 * step + 10 * micro + rank)
            tokens = torch.randint(0, VOCABULARY, (engine.train_micro_batch_size_per_gpu(), 7), generator=drawn)
            logits = engine(tokens)
            loss = nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1).float(), tokens[:, 1:].flatten())
            engine.backward(loss)
            engine.step()
            summed += loss.item()
        seconds.append(time.process_time() - begun)
        losses.append(summed / engine.gradient_accumulation_steps())
        rates.append(engine.get_lr())
        norms.append(float(engine.get_global_grad_norm() or 0.0))
    if "save" in given:
        folder, tag = given["save"]
        engine.save_checkpoint(folder, tag=tag, **given.get("save_keywords", {}))
    return {
        "losses": losses, "rates": rates, "norms": norms, "cpu_seconds": seconds, "ranks": ranks, "rank": rank,
        "seen": model.seen.tolist(), "global_steps": engine.global_steps,
        "peak_nbytes": _peak_nbytes(),
        "imported_nbytes": imported_nbytes,
    }  # fmt: skip


if __name__ == "__main__":
    answer = main(json.loads(sys.argv[1]))
    print()
    print(json.dumps(answer), flush=True)
    torch.distributed.barrier()
