# SPDX-License-Identifier: Apache-2.0
"""Updates that begin before the norm is known: never another bit, whether they are kept or undone, whatever comes between."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from functools import lru_cache
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import offload
from offload.step.gradients.buffers import GRADIENT_BUFFERS
from offload.step.updates.update import Updates
from offload.tiers import StagingPool
from tests.crosses import in_pairs, in_turn
from tests.file_systems import free_room
from tests.inside import layout_of, parts_of, placement_of, units_of
from tests.small_sizes import small
from tests.updates import before_each_update

from . import test_spare_host_memory
from .models import IN_MEMORY, Setup, Sometimes, Tied, adamw, gpt2, llama, stack, two_groups, vector_batches
from .runs import Run, allocated_nbytes, assert_same_bits, bitwise_loop, loop_of, refused, run_engine
from .speculating import (
    ALWAYS,
    AT_TIMES,
    BOTH,
    NEVER,
    ON_CPU_DEVICE,
    ON_DEFERRED,
    STEPS,
    at_once,
    both,
    counts,
    one_step,
)  # fmt: skip

WIDTH = 32
"""Of the models here, whose units have two chunks or three of the 4,096 elements that `speculating` cuts them into."""


def train(run: Run) -> list[float]:
    return bitwise_loop(run, STEPS, overflow_step=3 if run.engine.config.dtype == "fp16" else None)


@lru_cache
def reference(
    dtype: str, clip: float, state_format: str = "fp32", layers: int = 2, width: int = WIDTH
) -> tuple[list[float], dict[str, torch.Tensor]]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("OFFLOAD_ACCELERATOR", "cpu")
        model = llama(layers, width)
        fields = IN_MEMORY.fields(Path("."), dtype=dtype, max_grad_norm=clip, state_format=state_format)
        with offload.initialize(model, two_groups(model), offload.Config(**fields)) as engine:
            return run_engine(engine, train)


# Whether an update is kept or undone is the norm's matter and, where a step is left out, the loss scale's: all pairs of these,
# and each in place and on a device.
@pytest.mark.parametrize(("setup", "dtype", "clip"), in_pairs(BOTH, ("fp32", "bf16", "fp16"), (NEVER, AT_TIMES, ALWAYS)))
def test_kept_or_undone_the_bits_are_the_same(opened: Any, speculating: None, setup: Setup, dtype: str, clip: float) -> None:
    model = llama(2, WIDTH)
    engine = opened(model, two_groups(model), setup, dtype=dtype, max_grad_norm=clip)
    assert_same_bits(run_engine(engine, train), reference(dtype, clip))
    pool = parts_of(engine).pool
    assert pool.free_count(GRADIENT_BUFFERS) == pool.stats.consumers[GRADIENT_BUFFERS].count, "a gradient is still held"
    begun, undone = counts(engine)
    assert begun == STEPS
    if clip == ALWAYS:
        assert undone == STEPS
    elif clip == NEVER:
        assert undone == engine.stats()["skipped_steps"] and (undone > 0) == (dtype == "fp16")
    else:
        assert 0 < undone < STEPS


FORMS = [("fp32", "fp32"), ("bf16", "fp32"), ("fp16", "fp32"), ("bf16", "split"), ("bf16", "bf16"), ("bf16", "8bit")]


@pytest.mark.parametrize(
    ("parameters", "dtype", "state_format", "clip"), in_pairs(("cpu", "nvme", "device"), FORMS, (NEVER, AT_TIMES, ALWAYS))
)
def test_records_in_host_memory_are_kept_or_undone(
    opened: Any, speculating: None, parameters: str, dtype: str, state_format: str, clip: float
) -> None:
    """Beside a device. Parameters that are a part of their masters are kept, too, where they lie in memory; on the device they
    are not, and their updates wait."""
    model = llama(2, WIDTH)
    setup = Setup(parameters, "cpu", "deferred", "backward")
    engine = opened(model, two_groups(model), setup, dtype=dtype, state_format=state_format, max_grad_norm=clip)
    assert_same_bits(run_engine(engine, train), reference(dtype, clip, state_format))
    begun, undone = counts(engine)
    assert begun == (0 if parameters == "device" and state_format != "fp32" else STEPS)
    if begun and clip != NEVER:
        assert undone > 0 and (undone == STEPS) == (clip == ALWAYS)


@pytest.mark.parametrize("clip", [NEVER, AT_TIMES])
@both
def test_racing_updates_are_undone_wherever_they_are(
    opened: Any, monkeypatch: pytest.MonkeyPatch, setup: Setup, clip: float
) -> None:
    """Not waiting for what has begun: some chunks are updated when they are undone, some are being read, some wait."""
    small(monkeypatch, chunk_numel=4096, quiet_steps=0)
    for _ in range(2):
        model = llama(2, WIDTH)
        engine = opened(model, two_groups(model), setup, dtype="fp32", max_grad_norm=clip)
        assert_same_bits(run_engine(engine, train), reference("fp32", clip))
        engine.close()


@pytest.mark.parametrize("clip", [NEVER, AT_TIMES, ALWAYS])
@both
def test_gradients_that_still_lie_in_their_buffers_are_not_read_back(
    opened: Any, speculating: None, monkeypatch: pytest.MonkeyPatch, setup: Setup, clip: float
) -> None:
    """Of units of more chunks than gradients have buffers, some are on their way to the drive when backward leaves them."""
    found = []
    for has_it_again in (True, False):
        if not has_it_again:
            monkeypatch.setattr(StagingPool, "take_again", lambda pool, released: None)
        model = llama(2, 64)
        engine = opened(model, two_groups(model), setup, dtype="fp32", max_grad_norm=clip)
        buffers = parts_of(engine).pool.stats.consumers[GRADIENT_BUFFERS]
        assert max(len(unit.trained_chunks) for unit in units_of(engine)) > buffers.count
        result = run_engine(engine, train)
        io = engine.stats()["io"]
        found.append((result, io.read_nbytes, io.written_nbytes))
        engine.close()
    (result, read, written), (other_result, other_read, other_written) = found
    assert_same_bits(result, other_result)
    assert_same_bits(result, reference("fp32", clip, layers=2, width=64))
    assert read < other_read and read + written < other_read + other_written


@pytest.mark.parametrize("state_format", ["split", "bf16", "8bit"])
@both
def test_state_formats(opened: Any, speculating: None, setup: Setup, state_format: str) -> None:
    """Their masters are parameters and records together: both are undone, or neither."""
    model = llama(2, WIDTH)
    fields = {"dtype": "bf16", "max_grad_norm": AT_TIMES, "state_format": state_format}
    engine = opened(model, two_groups(model), setup, **fields)
    assert_same_bits(run_engine(engine, train), reference("bf16", AT_TIMES, state_format))
    begun, undone = counts(engine)
    assert begun == STEPS and 0 < undone < STEPS


@pytest.mark.parametrize("share", [0.16, 0.22])
@both
def test_a_part_kept_in_memory(opened: Any, monkeypatch: pytest.MonkeyPatch, setup: Setup, share: float) -> None:
    """What lies in memory waits for `step`, in the same steps in which the rest does not."""
    at_once(monkeypatch)
    clip = test_spare_host_memory.CLIP
    smallest, everything = test_spare_host_memory.limits(setup, dtype="fp32", max_grad_norm=clip)
    model = llama(test_spare_host_memory.LAYERS)
    budget = smallest + int(share * (everything - smallest))
    engine = opened(model, two_groups(model), setup, dtype="fp32", max_grad_norm=clip, cpu_memory=budget)
    units = engine.stats()["units"]
    assert 0 < sum(unit["begins_early"] for unit in units) < len(units) - 1
    losses, weights = run_engine(engine, test_spare_host_memory.train)
    assert_same_bits([losses, weights], list(test_spare_host_memory.reference("fp32")))
    assert min(counts(engine)) > 0


def frozen() -> nn.Module:
    model = stack(WIDTH, 4)
    for name, parameter in model.named_parameters():
        parameter.requires_grad_("norm" not in name and not name.startswith("blocks.1"))
    return model


MODELS: dict[str, tuple[Callable[[], nn.Module], int]] = {
    "tied": (Tied, 16),
    "frozen": (frozen, WIDTH),
    "sometimes": (Sometimes, 16),
}


# A model decides when its units' gradients are complete: each with updates that are kept and undone, in place and on a device.
@pytest.mark.parametrize(("setup", "kind", "clip"), in_pairs(BOTH, MODELS, (NEVER, 0.3)))
def test_models(opened: Any, speculating: None, setup: Setup, kind: str, clip: float) -> None:
    make, width = MODELS[kind]

    def loss_of(run: Run, step: int, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return F.mse_loss(run.model(x, step % 2 == 0) if kind == "sometimes" else run.model(x), y)

    loop = loop_of(vector_batches(STEPS, width), loss_of)
    results = []
    for where in (IN_MEMORY, setup):
        torch.manual_seed(4)
        model = make()
        engine = opened(model, adamw(model), where, max_grad_norm=clip)
        results.append(run_engine(engine, loop))
    assert_same_bits(results[1], results[0])
    begun, undone = counts(engine)
    assert begun > 0 and (undone > 0) == (clip != NEVER)


# What a loop may do between a backward and its step. Each gets the run, the step's index and its batch.


def _evaluates(run: Run, step: int, x: torch.Tensor) -> Any:
    with torch.no_grad():
        return run.model(x).sum().item()


def _runs_a_forward(run: Run, step: int, x: torch.Tensor) -> Any:
    return run.model(x).sum().item()


def _reads_weights(run: Run, step: int, x: torch.Tensor) -> Any:
    with run.gathered([run.model.blocks[2].up.weight]):
        return run.model.blocks[2].up.weight.sum().item()


def _writes_weights(run: Run, step: int, x: torch.Tensor) -> None:
    weight = run.model.blocks[2].up.weight
    with run.gathered([weight]), torch.no_grad():
        weight[1, 2:5] = step


def _looks_at_all_weights(run: Run, step: int, x: torch.Tensor) -> Any:
    return {name: value.sum().item() for name, value in run.weights().items()}


def _drops_gradients(run: Run, step: int, x: torch.Tensor) -> None:
    run.optimizer.zero_grad()


def _zeroes_gradients(run: Run, step: int, x: torch.Tensor) -> None:
    run.optimizer.zero_grad(set_to_none=False)


def _drops_one_gradient(run: Run, step: int, x: torch.Tensor) -> None:
    run.model.blocks[1].down.weight.grad = None


def _assigns_one_gradient(run: Run, step: int, x: torch.Tensor) -> None:
    weight = run.model.blocks[1].down.weight
    weight.grad = torch.full(weight.shape, 0.01)


def _changes_the_learning_rate(run: Run, step: int, x: torch.Tensor) -> None:
    for group in run.optimizer.param_groups:
        group["lr"] *= 0.5


def _clips(run: Run, step: int, x: torch.Tensor) -> float:
    return float(run.engine.clip_grad_norm_(0.05))


def _measures_the_norm(run: Run, step: int, x: torch.Tensor) -> float:
    return float(run.engine.clip_grad_norm_(1e6))


def _is_interrupted(run: Run, step: int, x: torch.Tensor) -> None:
    class Breaks(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, value: torch.Tensor) -> torch.Tensor:
            return value.clone()

        @staticmethod
        def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
            raise ZeroDivisionError("in backward")

    run.optimizer.zero_grad()
    hook = run.model.blocks[0].register_forward_hook(lambda module, args, out: Breaks.apply(out))
    loss = run.model(x).square().mean()
    hook.remove()
    with pytest.raises(ZeroDivisionError):
        loss.backward()
    # Without zero_grad: what came before the exception counts, as in PyTorch.


BETWEEN = (
    _evaluates, _runs_a_forward, _reads_weights, _writes_weights, _looks_at_all_weights, _drops_gradients, _zeroes_gradients,
    _drops_one_gradient, _assigns_one_gradient, _changes_the_learning_rate, _clips, _measures_the_norm, _is_interrupted,
)  # fmt: skip
KEPT = (_measures_the_norm,)
"""Those after which the step goes on from what has begun."""


# Each once, in turns: in place or on a device the chunks that are undone are the same. Most are in both in
# test_update_loops.py; on a device are here those that take more room for gradients.
@pytest.mark.parametrize(("between", "setup"), in_turn(BETWEEN, (ON_DEFERRED, ON_CPU_DEVICE)))
def test_what_comes_between_backward_and_step(opened: Any, speculating: None, setup: Setup, between: Any) -> None:
    def loop(run: Run) -> list[Any]:
        seen: list[Any] = []
        for step, (x, y) in enumerate(vector_batches(STEPS, WIDTH)):
            loss = F.mse_loss(run.model(x), y)
            loss.backward()
            if step % 2 == 1:
                seen.append(between(run, step, x))
            run.optimizer.step()
            run.optimizer.zero_grad()
            seen.append(loss.item())
        return seen

    results = []
    for where in (IN_MEMORY, setup):
        model = stack(WIDTH, 4)
        engine = opened(model, two_groups(model), where, max_grad_norm=NEVER)
        results.append(run_engine(engine, loop))
    assert_same_bits(results[1], results[0])
    begun, undone = counts(engine)
    assert begun >= STEPS and undone == (0 if between in KEPT else STEPS // 2)


def test_a_gradient_that_is_dropped_is_not_taken_out_of_an_updates_hands(opened: Any, speculating: None) -> None:
    """torch's clipping asks which gradients there are before their norm, by which the update is undone."""
    model = stack(2 * WIDTH, 4)
    engine = opened(model, adamw(model), ON_CPU_DEVICE, max_grad_norm=NEVER)
    x, y = next(iter(vector_batches(1, 2 * WIDTH)))
    F.mse_loss(model(x), y).backward()
    weight = model.blocks[1].down.weight
    weight.grad = None
    gradients = parts_of(engine).gradients
    held = [chunk for unit in units_of(engine) for chunk in unit.trained_chunks if next(iter(chunk.infos)).parameter is weight]
    assert gradients is not None and held and all(chunk.gradient is not None and chunk.gradient.held for chunk in held)
    assert "blocks.1.down.weight" not in [info.fqn for info in gradients.live_parameters()]
    assert all(chunk.gradient is not None and chunk.gradient.live for chunk in held)
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1e9)
    assert not any(chunk.gradient is not None and chunk.gradient.held for chunk in held) and counts(engine) == (1, 1)
    engine.step()


