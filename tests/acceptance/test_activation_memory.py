# SPDX-License-Identifier: Apache-2.0
"""Without `device_memory` units stay on the device as far as the model leaves room, and go before an allocation would fail."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import offload
from offload.model.unit_state import UnitState
from tests.devices import records_stay_home, says_it_has
from tests.inside import accelerator_of, layout_of, residency_of, units_of

from .models import adamw
from .runs import assert_same_bits

WIDTH, BLOCKS = 64, 8
SMALL, LARGE = 8, 4096


def blocks() -> nn.Module:
    torch.manual_seed(3)
    pairs = ((nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)) for _ in range(BLOCKS))
    return nn.Sequential(*(nn.Sequential(first, nn.Tanh(), second) for first, second in pairs))


WITH_RECORDS = pytest.mark.parametrize("started", [False, True], indirect=True, ids=["", "records"])


def batch(rows: int) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(rows)
    return torch.randn(rows, WIDTH, generator=generator), torch.randn(rows, WIDTH, generator=generator)


def play(engine: Any, rows: list[int]) -> Iterator[tuple[int, float]]:
    """One step of each size, on a device whose memory holds activations too: bytes copied to it, and the loss."""
    accelerator = accelerator_of(engine)
    for count in rows:
        before = accelerator.copied_in_nbytes
        with accelerator.counting():
            x, y = (tensor.clone() for tensor in batch(count))
            loss = F.mse_loss(engine.module(x), y)
            loss.backward()
            engine.step()
            engine.zero_grad()
            del x, y
        engine._training.settle()
        yield accelerator.copied_in_nbytes - before, loss.item()


@pytest.fixture
def started(monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> Iterator[Callable[..., Any]]:
    """Param: whether records may visit the device too."""
    monkeypatch.setenv("OFFLOAD_ACCELERATOR", "deferred")
    if not getattr(request, "param", False):
        records_stay_home(monkeypatch)
    engines = []

    def start(nbytes: int | None, make: Callable[[], nn.Module] = blocks, **fields: Any) -> Any:
        if nbytes is None:
            monkeypatch.delenv("OFFLOAD_DEVICE_NBYTES", raising=False)
        else:
            monkeypatch.setenv("OFFLOAD_DEVICE_NBYTES", str(nbytes))
        model = make()
        engines.append(
            offload.initialize(model, adamw(model), offload.Config(parameters="cpu", optimizer_states="cpu", **fields))
        )
        return engines[-1]

    yield start
    for engine in engines:
        engine.close()


def least(start: Any, rows: list[int]) -> int:
    """The most device memory in use with no unit beyond those in use."""
    with pytest.MonkeyPatch.context() as patch:
        says_it_has(patch, 0)
        engine = start(1 << 40)
        list(play(engine, rows))
        return int(accelerator_of(engine).peak_nbytes())


def test_batches_grow_until_nothing_stays_and_shrink_again(started: Any) -> None:
    """On a device with just the room that the largest batch needs with no unit beyond those in use."""
    growing = [SMALL, 4 * SMALL, 5 * SMALL, 20 * SMALL, LARGE]
    rows = [*(count for count in growing for _ in range(2)), *reversed(growing)]
    unbounded = started(None)
    expected = list(play(unbounded, rows))
    engine = started(least(started, rows))
    found = list(play(engine, rows))
    assert_same_bits([loss for _, loss in found], [loss for _, loss in expected])
    assert_same_bits(engine.state_dict(), unbounded.state_dict())
    units = [flat.nbytes for unit in layout_of(engine).units for flat in unit.flats]
    once, twice = sum(units), 2 * sum(units) - units[-1]  # for a step, for its forward and its backward: the last stays
    moved = [nbytes for nbytes, _ in found]
    looked_at, little_more, nothing_stays = [twice, once], [once, once], [twice, twice]
    moved[0] -= units[0]  # the first unit of the next forward, whose fetch a step begins
    assert moved[:10] == [*looked_at, *looked_at, *little_more, *looked_at, *nothing_stays]
    assert moved[10] == twice and moved[12:] == [once] * 3
    assert accelerator_of(engine).peak_nbytes() == accelerator_of(engine).memory_use().total


@WITH_RECORDS
def test_less_memory_than_the_least_needs_is_out_of_memory(started: Any) -> None:
    """The test above could fail."""
    engine = started(least(started, [LARGE]) - 4096)
    with pytest.raises(torch.OutOfMemoryError, match="deferred device"):
        list(play(engine, [SMALL, SMALL, LARGE]))


@WITH_RECORDS
@pytest.mark.parametrize("ahead", [True, False], ids=["ahead", "needed"])
def test_memory_that_something_else_took_meanwhile(started: Any, ahead: bool) -> None:
    """What is fetched ahead gives up; what is needed has what may leave go."""
    engine = started(1 << 22)
    accelerator, residency = accelerator_of(engine), residency_of(engine)
    list(play(engine, [SMALL] * 2))
    units = [unit for unit in units_of(engine) if unit.residency.nbytes]
    for unit in units:
        residency.bring(unit)
    residency.evict_all() if ahead else residency._drop(units[0])
    other = accelerator.memory(accelerator.free_nbytes())
    residency._start_fetch(units[0], optional=ahead)
    assert (units[0].residency.state is UnitState.ABSENT) is ahead
    del other
    list(play(engine, [SMALL]))


@WITH_RECORDS
def test_without_giving_up_units_memory_would_run_out(started: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """On a device that says to have more than it has, where a batch that was seen leaves room by that."""
    rows = [SMALL, LARGE, LARGE]
    nbytes = least(started, rows)
    list(play(started(nbytes), rows))
    says_it_has(monkeypatch, 1 << 40)
    with pytest.raises(torch.OutOfMemoryError, match="deferred device"):
        list(play(started(nbytes), rows))


def test_what_the_loop_takes_beside_the_model_is_followed(started: Any) -> None:
    """Another model's memory, taken and given back between steps on inputs of one size."""
    beyond = 4 * sum(parameter.nbytes for parameter in blocks().parameters())
    engine = started(least(started, [SMALL]) + beyond)
    ((_, _), (quiet, _)) = play(engine, [SMALL] * 2)
    other = accelerator_of(engine).memory(beyond)
    ((crowded, _),) = play(engine, [SMALL])
    del other
    ((_, _), (again, _)) = play(engine, [SMALL] * 2)
    assert quiet == again < 0.6 * crowded


