# SPDX-License-Identifier: Apache-2.0
"""A plain loop that accumulates gets the places of one that says so beforehand, once its first step has shown it."""

from __future__ import annotations

import errno
import logging
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import offload
from tests.drives import drive_is, drives_from
from tests.file_systems import free_room, scratch_kind
from tests.inside import accelerator_of, finish_updates, parts_of, settle_writes
from tests.small_sizes import small
from tests.tiers.faulty_io import Fault, FaultyBackend

from .models import adamw
from .runs import assert_same_bits

WIDTH, BLOCKS, COUNT = 64, 6, 4
ON_CPU = {"parameters": "cpu", "optimizer_states": "cpu"}
ON_NVME = {"parameters": "nvme", "optimizer_states": "nvme"}
IN_MEMORY = {"parameters": "device", "optimizer_states": "device"}
BUDGETS: dict[str, dict[str, Any]] = {
    "device": {**ON_CPU, "device_memory": 500_000},
    "auto": {"device_memory": 700_000, "cpu_memory": 3_000_000},
    "host": {**ON_NVME, "cpu_memory": 1_500_000},
    "both": {**ON_NVME, "device_memory": 500_000, "cpu_memory": 1_500_000},
}


def blocks() -> nn.Module:
    torch.manual_seed(3)
    pairs = ((nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)) for _ in range(BLOCKS))
    return nn.Sequential(*(nn.Sequential(first, nn.Tanh(), second) for first, second in pairs))


@pytest.fixture
def started(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Callable[..., Any]]:
    """`started(micro_batches=1, **config)`, on a deferred device with room for everything."""
    monkeypatch.setenv("OFFLOAD_ACCELERATOR", "deferred")
    monkeypatch.setenv("OFFLOAD_DEVICE_NBYTES", str(1 << 40))
    small(monkeypatch, chunk_numel=4096)
    scratch_kind(monkeypatch, "ext4")
    engines = []

    def start(micro_batches: int = 1, **fields: Any) -> Any:
        model = blocks()
        config = offload.Config(**({"dtype": "bf16", "nvme": str(tmp_path / str(len(engines)))} | fields))
        engines.append(offload.initialize(model, adamw(model), config.expecting(micro_batches)))
        return engines[-1]

    yield start
    for engine in engines:
        engine.close()


def backward(engine: Any, seed: int) -> float:
    generator = torch.Generator().manual_seed(seed)
    x, y = torch.randn(8, WIDTH, generator=generator), torch.randn(8, WIDTH, generator=generator)
    loss = F.mse_loss(engine.module(x.to(engine.module[0][0].weight.dtype)).float(), y)
    engine.backward(loss)
    return loss.item()


def step(engine: Any, number: int, micro_batches: int = COUNT) -> list[float]:
    losses = [backward(engine, 100 * number + count) for count in range(micro_batches)]
    engine.step()
    engine.zero_grad()
    return losses


def moved_in(engine: Any, act: Callable[[], object]) -> dict[str, int]:
    """Bytes by link, from one moment at which all is done to the next."""

    def counted() -> dict[str, int]:
        engine._training.settle()
        parts, device = parts_of(engine), accelerator_of(engine)
        parts.records.settle_writes()
        parts.parameter_store.settle_writes()
        io = parts.backend.stats() if parts.backend is not None else None
        return {
            "in": device.copied_in_nbytes,
            "out": device.copied_out_nbytes,
            "read": io.read_nbytes if io is not None else 0,
            "written": io.written_nbytes if io is not None else 0,
        }

    before = counted()
    act()
    return {link: nbytes - before[link] for link, nbytes in counted().items()}


def routes(engine: Any) -> Any:
    return parts_of(engine).placement.routes


@pytest.mark.parametrize("name", BUDGETS)
def test_the_second_step_has_the_routes_of_a_loop_that_said_so(started: Any, name: str) -> None:
    fields = BUDGETS[name]
    told, plain, in_memory = (
        started(COUNT, **fields),
        started(**fields),
        started(**IN_MEMORY),
    )
    assert routes(plain) != routes(told)
    for number in range(2):
        losses = [step(engine, number) for engine in (told, plain, in_memory)]
        assert_same_bits(*losses[:2])
        assert_same_bits(*losses[1:])
    assert routes(plain) == routes(told)
    assert parts_of(plain).placement.plan == parts_of(told).placement.plan
    moved = []
    for engine in (told, plain):
        step(engine, 2)
        moved.append(moved_in(engine, lambda engine=engine: step(engine, 3)))
    assert moved[0] == moved[1] and any(moved[0].values())
    for number in (2, 3):
        step(in_memory, number)
    assert_same_bits(plain.state_dict(), in_memory.state_dict())
    assert_same_bits(told.state_dict(), in_memory.state_dict())


@pytest.mark.parametrize("state_format", ["split", "bf16", "8bit"])
def test_in_every_format_of_states(started: Any, state_format: str) -> None:
    fields = BUDGETS["both"] | {"state_format": state_format}
    plain, in_memory = started(**fields), started(parameters="cpu", optimizer_states="cpu", state_format=state_format)
    before = routes(plain)
    for number in range(4):
        assert_same_bits(step(plain, number), step(in_memory, number))
    assert routes(plain) != before
    assert_same_bits(plain.state_dict(), in_memory.state_dict())
    weights = [(engine, engine.module[2][0].weight) for engine in (plain, in_memory)]
    for what in ("exp_avg", "exp_avg_sq", "step"):
        assert_same_bits(*(engine.read(weight, what) for engine, weight in weights))


