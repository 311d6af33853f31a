"""What two ranks do with `offload.deepspeed`. Every function runs on both; arguments and results are JSON."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

import offload.deepspeed as deepspeed

from .conftest import CONFIG, small

for handler in deepspeed.logger.handlers:  # it logs to stdout, as DeepSpeed's; answers go there
    handler.setStream(sys.stderr)


def _config(**keys: Any) -> dict[str, Any]:
    return CONFIG | {"train_batch_size": 2} | keys


def tags(folder: str, validation: str) -> list[str]:
    """Each rank names a tag of its own."""
    engine = deepspeed.initialize(model=small(), config=_config(checkpoint={"tag_validation": validation}))[0]
    try:
        engine.save_checkpoint(folder, tag=f"rank-{dist.get_rank()}")
    finally:
        engine.destroy()
    return sorted(one.name for one in Path(folder).iterdir())


def init_block() -> list[float]:
    """initialize and training inside the block in which the model was built."""
    torch.manual_seed(0)
    with deepspeed.zero.Init():
        engine = deepspeed.initialize(model=small(), config=_config(zero_optimization={"stage": 3}))[0]
        losses = []
        for _ in range(2):
            loss = engine(torch.ones(1, 4)).square().mean()
            engine.backward(loss)
            engine.step()
            losses.append(loss.item())
    engine.destroy()
    return losses
