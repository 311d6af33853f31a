# SPDX-License-Identifier: Apache-2.0
"""On a machine that computes on its cores whatever else takes a core holds up the model; beside a device nothing does."""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Callable
from pathlib import Path

import pytest

from offload.device.virtual.description import Machine, read_machine, write_machine
from offload.device.virtual.machine import CORES, VirtualMachine

CALLS = dataclasses.replace(read_machine("gb10"), call_seconds=1.0)
TRANSFERS = dataclasses.replace(read_machine("gb10"), call_seconds=1e-9, nvme_core=1e9, nvme_read=2e9, nvme_both=2e9)
COMPUTED_SECONDS = 3.0


def computed_beside(machine: Machine, work: Callable[[VirtualMachine], object]) -> tuple[float, float]:
    """When `work`, of a lane, is done, and when the model's three seconds are that began with it."""
    virtual = VirtualMachine(machine)
    with virtual.running():
        virtual.is_lane()
        amounts = {"flops": COMPUTED_SECONDS * machine.flops}
        cores = {CORES: COMPUTED_SECONDS} if machine.kind == "cpu" else {}
        computed = virtual.sharing.start(virtual.amounts(amounts | cores))
        work(virtual)
        done = virtual.simulation.now
        computed.wait()
        return done, virtual.simulation.now


def moved(virtual: VirtualMachine) -> None:
    """A second of one core, and less of the drive."""
    virtual.transfer(10**9, is_write=False, priority=0).wait()


WORKS = pytest.mark.parametrize(
    ("machine", "work"), [(CALLS, VirtualMachine.call), (TRANSFERS, moved)], ids=["calls of Python", "hand-over to a drive"]
)


@WORKS
def test_a_core_that_is_taken_holds_up_the_model_as_long(machine: Machine, work: Callable[[VirtualMachine], object]) -> None:
    """The operations are over when the last core is through: two share that one, and each takes twice as long there."""
    found = computed_beside(dataclasses.replace(machine, kind="cpu"), work)
    assert found == pytest.approx((2.0, COMPUTED_SECONDS + 1.0))


@WORKS
def test_beside_a_device_the_model_computes_on(machine: Machine, work: Callable[[VirtualMachine], object]) -> None:
    assert computed_beside(machine, work)[1] == pytest.approx(COMPUTED_SECONDS)


def test_a_machine_may_leave_out_what_a_core_hands_over(tmp_path: Path) -> None:
    path = tmp_path / "machine.json"
    write_machine(dataclasses.replace(TRANSFERS, kind="cpu"), {}, path)
    assert read_machine(str(path)).nvme_core == TRANSFERS.nvme_core
    content = json.loads(path.read_text())
    del content["nvme_core"]
    path.write_text(json.dumps(content))
    unsaid = read_machine(str(path))
    assert unsaid.nvme_core == math.inf
    assert computed_beside(unsaid, moved) == pytest.approx((1e9 / TRANSFERS.nvme_read, COMPUTED_SECONDS))
