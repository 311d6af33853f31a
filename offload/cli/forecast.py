# SPDX-License-Identifier: Apache-2.0
"""A rehearsal of training a causal language model."""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Callable, Collection
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from torch import nn

import offload
from offload.device.virtual.description import Machine, share_of
from offload.device.virtual.machine import VirtualMachine
from offload.errors import BudgetError
from offload.rehearsal.forecast import FIRST_STEPS, Forecast, Loop, rehearse

GRANTED_SHARE = 0.95
"""Of the device's memory, with what the model takes: the rest is for what allocators lose."""

Make = Callable[[], tuple[nn.Module, torch.optim.Optimizer]]
"""A model on the meta device, and its optimizer; new each time."""


@dataclass(frozen=True, slots=True)
class Work:
    """What one step trains on."""

    batch: int
    sequence: int
    micro_batches: int
    checkpointing: bool
    ranks: int = 1
    """Each of which trains on so much, with a device like the machine's."""

    @property
    def tokens(self) -> int:
        """Of all ranks."""
        return self.ranks * self.batch * self.sequence * self.micro_batches


def forecast(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    config: offload.Config,
    machine: Machine,
    work: Work,
    trace: Path | None = None,
    *,
    first_steps: int = FIRST_STEPS,
    unbound: Collection[str] = (),
) -> Forecast:
    """Train `model`, which lies on the meta device, a few steps on `machine`; `trace`: the file for one of the last.
    `first_steps`: before the one that is told of. `unbound`: as of `VirtualMachine`.

    Raises `BudgetError` where nothing fits."""
    if work.checkpointing:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", FutureWarning)  # of its name, which older versions know alone
            model.gradient_checkpointing_enable()  # type: ignore[operator]
            if not all(parameter.requires_grad for parameter in model.parameters()):
                model.enable_input_require_grads()  # type: ignore[operator]

    def begin() -> offload.Engine:
        return offload.initialize(model, optimizer, config.expecting(work.micro_batches, work.batch * work.sequence))

    def micro_batch(engine: offload.Engine) -> None:
        tokens = torch.zeros(work.batch, work.sequence, dtype=torch.long, device="meta")
        engine.backward(model(input_ids=tokens, labels=tokens).loss)

    def end(engine: offload.Engine) -> None:
        engine.step()
        engine.zero_grad()

    virtual = VirtualMachine(share_of(machine, work.ranks), work.ranks, unbound)
    loop, count = Loop(begin, micro_batch, end), work.micro_batches
    return rehearse(virtual, loop, tokens=work.tokens, micro_batches=count, trace=trace, first_steps=first_steps)


def forecast_granted(
    make: Make, config: offload.Config, machine: Machine, work: Work, trace: Path | None = None
) -> tuple[Forecast, offload.Config]:
    """`forecast` with what the model's own tensors leave of the device's memory granted, where the configuration names neither
    a budget for it nor the tiers; and the configuration of what is returned.

    What they take is seen in one micro-batch. Raises `BudgetError` where nothing fits."""
    is_open = config.device_memory is None and "auto" in (config.parameters, config.optimizer_states)
    if is_open and not machine.is_unified:
        alone = forecast(*make(), config, machine, replace(work, micro_batches=1), first_steps=0)
        left = int(GRANTED_SHARE * machine.device_nbytes) - alone.own_nbytes
        with contextlib.suppress(BudgetError):  # less than the least, which is not bounded without a budget
            granted = replace(config, device_memory=max(left, 1))
            found = forecast(*make(), granted, machine, work, trace)
            if found.fits:
                return found, granted
    return forecast(*make(), config, machine, work, trace), config
