# SPDX-License-Identifier: Apache-2.0
"""When updates begin never shows: in any loop, in every place, "auto", "step" and "backward" train to the same bits."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from functools import lru_cache
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import offload
from offload.step.clip_history import QUIET_STEPS
from tests.file_systems import free_room

from .models import IN_MEMORY, Setup, stack, two_groups, vector_batches
from .runs import Run, assert_same_bits, loop_of, run_engine
from .speculating import counts

WIDTH, STEPS = 32, 5
Loop = Callable[[Run], list[Any]]
LOOPS: dict[str, Loop] = {}


def loop(body: Callable[[Run, int, Iterator[tuple[torch.Tensor, torch.Tensor]]], Any]) -> None:
    """`body` is what a loop does in a step but for the step itself, given the run, the step's index and batches without end."""

    def whole(run: Run) -> list[Any]:
        batches = iter(vector_batches(4 * STEPS, WIDTH))
        seen: list[Any] = []
        for index in range(STEPS):
            seen.append(body(run, index, batches))
            if seen[-1] is not None:
                run.optimizer.step()
                run.optimizer.zero_grad()
        return seen

    LOOPS[body.__name__.strip("_")] = whole


Batches = Iterator[tuple[torch.Tensor, torch.Tensor]]


def loss_of(run: Run, batches: Batches) -> torch.Tensor:
    x, y = next(batches)
    dtype = run.engine.config.dtype
    return F.mse_loss(run.model(x).float(), y) if dtype else F.mse_loss(run.model(x), y)


def backward(run: Run, batches: Batches, **options: Any) -> float:
    loss = loss_of(run, batches)
    run.engine.backward(loss, **options)
    return loss.item()


@loop
def _plain(run: Run, index: int, batches: Batches) -> Any:
    return backward(run, batches)


@loop
def _accumulates(run: Run, index: int, batches: Batches) -> Any:
    return [backward(run, batches) for _ in range(3)]


@loop
def _accumulates_within_no_sync(run: Run, index: int, batches: Batches) -> Any:
    with run.no_sync():
        losses = [backward(run, batches) for _ in range(2)]
    return [*losses, backward(run, batches)]


@loop
def _accumulates_more_or_less(run: Run, index: int, batches: Batches) -> Any:
    return [backward(run, batches) for _ in range((2, 2, 1, 3, 2)[index])]


@loop
def _evaluates_before_the_step(run: Run, index: int, batches: Batches) -> Any:
    loss = backward(run, batches)
    with torch.no_grad():
        return loss, loss_of(run, batches).item()


@loop
def _evaluates_between_backwards(run: Run, index: int, batches: Batches) -> Any:
    losses = [backward(run, batches)]
    with torch.no_grad():
        losses.append(loss_of(run, batches).item())
    return [*losses, backward(run, batches)]


@loop
def _clips_by_the_engine(run: Run, index: int, batches: Batches) -> Any:
    return backward(run, batches), run.engine.clip_grad_norm_(0.05 if index % 2 else 1e6).item()


@loop
def _clips_by_torch(run: Run, index: int, batches: Batches) -> Any:
    loss = backward(run, batches)
    return loss, nn.utils.clip_grad_norm_(run.model.parameters(), 0.05 if index % 2 else 1e6).item()


@loop
def _leaves_steps_out(run: Run, index: int, batches: Batches) -> Any:
    loss = backward(run, batches)
    if index % 2:
        return loss
    run.optimizer.zero_grad()
    return None


@loop
def _steps_every_other_time(run: Run, index: int, batches: Batches) -> Any:
    loss = backward(run, batches)
    return loss if index % 2 else None


@loop
def _overflows(run: Run, index: int, batches: Batches) -> Any:
    loss = loss_of(run, batches)
    run.engine.backward(loss * 1e30 if index == 2 and run.engine.config.dtype == "fp16" else loss)
    return loss.item()


@loop
def _backward_twice_through_one_graph(run: Run, index: int, batches: Batches) -> Any:
    loss = loss_of(run, batches)
    run.engine.backward(loss, retain_graph=True)
    run.engine.backward(loss)
    return loss.item()


@loop
def _two_forwards_before_one_backward(run: Run, index: int, batches: Batches) -> Any:
    loss = loss_of(run, batches) + loss_of(run, batches)
    run.engine.backward(loss)
    return loss.item()


@loop
def _scales_by_itself(run: Run, index: int, batches: Batches) -> Any:
    loss = loss_of(run, batches)
    run.engine.scaled(loss).backward()
    return loss.item()


