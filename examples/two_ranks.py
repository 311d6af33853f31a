# SPDX-License-Identifier: Apache-2.0
"""The plain loop on several ranks: parameters, gradients and states are partitioned across them.

torchrun --nproc-per-node=2 examples/two_ranks.py CHECKPOINT TEXT NVME_FOLDER OUT
"""

import os
import sys
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

import offload

checkpoint, text, nvme, out = sys.argv[1:5]
rank, ranks = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
LENGTH, STEPS = 32, 4

with offload.deferred_init():
    model = AutoModelForCausalLM.from_pretrained(checkpoint)
tokens = AutoTokenizer.from_pretrained(checkpoint)(Path(text).read_text(), return_tensors="pt").input_ids[0]
rows = tokens[: STEPS * ranks * LENGTH].reshape(STEPS, ranks, LENGTH)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
config = {"parameters": "nvme", "optimizer_states": "nvme", "nvme": nvme, "max_grad_norm": 1.0}
with offload.initialize(model, optimizer, config) as engine:  # starts the process group
    model.train()
    for step in range(STEPS):
        batch = rows[step, rank][None].to(model.device)
        loss = model(input_ids=batch, labels=batch).loss
        loss.backward()
        engine.optimizer.step()
        engine.optimizer.zero_grad()
        print(f"rank {rank} step {step} loss {loss.item():.4f}")
    engine.export(out)
