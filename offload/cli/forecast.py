"""A rehearsal of training a causal language model."""

from __future__ import annotations

import warnings
from dataclasses import dataclass

import torch
from torch import nn

import offload
from offload.device.virtual.description import Machine
from offload.device.virtual.machine import VirtualMachine
from offload.rehearsal.forecast import Forecast, rehearse


@dataclass(frozen=True, slots=True)
class Work:
    """What one step trains on."""

    batch: int
    sequence: int
    micro_batches: int
    checkpointing: bool

    @property
    def tokens(self) -> int:
        return self.batch * self.sequence * self.micro_batches


def forecast(
    model: nn.Module, optimizer: torch.optim.Optimizer, config: offload.Config, machine: Machine, work: Work
) -> Forecast:
    """Train `model`, which lies on the meta device, a few steps on `machine`. Raises `BudgetError` where nothing fits."""
    if work.checkpointing:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", FutureWarning)  # of its name, which older versions know alone
            model.gradient_checkpointing_enable()  # type: ignore[operator]

    def step(engine: offload.Engine) -> None:
        for _ in range(work.micro_batches):
            tokens = torch.zeros(work.batch, work.sequence, dtype=torch.long, device="meta")
            engine.backward(model(input_ids=tokens, labels=tokens).loss)
        engine.step()
        engine.zero_grad()

    return rehearse(VirtualMachine(machine), lambda: offload.initialize(model, optimizer, config), step, tokens=work.tokens)
