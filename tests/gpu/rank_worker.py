# SPDX-License-Identifier: Apache-2.0
"""One rank of tests/gpu/test_ranks.py: trains on its half of every batch and prints a digest of the weights."""

from __future__ import annotations

import hashlib
import json
import os
import sys

import torch

import offload
from tests.gpu.loops import LENGTH, VOCABULARY, Language


def main(configs: list[dict[str, object]]) -> None:
    """One engine after the other: a process takes longer to start than all of them."""
    device = "cuda" if os.environ["OFFLOAD_ACCELERATOR"] == "cuda" else "cpu"
    torch.set_num_threads(1)
    torch.use_deterministic_algorithms(True)
    torch.distributed.init_process_group("gloo")
    for config in configs:
        print(json.dumps(train(config, device)), flush=True)
    torch.distributed.destroy_process_group()


def train(config: dict[str, object], device: str) -> dict[str, object]:
    """This rank's losses, and the digest of all weights."""
    rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    torch.manual_seed(0)
    model = Language()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, weight_decay=0.1)
    batches = torch.randint(0, VOCABULARY, (4, size, 2, LENGTH), generator=torch.Generator().manual_seed(1)).to(device)
    losses = []
    with offload.initialize(model, optimizer, config) as engine:
        for batch in batches:
            loss = model.loss(batch[rank])
            engine.backward(loss)
            engine.optimizer.step()
            engine.optimizer.zero_grad()
            losses.append(loss.item())
        total = hashlib.sha256()
        for name, value in sorted(engine.state_dict().items()):
            total.update(name.encode() + value.float().numpy().tobytes())
    return {"losses": losses, "digest": total.hexdigest()}


if __name__ == "__main__":
    main(json.loads(sys.argv[1]))