@loop
def _is_interrupted(run: Run, index: int, batches: Batches) -> Any:
    hook = run.model.blocks[0].up.weight.register_hook(_raises)
    with contextlib.suppress(ZeroDivisionError):
        backward(run, batches)
    hook.remove()
    return backward(run, batches)  # what came before the exception counts, as in PyTorch


def _raises(_: torch.Tensor) -> None:
    raise ZeroDivisionError


@loop
def _reads(run: Run, index: int, batches: Batches) -> Any:
    loss, weight = backward(run, batches), run.model.blocks[3].up.weight
    with run.gathered([weight]):
        found = [weight.sum().item()]
    if index % 2:
        found += [run.engine.read(weight, what).sum().item() for what in ("value", "gradient", "exp_avg")]
    return loss, found


@loop
def _writes(run: Run, index: int, batches: Batches) -> Any:
    loss, weight = backward(run, batches), run.model.blocks[index % 4].up.weight
    with run.gathered([weight]), torch.no_grad():
        weight[1, 2:5] = index
    run.engine.write(run.model.outlet.bias, "value", torch.full((WIDTH,), 0.25 * index))
    return loss


@loop
def _looks_at_all_weights(run: Run, index: int, batches: Batches) -> Any:
    return backward(run, batches), {name: value.sum().item() for name, value in run.weights().items()}


@loop
def _changes_the_learning_rate(run: Run, index: int, batches: Batches) -> Any:
    loss = backward(run, batches)
    for group in run.optimizer.param_groups:
        group["lr"] *= 0.5
    return loss


@loop
def _freezes_and_unfreezes(run: Run, index: int, batches: Batches) -> Any:
    losses = [backward(run, batches)]
    run.model.blocks[1].requires_grad_(index % 2 == 1)
    return [*losses, backward(run, batches)]


def _with_a_closure(run: Run) -> list[Any]:
    batches, losses = iter(vector_batches(2 * STEPS, WIDTH)), []

    def closure() -> torch.Tensor:
        run.optimizer.zero_grad()
        loss = loss_of(run, batches)
        run.engine.backward(loss)
        losses.append(loss.item())
        return loss

    for index in range(STEPS):
        if index % 2:
            closure()  # of a line search that took nothing
        run.optimizer.step(closure)
    return losses


def _adds_a_group(run: Run) -> list[Any]:
    batches, losses = iter(vector_batches(2 * STEPS, WIDTH)), []
    for index in range(STEPS):
        losses.append(backward(run, batches))
        run.optimizer.step()
        run.optimizer.zero_grad()
        if index == 1:
            late = list(run.model.blocks[1].parameters())
            run.model.blocks[1].requires_grad_(True)
            run.optimizer.add_param_group({"params": late, "lr": 5e-3, "weight_decay": 0.2})
    return losses


LOOPS |= {"with_a_closure": _with_a_closure, "adds_a_group": _adds_a_group}
UNDONE = dict.fromkeys(LOOPS, 0) | {
    # Once, until the loop is known:
    "accumulates": 1, "evaluates_between_backwards": 1, "backward_twice_through_one_graph": 1, "is_interrupted": 1,
    "steps_every_other_time": 1, "freezes_and_unfreezes": 1,
    # As often as it goes on longer than the step before, clips, overflows, drops what came, or is called by a line search:
    "accumulates_more_or_less": 2, "clips_by_the_engine": 2, "clips_by_torch": 2, "overflows": 1, "leaves_steps_out": 3,
    "with_a_closure": 2,
    # In every step:
    "evaluates_before_the_step": STEPS, "reads": STEPS, "writes": STEPS, "looks_at_all_weights": STEPS,
    "changes_the_learning_rate": STEPS,
}  # fmt: skip
"""How often updates that began are undone, where none is given up for the steps that follow."""

PLACES = (
    Setup("nvme", "nvme", "cpu"),
    Setup("nvme", "nvme", "deferred"),
    Setup("cpu", "nvme", "deferred"),
    Setup("device", "nvme", "deferred"),
    Setup("cpu", "cpu", "deferred"),
)


def model_for(name: str) -> nn.Module:
    model = stack(WIDTH, 4)
    if name == "adds_a_group":
        model.blocks[1].requires_grad_(False)
    return model


@lru_cache
def reference(name: str, dtype: str | None) -> Any:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("OFFLOAD_ACCELERATOR", "cpu")
        model = model_for(name)
        with offload.initialize(model, two_groups(model), offload.Config(**IN_MEMORY.fields(Path("."), dtype=dtype))) as engine:
            return run_engine(engine, LOOPS[name])


