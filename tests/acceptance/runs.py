# SPDX-License-Identifier: Apache-2.0
"""How a loop is run and judged.

A loop is written once, as a user would write it, against `Run`; it is then run by plain PyTorch and by an engine, so
that both are fed the same batches in the same order.
"""

from __future__ import annotations

import contextlib
import copy
import hashlib
import os
import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from .models import Setup, adamw, byte_batches, vector_batches


@dataclass
class Run:
    """What a loop sees: the same names whether plain PyTorch or an engine is behind them."""

    model: nn.Module
    optimizer: Any
    engine: Any = None

    def no_sync(self) -> Any:
        return contextlib.nullcontext() if self.engine is None else self.engine.no_sync()

    def gathered(self, parameters: Iterable[nn.Parameter]) -> Any:
        return contextlib.nullcontext() if self.engine is None else self.engine.gathered(parameters)

    def weights(self) -> dict[str, torch.Tensor]:
        """Copies of all parameters and buffers, by fqn."""
        state = self.model.state_dict() if self.engine is None else self.engine.state_dict()
        return {name: value.detach().clone() for name, value in state.items()}


Loop = Callable[[Run], Any]


def run_plain(model: nn.Module, optimizer: Any, loop: Loop) -> tuple[Any, dict[str, torch.Tensor]]:
    run = Run(model, optimizer)
    return loop(run), run.weights()


def run_engine(engine: Any, loop: Loop) -> tuple[Any, dict[str, torch.Tensor]]:
    run = Run(engine.module, engine.optimizer, engine)
    return loop(run), run.weights()


# Against plain torch: our Adam differs from torch's only in the last bit of a square root, so a step differs by about
# lr * 2**-23 = 1.2e-9 and, over the 20 or fewer steps of these tests, weights by some 1e-8 before the loop feeds the
# difference back through the gradients; 2e-6 leaves two orders of magnitude for that. The smallest fault we look for
# (one missing weight decay: lr * wd * |w|, about 1e-4) is fifty times larger.
WEIGHT_ATOL = 2e-6
LOSS_RTOL = 1e-5


def assert_close(ours: Any, plain: Any, atol: float = WEIGHT_ATOL, what: str = "") -> None:
    """Nested lists and dicts of numbers and tensors are close; shapes, keys, lengths and finiteness count."""
    if isinstance(plain, dict):
        assert set(ours) == set(plain), f"{what}: keys differ: {set(ours) ^ set(plain)}"
        for key in plain:
            assert_close(ours[key], plain[key], atol, f"{what}.{key}")
    elif isinstance(plain, (list, tuple)):
        assert len(ours) == len(plain), what
        for index, (one, other) in enumerate(zip(ours, plain, strict=True)):
            assert_close(one, other, atol, f"{what}[{index}]")
    elif isinstance(plain, torch.Tensor):
        assert plain.is_floating_point() is False or plain.isfinite().all(), f"{what}: the reference is not finite"
        torch.testing.assert_close(ours, plain, atol=atol, rtol=LOSS_RTOL, msg=lambda m: f"{what}: {m}")
    elif isinstance(plain, float):
        assert abs(ours - plain) <= atol + LOSS_RTOL * abs(plain), f"{what}: {ours} is not {plain}"
    else:
        assert ours == plain, f"{what}: {ours} is not {plain}"


def assert_same_bits(ours: Any, other: Any, what: str = "") -> None:
    """As assert_close, to the bit; NaN never passes."""
    if isinstance(other, dict):
        assert set(ours) == set(other), f"{what}: keys differ: {set(ours) ^ set(other)}"
        for key in other:
            assert_same_bits(ours[key], other[key], f"{what}.{key}")
    elif isinstance(other, (list, tuple)):
        assert len(ours) == len(other), what
        for index, (one, two) in enumerate(zip(ours, other, strict=True)):
            assert_same_bits(one, two, f"{what}[{index}]")
    elif isinstance(other, torch.Tensor):
        assert ours.dtype == other.dtype and ours.shape == other.shape, f"{what}: {ours.dtype} {ours.shape}"
        assert torch.equal(ours, other), f"{what}: {int((ours != other).sum())} of {other.numel()} elements differ"
    else:
        assert ours == other, f"{what}: {ours!r} is not {other!r}"


def compare(
    build: Callable[[], nn.Module],
    loop: Loop,
    setup: Setup,
    opened: Any,
    optimizer: Callable[[nn.Module], Any] = adamw,
    atol: float = WEIGHT_ATOL,
    **fields: Any,
) -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor]]:
    """Run `loop` by plain PyTorch and by an engine; losses and all weights and buffers are close, and they moved.

    Returns the engine's weights at the start and at the end.
    """
    torch.manual_seed(1)
    plain = build()
    model = copy.deepcopy(plain)
    start = {name: value.clone() for name, value in plain.state_dict().items()}
    torch.manual_seed(2)
    expected, expected_weights = run_plain(plain, optimizer(plain), loop)
    assert any(not torch.equal(start[name], expected_weights[name]) for name in start), "the reference did not train"
    torch.manual_seed(2)
    results, weights = run_engine(opened(model, optimizer(model), setup, **fields), loop)
    assert_close(results, expected, max(atol, WEIGHT_ATOL), "losses")
    assert_close(weights, expected_weights, atol, "weights")
    return start, weights


