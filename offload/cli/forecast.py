"""A rehearsal of training a causal language model."""

from __future__ import annotations

import warnings
from dataclasses import dataclass
from pathlib import Path

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
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    config: offload.Config,
    machine: Machine,
    work: Work,
    trace: Path | None = None,
) -> Forecast:
    """Train `model`, which lies on the meta device, a few steps on `machine`; `trace`: the file for one of the last.

    Raises `BudgetError` where nothing fits."""
    if work.checkpointing:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", FutureWarning)  # of its name, which older versions know alone
            model.gradient_checkpointing_enable()  # type: ignore[operator]
            if not all(parameter.requires_grad for parameter in model.parameters()):
                model.enable_input_require_grads()  # type: ignore[operator]

    def step(engine: offload.Engine) -> None:
        for _ in range(work.micro_batches):
            tokens = torch.zeros(work.batch, work.sequence, dtype=torch.long, device="meta")
            engine.backward(model(input_ids=tokens, labels=tokens).loss)
        engine.step()
        engine.zero_grad()

    def begin() -> offload.Engine:
        return offload.initialize(model, optimizer, config)

    return rehearse(VirtualMachine(machine), begin, step, tokens=work.tokens, trace=trace)
