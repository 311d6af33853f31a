# SPDX-License-Identifier: Apache-2.0
"""Routes that differ between the units of one engine: never another bit, whatever lies where, and saves go from any to any."""

from __future__ import annotations

import weakref
from functools import lru_cache
from pathlib import Path
from typing import Any

import pytest
import torch

import offload
from offload.model.chunk import Chunk
from offload.planning.purposes import UPDATED_PARAMETERS
from offload.planning.route import Memory
from offload.planning.tier_choice import Kept
from offload.step.updates.value_paths import ValuesCopiedOut, ValuesNeeded
from tests.crosses import in_turn
from tests.inside import placement_of, units_of
from tests.small_sizes import small

from .chosen import choosing
from .models import IN_MEMORY, Setup, llama, two_groups
from .runs import CLIP, assert_same_bits, bitwise_loop, run_engine

STEPS = 4
LAYERS = 4
FORMATS = [("fp32", "fp32"), ("bf16", "fp32"), ("bf16", "split"), ("bf16", "8bit")]
ON_CPU, RECORDS_ON_NVME, ON_NVME = (Setup(*pair, "deferred") for pair in (("cpu", "cpu"), ("cpu", "nvme"), ("nvme", "nvme")))
SOME = {1, 3, 5}
KEPT = Kept(parameter_count=2, record_count=3)
CASES: dict[str, tuple[Setup, dict[str, Any]]] = {
    "parameters stay": (ON_CPU, {"parameters": SOME}),
    "gradients stay": (ON_CPU, {"gradients": SOME}),
    "updated there": (ON_CPU, {"parameters": SOME, "gradients": SOME, "records": SOME}),
    "records from nvme": (RECORDS_ON_NVME, {"parameters": {2}, "gradients": {2, 4}, "records": {2}, "kept": KEPT}),
    "everywhere": (ON_NVME, {"parameters": {1, 2, 5}, "gradients": {1, 2, 3}, "records": {1}, "kept": KEPT, "prefetch": 1}),
    "records alone": (ON_NVME, {"gradients": SOME, "records": SOME, "spare_nbytes": 1 << 20}),
}
cases = pytest.mark.parametrize("case", CASES)


@lru_cache
def reference(dtype: str, state_format: str) -> Any:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("OFFLOAD_ACCELERATOR", "cpu")
        model = llama(LAYERS)
        fields = IN_MEMORY.fields(Path("."), dtype=dtype, state_format=state_format, max_grad_norm=CLIP)
        with offload.initialize(model, two_groups(model), offload.Config(**fields)) as engine:
            return list(run_engine(engine, lambda run: bitwise_loop(run, STEPS)))


def started(opened: Any, case: str, dtype: str = "bf16", state_format: str = "fp32", **fields: Any) -> Any:
    setup, choice = CASES[case]
    model = llama(LAYERS)
    with choosing(**choice):
        return opened(model, two_groups(model), setup, dtype=dtype, state_format=state_format, max_grad_norm=CLIP, **fields)


@pytest.mark.parametrize(("dtype", "state_format"), FORMATS)
@cases
def test_no_route_changes_a_bit(opened: Any, case: str, dtype: str, state_format: str) -> None:
    engine = started(opened, case, dtype, state_format)
    assert len(set(placement_of(engine).routes)) > 1
    assert_same_bits(list(run_engine(engine, lambda run: bitwise_loop(run, STEPS))), reference(dtype, state_format))
    planned = sum(line["nbytes"] for line in engine.stats()["planned"] if line["tier"] == "device")
    assert engine.stats()["device_peak_nbytes"] <= planned


@cases
def test_update_in_backward(opened: Any, case: str) -> None:
    engine = started(opened, case, update="backward")
    assert_same_bits(list(run_engine(engine, lambda run: bitwise_loop(run, STEPS))), reference("bf16", "fp32"))


# Each goes and comes once; that a save beside training is the one that is waited for is what test_beside.py has of all places.
@pytest.mark.parametrize(("case", "wait"), in_turn(CASES, (True, False)))
def test_a_save_goes_from_any_to_any(opened: Any, case: str, wait: bool, tmp_path: Path) -> None:
    """Half of the run, a save, the other half in an engine with other routes: as if it had been one."""
    order = list(CASES)
    first = started(opened, case)
    halves = [run_engine(first, lambda run: bitwise_loop(run, STEPS))]
    save = first.save_checkpoint(tmp_path / "saved", wait=wait)
    halves.append(run_engine(first, lambda run: bitwise_loop(run, STEPS)))
    save.wait()
    second = started(opened, order[(order.index(case) + 1) % len(order)])
    second.load_checkpoint(tmp_path / "saved")
    assert_same_bits(second.state_dict(), halves[0][1])
    assert_same_bits(list(run_engine(second, lambda run: bitwise_loop(run, STEPS))), list(halves[1]))