def test_a_loop_of_one_and_a_longer_step_now_and_then_change_nothing(started: Any) -> None:
    fields = BUDGETS["device"]
    single, told = started(**fields), started(COUNT, **fields)
    for number, count in enumerate([1, 1, 1]):
        parts = parts_of(single)
        step(single, number, count)
        step(told, number, 2 * COUNT - 1)
        assert parts_of(single) is parts
    assert routes(told) == routes(started(COUNT, **fields))


def test_not_while_something_is_under_way(started: Any, tmp_path: Path) -> None:
    """Values lent, a profile: after the next step."""
    engine = started(**BUDGETS["device"])
    profile = engine.profile(tmp_path / "trace.json")
    step(engine, 0)
    parts = parts_of(engine)
    backward(engine, 1)  # gradients wait from here on
    profile.close()
    backward(engine, 2)
    assert parts_of(engine) is parts
    engine.step()
    engine.zero_grad()
    with engine.gathered([engine.module[1][0].weight]):
        engine.module(torch.ones(1, WIDTH, dtype=torch.bfloat16))
        assert parts_of(engine) is parts
    step(engine, 2)
    assert parts_of(engine) is parts
    step(engine, 3)
    assert parts_of(engine) is not parts


def test_a_forward_that_ran_after_the_step_keeps_its_parts(started: Any) -> None:
    """Though others begin between the steps as well, once gradients are dropped: backward through the first one is right."""
    engine, in_memory = started(**BUDGETS["device"]), started(**IN_MEMORY)
    x, before = torch.ones(2, WIDTH, dtype=torch.bfloat16), routes(engine)
    for one in (engine, in_memory):
        step(one, 0)
        parts = parts_of(one)
        with one.gathered([one.module[1][0].weight]):
            kept = one.module(x).float().sum()
        one.module(x)
        assert parts_of(one) is parts
        kept.backward()
        one.step()
        one.zero_grad()
        step(one, 1)
        step(one, 2)
    assert routes(engine) != before
    assert_same_bits(engine.state_dict(), in_memory.state_dict())


@pytest.mark.parametrize("why", ["no room", "a drive in memory"])
def test_without_a_place_for_what_is_carried_over_all_stays(started: Any, monkeypatch: pytest.MonkeyPatch, why: str) -> None:
    if why == "no room":
        free_room(monkeypatch, 1000)
    else:
        scratch_kind(monkeypatch, "tmpfs")
    engine, in_memory = started(**BUDGETS["device"]), started(**IN_MEMORY)
    parts = parts_of(engine)
    for number in range(3):
        assert_same_bits(step(engine, number), step(in_memory, number))
    assert parts_of(engine) is parts


def test_what_fails_on_the_way_leaves_all_as_it_was(
    started: Any, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    engine, in_memory = started(**BUDGETS["both"]), started(**IN_MEMORY)
    before, opened = routes(engine), list[FaultyBackend | None]()

    def made() -> FaultyBackend:
        opened.append(None if not opened else FaultyBackend())
        if opened[-1] is None:
            raise offload.StorageError("the drive is full")
        return opened[-1]

    assert_same_bits(step(engine, 0), step(in_memory, 0))
    drives_from(monkeypatch, made)  # those of the parts that are made anew
    with caplog.at_level(logging.WARNING, "offload.engine_rebuild"):
        for number in range(1, 3):
            assert_same_bits(step(engine, number), step(in_memory, number))
    assert routes(engine) == before and "the drive is full" in caplog.text and len(opened) == 2
    assert_same_bits(engine.state_dict(), in_memory.state_dict())


def test_where_no_parts_can_be_made_the_engine_says_so_until_a_load(
    started: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Neither those for the new places nor those for the old ones: nothing goes on with what is closed."""
    engine, in_memory = started(**BUDGETS["both"]), started(**IN_MEMORY)
    assert_same_bits(step(engine, 0), step(in_memory, 0))
    engine.save_checkpoint(tmp_path / "saved")

    def refuse() -> FaultyBackend:
        raise offload.StorageError("the drive is full")

    with monkeypatch.context() as patch:
        drives_from(patch, refuse)
        with pytest.raises(offload.StorageError, match="the drive is full"):
            step(engine, 1)
        for ask in (lambda: step(engine, 1), engine.state_dict, lambda: engine.save_checkpoint(tmp_path / "next")):
            with pytest.raises(offload.EngineFailedError, match="the drive is full"):
                ask()
    engine.load_checkpoint(tmp_path / "saved")
    for number in (1, 2):
        assert_same_bits(step(engine, number), step(in_memory, number))
    assert_same_bits(engine.state_dict(), in_memory.state_dict())


def test_a_drive_that_fails_then_is_told_by_its_own_error(
    started: Any, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    class Drive(FaultyBackend):
        fails_next = False

        def read(self, *given: Any, **named: Any) -> Any:
            if self.fails_next:
                self.faults[self.submitted_count], self.fails_next = Fault("errno", errno.EIO), False
            return super().read(*given, **named)

    backend = Drive()
    drive_is(monkeypatch, backend)
    engine = started(**BUDGETS["both"])
    step(engine, 0)
    finish_updates(engine)
    settle_writes(engine)
    backend.fails_next = True  # as all is saved that is carried over
    with (
        caplog.at_level(logging.INFO, "offload.engine_rebuild"),
        pytest.raises(offload.StorageError, match="Input/output error"),
    ):
        step(engine, 1)
    assert "are decided anew" in caplog.text
    with pytest.raises(offload.EngineFailedError, match="Input/output error"):
        step(engine, 1)
