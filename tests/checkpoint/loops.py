# SPDX-License-Identifier: Apache-2.0
"""A training loop that can stop and go on: batches, schedule and state are all functions of the step."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch

from ..acceptance.models import ByteModel, byte_batches, two_groups
from ..acceptance.runs import Run

STEPS, SAVED_AT = 6, 3
BATCHES = byte_batches(2 * STEPS)


def byte_model(seed: int = 1, width: int = 16) -> ByteModel:
    torch.manual_seed(seed)
    return ByteModel(width)


def schedule(optimizer: torch.optim.Optimizer) -> torch.optim.lr_scheduler.LambdaLR:
    return torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1.0 / (1.0 + 0.2 * step))


def train(run: Run, scheduler: Any, steps: Iterable[int], overflow_step: int | None = None) -> list[float]:
    """Two micro-batches a step, with the schedule; every micro-batch's loss."""
    losses = []
    for step in steps:
        for micro in range(2):
            tokens = BATCHES[2 * step + micro]
            with run.no_sync() if micro == 0 else contextlib.nullcontext():
                loss = run.model(input_ids=tokens, labels=tokens).loss / 2
                run.engine.backward(loss * 1e8 if step == overflow_step else loss)
            losses.append(loss.item())
        run.optimizer.step()
        scheduler.step()
        run.optimizer.zero_grad()
    return losses


class Resumable:
    """An engine with its schedule, as one script would have them."""

    def __init__(self, opened: Any, setup: Any, seed: int = 1, model: Any = None, **fields: Any) -> None:
        self.model = byte_model(seed) if model is None else model
        self.engine = opened(self.model, two_groups(self.model), setup, **fields)
        self.run = Run(self.model, self.engine.optimizer, self.engine)
        self.scheduler = schedule(self.engine.optimizer)

    def train(self, steps: Iterable[int], **options: Any) -> list[float]:
        return train(self.run, self.scheduler, steps, **options)

    def save(self, path: Any, **options: Any) -> None:
        self.engine.save_checkpoint(path, client_state={"scheduler": self.scheduler.state_dict()}, **options)

    def load(self, path: Any) -> None:
        self.scheduler.load_state_dict(self.engine.load_checkpoint(path)["scheduler"])

    def weights(self) -> dict[str, torch.Tensor]:
        return self.run.weights()


def files_of(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}