@pytest.mark.parametrize(("parameters", "records"), [("cpu", "cpu"), ("device", "cpu"), ("nvme", "cpu"), ("nvme", "nvme")])
def test_a_hook_takes_a_gradient_out_under_backward(
    opened: Any, speculating: None, monkeypatch: pytest.MonkeyPatch, parameters: str, records: str
) -> None:
    """After it was taken over, and before its unit's update begins: that has no gradient of it any more, and waits."""
    small(monkeypatch, gradients_together_nbytes=0)  # each is taken over as soon as it is there

    def loop(run: Run) -> list[float]:
        losses = []
        for step, (x, y) in enumerate(vector_batches(STEPS, WIDTH)):
            hook = run.model.blocks[1].down.weight.register_post_accumulate_grad_hook(
                lambda parameter, step=step: setattr(parameter, "grad", None) if step % 2 else None
            )
            loss = F.mse_loss(run.model(x), y)
            loss.backward()
            run.optimizer.step()
            run.optimizer.zero_grad()
            hook.remove()
            losses.append(loss.item())
        return losses

    results = []
    for where in (IN_MEMORY, Setup(parameters, records, "deferred", "backward")):
        model = stack(WIDTH, 4)
        engine = opened(model, two_groups(model), where, max_grad_norm=NEVER)
        results.append(run_engine(engine, loop))
    assert_same_bits(results[1], results[0])
    assert counts(engine) == (STEPS, 0)


