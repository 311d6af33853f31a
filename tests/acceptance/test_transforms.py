# SPDX-License-Identifier: Apache-2.0
"""torch.func and forward-mode differentiation around the model, wherever in a loop: the engine's own work is no part of it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.autograd.forward_ad as forward_ad
import torch.nn.functional as F
from torch.func import functional_call, grad, hessian, jacfwd, jacrev, jvp, vjp, vmap

from tests.crosses import in_turn

from .models import IN_MEMORY, IN_PLACE_IN_BACKWARD, ON_CPU, Setup, adamw, stack, vector_batches
from .runs import Run, assert_close, assert_same_bits, run_engine, run_plain

SETUPS = (ON_CPU, IN_PLACE_IN_BACKWARD)


def _energy(run: Run) -> Callable[[torch.Tensor], torch.Tensor]:
    return lambda point: run.model(point).square().mean()


def _dual(run: Run, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    with forward_ad.dual_level():
        tangent = forward_ad.unpack_dual(run.model(forward_ad.make_dual(x, y))).tangent
        assert tangent is not None
        return tangent.clone()


def _grad_in_gathered(run: Run, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    with run.gathered(run.model.parameters()):
        return grad(_energy(run))(x)


def _grad_of_parameters(run: Run, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    with run.gathered(run.model.parameters()):
        named = dict(run.model.named_parameters())
        slopes = grad(lambda given: functional_call(run.model, given, (x,)).square().mean())(named)
        return torch.cat([slope.detach().flatten() for slope in slopes.values()])


TRANSFORMS: dict[str, Callable[[Run, torch.Tensor, torch.Tensor], torch.Tensor]] = {
    "jacrev": lambda run, x, y: jacrev(lambda point: run.model(point).sum(0))(x),
    "jacfwd": lambda run, x, y: jacfwd(lambda point: run.model(point).sum(0))(x),
    "jvp": lambda run, x, y: jvp(run.model, (x,), (y,))[1],
    "vjp": lambda run, x, y: vjp(run.model, x)[1](y)[0],
    "grad": lambda run, x, y: grad(_energy(run))(x),
    "grad of grad": lambda run, x, y: grad(lambda point: grad(_energy(run))(point).square().sum())(x),
    "vmap of grad": lambda run, x, y: vmap(grad(_energy(run)))(x),
    "hessian": lambda run, x, y: hessian(_energy(run))(x[:1]),
    "dual": _dual,
    "grad in gathered": _grad_in_gathered,
    "grad of parameters": _grad_of_parameters,
    "vectorized": lambda run, x, y: torch.autograd.functional.jacobian(lambda v: run.model(v).sum(0), x, vectorize=True),
}


# What a transform does to a unit's hooks is its own; that the unit comes and goes is tested of each place everywhere.
@pytest.mark.parametrize(("name", "setup"), in_turn(TRANSFORMS, SETUPS))
def test_wherever_in_a_loop(opened: Any, setup: Setup, name: str) -> None:
    """Before a step's forward, between its backward and step, and while its updates are still to be made."""

    def loop(run: Run) -> list[torch.Tensor]:
        seen = []
        for x, y in vector_batches(2, rows=3):
            seen.append(TRANSFORMS[name](run, x, y).detach().clone())
            F.mse_loss(run.model(x), y).backward()
            seen.append(TRANSFORMS[name](run, x, y).detach().clone())
            run.optimizer.step()
            seen.append(TRANSFORMS[name](run, y, x).detach().clone())
            run.optimizer.zero_grad()
        return seen

    model, in_memory, plain = stack(), stack(), stack()
    found = run_engine(opened(model, adamw(model), setup), loop)
    assert_close(found, run_plain(plain, adamw(plain), loop))
    assert_same_bits(found, run_engine(opened(in_memory, adamw(in_memory), IN_MEMORY), loop))
