# SPDX-License-Identifier: Apache-2.0
"""Writes docs/performance/zero_memory.json: what each rank needs of a 7 B model by ZeRO stage, as the planner says. No GPU."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

SHAPE = {
    "vocab_size": 32000,
    "hidden_size": 4096,
    "intermediate_size": 11008,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
}
RANKS = (2, 8)
OUT = Path(__file__).resolve().parent.parent / "docs" / "performance" / "zero_memory.json"
KINDS = ("parameters", "gradients", "optimizer states")
WHOLE = "gradients before their reduction"
"""Of all parameters below stage 2, of two units from there on."""


def measured(ranks: tuple[int, ...] = RANKS) -> dict[str, Any]:
    """The content of the file. Nothing is allocated: the model lies on the meta device."""
    os.environ |= {"OFFLOAD_ACCELERATOR": "deferred", "OFFLOAD_DEVICE_NBYTES": str(1 << 50)}
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    import offload
    from offload.cli.plans.outline import Outline

    with torch.device("meta"):
        model = LlamaForCausalLM(LlamaConfig(**SHAPE, tie_word_embeddings=False))
    optimizer = torch.optim.AdamW(model.parameters())
    results = []
    for count, stages in ((1, (3,)), *((count, range(4)) for count in ranks)):
        for stage in stages:
            config = offload.Config(stage=stage, parameters="device", optimizer_states="device", dtype="bf16")
            with Outline(model, optimizer, config, count) as outline:
                lines = outline.placement().plan.lines
                numel = outline.parameter_numel
            nbytes = {kind: sum(line.nbytes for line in lines if line.purpose == kind) for kind in KINDS}
            if stage < 2:
                nbytes["gradients"] += sum(line.nbytes for line in lines if line.purpose == WHOLE)
            rest = sum(line.nbytes for line in lines) - sum(nbytes.values())
            results.append({"stage": stage, "ranks": count, **nbytes, "buffers": rest})
    return {"parameter_numel": numel, "shape": SHAPE, "results": results}


if __name__ == "__main__":
    OUT.write_text(json.dumps(measured(), indent=2) + "\n")
