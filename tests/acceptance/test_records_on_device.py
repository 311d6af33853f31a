# SPDX-License-Identifier: Apache-2.0
"""Without `device_memory` records of whole units visit the device in what the model leaves: they are updated there, nothing of
them moves any more, and they go home before an allocation would fail."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import offload
from offload.device.deferred import DeferredAccelerator
from offload.planning.purposes import RECORDS, UPDATED_PARAMETERS
from offload.step.updates import records_on_device
from offload.step.updates.chunk_arithmetic import ChunkArithmetic
from offload.step.updates.records_on_device import RecordsOnDevice
from offload.tiers.staging import Lease, StagingPool
from tests.crosses import in_turn
from tests.devices import computed_on, says_it_has
from tests.inside import accelerator_of, finish_updates, parts_of, records_on_device_of, settle_writes
from tests.small_sizes import small

from .models import adamw
from .runs import assert_same_bits

WIDTH, BLOCKS = 32, 4
ROOMY = 1 << 40
PLACES = [("cpu", "cpu"), ("device", "cpu"), ("nvme", "nvme"), ("cpu", "nvme"), ("nvme", "cpu")]
FORMATS = [("bf16", "fp32"), ("bf16", "split"), ("bf16", "bf16"), ("bf16", "8bit"), ("fp32", "fp32"), ("fp16", "fp32")]


def blocks() -> nn.Module:
    torch.manual_seed(3)
    pairs = ((nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)) for _ in range(BLOCKS))
    return nn.Sequential(*(nn.Sequential(first, nn.Tanh(), second) for first, second in pairs))


Start = Callable[..., Any]


@pytest.fixture
def started(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Start]:
    """`started(nbytes, (parameters, states), **config)`; nbytes: of the deferred device's memory, None: nobody knows."""
    monkeypatch.setenv("OFFLOAD_ACCELERATOR", "deferred")
    small(monkeypatch, chunk_numel=4096, joined_numel=0)
    engines = []

    def start(nbytes: int | None, places: tuple[str, str] = ("cpu", "cpu"), micro_batches: int = 1, **fields: Any) -> Any:
        if nbytes is None:
            monkeypatch.delenv("OFFLOAD_DEVICE_NBYTES", raising=False)
        else:
            monkeypatch.setenv("OFFLOAD_DEVICE_NBYTES", str(nbytes))
        model, optimizer = blocks(), fields.pop("optimizer", adamw)
        fields = {"dtype": "bf16", "nvme": str(tmp_path / str(len(engines)))} | fields
        config = offload.Config(parameters=places[0], optimizer_states=places[1], **fields).expecting(micro_batches)
        engines.append(offload.initialize(model, optimizer(model), config))
        return engines[-1]

    yield start
    for engine in engines:
        engine.close()


def backward(engine: Any, seed: int, rows: int = 8) -> float:
    generator = torch.Generator().manual_seed(seed)
    x, y = torch.randn(rows, WIDTH, generator=generator), torch.randn(rows, WIDTH, generator=generator)
    with accelerator_of(engine).counting():  # activations lie there too
        loss = F.mse_loss(engine.module(x.to(engine.module[0][0].weight.dtype)).float(), y)
        engine.backward(loss)
    return loss.item()


def step(engine: Any, number: int, micro_batches: int = 1, rows: int = 8) -> list[float]:
    losses = []
    for count in range(micro_batches):
        with contextlib.nullcontext() if count == micro_batches - 1 else engine.no_sync():
            losses.append(backward(engine, 100 * number + count, rows))
    engine.step()
    engine.zero_grad()
    return losses


def moved(engine: Any) -> tuple[int, int, int]:
    """Bytes copied to the device, from it, and over NVMe, so far, with the updates of the last step."""
    finish_updates(engine)
    settle_writes(engine)
    accelerator, links = accelerator_of(engine), engine.stats()["links"]
    over_nvme = sum(links[name]["nbytes"] for name in ("nvme read", "nvme write") if name in links)
    return accelerator.copied_in_nbytes, accelerator.copied_out_nbytes, over_nvme


@pytest.mark.parametrize(("parameters", "states", "dtype", "state_format", "micro_batches"), in_turn(PLACES, FORMATS, [1, 3]))
def test_where_there_is_room_nothing_moves(
    started: Start, parameters: str, states: str, dtype: str, state_format: str, micro_batches: int
) -> None:
    """Whatever the routes say. The bits are those of everything in memory."""
    fields = {"dtype": dtype, "state_format": state_format, "max_grad_norm": 1.0, "micro_batches": micro_batches}
    places = parameters, states
    engine, in_memory = started(ROOMY, places, **fields), started(None, ("device", "device"), **fields)
    seen = []
    for number in range(6):
        before = moved(engine)
        assert_same_bits(step(engine, number, micro_batches), step(in_memory, number, micro_batches))
        seen.append([now - then for now, then in zip(moved(engine), before, strict=True)])
    squares, values = seen[-1][1], sum(info.numel * info.dtype.itemsize for info in parts_of(engine).parameters)
    assert 0 < squares < values / 100, "sums of squares, for the norm"
    assert seen[-1] == seen[-2] == [0, squares, 0]
    assert seen[0][1] > values and records_on_device_of(engine).nbytes > 0
    assert_same_bits(engine.state_dict(), in_memory.state_dict())


