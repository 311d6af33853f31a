# SPDX-License-Identifier: Apache-2.0
"""An engine that is closed gives its host memory back, whoever still has it, but for parameters that are the model's own."""

from __future__ import annotations

from typing import Any

import pytest
import torch.nn.functional as F

from offload.device.deferred import DeferredAccelerator
from offload.step.gradients.transit import GradientTransit
from offload.tiers.staging import StagingPool
from tests.inside import accelerator_of, parts_of

from .models import ON_CPU_IN_BACKWARD, ON_CPU_IN_PLACE, ON_NVME, ON_NVME_IN_PLACE, Setup, adamw, stack, vector_batches
from .speculating import at_once, one_step

ON_DEVICE = Setup("device", "device", "deferred")
IN_STEPS = (ON_CPU_IN_PLACE, ON_CPU_IN_BACKWARD, ON_DEVICE, ON_NVME, ON_NVME_IN_PLACE)


@pytest.mark.parametrize("goes_on", [False, True], ids=["between steps", "within a step"])
@pytest.mark.parametrize("setup", IN_STEPS, ids=lambda setup: setup.name)
def test_closed_and_not_let_go(opened: Any, monkeypatch: pytest.MonkeyPatch, setup: Setup, goes_on: bool) -> None:
    at_once(monkeypatch)
    model = stack()
    engine = opened(model, adamw(model), setup)
    batches = vector_batches(4)
    for x, y in batches:
        one_step(engine, x, y)
    if goes_on:
        F.mse_loss(model(batches[0][0]), batches[0][1]).backward()
    ledger = parts_of(engine).ledger
    assert ledger.total_nbytes > 0
    engine.close()
    kept = {"parameters"} if setup is ON_CPU_IN_PLACE else set[str]()
    assert ledger.by_purpose.keys() == kept


def test_what_is_on_its_way_there_arrives_before(opened: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """The device writes to addresses, whoever has them by then."""
    model = stack()
    engine = opened(model, adamw(model), ON_NVME, update="step")
    (x, y) = vector_batches(1)[0]
    F.mse_loss(model(x), y).backward()
    device, close = accelerator_of(engine), StagingPool.close
    assert isinstance(device, DeferredAccelerator)
    assert device._drain._queue, "all gradients had arrived"
    left = []

    def noted(pool: StagingPool) -> None:
        left.append(len(device._drain._queue))
        close(pool)

    monkeypatch.setattr(StagingPool, "close", noted)
    engine.close()
    assert left == [0]


def test_an_interrupt_of_the_close_leaves_nothing(opened: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """It goes on where it was: what had been given back is not given back again."""
    model = stack()
    engine = opened(model, adamw(model), ON_NVME)
    (x, y) = vector_batches(1)[0]
    one_step(engine, x, y)
    close, given_back = GradientTransit.close, list[str]()

    def interrupted(transit: GradientTransit) -> None:
        if not given_back:
            given_back.append("interrupted")
            raise KeyboardInterrupt
        close(transit)
        given_back.append("closed")

    monkeypatch.setattr(GradientTransit, "close", interrupted)
    with pytest.raises(KeyboardInterrupt):
        engine.close()
    assert given_back == ["interrupted", "closed"] and not parts_of(engine).ledger.by_purpose
