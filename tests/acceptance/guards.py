# SPDX-License-Identifier: Apache-2.0
"""What a user's loop does to parameters and gradients behind the engine's back: right, or told how; never silence.

Every case runs in plain PyTorch too. Where the engine raises, the message must hold one of the words that lead on, the
operation must have had no effect, and training must go on as if it had not been called. Where it does not raise, the
run must equal plain PyTorch's with the operation.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import offload

from .models import IN_MEMORY, ON_CPU, ON_CPU_IN_PLACE, ON_NVME, Setup, adamw, stack, vector_batches
from .runs import Run, assert_close

SETUPS = (IN_MEMORY, ON_CPU, ON_CPU_IN_PLACE, ON_NVME)
everywhere = pytest.mark.parametrize("setup", SETUPS, ids=lambda s: s.name)

READ = ("gathered", "state_dict")
WRITE = ("gathered",)
CLIPPING = ("max_grad_norm", "clip_grad_norm_")
SCALING = ("loss_scale", "engine.backward")
GRADIENT = ("gathered", "grad_norm", "clip_grad_norm_", "max_grad_norm", "engine.", "hook")


@dataclass
class Probe:
    """Calls an operation as a user would, and remembers whether it was told off."""

    run: Run
    words: tuple[str, ...]
    told: list[str] = field(default_factory=list)

    def __call__(self, operation: Callable[[Run], Any]) -> Any:
        """The operation's value, or None if it raised an error that leads on."""
        try:
            return operation(self.run)
        except (offload.OffloadError, RuntimeError) as error:
            if self.run.engine is None:
                raise
            assert any(word in str(error) for word in self.words), f"does not say what to do: {error!r}"
            self.told.append(str(error))
            return None


def check(
    opened: Any,
    setup: Setup,
    operation: Callable[[Run], Any],
    words: tuple[str, ...],
    when: str,
    steps: int = 6,
    optimizer: Callable[[nn.Module], Any] = adamw,
    build: Callable[[], nn.Module] = stack,
) -> bool:
    """Whether the operation was allowed. `when`: before the step's forward, after backward, or after step."""
    model = build()
    engine = opened(model, optimizer(model), setup)
    probe = Probe(Run(model, engine.optimizer, engine), words)
    try:
        values, losses = _loop(probe, operation, when, steps)
        weights = probe.run.weights()
    except offload.OffloadError as error:
        # A refusal that came late, at the step that could not be right: then everything after it must refuse as well.
        assert any(word in str(error) for word in words), f"does not say what to do: {error!r}"
        return False
    allowed = not probe.told
    assert allowed or len(probe.told) >= 1
    expected, expected_losses, expected_weights = _plainly(operation if allowed else None, when, steps, optimizer, build)
    if allowed:
        assert_close(values, expected, what="values")
    else:
        assert all(value is None for value in values), "raised at one step and passed at another"
    assert_close(losses, expected_losses, what=f"losses, the operation being {'allowed' if allowed else 'refused'}")
    assert_close(weights, expected_weights, what=f"weights, the operation being {'allowed' if allowed else 'refused'}")
    return allowed


def _loop(probe: Probe, operation: Callable[[Run], Any] | None, when: str, steps: int) -> tuple[list[Any], list[float]]:
    run, values, losses = probe.run, [], []
    for step, (x, y) in enumerate(vector_batches(steps)):

        def poke(now: str, step: int = step) -> None:
            if operation is not None and now == when and step in (2, 4):
                values.append(probe(operation))

        poke("before forward")
        loss = F.mse_loss(run.model(x), y)
        loss.backward()
        poke("after backward")
        probe(lambda run: run.optimizer.step())
        poke("after step")
        run.optimizer.zero_grad()
        losses.append(loss.item())
    return values, losses


@lru_cache(maxsize=64)
def _plainly(
    operation: Callable[[Run], Any] | None,
    when: str,
    steps: int,
    optimizer: Callable[[nn.Module], Any],
    build: Callable[[], nn.Module],
) -> tuple[list[Any], list[float], dict[str, torch.Tensor]]:
    """The loop by plain PyTorch, once for all setups."""
    plain = build()
    run = Run(plain, optimizer(plain))
    return *_loop(Probe(run, ()), operation, when, steps), run.weights()


def block_weight(run: Run) -> nn.Parameter:
    return run.model.blocks[1].up.weight


def other_state(run: Run) -> dict[str, torch.Tensor]:
    draw = torch.Generator().manual_seed(9)
    return {name: torch.randn(v.shape, generator=draw) * 0.2 for name, v in stack().state_dict().items()}
