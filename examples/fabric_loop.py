# SPDX-License-Identifier: Apache-2.0
"""Lightning Fabric's loop.

python examples/fabric_loop.py CHECKPOINT TEXT NVME_FOLDER OUT
"""

import sys
from pathlib import Path

import lightning
import torch
from torch.utils.data import DataLoader
from transformers import AutoModelForCausalLM, AutoTokenizer

import offload
from offload.integrations.fabric import OffloadStrategy

checkpoint, text, nvme, out = sys.argv[1:5]
LENGTH = 32

strategy = OffloadStrategy({"parameters": "nvme", "optimizer_states": "nvme", "nvme": nvme})
fabric = lightning.Fabric(devices=1, strategy=strategy)
fabric.launch()
tokens = AutoTokenizer.from_pretrained(checkpoint)(Path(text).read_text(), return_tensors="pt").input_ids[0][: 8 * LENGTH]
with offload.deferred_init():
    model = AutoModelForCausalLM.from_pretrained(checkpoint)
model, optimizer = fabric.setup(model, torch.optim.AdamW(model.parameters(), lr=1e-3))
loader = fabric.setup_dataloaders(DataLoader(tokens.reshape(-1, LENGTH), batch_size=2))
model.train()
for batch in loader:
    loss = model(input_ids=batch, labels=batch).loss
    fabric.backward(loss)
    fabric.clip_gradients(model, optimizer, max_norm=1.0)
    optimizer.step()
    optimizer.zero_grad()
    fabric.print(f"loss {loss.item():.4f}")
fabric.save(f"{out}/state", {"model": model, "optimizer": optimizer})  # fabric.load goes on from it
engine = strategy.engine
assert engine is not None  # made by fabric.setup
engine.export(f"{out}/model")
engine.close()
