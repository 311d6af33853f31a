# SPDX-License-Identifier: Apache-2.0
"""Accelerate's loop, with accumulation, clipping and its own saves.

python examples/accelerate_loop.py CHECKPOINT TEXT NVME_FOLDER OUT
"""

import sys
from pathlib import Path

import torch
from accelerate import Accelerator
from torch.utils.data import DataLoader
from transformers import AutoModelForCausalLM, AutoTokenizer

import offload
from offload.integrations.accelerate import prepare

checkpoint, text, nvme, out = sys.argv[1:5]
LENGTH = 32

accelerator = Accelerator(gradient_accumulation_steps=2)
tokens = AutoTokenizer.from_pretrained(checkpoint)(Path(text).read_text(), return_tensors="pt").input_ids[0][: 16 * LENGTH]
with offload.deferred_init():
    model = AutoModelForCausalLM.from_pretrained(checkpoint)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
engine = prepare(accelerator, model, optimizer, {"parameters": "nvme", "optimizer_states": "nvme", "nvme": nvme})
loader = DataLoader(tokens.reshape(-1, LENGTH), batch_size=2)
model, optimizer, loader = accelerator.prepare(engine.module, engine.optimizer, loader)
for batch in loader:
    with accelerator.accumulate(model):
        loss = model(input_ids=batch, labels=batch).loss
        accelerator.backward(loss)
        if accelerator.sync_gradients:
            accelerator.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
    accelerator.print(f"loss {loss.item():.4f}")
accelerator.save_state(f"{out}/state")  # load_state goes on from it
engine.export(f"{out}/model")  # for from_pretrained
engine.close()
