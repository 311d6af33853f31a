# SPDX-License-Identifier: Apache-2.0
"""Sums of several micro-batches stay on the device while it has room, and change no bit: on devices of stated sizes."""

from __future__ import annotations

import itertools
import weakref
from collections import deque
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import offload
from offload.config import with_internal_settings
from offload.device.accelerator import Accelerator
from offload.device.deferred import DeferredAccelerator
from offload.device.pending import Settled
from offload.step.gradients.sums_on_device import SumsOnDevice
from tests.crosses import in_turn
from tests.devices import computed_on, records_stay_home, says_it_has
from tests.inside import accelerator_of, layout_of, parts_of, sums_on_device_of
from tests.small_sizes import small

from .models import adamw
from .runs import assert_same_bits

WIDTH, BLOCKS = 32, 6
SMALL, LARGE = 8, 2048
ROOMY = 1 << 40
COUNTS = [3, 3, 3, 5, 3]
"""Micro-batches of a few steps."""
ON_CPU = {"parameters": "cpu", "optimizer_states": "cpu"}
SUMS = (pytest.param(False, id=""), pytest.param(True, id="narrow"))
WITH_RECORDS = pytest.mark.parametrize("started", [False, True], indirect=True, ids=["", "records"])


def blocks() -> nn.Module:
    torch.manual_seed(3)
    pairs = ((nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)) for _ in range(BLOCKS))
    return nn.Sequential(*(nn.Sequential(first, nn.Tanh(), second) for first, second in pairs))