def loop_of(batches: Sequence[Any], loss_of: Callable[[Run, int, Any, Any], torch.Tensor]) -> Loop:
    """A backward and a step for each batch: of `loss_of(run, index, x, y)`, which the loop returns the values of."""

    def loop(run: Run) -> list[float]:
        losses = []
        for index, (x, y) in enumerate(batches):
            loss = loss_of(run, index, x, y)
            loss.backward()
            run.optimizer.step()
            run.optimizer.zero_grad()
            losses.append(loss.item())
        return losses

    return loop


def simple_loop(steps: int = 6, width: int = 16, clip: float | None = None, rows: int = 6) -> Loop:
    """Regression on random vectors, one backward a step. `clip`: for plain torch only; engines clip by their config."""
    batches = vector_batches(steps, width, rows)

    def loop(run: Run) -> list[float]:
        losses = []
        for x, y in batches:
            loss = F.mse_loss(run.model(x), y)
            loss.backward()
            if clip is not None and run.engine is None:
                torch.nn.utils.clip_grad_norm_(run.model.parameters(), clip)
            run.optimizer.step()
            run.optimizer.zero_grad()
            losses.append(loss.item())
        return losses

    return loop


def token_loop(steps: int = 6) -> Loop:
    """Language modelling on bytes of text with a Hugging Face model."""
    batches = [(tokens, tokens) for tokens in byte_batches(steps)]
    return loop_of(batches, lambda run, _, tokens, labels: run.model(input_ids=tokens, labels=labels).loss)


BITWISE_STEPS = 8
LONG_STEPS = 20
"""Of the slow ones."""
CLIP = 0.5  # the gradient norm of these runs is 1 to 3: the clipping strikes at nearly every step


def bitwise_loop(run: Run, steps: int = BITWISE_STEPS, overflow_step: int | None = None) -> list[float]:
    """Two micro-batches a step, a schedule of learning rates, backward by the engine; returns every micro-batch's loss.

    At `overflow_step` the loss is multiplied so that 16-bit gradients overflow.
    """
    scheduler = torch.optim.lr_scheduler.LambdaLR(run.optimizer, lambda step: 1.0 / (1.0 + 0.2 * step))
    batches = byte_batches(2 * steps)
    losses = []
    for step in range(steps):
        for micro in range(2):
            tokens = batches[2 * step + micro]
            with run.no_sync() if micro == 0 else contextlib.nullcontext():
                loss = run.model(input_ids=tokens, labels=tokens).loss / 2
                run.engine.backward(loss * 1e8 if step == overflow_step else loss)
            losses.append(loss.item())
        run.optimizer.step()
        scheduler.step()
        run.optimizer.zero_grad()
    return losses


def digest(weights: dict[str, torch.Tensor]) -> str:
    """One SHA-256 over names, dtypes, shapes and bytes."""
    total = hashlib.sha256()
    for name in sorted(weights):
        value = weights[name].detach().cpu().contiguous()
        total.update(f"{name}|{value.dtype}|{tuple(value.shape)}|".encode())
        total.update(value.reshape(-1).view(torch.uint8).numpy().tobytes())
    return total.hexdigest()


def refused(kind: type[Exception], *words: str) -> Any:
    """pytest.raises, and the message holds each of the words (in any case)."""
    return pytest.raises(kind, match="(?is)" + "".join(f"(?=.*{re.escape(word)})" for word in words))


def one_step(run: Run, seed: int = 0) -> None:
    """One step of regression, at the batch of `seed`."""
    x, y = vector_batches(1, seed=seed)[0]
    F.mse_loss(run.model(x), y).backward()
    run.optimizer.step()
    run.optimizer.zero_grad()


def allocated_nbytes(directory: Path) -> int:
    """Bytes that this process holds under `directory`: files by name, and open files whose name is already gone."""
    held: dict[tuple[int, int], int] = {}
    for root, _, names in os.walk(directory):
        for name in names:
            with contextlib.suppress(FileNotFoundError):
                found = os.stat(os.path.join(root, name))
                held[found.st_dev, found.st_ino] = found.st_blocks * 512
    for link in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):
            if os.readlink(f"/proc/self/fd/{link}").startswith(str(directory)):
                found = os.stat(f"/proc/self/fd/{link}")
                held[found.st_dev, found.st_ino] = found.st_blocks * 512
    return sum(held.values())


def files_under(directory: Path) -> list[str]:
    return sorted(str(path.relative_to(directory)) for path in directory.rglob("*") if path.is_file())
