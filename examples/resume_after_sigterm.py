# SPDX-License-Identifier: Apache-2.0
"""A run on a machine that may be taken away: SIGTERM saves and ends it, and the same command goes on to the bit.

python examples/resume_after_sigterm.py CHECKPOINT TEXT NVME_FOLDER OUT
"""

import sys
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

import offload

checkpoint, text, nvme, out = sys.argv[1:5]
LENGTH, STEPS = 32, 40

with offload.deferred_init():
    model = AutoModelForCausalLM.from_pretrained(checkpoint)
tokens = AutoTokenizer.from_pretrained(checkpoint)(Path(text).read_text(), return_tensors="pt").input_ids[0]
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
config = {"parameters": "nvme", "optimizer_states": "nvme", "nvme": nvme}
with offload.initialize(model, optimizer, config) as engine:
    model.train()
    state = engine.resume_or_start(f"{out}/checkpoints", catch_sigterm=True)
    for step in range(state["step"] if state else 0, STEPS):
        batch = tokens[step * LENGTH : (step + 1) * LENGTH][None].to(model.device)
        loss = model(input_ids=batch, labels=batch).loss
        loss.backward()
        engine.optimizer.step()
        engine.optimizer.zero_grad()
        print(f"step {step} loss {loss.item():.9f}", flush=True)
        if step % 10 == 9:
            engine.save_checkpoint(
                f"{out}/checkpoints/step-{step + 1}", client_state={"step": step + 1}, keep_last=2, wait=False
            )
        engine.exit_if_terminated(lambda: {"step": step + 1})  # noqa: B023  (called at once)
    engine.export(f"{out}/model")