@cases
def test_values_are_read_and_written_wherever_they_lie(opened: Any, case: str) -> None:
    weights = []
    for made in (lambda: started(opened, case), lambda: started(opened, "gradients stay")):
        engine = made()
        run_engine(engine, lambda run: bitwise_loop(run, 1))
        parameters = list(engine.module.parameters())
        with engine.gathered(parameters), torch.no_grad():
            for parameter in parameters:
                parameter.mul_(0.5)
        run_engine(engine, lambda run: bitwise_loop(run, 1))
        state = {name: value * 2 for name, value in engine.state_dict().items()}
        engine.load_state_dict(state)
        assert_same_bits(engine.state_dict(), state)
        run_engine(engine, lambda run: bitwise_loop(run, 1))
        weights.append(engine.state_dict())
        engine.close()
    assert_same_bits(weights[0], weights[1])


@pytest.mark.parametrize(
    ("home", "kept", "count"),
    [("cpu", 0, 2), ("nvme", 0, 1), ("nvme", 2, 2)],
    ids=["memory", "a file", "a file, some of it in memory"],
)
def test_new_values_take_no_more_of_the_device_on_their_way_home_than_the_plan_says(
    opened: Any, monkeypatch: pytest.MonkeyPatch, home: str, kept: int, count: int
) -> None:
    """A copy to host memory goes on under the next update; one to a file's buffer is over before."""
    small(monkeypatch, chunk_numel=4096)
    there: list[int] = []
    most = 0
    begin = ValuesCopiedOut.begin

    def counted(self: ValuesCopiedOut, chunk: Chunk, old: ValuesNeeded) -> torch.Tensor:
        nonlocal most
        values = begin(self, chunk, old)
        there.append(values.nbytes)
        weakref.finalize(values.untyped_storage(), there.remove, values.nbytes)
        most = max(most, sum(there))
        return values

    monkeypatch.setattr(ValuesCopiedOut, "begin", counted)
    model = llama(LAYERS)
    with choosing(kept=Kept(parameter_count=kept)):
        engine = opened(model, two_groups(model), Setup(home, "device", "deferred"), dtype="bf16", max_grad_norm=CLIP)
    found = list(run_engine(engine, lambda run: bitwise_loop(run, STEPS)))
    [line] = [line for line in engine.stats()["planned"] if (line["tier"], line["purpose"]) == ("device", UPDATED_PARAMETERS)]
    assert most == line["nbytes"] == count * max(unit.flats[0].chunks[0].nbytes for unit in units_of(engine))
    assert_same_bits(found, reference("bf16", "fp32"))


def test_a_newly_trained_parameter_finds_its_place(opened: Any) -> None:
    """The parts are made anew, with routes that fit them."""
    results = []
    for memory in (None, "64MiB"):
        model = llama(LAYERS)
        frozen = model.model.layers[1].requires_grad_(False)
        engine = opened(model, two_groups(model), ON_NVME, dtype="bf16", device_memory=memory)
        run_engine(engine, lambda run: bitwise_loop(run, 1))
        frozen.requires_grad_(True)
        results.append(list(run_engine(engine, lambda run: bitwise_loop(run, 2))))
        near = {unit.route.update_in for unit in units_of(engine) if unit.trained_chunks}
        assert near == ({Memory.DEVICE} if memory else {Memory.HOST})
        engine.close()
    assert_same_bits(results[0], results[1])


def test_what_deepspeed_keeps_on_the_device_is_updated_there_to_the_same_bits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OFFLOAD_ACCELERATOR", "deferred")
    zero = {"stage": 3, "offload_optimizer": {"device": "cpu", "ratio": 0.5}, "offload_param": {"device": "cpu"}}
    keys = {"zero_optimization": zero, "bf16": {"enabled": True, "check_grad_overflow": False}, "gradient_clipping": CLIP}
    model = llama(LAYERS)
    with offload.initialize(model, two_groups(model), keys) as engine:
        places = {route.update_in for route in placement_of(engine).routes}
        assert places == {Memory.DEVICE, Memory.HOST}
        assert_same_bits(list(run_engine(engine, lambda run: bitwise_loop(run, STEPS))), reference("bf16", "fp32"))