@pytest.fixture
def started(monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> Iterator[Callable[..., Any]]:
    """`started(device_nbytes, micro_batches=1, tokens=0, narrow=False, frozen_count=0, **config)`; None: of a device that does
    not say what it has, where sums lie in host memory. `narrow`: they are in the parameters' dtype. `frozen_count`: blocks.
    Param: whether records may visit the device too, and have gradients stay for their updates."""
    monkeypatch.setenv("OFFLOAD_ACCELERATOR", "deferred")
    if not getattr(request, "param", False):
        records_stay_home(monkeypatch)
    small(monkeypatch, chunk_numel=4096)
    engines = []

    def start(
        nbytes: int | None, micro_batches: int = 1, tokens: int = 0, narrow: bool = False, frozen_count: int = 0, **fields: Any
    ) -> Any:
        if nbytes is None:
            monkeypatch.delenv("OFFLOAD_DEVICE_NBYTES", raising=False)
        else:
            monkeypatch.setenv("OFFLOAD_DEVICE_NBYTES", str(nbytes))
        model = blocks()
        model[:frozen_count].requires_grad_(False)
        config = offload.Config(**({"dtype": "bf16"} | ON_CPU | fields)).expecting(micro_batches, tokens)
        engines.append(offload.initialize(model, adamw(model), with_internal_settings(config, sums_are_narrow=narrow)))
        return engines[-1]

    yield start
    for engine in engines:
        engine.close()


def backward(engine: Any, rows: int, seed: int) -> float:
    generator = torch.Generator().manual_seed(seed)
    x, y = torch.randn(rows, WIDTH, generator=generator), torch.randn(rows, WIDTH, generator=generator)
    with accelerator_of(engine).counting():  # activations lie there too
        loss = F.mse_loss(engine.module(x.to(engine.module[0][0].weight.dtype)).float(), y)
        engine.backward(loss)
    return loss.item()


def step(engine: Any, number: int, micro_batches: int, rows: int = SMALL) -> list[float]:
    losses = [backward(engine, rows, 100 * number + count) for count in range(micro_batches)]
    engine.step()
    engine.zero_grad()
    return losses


_ELSEWHERE: dict[Any, Any] = {}


def once(run: Callable[[], Any], *key: Any) -> Any:
    """What `run` gives, of sums in host memory: where records lie beside them is no matter, so it is run once for both."""
    if key not in _ELSEWHERE:
        _ELSEWHERE[key] = run()
    return _ELSEWHERE[key]


def whole_nbytes(engine: Any, itemsize: int = 4) -> int:
    """Of the sums of all chunks."""
    return itemsize * sum(flat.numel for flat in layout_of(engine).flats)


@pytest.mark.parametrize("narrow", SUMS)
@pytest.mark.parametrize("dtype", ["bf16", "fp32"])
def test_from_the_second_step_on_sums_leave_the_device_once(started: Any, dtype: str, narrow: bool) -> None:
    """In their own dtype, however many micro-batches there are, where there was a copy for each of them; the bits are those
    without."""
    elsewhere, engine = started(None, dtype=dtype, narrow=narrow), started(ROOMY, dtype=dtype, narrow=narrow)
    numel, itemsize = sum(parameter.numel() for parameter in blocks().parameters()), 2 if dtype == "bf16" else 4
    of_sum = itemsize if narrow else 4
    for number, micro_batches in enumerate([1, 3, 3, 2, 4]):
        moved, losses = [], []
        for one in (elsewhere, engine):
            before = accelerator_of(one).copied_out_nbytes
            losses.append(step(one, number, micro_batches))
            one._training.settle()
            moved.append(accelerator_of(one).copied_out_nbytes - before)
        assert_same_bits(*losses)
        several = number > 1  # learned in the step before
        assert moved[0] - moved[1] == ((micro_batches * itemsize - of_sum) * numel if several else 0), number
        assert (sums_on_device_of(engine).peak_nbytes > 0) == several
    assert sums_on_device_of(engine).peak_nbytes == whole_nbytes(engine, of_sum)
    assert_same_bits(engine.state_dict(), elsewhere.state_dict())


@pytest.mark.parametrize("narrow", SUMS)
def test_sums_leave_under_the_last_backward(started: Any, monkeypatch: pytest.MonkeyPatch, narrow: bool) -> None:
    """Which that is the loop said, or its last two steps show. What comes after it goes to the host as it comes."""
    monkeypatch.setattr(SumsOnDevice, "see_what_was_late", lambda sums: None)  # the link keeps up
    numel = sum(parameter.numel() for parameter in blocks().parameters())
    of_sum = (2 if narrow else 4) * numel
    told, learning, elsewhere = started(ROOMY, 3, narrow=narrow), started(ROOMY, narrow=narrow), started(None, narrow=narrow)

    def moved_in(engine: Any, number: int) -> list[int]:
        found, device = [], accelerator_of(engine)
        for count in range(COUNTS[number]):
            before = device.copied_out_nbytes
            backward(engine, SMALL, 100 * number + count)
            found.append(device.copied_out_nbytes - before)
        engine.step()
        engine.zero_grad()
        return found

    one = 2 * numel
    first, at_the_step, under_the_last = [one] * 3, [0] * 3, [0, 0, of_sum]
    assert [moved_in(told, number) for number in range(5)] == [
        first, under_the_last, under_the_last, [*under_the_last, one, one], at_the_step,
    ]  # fmt: skip
    assert [moved_in(learning, number) for number in range(5)] == [
        first, at_the_step, under_the_last, [*under_the_last, one, one], at_the_step,
    ]  # fmt: skip
    for number in range(5):
        moved_in(elsewhere, number)
    assert_same_bits(told.state_dict(), elsewhere.state_dict())
    assert_same_bits(learning.state_dict(), elsewhere.state_dict())


def test_a_link_that_does_not_keep_up_has_the_rest_leave_at_the_step(started: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Until it does again: here a third of what leaves under the last backward of one step is late, and of the next nothing."""
    engine, elsewhere = started(ROOMY, 3), started(None)
    there, early = sums_on_device_of(engine), []

    class Copy(Settled):
        """Of a step whose last third is late."""

        def done(self) -> bool:
            return len(early) != 2 or next(counted) < 2 * len(there._leaving) // 3

    counted: Iterator[int] = itertools.count()
    see_what_was_late = SumsOnDevice.see_what_was_late

    def seen(sums: SumsOnDevice) -> None:
        if sums._early_nbytes:
            early.append(sums._early_nbytes)
            for _, copied in sums._leaving:
                copied.wait()
            sums._leaving = deque((memory, Copy()) for memory, _ in sums._leaving)
        see_what_was_late(sums)

    monkeypatch.setattr(SumsOnDevice, "see_what_was_late", seen)
    monkeypatch.setattr(SumsOnDevice, "_settle", lambda sums, *, waits=False: None)
    for number in range(5):
        assert_same_bits(step(engine, number, 3), step(elsewhere, number, 3))
        there._leaving.clear()
    whole = whole_nbytes(engine)
    assert early[:2] == [whole, whole] and whole / 2 < early[2] < 3 * whole / 4 and early[2] < early[3] < whole
    assert_same_bits(engine.state_dict(), elsewhere.state_dict())


@WITH_RECORDS
@pytest.mark.parametrize("narrow", SUMS)
def test_the_bits_are_those_of_everything_in_memory(started: Any, narrow: bool) -> None:
    """Where sums stay by the planner's choice or in what is left, and are in the parameters' dtype or in fp32, which differ."""
    in_memory = {"parameters": "device", "optimizer_states": "device", "narrow": narrow}
    with pytest.raises(offload.BudgetError) as refusal:
        started(ROOMY, 3, narrow=narrow, device_memory=1)
    assert refusal.value.smallest_nbytes is not None
    least_nbytes = refusal.value.smallest_nbytes
    planned = started(ROOMY, 3, narrow=narrow, device_memory=4 * least_nbytes)
    assert any(unit.route.brings_gradients for unit in parts_of(planned).units)
    engines = (planned, started(ROOMY, 3, narrow=narrow), started(ROOMY, 3, **in_memory))
    for number, micro_batches in enumerate([3, 4, 1, 3]):
        losses = [step(engine, number, micro_batches) for engine in engines]
        assert_same_bits(*losses[:2])
        assert_same_bits(*losses[1:])
    assert sums_on_device_of(engines[1]).peak_nbytes > 0
    states = [engine.state_dict() for engine in engines]
    assert_same_bits(*states[:2])
    assert_same_bits(*states[1:])
    other = started(ROOMY, 3, **(in_memory | {"narrow": not narrow}))
    for number, micro_batches in enumerate([3, 4, 1, 3]):
        step(other, number, micro_batches)
    with pytest.raises(AssertionError):
        assert_same_bits(other.state_dict(), states[0])


def test_a_loop_that_says_so_keeps_them_where_one_that_does_not_has_yet_to_learn(started: Any) -> None:
    """After a first step of one micro-batch, which shows what the model takes."""
    told, within, learning, elsewhere = started(ROOMY, micro_batches=3), started(ROOMY), started(ROOMY), started(None)
    for engine in (told, within, learning, elsewhere):
        step(engine, 0, 1)
        if engine is within:
            with within.no_sync():
                backward(within, SMALL, 100)
                backward(within, SMALL, 101)
            backward(within, SMALL, 102)
            within.step()
        else:
            step(engine, 1, 3)
    assert sums_on_device_of(within).peak_nbytes == whole_nbytes(within)
    assert sums_on_device_of(told).peak_nbytes == sums_on_device_of(learning).peak_nbytes == 0  # the last step had one
    for engine in (told, within, learning):
        assert_same_bits(engine.state_dict(), elsewhere.state_dict())


@WITH_RECORDS
@pytest.mark.parametrize("tiers", [("cpu", "cpu"), ("device", "device")], ids=str)
def test_an_engine_that_is_closed_and_not_let_go_has_nothing_of_them(
    started: Any, monkeypatch: pytest.MonkeyPatch, tiers: tuple[str, str]
) -> None:
    """Nor of the buffers through which gradients leave, nor of sums of squares: another engine may want the memory."""
    made: list[weakref.ref[torch.UntypedStorage]] = []

    def watched(inner: type[Accelerator]) -> type[Accelerator]:
        def memory(device: Accelerator, nbytes: int) -> torch.Tensor:
            found = inner.memory(device, nbytes)
            made.append(weakref.ref(found.untyped_storage()))
            return found

        return type(inner.__name__, (inner,), {"memory": memory})

    computed_on(monkeypatch, DeferredAccelerator, watched)
    engine = started(ROOMY, parameters=tiers[0], optimizer_states=tiers[1])
    for number in range(2):
        step(engine, number, 2)
    backward(engine, SMALL, 200)

    def held_nbytes() -> int:
        return sum(storage.nbytes() for one in made if (storage := one()) is not None)

    assert held_nbytes() > whole_nbytes(engine), "nothing was on the device"
    engine.close()
    assert not held_nbytes()


def least(start: Any, rows: list[int]) -> int:
    """The most device memory in use with no unit beyond those in use, and no sum."""
    with pytest.MonkeyPatch.context() as patch:
        says_it_has(patch, 0)
        engine = start(ROOMY)
        for number, count in enumerate(rows):
            step(engine, number, 3, count)
        return int(accelerator_of(engine).peak_nbytes())


GROWING = [SMALL, SMALL, 4 * SMALL, 20 * SMALL, LARGE, LARGE, SMALL, SMALL]


@WITH_RECORDS
def test_sums_are_given_up_as_batches_grow(started: Any) -> None:
    """On a device with just the room that the largest batch needs with nothing beyond what is in use."""
    elsewhere, engine = started(None), started(least(started, GROWING))
    held = []
    for number, rows in enumerate(GROWING):
        between = []  # the micro-batches of a step
        for count in range(3):
            seed = 100 * number + count
            assert_same_bits(backward(engine, rows, seed), backward(elsewhere, rows, seed))
            between.append(sums_on_device_of(engine).nbytes)
        for one in (engine, elsewhere):
            one.step()
            one.zero_grad()
        held.append(max(between))
    assert held[0] == 0 < held[1] and held[4] == held[5] == 0 < held[7]
    assert_same_bits(engine.state_dict(), elsewhere.state_dict())


@WITH_RECORDS
@pytest.mark.parametrize("narrow", SUMS)
def test_sums_that_begin_go_when_a_larger_micro_batch_follows(started: Any, narrow: bool) -> None:
    """Some are on the device, and leave in the middle of a step; the host adds what comes after them."""
    rows = [SMALL, SMALL, LARGE, SMALL]
    sizes = [SMALL, LARGE]
    elsewhere, engine = started(None, narrow=narrow), started(least(started, sizes), narrow=narrow)
    for one in (elsewhere, engine):
        for number in range(2):
            step(one, number, 3)
        for seed, count in enumerate(rows):
            backward(one, count, seed)
            if one is engine and seed == 1:
                assert sums_on_device_of(engine).nbytes > 0
            if one is engine and seed == 2:
                assert sums_on_device_of(engine).nbytes == 0
        one.step()
    assert_same_bits(engine.state_dict(), elsewhere.state_dict())


@WITH_RECORDS
def test_keeping_what_does_not_fit_would_run_out(started: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """The tests above could fail: on a device that says to have more than it has."""
    nbytes, rows = least(started, [SMALL, LARGE]), [SMALL, SMALL, LARGE, LARGE]
    says_it_has(monkeypatch, ROOMY)
    engine = started(nbytes)
    with pytest.raises(torch.OutOfMemoryError, match="deferred device"):
        for number, count in enumerate(rows):
            step(engine, number, 3, count)


def reads(engine: Any, folder: Path) -> Any:
    return engine.read(engine.module[1][0].weight, "gradient")


def saves(engine: Any, folder: Path) -> None:
    engine.save_checkpoint(folder, leave_gradients=True)


def measures(engine: Any, folder: Path) -> float:
    norm: float = engine.clip_grad_norm_(1e9).item()
    return norm


def evaluates(engine: Any, folder: Path) -> float:
    with torch.no_grad():
        total: float = engine.module(torch.ones(3, WIDTH).to(torch.bfloat16)).sum().item()
    return total


def drops_all(engine: Any, folder: Path) -> None:
    engine.zero_grad()


def drops_one(engine: Any, folder: Path) -> None:
    engine.module[1][0].weight.grad = None


def freezes(engine: Any, folder: Path) -> None:
    engine.module[1][0].weight.requires_grad_(False)


def thaws(engine: Any, folder: Path) -> None:
    engine.module[1][0].weight.requires_grad_(True)


def fails(engine: Any, folder: Path) -> None:
    def raises(gradient: torch.Tensor) -> None:
        raise ValueError("own")

    undo = engine.module[2][0].weight.register_hook(raises)
    with pytest.raises(ValueError, match="own"):
        backward(engine, SMALL, 9)
    undo.remove()
    engine.zero_grad()


CLIPS = (pytest.param(None, id=""), pytest.param(0.01, id="clips"))


# What comes between ends the sum, or does not; whether the whole is clipped is decided when it is complete.
@WITH_RECORDS
@pytest.mark.parametrize("narrow", SUMS)
@pytest.mark.parametrize(
    ("between", "clip"), in_turn([reads, saves, measures, evaluates, drops_all, drops_one, freezes, fails], CLIPS)
)
def test_between_two_micro_batches(started: Any, tmp_path: Path, between: Any, clip: float | None, narrow: bool) -> None:

    def run(nbytes: int | None) -> Any:
        engine, said = started(nbytes, max_grad_norm=clip, narrow=narrow), []
        for number in range(4):
            for count in range(3):
                backward(engine, SMALL, 10 * number + count)
                if count == number - 1:
                    said.append(between(engine, tmp_path / f"{nbytes}-{number}"))
            engine.step()
            engine.zero_grad()
            thaws(engine, tmp_path)
        assert (sums_on_device_of(engine).peak_nbytes == 0) == (nbytes is None)
        return said, engine.grad_norm, engine.state_dict()

    assert_same_bits(run(ROOMY), once(lambda: run(None), between, clip, narrow))


@WITH_RECORDS
@pytest.mark.parametrize("narrow", SUMS)
def test_fp16_overflows_and_is_left_out(started: Any, narrow: bool) -> None:

    def run(nbytes: int | None) -> Any:
        engine = started(nbytes, dtype="fp16", loss_scale="dynamic", narrow=narrow)
        engine.loss_scale = 2.0**40
        for number in range(30):
            step(engine, number, 2)
        assert engine.stats()["skipped_steps"] > 0
        return engine.loss_scale, engine.stats()["skipped_steps"], engine.state_dict()

    assert_same_bits(run(ROOMY), once(lambda: run(None), "fp16", narrow))


@WITH_RECORDS
@pytest.mark.parametrize("narrow", SUMS)
@pytest.mark.parametrize("update", ["auto", "step"])
@pytest.mark.parametrize("fields", [{}, {"cpu_memory": 3}], ids=["in memory", "spilling"])
def test_updates_that_begin_in_backward_and_are_undone(
    started: Any, tmp_path: Path, update: str, fields: dict[str, Any], narrow: bool
) -> None:
    """On NVMe: a further micro-batch than the last step had comes when updates of the last ones have begun."""
    on_nvme = {"parameters": "nvme", "optimizer_states": "nvme", "nvme": str(tmp_path), "update": update}
    if fields:
        with pytest.raises(offload.BudgetError) as refusal:
            started(ROOMY, narrow=narrow, cpu_memory=1, **on_nvme)
        fields = {"cpu_memory": refusal.value.smallest_nbytes}

    def run(nbytes: int | None) -> Any:
        engine = started(nbytes, narrow=narrow, **on_nvme, **fields)
        losses = [step(engine, number, count) for number, count in enumerate([2, 2, 3, 2, 1, 4])]
        if nbytes is not None:
            assert sums_on_device_of(engine).peak_nbytes > 0
            assert (engine.stats()["undone_steps"] > 0) == (update == "auto")
        return losses, engine.state_dict()

    assert_same_bits(run(ROOMY), once(lambda: run(None), "undone", update, bool(fields), narrow))


@pytest.mark.parametrize("spare", [0.0, 0.4, 8.0])
@pytest.mark.parametrize(("micro_batches", "tokens"), [(1, 0), (3, 0), (3, 3000)])
def test_within_a_budget_for_the_device(started: Any, spare: float, micro_batches: int, tokens: int) -> None:
    """Known beforehand or learned: the bits are the same, and the plan is kept. Where tokens are known, records may lie on the
    device before the gradients of other units do."""
    with pytest.raises(offload.BudgetError) as refusal:
        started(ROOMY, micro_batches, device_memory=1)
    assert refusal.value.smallest_nbytes is not None
    elsewhere = started(None)
    budget = int(refusal.value.smallest_nbytes + spare * whole_nbytes(elsewhere))
    chosen = {"parameters": "auto", "optimizer_states": "auto"} if tokens else {}
    engine = started(ROOMY, micro_batches, tokens, device_memory=budget, **chosen)
    for number in range(3):
        assert_same_bits(step(engine, number, 3), step(elsewhere, number, 3))
    assert_same_bits(engine.state_dict(), elsewhere.state_dict())
    planned = sum(line["nbytes"] for line in engine.stats()["planned"] if line["tier"] == "device")
    sums = sums_on_device_of(engine).peak_nbytes if parts_of(engine).gradients.sums_on_device is not None else 0
    assert planned + sums <= budget


@pytest.mark.parametrize("frozen_count", [0, 2, BLOCKS - 1])
def test_a_backward_in_which_sums_leave_is_shorter_where_blocks_are_frozen(
    started: Any, monkeypatch: pytest.MonkeyPatch, frozen_count: int
) -> None:
    """Two operations for each token and parameter, two more of a trained one."""
    said: list[float] = []
    monkeypatch.setattr(SumsOnDevice, "expect_in_time", lambda _, nbytes: said.append(nbytes))
    engine = started(ROOMY, 3, 3000, frozen_count=frozen_count)
    rates, flats = accelerator_of(engine).rates(), list(layout_of(engine).flats)
    numel, trained = (sum(flat.numel for flat in flats if flat.trainable or whole) for whole in (True, False))
    assert (trained < numel) == bool(frozen_count)
    assert said == [pytest.approx(rates.d2h * 2 * 3000 * (numel + trained) / rates.flops)]


@pytest.mark.parametrize("micro_batches", [1, 2])
def test_a_gradient_that_lies_on_the_device_is_read_before_the_step_and_before_the_next_backward(
    started: Any, tmp_path: Path, micro_batches: int
) -> None:
    """Its update is on the host, which it is copied to: it lies on the device still."""
    with pytest.raises(offload.BudgetError) as refusal:
        started(ROOMY, 2, device_memory=1)
    assert refusal.value.smallest_nbytes is not None
    there, found = started(ROOMY, 2, device_memory=4 * refusal.value.smallest_nbytes), []
    assert any(unit.route.brings_gradients for unit in parts_of(there).units)
    for engine in (there, started(None)):
        seen = []
        for number in range(3):
            for count in range(micro_batches):
                backward(engine, SMALL, 100 * number + count)
                seen += [reads(engine, tmp_path).clone() for _ in range(2)]
            engine.step()
            engine.zero_grad()
        found.append((seen, engine.state_dict()))
    assert_same_bits(*found)
