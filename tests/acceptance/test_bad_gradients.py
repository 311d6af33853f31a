# SPDX-License-Identifier: Apache-2.0
"""Non-finite gradients: skipped with fp16, raised with fp32 and bf16, or skipped by choice."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch
import torch.nn.functional as F

import offload
from tests.crosses import in_pairs

from .models import IN_MEMORY, ON_CPU, ON_NVME, ON_NVME_IN_BACKWARD, Setup, adamw, stack, vector_batches
from .runs import Run, assert_same_bits, one_step, refused

FEW = (IN_MEMORY, ON_CPU, ON_NVME)
few = pytest.mark.parametrize("setup", FEW, ids=lambda s: s.name)
also_in_backward = pytest.mark.parametrize("setup", (IN_MEMORY, ON_CPU, ON_NVME, ON_NVME_IN_BACKWARD), ids=lambda s: s.name)


def _poisoned_loss(run: Run, value: float) -> torch.Tensor:
    """A finite loss whose gradient of one parameter in the middle is not finite."""
    x, y = vector_batches(1)[0]
    hook = run.model.blocks[1].register_forward_hook(lambda module, args, out: _Poison.apply(out, value))
    loss = F.mse_loss(run.model(x.to(run.model.inlet.weight.dtype)).float(), y)
    hook.remove()
    return loss


class _Poison(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, value: float) -> torch.Tensor:
        ctx.value = value
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        grad = grad.clone()
        grad[0, 0] = ctx.value
        return grad, None


# Where a value is found depends on the place, the dtype, and whether a norm is taken to clip by: each two of them.
@pytest.mark.parametrize(
    ("setup", "dtype", "clip", "value"), in_pairs(FEW, (None, "fp32", "bf16"), (None, 1.0), (float("inf"), float("nan")))
)
def test_non_finite_gradients_raise(opened: Any, setup: Setup, dtype: str | None, clip: float | None, value: float) -> None:
    """Raised with a parameter's name; nothing has moved, and after zero_grad() training goes on as if it never was."""
    runs = []
    for poisoned in (True, False):
        model = stack()
        engine = opened(model, adamw(model), setup, dtype=dtype, max_grad_norm=clip)
        run = Run(model, engine.optimizer, engine)
        for step in range(6):
            if poisoned and step == 3:
                before = run.weights()
                with refused(offload.NonFiniteGradientError, "loss_scale", "skip") as caught:
                    _poisoned_loss(run, value).backward()
                    run.optimizer.step()
                assert re.search(r"(blocks\.[01]|inlet)\.", str(caught.value)), "names no parameter"
                run.optimizer.zero_grad()
                assert_same_bits(run.weights(), before)
            x, y = vector_batches(6)[step]
            F.mse_loss(model(x.to(model.inlet.weight.dtype)).float(), y).backward()
            run.optimizer.step()
            run.optimizer.zero_grad()
        runs.append(run.weights())
        engine.close()
    assert_same_bits(runs[0], runs[1])


# The same ways: the step is left out instead.
@pytest.mark.parametrize(("setup", "dtype", "clip"), in_pairs(FEW, (None, "fp32", "bf16"), (None, 1.0)))
def test_non_finite_gradients_are_skipped_where_asked(opened: Any, setup: Setup, dtype: str | None, clip: float | None) -> None:
    runs = []
    for poisoned in (True, False):
        model = stack()
        engine = opened(model, adamw(model), setup, dtype=dtype, max_grad_norm=clip, loss_scale="skip")
        run = Run(model, engine.optimizer, engine)
        for step in range(6):
            if poisoned and step in (0, 3):
                before = run.weights()
                _poisoned_loss(run, float("inf")).backward()
                run.optimizer.step()
                run.optimizer.zero_grad()
                assert_same_bits(run.weights(), before)
            x, y = vector_batches(6)[step]
            F.mse_loss(model(x.to(model.inlet.weight.dtype)).float(), y).backward()
            run.optimizer.step()
            run.optimizer.zero_grad()
        runs.append(run.weights())
        engine.close()
    assert_same_bits(runs[0], runs[1])


@pytest.mark.parametrize("accumulated", ["first", "last"])
@few
def test_a_non_finite_micro_batch_spoils_its_step(opened: Any, setup: Setup, accumulated: str) -> None:
    """An inf in one of two micro-batches is not lost in the sum."""
    model = stack()
    engine = opened(model, adamw(model), setup)
    run = Run(model, engine.optimizer, engine)
    before = run.weights()
    x, y = vector_batches(1)[0]
    with pytest.raises(offload.NonFiniteGradientError):
        for kind in ("first", "last"):
            (_poisoned_loss(run, float("inf")) if kind == accumulated else F.mse_loss(model(x), y)).backward()
        run.optimizer.step()
    run.optimizer.zero_grad()
    assert_same_bits(run.weights(), before)


@pytest.mark.parametrize("clip", [None, 1.0])
def test_non_finite_gradients_of_an_update_in_backward(opened: Any, clip: float | None) -> None:
    """Whatever had begun is undone."""
    model = stack()
    engine = opened(model, adamw(model), ON_NVME_IN_BACKWARD, max_grad_norm=clip)
    run = Run(model, engine.optimizer, engine)
    one_step(run)
    before = run.weights()
    with pytest.raises(offload.NonFiniteGradientError):
        _poisoned_loss(run, float("nan")).backward()
        run.optimizer.step()
    run.optimizer.zero_grad()
    assert_same_bits(run.weights(), before)
    one_step(run, 1)


@few
def test_fp16_overflow_is_skipped(opened: Any, setup: Setup) -> None:
    model = stack()
    engine = opened(model, adamw(model), setup, dtype="fp16")
    run = Run(model, engine.optimizer, engine)
    scales: list[float] = []
    for value in (None, float("inf"), None, float("nan"), None):
        before = run.weights()
        if value is None:
            x, y = vector_batches(1)[0]
            loss = F.mse_loss(model(x.half()).float(), y) * 1e-3
        else:
            loss = _poisoned_loss(run, value)
        loss.register_hook(lambda grad: scales.append(grad.item()))
        engine.backward(loss)
        engine.step()
        engine.optimizer.zero_grad()
        if value is not None:
            assert_same_bits(run.weights(), before)
    assert scales[2] == scales[1] / 2 and scales[4] == scales[3] / 2, scales
