# SPDX-License-Identifier: Apache-2.0
"""The README's loop as a user's own file, for `mypy --strict` in `make check`. `test_package.py` holds it to the README."""

from collections.abc import Iterable
from typing import Any

import torch
from torch import nn

import offload


class MyTransformer(nn.Module):
    pass


loader: Iterable[dict[str, Any]] = []

with offload.deferred_init():  # the model is never in memory as a whole
    model = MyTransformer()
optimizer = torch.optim.AdamW(model.parameters(), lr=3e-4, weight_decay=0.1)
engine = offload.initialize(model, optimizer, {"parameters": "nvme", "optimizer_states": "nvme", "nvme": "/mnt/nvme0/run"})
for batch in loader:
    engine.backward(model(**batch).loss)  # loss.backward(), with the loss scaled in fp16
    engine.optimizer.step()
    engine.optimizer.zero_grad()
