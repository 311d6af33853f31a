# SPDX-License-Identifier: Apache-2.0
"""Host memory in NVMe mode depends on the largest unit, not on the model.

Each measurement is a process of its own: peak resident bytes (VmHWM) less those after an import and a tiny run.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from . import worker
from .models import Setup

MIB = 2**20
BUDGET = 192 * MIB
WIDTH = 912  # a block has 6 * 912**2 + 6 * 912 = 5.0 M parameters: 20 MB in fp32, 60 MB of records
BLOCKS = 12
NUMEL = BLOCKS * (6 * WIDTH**2 + 6 * WIDTH) + 2 * (WIDTH**2 + WIDTH)
STATES = 16 * NUMEL  # weights, gradients and two moments in fp32: 985 MB
assert 900 * 10**6 < STATES < 1100 * 10**6

# Growth allowed: the host budget; on the cpu accelerator "device" memory is resident too (four units of weights and
# two of gradients, 20 MB each); and 48 MiB for the allocator and what a larger matrix product of torch takes.
BOUND = BUDGET + 6 * 20 * MIB + 48 * MIB


def measure(
    nvme: Path, deferred: bool = True, blocks: int = BLOCKS, update: str = "step", quiet_steps: int | None = None, **fields: Any
) -> Any:
    config = Setup("nvme", "nvme", update=update).fields(nvme, **({"cpu_memory": BUDGET} | fields))
    asked = {"kind": "memory", "fields": config, "blocks": blocks, "width": WIDTH, "deferred": deferred, "steps": 2}
    return worker.run(asked | {"quiet_steps": quiet_steps})


@pytest.fixture(scope="module")
def measured(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """The run that two tests look at: all on NVMe, built under deferred_init."""
    return measure(tmp_path_factory.mktemp("nvme"))


def test_the_bound_says_something() -> None:
    assert BOUND < STATES * 0.4


def test_peak_is_far_below_the_states(measured: Any) -> None:
    """The model was built under deferred_init: neither it, nor its gradients, nor its states were ever in memory."""
    growth = measured["peak"] - measured["before"]
    assert growth < BOUND, f"{growth / MIB:.0f} MiB for {STATES / MIB:.0f} MiB of states"


def test_memory_is_constant_when_the_model_doubles(measured: Any, nvme: Path) -> None:
    """Twelve blocks more are 240 MB of weights and 1 GB of states; 32 MiB are noise of the allocator."""
    doubled = measure(nvme, blocks=2 * BLOCKS)
    growth = (doubled["peak"] - doubled["before"]) - (measured["peak"] - measured["before"])
    assert growth < 32 * MIB, f"{growth / MIB:.0f} MiB more for twice the blocks"


def test_update_in_backward_needs_no_more(nvme: Path) -> None:
    growth = (lambda result: result["peak"] - result["before"])(measure(nvme, update="backward"))
    assert growth < BOUND, f"{growth / MIB:.0f} MiB"


def test_updates_that_may_be_undone_need_no_more(nvme: Path) -> None:
    """All their gradients wait for the norm, and what is needed to undo them: on NVMe."""
    result = measure(nvme, update="backward", quiet_steps=0, max_grad_norm=1e6)
    assert result["speculated"] == 2
    growth = result["peak"] - result["before"]
    assert growth < BOUND, f"{growth / MIB:.0f} MiB"


def test_a_model_that_was_in_memory_is_given_back(nvme: Path) -> None:
    """Built as usual: its 240 MB are there until initialize has moved them, and are not there at the end."""
    result = measure(nvme, deferred=False)
    assert result["peak"] - result["before"] < BOUND + 4 * NUMEL
    assert result["end"] - result["before"] < BOUND


# Not the engine's, so not in its plan: autograd's gradient that just arrived and its successor (3 * WIDTH**2 floats each
# at most), what glibc keeps of freed ones before it is told to give it back (16 MiB), stacks of threads.
NOT_PLANNED = 2 * 4 * 3 * WIDTH**2 + 24 * MIB


def test_peak_is_what_was_planned(nvme: Path) -> None:
    """Within 5 %, where a budget keeps a part of the states in memory."""
    result = measure(nvme, cpu_memory=600 * MIB)
    growth = result["peak"] - result["before"]
    assert 0.95 * 600 * MIB < result["planned"] <= 600 * MIB
    assert 0.95 * result["planned"] < growth < 1.05 * result["planned"] + NOT_PLANNED, f"{growth / MIB:.0f} MiB"


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
@pytest.mark.parametrize(
    ("parameters", "states", "cpu_memory"),
    [
        ("device", "device", None),
        ("device", "cpu", None),
        ("cpu", "cpu", None),
        ("device", "nvme", "1280MiB"),
        ("cpu", "nvme", "1280MiB"),
        ("cpu", "nvme", "4GiB"),
        ("nvme", "cpu", None),
        ("nvme", "nvme", "1GiB"),
        ("nvme", "nvme", "4GiB"),
    ],
)
def test_peak_stays_close_to_the_plan(nvme: Path, parameters: str, states: str, cpu_memory: str | None, dtype: str) -> None:
    """2.5 GB of states, so that 5 % of what is planned are more than all that is not planned for."""
    config = Setup(parameters, states).fields(nvme, dtype=dtype, cpu_memory=cpu_memory)
    result = worker.run({"kind": "memory", "fields": config, "blocks": 30, "width": WIDTH, "deferred": True, "steps": 3})
    assert result["planned"] > 0.9 * 2**30
    growth = result["peak"] - result["before"]
    # With nothing on NVMe gradients stay in autograd's own tensors, whose holes in glibc's heap are not given back: a trim
    # costs more there than it is worth. Up to 6 % were seen.
    bound = 1.05 if "nvme" in (parameters, states) else 1.07
    assert growth < bound * result["planned"], f"{growth / MIB:.0f} MiB for a plan of {result['planned'] / MIB:.0f} MiB"
    if dtype == "fp32":  # 16-bit gradients are planned for twice: as they arrive, and as a sum in fp32 if there is one
        assert growth > 0.95 * result["planned"]
