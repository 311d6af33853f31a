# SPDX-License-Identifier: Apache-2.0
"""Training by the compiled kernels, run on the host, has the bits of the same in memory; and takes a few launches."""

from __future__ import annotations

from collections import Counter
from functools import lru_cache
from pathlib import Path
from typing import Any

import pytest

import offload
from offload.device.arithmetic.compiled_kernels import DeviceKernels
from offload.layout import BLOCK
from tests.device.host_kernels import HostLauncher, launched_by
from tests.small_sizes import small

from .models import IN_MEMORY, Setup, byte_batches, llama, two_groups
from .runs import CLIP, Loop, Run, assert_same_bits, bitwise_loop, run_engine

STEPS = 2
SETUPS = tuple(Setup(p, s, "deferred") for p in ("device", "cpu") for s in ("device", "cpu"))


def one_backward_a_step(run: Run) -> list[float]:
    losses = []
    for tokens in byte_batches(STEPS):
        loss = run.model(input_ids=tokens, labels=tokens).loss
        run.engine.backward(loss)
        run.optimizer.step()
        run.optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def two_backwards_a_step(run: Run) -> list[float]:
    return bitwise_loop(run, STEPS)


@lru_cache
def reference(dtype: str, loop: Loop) -> Any:
    """In memory, of chunks as large as they are by themselves: their size never shows (test_rules_and_formats.py)."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("OFFLOAD_ACCELERATOR", "cpu")
        model = llama(2)
        fields = IN_MEMORY.fields(Path("."), dtype=dtype, max_grad_norm=CLIP)
        with offload.initialize(model, two_groups(model), offload.Config(**fields)) as engine:
            return run_engine(engine, loop)


class CountedLauncher(HostLauncher):
    """`counts`: of launches, by what they do."""

    def __init__(self) -> None:
        super().__init__()
        self.counts: Counter[str] = Counter()

    def __call__(self, name: str, block_count: int, parameter: bytes) -> None:
        self.counts[name.split("_")[1]] += 1
        super().__call__(name, block_count, parameter)


@pytest.mark.parametrize("chunk_numel", [BLOCK, None])
@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
@pytest.mark.parametrize("setup", SETUPS, ids=lambda s: s.name)
def test_same_bits(opened: Any, monkeypatch: pytest.MonkeyPatch, setup: Setup, dtype: str, chunk_numel: int | None) -> None:
    """Where parameters and states lie on the device a unit's update is one launch, of however many chunks it consists."""
    right, launcher = reference(dtype, two_backwards_a_step), CountedLauncher()
    if chunk_numel is not None:
        small(monkeypatch, chunk_numel=chunk_numel)
    model = llama(2)
    with launched_by(DeviceKernels(launcher)):
        engine = opened(model, two_groups(model), setup, dtype=dtype, max_grad_norm=CLIP)
        found = run_engine(engine, two_backwards_a_step)
    assert_same_bits(found, right)
    units = engine.stats()["units"]
    assert max(unit["nbytes"] for unit in units) > 2 * 2 * BLOCK
    if setup == SETUPS[0]:
        assert launcher.counts["adam"] == STEPS * len(units)


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
@pytest.mark.parametrize("setup", SETUPS, ids=lambda s: s.name)
def test_gradients_of_a_unit_are_one_launch(opened: Any, setup: Setup, dtype: str) -> None:
    """Wherever they go from the device, in the only micro-batch of a step. On the host nothing is launched for them."""
    right, launcher, model = reference(dtype, one_backward_a_step), CountedLauncher(), llama(2)
    with launched_by(DeviceKernels(launcher)):
        engine = opened(model, two_groups(model), setup, dtype=dtype, max_grad_norm=CLIP)
        found = run_engine(engine, one_backward_a_step)
    assert_same_bits(found, right)
    assert launcher.counts["ingest"] == STEPS * len(engine.stats()["units"])
