# SPDX-License-Identifier: Apache-2.0
"""Updates that may be undone on a drive that fails, and when they begin early."""

from __future__ import annotations

import errno
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, strategies as st

import offload
from offload.step import clip_history
from tests.drives import drive_is
from tests.tiers.faulty_io import Fault, FaultyBackend, seeded_faults

from .models import IN_MEMORY, Setup, adamw, stack, vector_batches
from .runs import assert_same_bits
from .speculating import both, counts, one_step


def run_on(backend: FaultyBackend, nvme: Path, setup: Setup, patch: pytest.MonkeyPatch) -> tuple[Any, tuple[int, int]]:
    """Three steps on that drive: kept, undone, kept; and what they gave."""
    patch.setenv("OFFLOAD_ACCELERATOR", setup.accelerator)
    drive_is(patch, backend)
    model = stack(32, 4)
    with offload.initialize(model, adamw(model), setup.fields(nvme, max_grad_norm=1e3)) as engine:
        for step, (x, y) in enumerate(vector_batches(3, 32)):
            one_step(engine, x, y * 1e6 if step == 1 else y)
        return engine.state_dict(), counts(engine)


@pytest.fixture
def right(nvme: Path, speculating: None, monkeypatch: pytest.MonkeyPatch) -> Any:
    return run_on(FaultyBackend(0), nvme, IN_MEMORY, monkeypatch)[0]


@pytest.mark.parametrize("seed", range(2))
@both
def test_any_order_of_transfers(
    nvme: Path, speculating: None, right: Any, monkeypatch: pytest.MonkeyPatch, setup: Setup, seed: int
) -> None:
    faults = seeded_faults(seed, 5000, 0.4, (Fault("short"), Fault("delay")))
    result, counted = run_on(FaultyBackend(seed, faults), nvme, setup, monkeypatch)
    assert_same_bits(result, right)
    assert counted == (3, 1)


@pytest.mark.parametrize("kind", ["errno", "bit_flip"])
@both
def test_faults_are_raised_or_strike_what_nobody_needs(
    nvme: Path, speculating: None, right: Any, monkeypatch: pytest.MonkeyPatch, setup: Setup, kind: Any
) -> None:
    """What was written to be undone, and a gradient that is never read again, may be lost; nothing else."""
    whole = FaultyBackend(1)
    run_on(whole, nvme, setup, monkeypatch)
    raised = tried = 0
    for index in range(0, whole.submitted_count, max(whole.submitted_count // 14, 1)):
        tried += 1
        try:
            result, _ = run_on(FaultyBackend(1, {index: Fault(kind, errno.EIO)}), nvme, setup, monkeypatch)
        except offload.StorageError as error:
            raised += 1
            assert error.errno == (errno.EIO if kind == "errno" else errno.EBADMSG)
        else:
            assert_same_bits(result, right)
    assert tried // 2 <= raised <= tried


# ---- when to speculate ---------------------------------------------------------------------------------------------


@given(st.lists(st.booleans(), max_size=60))
def test_at_most_one_step_in_nine_begins_in_vain(struck: list[bool]) -> None:
    history = clip_history.ClipHistory()
    vain = []
    for step, one in enumerate(struck):
        if history.expects_none:
            assert not any(struck[step - clip_history.QUIET_STEPS : step]) and step >= clip_history.QUIET_STEPS
            vain += [step] if one else []
        else:
            assert any(struck[max(step - clip_history.QUIET_STEPS, 0) : step]) or step < clip_history.QUIET_STEPS
        history.record(one)
    assert all(later - earlier > clip_history.QUIET_STEPS for earlier, later in pairwise(vain))
