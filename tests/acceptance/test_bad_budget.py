# SPDX-License-Identifier: Apache-2.0
"""Budgets that cannot hold the largest unit: the error says the smallest that can, and that one does."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
from torch import nn

import offload

from .models import IN_MEMORY, ON_CPU, ON_NVME, ON_NVME_IN_BACKWARD, Setup, adamw, stack
from .runs import allocated_nbytes, assert_same_bits, refused, run_engine, simple_loop

few = pytest.mark.parametrize("setup", (IN_MEMORY, ON_CPU, ON_NVME), ids=lambda s: s.name)
also_in_backward = pytest.mark.parametrize("setup", (IN_MEMORY, ON_CPU, ON_NVME, ON_NVME_IN_BACKWARD), ids=lambda s: s.name)


SIZE = re.compile(r"(\d[\d,_]*(?:\.\d+)?)\s*(bytes|[KMGT]i?B|B)\b")
FACTOR = {"bytes": 1, "B": 1, "KiB": 2**10, "MiB": 2**20, "GiB": 2**30, "TiB": 2**40}
FACTOR |= {"KB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12}


def smallest_in(message: str) -> int:
    """The size that the message calls the smallest that works."""
    said = re.search(r"(?i)(smallest|at least|minimum)", message)
    assert said, f"does not say the smallest budget that works: {message}"
    found = SIZE.search(message, said.end()) or SIZE.search(message)
    assert found, f"no size in: {message}"
    number = float(found[1].replace(",", "").replace("_", ""))
    return int(number * FACTOR[found[2]] + 0.999)


def wide() -> nn.Module:
    """Units of unequal size; the largest, 1.3 M parameters, decides."""
    model = stack(64, 3)
    model.large = nn.Linear(64, 64)
    model.blocks.append(nn.Sequential(nn.Linear(64, 10000), nn.Linear(10000, 64)))
    return model


@pytest.mark.parametrize(
    ("field", "setup"),
    [
        ("cpu_memory", Setup("nvme", "nvme", "cpu")),
        ("cpu_memory", Setup("nvme", "nvme", "deferred")),
        ("cpu_memory", Setup("cpu", "nvme", "deferred")),
        ("cpu_memory", Setup("cpu", "cpu", "deferred")),
        ("device_memory", Setup("nvme", "nvme", "deferred")),
        ("device_memory", Setup("cpu", "cpu", "deferred")),
    ],
    ids=lambda value: value if isinstance(value, str) else value.name,
)
def test_a_budget_that_is_too_small(opened: Any, nvme: Path, field: str, setup: Setup) -> None:
    """The message says the smallest budget; with it training works, to the bit; a little below it does not."""
    model = wide()
    with refused(offload.BudgetError, field, "smallest") as caught:
        opened(model, adamw(model), setup, **{field: "64KiB"})
    assert re.search(r"blocks\.3|unit", str(caught.value)), "does not name the unit"
    assert allocated_nbytes(nvme) == 0, "allocated before the check"
    smallest = smallest_in(str(caught.value))
    assert 64 << 10 < smallest < 512 << 20
    with refused(offload.BudgetError, field):
        opened(model, adamw(model), setup, **{field: smallest - smallest // 16})
    engine = opened(model, adamw(model), setup, **{field: smallest})
    losses, weights = run_engine(engine, simple_loop(4, width=64))
    plain = wide()
    reference = opened(plain, adamw(plain), IN_MEMORY)
    expected, expected_weights = run_engine(reference, simple_loop(4, width=64))
    assert_same_bits(losses, expected)
    assert_same_bits(weights, expected_weights)


def test_a_generous_budget_changes_nothing(opened: Any) -> None:
    results = []
    for memory in ("64MiB", "1GiB"):
        model = wide()
        engine = opened(model, adamw(model), ON_NVME, cpu_memory=memory, device_memory=memory)
        results.append(list(run_engine(engine, simple_loop(4, width=64))))
        engine.close()
    assert_same_bits(results[0], results[1])
