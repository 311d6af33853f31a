# SPDX-License-Identifier: Apache-2.0
"""A forecast of training a causal language model."""

from __future__ import annotations

import contextlib
import math
import warnings
from collections.abc import Callable, Collection
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from torch import nn

import offload
from offload.cli.models import enable_checkpointing, first_line
from offload.device.virtual.description import Machine, share_of
from offload.device.virtual.machine import VirtualMachine
from offload.errors import BudgetError, ConfigError, OffloadError
from offload.forecast import Forecast, Loop, simulate

GRANTED_SHARE = 0.95
"""Of the device's memory, with what the model takes: the rest is for what allocators lose."""

_ATTEMPTS = 5
"""To grant what fits."""

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
    unbound: Collection[str] = (),
    most_nbytes: float = math.inf,
) -> Forecast:
    """Train `model`, which lies on the meta device, a few steps on `machine`; `trace`: the file for one of the last.
    `unbound`: as of `VirtualMachine`. `most_nbytes`: as of `simulate`.

    Raises `BudgetError` where nothing fits."""
    virtual = VirtualMachine(share_of(machine, work.ranks), work.ranks, unbound)
    loop, count = training_loop(model, optimizer, config, work), work.micro_batches
    return simulate(virtual, loop, tokens=work.tokens, micro_batches=count, trace=trace, most_nbytes=most_nbytes)


def training_loop(
    model: nn.Module, optimizer: torch.optim.Optimizer, config: offload.Config, work: Work
) -> Loop[offload.Engine]:
    """A causal language model's, on tokens of which only the number counts. If `work` checkpoints, `model` does from now on."""
    if work.checkpointing:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", FutureWarning)  # of its name, which older versions know alone
            enable_checkpointing(model)
            if not all(parameter.requires_grad for parameter in model.parameters()):
                model.enable_input_require_grads()  # type: ignore[operator]

    def begin() -> offload.Engine:
        return offload.initialize(model, optimizer, config.expecting(work.micro_batches, work.batch * work.sequence))

    def micro_batch(engine: offload.Engine) -> None:
        tokens = torch.empty(work.batch, work.sequence, dtype=torch.long, device="meta")
        try:
            loss = model(input_ids=tokens, labels=tokens).loss
        except OffloadError:
            raise
        except Exception as error:  # whatever the model's own code does not do without values
            said = first_line(error).rstrip(".")
            raise ConfigError(
                f"no plan can be made of this model: its forward cannot run on the meta device ({said}). What it takes, train "
                "says at the end of a few steps."
            ) from error
        engine.backward(loss)

    def end(engine: offload.Engine) -> None:
        engine.step()
        engine.zero_grad()

    return Loop(begin, micro_batch, end)


def forecast_granted(
    make: Make, config: offload.Config, machine: Machine, work: Work, trace: Path | None = None
) -> tuple[Forecast, offload.Config]:
    """`forecast` with what the model's own tensors leave of the device's memory granted, where the configuration names neither
    a budget for it nor the tiers; and the configuration of what is returned.

    What they take depends on what stays on the device, and is seen where that is granted: first as if they took nothing, then
    with less until all of it fits. A run that takes too much ends where that is seen.
    Raises `BudgetError` where nothing fits."""
    is_open = config.device_memory is None and "auto" in (config.parameters, config.optimizer_states)
    if is_open and not machine.is_unified:
        usable = GRANTED_SHARE * machine.device_nbytes
        own_nbytes, most_nbytes = 0.0, usable
        with contextlib.suppress(BudgetError):  # less than the least, which is not bounded without a budget
            for attempt in range(_ATTEMPTS):
                budget_nbytes = max(int(usable - own_nbytes), 1)
                granted = replace(config, device_memory=budget_nbytes)
                found = forecast(*make(), granted, machine, work, trace, most_nbytes=most_nbytes)
                taken = found.peak_nbytes["device"]
                if taken <= most_nbytes:
                    if found.fits:
                        return found, granted
                    break
                own_nbytes, most_nbytes = max(taken - budget_nbytes, own_nbytes), machine.device_nbytes
                if attempt == _ATTEMPTS - 2:  # places take less than what is granted, so a little less changes none
                    own_nbytes = max(own_nbytes, found.own_nbytes)
    return forecast(*make(), config, machine, work, trace), config
