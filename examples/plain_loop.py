# SPDX-License-Identifier: Apache-2.0
"""Train a causal language model from a local checkpoint on text, parameters and states on NVMe, in a plain loop.

python examples/plain_loop.py CHECKPOINT TEXT NVME_FOLDER OUT
"""

import sys
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

import offload

checkpoint, text, nvme, out = sys.argv[1:5]
LENGTH, STEPS = 32, 4

with offload.deferred_init():  # nothing is read yet
    model = AutoModelForCausalLM.from_pretrained(checkpoint)
tokens = AutoTokenizer.from_pretrained(checkpoint)(Path(text).read_text(), return_tensors="pt").input_ids[0]
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, weight_decay=0.1)
config = {"parameters": "nvme", "optimizer_states": "nvme", "nvme": nvme, "max_grad_norm": 1.0}
with offload.initialize(model, optimizer, config) as engine:
    model.train()
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(engine.optimizer, STEPS)
    for step in range(STEPS):
        batch = tokens[step * LENGTH : (step + 1) * LENGTH][None].to(model.device)
        loss = model(input_ids=batch, labels=batch).loss
        loss.backward()
        engine.optimizer.step()
        engine.optimizer.zero_grad()
        scheduler.step()
        print(f"step {step} loss {loss.item():.4f} norm {engine.grad_norm:.3f}")
    engine.export(out)  # for from_pretrained
