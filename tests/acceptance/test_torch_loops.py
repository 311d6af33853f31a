# SPDX-License-Identifier: Apache-2.0
"""Forwards, backwards and steps in every order that users write: against plain PyTorch with torch.optim, in fp32."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F

from .models import (
    ALL_SETUPS,
    IN_MEMORY_IN_BACKWARD,
    IN_PLACE_IN_BACKWARD,
    ON_CPU,
    ON_CPU_IN_BACKWARD,
    ON_NVME,
    STEP_SETUPS,
    Setup,
    stack,
    vector_batches,
)
from .runs import Run, compare

anywhere = pytest.mark.parametrize(
    "setup", (*ALL_SETUPS, IN_MEMORY_IN_BACKWARD, ON_CPU_IN_BACKWARD, IN_PLACE_IN_BACKWARD), ids=lambda s: s.name
)
at_step = pytest.mark.parametrize("setup", STEP_SETUPS, ids=lambda s: s.name)
few = pytest.mark.parametrize("setup", (ON_CPU, ON_NVME), ids=lambda s: s.name)


@anywhere
def test_two_forwards_then_one_backward(opened: Any, setup: Setup) -> None:
    batches = vector_batches(10)

    def loop(run: Run) -> list[float]:
        losses = []
        for (x, y), (x2, y2) in zip(batches[::2], batches[1::2], strict=True):
            loss = F.mse_loss(run.model(x), y) + 2 * F.mse_loss(run.model(x2), y2)
            loss.backward()
            run.optimizer.step()
            run.optimizer.zero_grad()
            losses.append(loss.item())
        return losses

    compare(stack, loop, setup, opened)


@anywhere
def test_two_forwards_then_two_backwards(opened: Any, setup: Setup) -> None:
    """The second forward runs while the first one's graph waits; backwards come in the order of forwards."""
    batches = vector_batches(10)

    def loop(run: Run) -> list[float]:
        losses = []
        for (x, y), (x2, y2) in zip(batches[::2], batches[1::2], strict=True):
            first, second = F.mse_loss(run.model(x), y), F.mse_loss(run.model(x2), y2)
            first.backward()
            second.backward()
            run.optimizer.step()
            run.optimizer.zero_grad()
            losses += [first.item(), second.item()]
        return losses

    compare(stack, loop, setup, opened)


@anywhere
def test_a_forward_without_backward(opened: Any, setup: Setup) -> None:
    """A forward with gradients whose graph is thrown away, as a metric that forgot no_grad."""
    batches = vector_batches(10)

    def loop(run: Run) -> list[float]:
        losses = []
        for (x, y), (x2, _) in zip(batches[::2], batches[1::2], strict=True):
            wasted = run.model(x2)
            loss = F.mse_loss(run.model(x), y)
            loss.backward()
            run.optimizer.step()
            run.optimizer.zero_grad()
            losses += [loss.item(), wasted.sum().item()]
        return losses

    compare(stack, loop, setup, opened)


@anywhere
def test_retain_graph(opened: Any, setup: Setup) -> None:
    batches = vector_batches(5)

    def loop(run: Run) -> None:
        for x, y in batches:
            loss = F.mse_loss(run.model(x), y)
            loss.backward(retain_graph=True)
            (loss * 0.5).backward()
            run.optimizer.step()
            run.optimizer.zero_grad()

    compare(stack, loop, setup, opened)


@few
def test_autograd_grad_of_the_input(opened: Any, setup: Setup) -> None:
    """torch.autograd.grad for an input alone: right values, and no parameter's gradient comes of it."""
    batches = vector_batches(5)

    def loop(run: Run) -> list[torch.Tensor]:
        seen = []
        for x, y in batches:
            x = x.clone().requires_grad_()
            (slope,) = torch.autograd.grad(run.model(x).sum(), x)
            seen.append(slope)
            F.mse_loss(run.model(x), y).backward()
            assert x.grad is not None
            seen.append(x.grad)
            run.optimizer.step()
            run.optimizer.zero_grad()
        return seen

    compare(stack, loop, setup, opened)


@anywhere
def test_evaluation_between_steps(opened: Any, setup: Setup) -> None:
    batches = vector_batches(8)

    def loop(run: Run) -> list[float]:
        seen = []
        for step, (x, y) in enumerate(batches):
            run.model.eval()
            with torch.inference_mode() if step % 2 else torch.no_grad():
                seen.append(run.model(y).sum().item())
            run.model.train()
            loss = F.mse_loss(run.model(x), y)
            loss.backward()
            with torch.no_grad():  # between backward and step: still the old weights
                seen.append(run.model(y).sum().item())
            run.optimizer.step()
            with torch.no_grad():  # between step and zero_grad: the new ones
                seen.append(run.model(y).sum().item())
            run.optimizer.zero_grad()
            seen.append(loss.item())
        return seen

    compare(stack, loop, setup, opened)


@few
def test_calling_one_block_alone(opened: Any, setup: Setup) -> None:
    """Users call parts of a model: a block, a leaf, the root again; in another order than training does."""
    batches = vector_batches(5)

    def loop(run: Run) -> list[float]:
        seen = []
        for x, y in batches:
            with torch.no_grad():
                seen.append(run.model.blocks[2](run.model.blocks[0](x)).sum().item())
                seen.append(run.model.outlet(x).sum().item())
            loss = F.mse_loss(run.model(x), y)
            loss.backward()
            run.optimizer.step()
            run.optimizer.zero_grad()
            part = run.model.blocks[1](x).square().mean()  # and trains a part by itself
            part.backward()
            run.optimizer.step()
            run.optimizer.zero_grad()
            seen += [loss.item(), part.item()]
        return seen

    compare(stack, loop, setup, opened)


@few
def test_engine_methods_are_the_same_as_the_loops_own(opened: Any, setup: Setup) -> None:
    batches = vector_batches(6)

    def loop(run: Run) -> None:
        for x, y in batches:
            loss = F.mse_loss(run.model(x), y)
            if run.engine is None:
                loss.backward()
                run.optimizer.step()
            else:
                run.engine.backward(loss)
                run.engine.step()
            run.optimizer.zero_grad()

    compare(stack, loop, setup, opened)


@few
def test_step_with_a_closure(opened: Any, setup: Setup) -> None:
    batches = vector_batches(5)

    def loop(run: Run) -> list[float]:
        losses = []
        for x, y in batches:

            def closure(x: torch.Tensor = x, y: torch.Tensor = y) -> torch.Tensor:
                run.optimizer.zero_grad()
                loss = F.mse_loss(run.model(x), y)
                loss.backward()
                return loss

            losses.append(float(run.optimizer.step(closure)))
        return losses

    compare(stack, loop, setup, opened)


@few
def test_a_step_without_backward_changes_nothing(opened: Any, setup: Setup) -> None:
    batches = vector_batches(4)

    def loop(run: Run) -> None:
        for x, y in batches:
            run.optimizer.step()
            run.optimizer.zero_grad()
            F.mse_loss(run.model(x), y).backward()
            run.optimizer.step()
            run.optimizer.zero_grad()
            run.optimizer.step()

    compare(stack, loop, setup, opened)