def least(start: Start, rows: list[int], places: tuple[str, str] = ("cpu", "cpu")) -> int:
    """The most device memory in use with nothing beyond what is in use."""
    with pytest.MonkeyPatch.context() as patch:
        says_it_has(patch, 0)
        engine = start(ROOMY, places)
        for number, count in enumerate(rows):
            step(engine, number, rows=count)
        return int(accelerator_of(engine).peak_nbytes())


_EXPECTED: list[Any] = []


@pytest.mark.parametrize("places", PLACES)
def test_the_more_room_the_less_moves(started: Start, places: tuple[str, str]) -> None:
    """From the least to room for everything: bytes of a step fall steadily, and no allocation fails."""
    bare = least(started, [8] * 3, places)
    if not _EXPECTED:  # once for all places
        in_memory = started(None, ("device", "device"))
        _EXPECTED.append(([step(in_memory, number) for number in range(5)], in_memory.state_dict()))
    all_nbytes = 20 * sum(parameter.numel() for parameter in blocks().parameters())
    found, visiting = [], []
    for share in range(9):
        engine = started(bare + share * all_nbytes // 4, places)
        losses = []
        for number in range(5):
            before = moved(engine)
            losses.append(step(engine, number))
        found.append(sum(now - then for now, then in zip(moved(engine), before, strict=True)))
        visiting.append(records_on_device_of(engine).nbytes)
        assert_same_bits((losses, engine.state_dict()), _EXPECTED[0])
        engine.close()
    assert found == sorted(found, reverse=True) and visiting == sorted(visiting)
    assert found[-1] < found[0] / 2 and visiting[0] == 0 < visiting[-1]
    assert len(set(visiting)) > 2, "of some units, not of all"


GROWING = [8, 8, 32, 160, 2048, 2048, 8, 8, 2048, 8, 8, 8, 8]


@pytest.mark.parametrize("places", PLACES)
def test_records_go_home_as_batches_grow(started: Start, places: tuple[str, str]) -> None:
    """On a device with just the room that the largest batch needs with nothing beyond what is in use."""
    elsewhere, engine = started(None, places), started(least(started, GROWING, places), places)
    there = []
    for number, rows in enumerate(GROWING):
        assert_same_bits(step(engine, number, rows=rows), step(elsewhere, number, rows=rows))
        there.append(records_on_device_of(engine).nbytes)
    assert 0 == there[0] < there[1] and there[4] == there[5] == there[8] == 0 < min(there[7], there[-1])
    assert_same_bits(engine.state_dict(), elsewhere.state_dict())


def test_records_that_stayed_would_run_out_of_memory(started: Start, monkeypatch: pytest.MonkeyPatch) -> None:
    """The test above could fail."""
    engine = started(least(started, GROWING))
    monkeypatch.setattr(RecordsOnDevice, "limit", lambda records, nbytes: None)
    monkeypatch.setattr(RecordsOnDevice, "make_room", RecordsOnDevice.close)
    with pytest.raises(torch.OutOfMemoryError, match="deferred device"):
        for number, rows in enumerate(GROWING):
            step(engine, number, rows=rows)


def test_where_room_comes_and_goes_records_do_not_with_each_step(started: Start) -> None:
    """Large batches and small ones in turn: from the first times on records wait, longer each time."""
    engine, elsewhere, comings = started(least(started, [8, 2048])), started(None), list[int]()
    for number in range(60):
        rows, before = (2048 if number % 2 else 8), records_on_device_of(engine).nbytes
        assert_same_bits(step(engine, number, rows=rows), step(elsewhere, number, rows=rows))
        if records_on_device_of(engine).nbytes > before:
            comings.append(number)
    assert 2 < len(comings) < 8 and comings[-1] - comings[-2] > comings[1] - comings[0]
    assert_same_bits(engine.state_dict(), elsewhere.state_dict())


def test_where_the_allocator_has_no_memory_for_them_they_wait(started: Start, monkeypatch: pytest.MonkeyPatch) -> None:
    """Though there seemed to be enough (it may lie in pieces): it is asked once, and longer and longer not again. Each time it
    gives back all that it kept first."""
    asked, number = list[int](), 0

    def in_pieces(inner: type[Any]) -> type[Any]:
        def memory(device: Any, nbytes: int) -> torch.Tensor:
            if nbytes > 2**16:  # what a unit's gradients or values take is less
                asked.append(number)
                raise torch.OutOfMemoryError("in pieces")
            made: torch.Tensor = inner.memory(device, nbytes)
            return made

        return type(inner.__name__, (inner,), {"memory": memory})

    computed_on(monkeypatch, DeferredAccelerator, in_pieces)
    engine, elsewhere = started(ROOMY), started(None)
    for number in range(40):
        assert_same_bits(step(engine, number), step(elsewhere, number))
    assert asked == sorted(set(asked)) and 2 < len(asked) < 8 and asked[-1] - asked[-2] > asked[1] - asked[0]


def test_records_that_find_no_buffer_leave_the_others_theirs(started: Start, monkeypatch: pytest.MonkeyPatch) -> None:
    engine, elsewhere = started(ROOMY, ("nvme", "nvme")), started(None)
    try_lease = StagingPool.try_lease

    def few(pool: StagingPool, purpose: str, width: int = 1) -> Lease | None:
        return try_lease(pool, purpose, width) if purpose != UPDATED_PARAMETERS else None

    monkeypatch.setattr(StagingPool, "try_lease", few)
    pool = parts_of(engine).pool
    for number in range(4):
        assert_same_bits(step(engine, number), step(elsewhere, number))
    moved(engine)
    assert records_on_device_of(engine).nbytes == 0
    assert pool.free_count(RECORDS) == pool.stats.consumers[RECORDS].count


def test_records_leave_while_the_host_updates_others() -> None:
    """It notes for the first time where those lie, on its lane, as what has left is forgotten."""
    arithmetic = ChunkArithmetic(*2 * (None,))  # type: ignore[arg-type]
    others = iter(range(100))

    class Leaving:
        """Asked whether it is one that leaves."""

        def __hash__(self) -> int:
            arithmetic._joined[str(next(others)), 0] = [], None  # type: ignore[index, assignment]
            return 0

    leaving = [Leaving(), Leaving()]
    for one in leaving:
        arithmetic._joined[one, 0] = [], None  # type: ignore[index, assignment]
    arithmetic.forget(leaving[:1])  # type: ignore[arg-type]
    assert (leaving[1], 0) in arithmetic._joined and len(arithmetic._joined) > 2  # type: ignore[comparison-overlap]


def test_an_evaluation_of_what_was_trained_on_has_nothing_leave(started: Start) -> None:
    engine = started(ROOMY)
    for number in range(3):
        step(engine, number)
    there, before = records_on_device_of(engine).nbytes, accelerator_of(engine).copied_out_nbytes
    with torch.no_grad(), accelerator_of(engine).counting():
        engine.module(torch.ones(8, WIDTH, dtype=torch.bfloat16))
    assert records_on_device_of(engine).nbytes == there > 0
    assert accelerator_of(engine).copied_out_nbytes == before


# ---- who asks for what visits ----------------------------------------------------------------------------------------


def saves(engine: Any, folder: Path) -> None:
    engine.save_checkpoint(folder / "saved")
    engine.load_checkpoint(folder / "saved")


def saves_beside(engine: Any, folder: Path) -> None:
    save = engine.save_checkpoint(folder / "beside", wait=False)
    step(engine, 77)
    save.wait()
    engine.load_checkpoint(folder / "beside")


def reads_states(engine: Any, folder: Path) -> Any:
    weight = engine.module[1][0].weight
    return [engine.read(weight, state).clone() for state in ("value", "exp_avg", "exp_avg_sq")]


def writes_values(engine: Any, folder: Path) -> None:
    weight = engine.module[2][2].weight
    with engine.gathered([weight]), torch.no_grad():
        weight.mul_(0.5)


def writes_states(engine: Any, folder: Path) -> None:
    weight = engine.module[0][0].weight
    engine.write(weight, "exp_avg", engine.read(weight, "exp_avg") * 2)


def exports(engine: Any, folder: Path) -> None:
    engine.export(folder / "exported")


def evaluates(engine: Any, folder: Path) -> float:
    with torch.no_grad():
        total: float = engine.module(torch.ones(3, WIDTH, dtype=torch.bfloat16)).float().sum().item()
    return total


def accumulates_more(engine: Any, folder: Path) -> Any:
    """Than any step did before: the second micro-batch comes to gradients that stayed as they were."""
    return [step(engine, 50 + number, 1 + number) for number in range(3)]


def steps_on_some(engine: Any, folder: Path) -> None:
    """A parameter has no gradient, and a whole unit has none."""
    backward(engine, 60)
    engine.module[1][0].bias.grad = None
    for parameter in engine.module[3].parameters():
        parameter.grad = None
    engine.step()
    engine.zero_grad()


def drops(engine: Any, folder: Path) -> None:
    backward(engine, 61)
    engine.zero_grad()


def clips_by_hand(engine: Any, folder: Path) -> float:
    backward(engine, 62)
    norm = float(torch.nn.utils.clip_grad_norm_(engine.module.parameters(), 0.01))
    engine.step()
    engine.zero_grad()
    return norm


def reads_gradient(engine: Any, folder: Path) -> Any:
    backward(engine, 63)
    found = [engine.read(engine.module[1][0].weight, "gradient").clone() for _ in range(2)]
    engine.step()
    engine.zero_grad()
    return found


def unfreezes(engine: Any, folder: Path) -> Any:
    for parameter in engine.module[2].parameters():
        parameter.requires_grad_(False)
    found = [step(engine, 64), step(engine, 65)]
    for parameter in engine.module[2].parameters():
        parameter.requires_grad_(True)
    return [*found, step(engine, 66)]


BETWEEN = [
    saves, saves_beside, reads_states, writes_values, writes_states, exports, evaluates, accumulates_more, steps_on_some, drops,
    clips_by_hand, reads_gradient, unfreezes,
]  # fmt: skip


@pytest.mark.parametrize(
    ("between", "parameters", "states", "state_format", "update"),
    in_turn(BETWEEN, PLACES, ["fp32", "split"], ["auto", "backward"]),
)
def test_whoever_asks_for_what_visits_finds_it(
    started: Start, tmp_path: Path, between: Any, parameters: str, states: str, state_format: str, update: str
) -> None:
    fields, places, found = {"state_format": state_format, "update": update}, (parameters, states), []
    for name, engine in (("there", started(ROOMY, places, **fields)), ("here", started(None, places, **fields))):
        said = []
        for number in range(8):
            said.append(step(engine, number))
            if number % 3 == 2:
                visiting = parts_of(engine).updates.visiting
                assert name == "here" or visiting.nbytes > 0, "nothing visits"
                (tmp_path / f"{name}{number}").mkdir()
                said.append(between(engine, tmp_path / f"{name}{number}"))
        found.append((said, engine.state_dict(), reads_states(engine, tmp_path)))
    assert_same_bits(*found)


def test_steps_that_overflow_are_left_out(started: Start) -> None:
    found = []
    for nbytes in (ROOMY, None):
        engine = started(nbytes, dtype="fp16", loss_scale="dynamic")
        engine.loss_scale = 2.0**40
        for number in range(30):
            step(engine, number)
        assert engine.stats()["skipped_steps"] > 0
        found.append((engine.loss_scale, engine.stats()["skipped_steps"], engine.state_dict()))
    assert_same_bits(*found)


def test_what_has_visited_is_lost_by_nobody_who_goes_on_elsewhere(started: Start, tmp_path: Path) -> None:
    """Closed in the middle of a run, and resumed from its checkpoint."""
    first, through = started(ROOMY, ("nvme", "nvme")), started(None, ("device", "device"))
    for number in range(4):
        step(first, number)
    first.save_checkpoint(tmp_path / "saved")
    step(first, 99)
    first.close()
    second = started(ROOMY)
    second.load_checkpoint(tmp_path / "saved")
    for number in range(4, 7):
        step(second, number)
    for number in range(7):
        step(through, number)
    assert_same_bits(second.state_dict(), through.state_dict())


def test_a_closed_engine_holds_no_memory_for_records(started: Start) -> None:
    engine = started(ROOMY)
    for number in range(3):
        step(engine, number)
    visiting, accelerator = records_on_device_of(engine), accelerator_of(engine)
    held = visiting.nbytes
    before = accelerator.memory_use().now
    engine.close()
    assert before - accelerator.memory_use().now >= held > 0


@pytest.mark.parametrize("state_format", ["fp32", "split"])
def test_where_no_kernel_of_ours_updates_them_records_stay_home(
    started: Start, monkeypatch: pytest.MonkeyPatch, state_format: str
) -> None:
    """As on a GPU where the kernels are not there, or not for this format: torch operations take longer there than the CPU."""
    monkeypatch.setattr(records_on_device, "takes_one_pass", lambda device, record: record.state_format.value == "fp32")
    engine, elsewhere = started(ROOMY, state_format=state_format), started(None, state_format=state_format)
    for number in range(4):
        assert_same_bits(step(engine, number), step(elsewhere, number))
    assert (records_on_device_of(engine).peak_nbytes > 0) == (state_format == "fp32")