def test_units_leave_a_tenth_of_what_the_model_leaves(started: Any) -> None:
    """For what an allocator cannot use of what it has, and for who else computes there: of whatever it leaves."""
    bare, shares = least(started, [SMALL]), list[float]()
    whole = sum(parameter.nbytes for parameter in blocks().parameters())
    for beyond in range(whole // 32, whole, whole // 32):
        engine = started(bare + beyond)
        list(play(engine, [SMALL] * 4))
        taken, free = engine.stats()["resident_peak_nbytes"], bare + beyond - accelerator_of(engine).peak_nbytes()
        shares.append(taken / (taken + free))
        engine.close()
    assert 0.85 < max(shares) <= 0.9


@WITH_RECORDS
def test_what_hooks_keep_within_a_step_is_followed(started: Any) -> None:
    """From some step on, of inputs of the same size: units go as it grows, before it or the next use finds no memory."""
    rows, kept = [16 * SMALL] * 5, list[torch.Tensor]()

    def losses(engine: Any) -> list[float]:
        found = [loss for _, loss in play(engine, rows[:3])]
        hooks = [
            module.register_forward_hook(lambda module, inputs, output: kept.append(output.detach().repeat(4, 1)))
            for module in engine.module
        ]
        for _ in rows[3:]:
            found += [loss for _, loss in play(engine, rows[:1])]
            kept.clear()
        for hook in hooks:
            hook.remove()
        return found

    unbounded = started(None)
    expected = losses(unbounded)
    with pytest.MonkeyPatch.context() as patch:
        says_it_has(patch, 0)
        bare = started(1 << 40)
        losses(bare)
    engine = started(accelerator_of(bare).peak_nbytes())
    assert_same_bits(losses(engine), expected)
    assert_same_bits(engine.state_dict(), unbounded.state_dict())
    assert engine.stats()["resident_peak_nbytes"] > bare.stats()["resident_peak_nbytes"]


def wide_begin() -> nn.Module:
    model = blocks()
    model[0] = nn.Sequential(nn.Linear(WIDTH, 16 * WIDTH), nn.Tanh(), nn.Linear(16 * WIDTH, WIDTH))
    return model


@WITH_RECORDS
def test_in_an_evaluation_inputs_a_little_larger_find_room_at_their_first_use(started: Any) -> None:
    """It takes more than all others: nothing foretells that but smaller inputs."""
    rows = [LARGE, LARGE, 5 * LARGE // 4]

    def results(engine: Any) -> list[torch.Tensor]:
        list(play(engine, [SMALL] * 3))  # from here on units stay as far as there is room
        found = []
        for count in rows:
            with accelerator_of(engine).counting(), torch.no_grad():
                x, _ = (tensor.clone() for tensor in batch(count))
                found.append(engine.module(x).sum())
                del x
        return found

    with pytest.MonkeyPatch.context() as patch:
        says_it_has(patch, 0)
        bare = started(1 << 40, wide_begin)
        expected = results(bare)
    engine = started(int(accelerator_of(bare).peak_nbytes()), wide_begin)
    assert_same_bits(results(engine), expected)
    assert engine.stats()["resident_peak_nbytes"] > bare.stats()["resident_peak_nbytes"]


@WITH_RECORDS
def test_inputs_a_little_larger_find_the_room_that_they_need(started: Any) -> None:
    """On a device with just that, where units took what smaller ones had left."""
    rows = [LARGE, LARGE, 5 * LARGE // 4]
    unbounded, engine = started(None), started(least(started, rows))
    assert_same_bits([loss for _, loss in play(engine, rows)], [loss for _, loss in play(unbounded, rows)])
    assert_same_bits(engine.state_dict(), unbounded.state_dict())


@WITH_RECORDS
def test_a_budget_is_a_budget(started: Any) -> None:
    """What the user granted is kept, whatever is free."""
    engine = started(1 << 40, device_memory="64MiB")
    capacity = engine.stats()["resident_capacity_nbytes"]
    list(play(engine, [SMALL] * 3))
    assert engine.stats()["resident_capacity_nbytes"] == capacity
