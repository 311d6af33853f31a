# SPDX-License-Identifier: Apache-2.0
"""Training by the compiled kernels, run on the host, has the bits of the same in memory; and takes a few launches."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest

from offload.device.arithmetic.compiled_kernels import DeviceKernels
from offload.layout import BLOCK
from tests.device.host_kernels import HostLauncher, launched_by
from tests.small_sizes import small

from .models import IN_MEMORY, Setup, byte_batches, llama, two_groups
from .runs import CLIP, Run, assert_same_bits, bitwise_loop, run_engine

STEPS = 2
SETUPS = tuple(Setup(p, s, "deferred") for p in ("device", "cpu") for s in ("device", "cpu"))


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
    if chunk_numel is not None:
        small(monkeypatch, chunk_numel=chunk_numel)

    def trained(where: Setup) -> Any:
        model = llama(2)
        engine = opened(model, two_groups(model), where, dtype=dtype, max_grad_norm=CLIP)
        return run_engine(engine, lambda run: bitwise_loop(run, STEPS)), engine

    (right, _), launcher = trained(IN_MEMORY), CountedLauncher()
    with launched_by(DeviceKernels(launcher)):
        found, engine = trained(setup)
    assert_same_bits(found, right)
    units = engine.stats()["units"]
    assert max(unit["nbytes"] for unit in units) > 2 * 2 * BLOCK
    if setup == SETUPS[0]:
        assert launcher.counts["adam"] == STEPS * len(units)


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
@pytest.mark.parametrize("setup", SETUPS, ids=lambda s: s.name)
def test_gradients_of_a_unit_are_one_launch(opened: Any, setup: Setup, dtype: str) -> None:
    """Wherever they go from the device, in the only micro-batch of a step. On the host nothing is launched for them."""

    def trained(where: Setup) -> Any:
        model = llama(2)
        engine = opened(model, two_groups(model), where, dtype=dtype, max_grad_norm=CLIP)

        def loop(run: Run) -> list[float]:
            losses = []
            for tokens in byte_batches(STEPS):
                loss = run.model(input_ids=tokens, labels=tokens).loss
                run.engine.backward(loss)
                run.optimizer.step()
                run.optimizer.zero_grad()
                losses.append(loss.item())
            return losses

        return run_engine(engine, loop), len(engine.stats()["units"])

    (right, unit_count), launcher = trained(IN_MEMORY), CountedLauncher()
    with launched_by(DeviceKernels(launcher)):
        found, _ = trained(setup)
    assert_same_bits(found, right)
    assert launcher.counts["ingest"] == STEPS * unit_count