def _cases() -> Iterator[Any]:
    """Every loop where all that an update changes is undone, in place and from a device, and in one of the places where a part
    is or nothing: there updates begin early, "auto" and "backward" in turns. At "step" in one place. All others are slow."""
    for number, name in enumerate(LOOPS):
        for position, setup in enumerate(PLACES):
            place = f"{setup.parameters}+{setup.optimizer_states}-{setup.accelerator}"
            early = position in (0, 1, 2 + number % 3)
            quick = {("auto", "backward")[(number + position) % 2]} if early else set()
            quick |= {"step"} if position == number % len(PLACES) else set()
            for update in ("auto", "step", "backward"):
                marks = [] if update in quick else [pytest.mark.slow]
                yield pytest.param(name, setup, update, id=f"{name}-{place}-{update}", marks=marks)


@pytest.mark.parametrize(("name", "setup", "update"), list(_cases()))
def test_the_same_bits(opened: Any, speculating: None, name: str, setup: Setup, update: str) -> None:
    dtype = {"overflows": "fp16", "scales_by_itself": "fp16"}.get(name, "bf16" if setup.parameters != "nvme" else None)
    model = model_for(name)
    engine = opened(model, two_groups(model), setup, dtype=dtype, update=update)
    assert_same_bits(run_engine(engine, LOOPS[name]), reference(name, dtype))
    begun, undone = counts(engine)
    if update == "step":
        assert begun == 0
    elif setup.optimizer_states == "nvme" or (setup.accelerator == "deferred" and update == "backward"):
        assert begun > 0 and undone == UNDONE[name]
    else:  # in memory there is a second place where the user grants it
        assert begun == 0


@pytest.mark.parametrize("what", ["weight", "twice"])
def test_values_that_a_graph_keeps(opened: Any, speculating: None, what: str) -> None:
    """Parameters that stay on the device may be read outside of their units' uses, and backward compute with what was read:
    their updates wait for the step, others do not."""

    def loss_of(run: Run, step: int, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        if what == "twice":
            run.model(x)
        loss = F.mse_loss(run.model(x).float(), y)
        if step % 2:
            first, last = run.model.blocks[0].up.weight, run.model.blocks[3].up.weight
            loss = loss + (first * last.detach()).float().sum() * 1e-3
        return loss

    loop = loop_of(vector_batches(STEPS, WIDTH), loss_of)
    results = []
    for setup in (IN_MEMORY, Setup("device", "nvme", "deferred", "auto")):
        model = stack(WIDTH, 4)
        engine = opened(model, two_groups(model), setup, dtype="bf16")
        results.append(run_engine(engine, loop))
    assert_same_bits(results[1], results[0])
    assert counts(engine) == (STEPS, 0)


def test_a_loop_that_always_looks_is_left_alone_for_ever_longer(opened: Any) -> None:
    """Where the first step that begins updates has to undo them, twice as many pass before the next."""
    model = stack(WIDTH, 4)
    engine = opened(model, two_groups(model), Setup("nvme", "nvme", "cpu", "auto"))
    run, undone = Run(model, engine.optimizer, engine), []
    x, y = vector_batches(1, WIDTH)[0]
    for index in range(60):
        F.mse_loss(model(x), y).backward()
        with torch.no_grad():
            model(x)
        run.optimizer.step()
        run.optimizer.zero_grad()
        if counts(engine)[1] > len(undone):
            undone.append(index)
    assert undone == [0, 2 * QUIET_STEPS, 2 * QUIET_STEPS + 4 * QUIET_STEPS]


@pytest.mark.parametrize("update", ["auto", "backward"])
def test_room_on_the_drive_is_left_for_two_checkpoints(opened: Any, monkeypatch: pytest.MonkeyPatch, update: str) -> None:
    """Of records and parameters; where they would not fit beside all room to undo updates, "auto" takes less of it."""
    model = stack(WIDTH, 4)
    needed = opened(model, two_groups(model), Setup("nvme", "nvme", "cpu", "backward")).stats()["planned"]
    on_nvme = {line["purpose"]: line["nbytes"] for line in needed if line["tier"] == "nvme"}
    states = on_nvme["parameters"] + on_nvme["optimizer states"]
    for room, begins in ((2 * states - 2**16, update == "backward"), (2 * states, True)):
        free_room(monkeypatch, int((sum(on_nvme.values()) + room) / 0.98) + 4096)
        model = stack(WIDTH, 4)
        engine = opened(model, two_groups(model), Setup("nvme", "nvme", "cpu", update))
        assert all(unit["begins_early"] for unit in engine.stats()["units"][1:]) == begins