def test_what_was_read_ahead_for_an_undone_update_is_read_again(opened: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """The values that it would have updated are written before the step."""
    small(monkeypatch, chunk_numel=4096, quiet_steps=0)
    begun, goes_on = list[Any](), threading.Event()

    def after_the_first(unit: Any, update: Any) -> None:
        begun.append(unit)
        if len(begun) > 1:
            goes_on.wait(30)

    before_each_update(monkeypatch, after_the_first)
    results = []
    for setup in (IN_MEMORY, ON_DEFERRED):
        begun.clear()
        goes_on.clear() if setup is ON_DEFERRED else goes_on.set()
        model = stack(WIDTH, 4)
        engine = opened(model, adamw(model), setup, max_grad_norm=NEVER)
        x, y = vector_batches(1, WIDTH)[0]
        F.mse_loss(model(x), y).backward()
        weight = model.blocks[3].up.weight
        if setup is ON_DEFERRED:
            updates = parts_of(engine).updates
            updates.apply(updates.pending_units[0])  # of the outlet; on the way what comes next is read ahead
            (values,) = updates._value_accesses.values()
            assert values._ahead
            goes_on.set()
        with torch.no_grad():
            model(x)
        if setup is ON_DEFERRED:
            assert not values._ahead and counts(engine) == (1, 1)
        with engine.gathered([weight]), torch.no_grad():
            weight.mul_(2)
        engine.step()
        results.append(engine.state_dict())
    assert_same_bits(results[1], results[0])


def test_what_was_read_ahead_for_an_absent_unit_is_updated_where_it_is_used(
    opened: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The embedding left device memory before its gradient was complete: its update waits for `step` to bring it back."""
    small(monkeypatch, chunk_numel=4096, quiet_steps=0)
    recall = Updates.recall
    all_enqueued, partly_read = threading.Event(), set[str]()

    def late(unit: Any, update: Any) -> None:
        assert unit.name != "model.layers.0" or all_enqueued.wait(30)  # of those launched it is the last

    def recall_late(updates: Updates, units: Any) -> Any:
        all_enqueued.set()
        for unit in updates.launched_units:
            updates.apply(unit)
        deadline = time.monotonic() + 30
        for unit in [unit for unit in updates.pending_units if unit.update.job is None]:
            while not any(one.started for one in unit.update.chunks) and time.monotonic() < deadline:
                updates.read_ahead()  # as far as there are buffers, once the last writes have left them
                time.sleep(0.001)
            if not all(one.started for one in unit.update.chunks):
                partly_read.add(unit.name)
        return recall(updates, units)

    before_each_update(monkeypatch, late)
    monkeypatch.setattr(Updates, "recall", recall_late)
    results = []
    for setup in (IN_MEMORY, ON_CPU_DEVICE):
        model = llama(2, 64, vocabulary=2048)  # 32 chunks of it: more than there are buffers
        engine = opened(model, two_groups(model), setup, dtype="fp32", max_grad_norm=NEVER)
        results.append(run_engine(engine, train))
    assert_same_bits(results[1], results[0])
    assert partly_read == {"model.embed_tokens"}


@both
def test_an_update_without_states_is_undone(opened: Any, speculating: None, setup: Setup) -> None:
    """Plain SGD keeps nothing but the weights."""
    results = []
    for where in (IN_MEMORY, setup):
        model = llama(2, WIDTH)
        engine = opened(model, torch.optim.SGD(model.parameters(), lr=0.25), where, dtype="fp32", max_grad_norm=ALWAYS)
        results.append(run_engine(engine, train))
    assert_same_bits(results[1], results[0])
    assert counts(engine) == (STEPS, STEPS)


@both
def test_non_finite_gradients_change_nothing(opened: Any, speculating: None, setup: Setup) -> None:
    """What was updated before the last gradient turned out not to be finite is as it was, and training goes on."""

    def loop(run: Run, poisoned: bool) -> list[float]:
        losses = []
        for step, (x, y) in enumerate(vector_batches(STEPS, WIDTH)):
            if poisoned and step == 2:
                before = run.weights()
                F.mse_loss(run.model(x), y).backward()
                run.model.inlet.bias.grad = torch.full((WIDTH,), torch.inf)
                with refused(offload.NonFiniteGradientError, "inlet.bias"):
                    run.optimizer.step()
                run.optimizer.zero_grad()
                assert_same_bits(run.weights(), before)
            loss = F.mse_loss(run.model(x), y)
            loss.backward()
            run.optimizer.step()
            run.optimizer.zero_grad()
            losses.append(loss.item())
        return losses

    results = []
    for poisoned in (False, True):
        model = stack(WIDTH, 4)
        engine = opened(model, adamw(model), setup, max_grad_norm=NEVER)
        results.append(run_engine(engine, lambda run, poisoned=poisoned: loop(run, poisoned)))
    assert_same_bits(results[1], results[0])
    assert counts(engine) == (STEPS + 1, 1)


@both
def test_a_save_waits_for_the_step(opened: Any, tmp_path: Path, speculating: None, setup: Setup) -> None:
    """And one that runs beside training holds the state of its moment, whatever is begun and undone meanwhile."""
    model = stack(WIDTH, 4)
    engine = opened(model, adamw(model), setup, max_grad_norm=0.3)
    batches = vector_batches(STEPS, WIDTH)
    for step, (x, y) in enumerate(batches):
        if step == 2:
            engine.save_checkpoint(tmp_path / "waited")
            beside = engine.save_checkpoint(tmp_path / "beside", wait=False)
        F.mse_loss(model(x), y).backward()
        with refused(offload.UsageError, "step"):
            engine.save_checkpoint(tmp_path / "within")
        engine.step()
        engine.zero_grad()
    beside.wait()
    assert min(counts(engine)) > 0
    kept = [{path.name: path.read_bytes() for path in (tmp_path / name).iterdir()} for name in ("waited", "beside")]
    assert kept[0] == kept[1] and not (tmp_path / "within").exists()


@pytest.mark.parametrize("when", ["in backward", "before step"])
@both
def test_close_in_the_middle(opened: Any, nvme: Path, speculating: None, setup: Setup, when: str) -> None:
    model = stack(WIDTH, 4)
    with contextlib.suppress(ZeroDivisionError), opened(model, adamw(model), setup, max_grad_norm=NEVER) as engine:
        x, y = vector_batches(1, WIDTH)[0]
        if when == "in backward":
            _is_interrupted(Run(model, engine.optimizer, engine), 0, x)
        else:
            F.mse_loss(model(x), y).backward()
        assert counts(engine) == (1, 0)
        raise ZeroDivisionError
    assert allocated_nbytes(nvme) == 0


def test_steps_that_are_expected_to_be_quiet(opened: Any) -> None:
    """Eight quiet ones come first; a strike costs one, and then eight more are looked at."""
    model = stack(WIDTH, 4)
    engine = opened(model, adamw(model), ON_CPU_DEVICE, max_grad_norm=1e3)
    batches = vector_batches(20, WIDTH)
    for step, (x, y) in enumerate(batches):
        one_step(engine, x, y * 1e6 if step == 10 else y)
        begun = [*range(8, 11), *range(19, 20)]
        assert counts(engine) == (sum(1 for one in begun if one <= step), int(step >= 10)), step


@pytest.mark.parametrize(("setup", "said", "joined"), in_pairs(BOTH, (1, 4), (0, 1 << 20)))
def test_of_several_backwards_updates_begin_in_the_last(
    opened: Any, speculating: None, monkeypatch: pytest.MonkeyPatch, setup: Setup, said: int, joined: int
) -> None:
    """Of the first step where the loop says how many it has, and else of those after it; blocks that are one unit together wait
    for the last of them."""
    small(monkeypatch, joined_numel=joined)
    batches, begun = vector_batches(4 * STEPS, WIDTH), [list[bool]() for _ in range(STEPS)]

    def loop(run: Run) -> list[float]:
        losses = []
        for index, (x, y) in enumerate(batches, 1):
            loss = F.mse_loss(run.model(x), y)
            loss.backward()
            begun[(index - 1) // 4].append(any(unit.early is not None for unit in units_of(run.engine)))
            losses.append(loss.item())
            if index % 4 == 0:
                run.optimizer.step()
                run.optimizer.zero_grad()
        return losses

    results = []
    for where in (IN_MEMORY, setup):
        model = stack(WIDTH, 4)
        engine = opened(model, two_groups(model), where, max_grad_norm=NEVER, micro_batches=said)
        for one in begun:
            one.clear()
        results.append(run_engine(engine, loop))
    assert_same_bits(results[1], results[0])
    in_the_last = [False, False, False, True]
    assert begun[1:] == [in_the_last] * (STEPS - 1)
    assert begun[0] == (in_the_last if said == 4 else [True, False, False, False])
    assert counts(engine) == (STEPS, int(said == 1))


def test_a_first_step_of_several_backwards_is_no_strike(opened: Any) -> None:
    """How many there are is known after it."""
    model = stack(WIDTH, 4)
    engine = opened(model, adamw(model), ON_CPU_DEVICE)
    for step, (x, y) in enumerate(vector_batches(4, WIDTH)):
        F.mse_loss(model(x), y).backward()
        one_step(engine, x, y)
        assert counts(engine) == (step + 1, 1)


def test_only_where_it_can_be_undone(opened: Any) -> None:
    for setup, fields in (
        (Setup("nvme", "nvme", "cpu", "step"), {"max_grad_norm": 1.0}),
        (Setup("cpu", "nvme", "cpu", "backward"), {"max_grad_norm": 1.0}),
    ):
        model = stack(WIDTH, 4)
        engine = opened(model, adamw(model), setup, **fields)
        assert not any(unit["begins_early"] for unit in engine.stats()["units"])
        assert all("undo" not in line["purpose"] for line in engine.stats()["planned"])


def early_units(engine: Any) -> list[int]:
    return [index for index, unit in enumerate(engine.stats()["units"]) if unit["begins_early"]]


@pytest.mark.parametrize(("share", "setup"), in_turn((0.0, 0.5), BOTH))
def test_a_drive_has_room_for_a_part(
    opened: Any, monkeypatch: pytest.MonkeyPatch, speculating: None, setup: Setup, share: float
) -> None:
    """Second places are made of what is left, for the units that backward reaches first; the others wait for `step`."""

    def run() -> tuple[Any, Any]:
        model = gpt2(layers=6)
        engine = opened(model, adamw(model), setup, max_grad_norm=0.5)
        return engine, run_engine(engine, lambda run: bitwise_loop(run, steps=6))

    whole, expected = run()
    needed = {line["purpose"]: line["nbytes"] for line in whole.stats()["planned"] if line["tier"] == "nvme"}
    second = needed.pop("room to undo updates")
    free = (sum(needed.values()) + share * second) / 0.98 + 4096
    free_room(monkeypatch, free)
    engine, found = run()
    assert_same_bits(found, expected)
    chosen, all_units = early_units(engine), early_units(whole)
    count = len(chosen)
    assert chosen == all_units[len(all_units) - count :]
    assert count == len(all_units) // 2 if share else count == 0
    assert sum(line["nbytes"] for line in engine.stats()["planned"] if line["tier"] == "nvme") <= free


@pytest.mark.parametrize("share", [0.0, 0.5, 1.0])
def test_a_budget_has_room_for_a_part_of_what_lies_in_host_memory(opened: Any, speculating: None, share: float) -> None:
    """Second places are made of what it leaves; without a budget none are, unless update="backward" asks for them."""
    beside = Setup("cpu", "cpu", "deferred", "auto")

    def run(setup: Setup, **fields: Any) -> tuple[Any, Any]:
        model = gpt2(layers=6)
        engine = opened(model, adamw(model), setup, max_grad_norm=0.5, dtype="bf16", **fields)
        return engine, run_engine(engine, lambda run: bitwise_loop(run, steps=6))

    least, expected = run(beside)
    whole, found = run(Setup("cpu", "cpu", "deferred", "backward"))
    assert_same_bits(found, expected)
    planned = placement_of(whole).with_sums().plan  # within a budget sums of micro-batches have a place, if there will be any
    second = next(line.nbytes for line in planned.lines if line.purpose == "room to undo updates")
    budget = planned.total_nbytes("cpu") - second + int(share * second)
    engine, found = run(beside, cpu_memory=budget)
    assert_same_bits(found, expected)
    chosen, all_units = early_units(engine), early_units(whole)
    assert not early_units(least) and chosen == all_units[len(all_units) - len(chosen) :]
    left = budget - placement_of(engine).with_sums().plan.total_nbytes("cpu")
    assert left >= 0 and (engine.stats()["speculated_steps"] > 0) == bool(chosen) and (bool(chosen) or not share)
    others = [index for index in all_units if index not in chosen]
    assert bool(others) == (share < 1.0)
    for index in others[-1:]:
        records = parts_of(engine).records
        assert records is not None and sum(map(records.nbytes, units_of(engine)[index].trained_chunks)) > left


@both
def test_a_step_count_is_that_of_the_last_step(opened: Any, speculating: None, setup: Setup) -> None:
    model = stack(WIDTH, 2)
    engine = opened(model, adamw(model), setup)
    for step, (x, y) in enumerate(vector_batches(2, WIDTH)):
        F.mse_loss(model(x), y).backward()
        read = [engine.read(parameter, "step").item() for parameter in model.parameters()]
        assert counts(engine) == (step + 1, 0) and set(read) == {step}
        engine.step()
        assert {engine.read(parameter, "step").item() for parameter in model.parameters()} == {step + 1}
        engine.zero_grad()


@both
def test_the_second_places_are_planned(opened: Any, nvme: Path, setup: Setup) -> None:
    """To the byte: the records and trained parameters of every unit but the root, once more."""
    planned, held = {}, {}
    for update in ("step", "backward"):
        model = frozen()
        engine = opened(model, adamw(model), replace(setup, update=update))
        planned[update] = sum(line["nbytes"] for line in engine.stats()["planned"] if line["tier"] == "nvme")
        held[update] = allocated_nbytes(nvme)
        layout = layout_of(engine)
        engine.close()
    twice = [flat for unit in layout.units[1:] for flat in unit.flats if flat.trainable]
    values_and_moments = sum(4 * chunk.numel + 4 * 2 * chunk.numel for flat in twice for chunk in flat.chunks)
    assert planned["backward"] - planned["step"] == values_and_moments
    for update, nbytes in planned.items():
        assert nbytes <= held[update] < nbytes + 2**16  # the folder itself, and what the file system needs to find blocks
