# SPDX-License-Identifier: Apache-2.0
"""Small gradients wait in `p.grad` until backward leaves their unit, beside a device too, and leave it together, or go together
to where they stay on it: to the bits that they have one at a time, and that training in memory has."""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

import offload
from offload.device.arithmetic.ingest_table import IngestTable
from offload.device.deferred import DeferredAccelerator
from offload.model.taken_gradient import TakenGradient
from tests.crosses import in_pairs
from tests.devices import before_each_copy
from tests.inside import units_of
from tests.small_sizes import small

from .models import IN_MEMORY, ON_CPU, ON_NVME, ON_NVME_IN_PLACE, Block, Setup, adamw, vector_batches
from .runs import assert_same_bits
from .speculating import at_once

STAYING = (Setup("device", "device", "deferred"), Setup("device", "cpu", "deferred"))
"""Whose parameters never leave the device, so that nothing has to know when backward leaves a unit."""
LEAVING = (ON_CPU, ON_NVME, Setup("cpu", "nvme", "deferred"))
SETUPS = (*LEAVING, *STAYING)
beside_a_device = pytest.mark.parametrize("setup", SETUPS, ids=lambda setup: setup.name)
of_units_that_leave = pytest.mark.parametrize("setup", LEAVING, ids=lambda setup: setup.name)
BATCHES = vector_batches(24)
BLOCKS = 4


class Twice(nn.Module):
    """Blocks of four small parameters and one that is in two chunks; the third is used twice, the fourth may be recomputed."""

    def __init__(self, recomputes: bool | None = None) -> None:
        """`recomputes`: by a reentrant checkpoint, or one that is not."""
        super().__init__()
        self.recomputes = recomputes
        self.inlet = nn.Linear(16, 16)
        self.blocks = nn.ModuleList(Block() for _ in range(BLOCKS))
        for block in self.blocks:
            offload.unit(block)
        self.blocks[1].wide = nn.Parameter(torch.randn(3, 16, 200) / 10)
        self.outlet = nn.Linear(16, 16)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.inlet(x)
        for index in (0, 1, 2, 3, 2):
            block = self.blocks[index]
            recomputes = self.recomputes is not None and index == 3
            x = checkpoint(block, x, use_reentrant=self.recomputes) if recomputes else block(x)
            if index == 1:
                x = x + (x @ block.wide).sum((0, 2))[:, None]
        self.middle = x
        return self.outlet(x)


def built(opened: Any, setup: Setup, recomputes: bool | None = None, **fields: Any) -> Any:
    torch.manual_seed(3)
    model = Twice(recomputes)
    return opened(model, adamw(model), setup, **fields)


@pytest.fixture(autouse=True)
def small_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    small(monkeypatch, chunk_numel=4096)


@pytest.fixture
def packed(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """How many gradients came at once into each buffer on the device that they do not fill."""
    counts: list[int] = []
    ingest_some = IngestTable.ingest_some

    def counted(self: IngestTable, dst: Any, sources: Any, which: Any) -> None:
        counts.append(len(which))
        ingest_some(self, dst, sources, which)

    monkeypatch.setattr(IngestTable, "ingest_some", counted)
    return counts


def backward(engine: Any, number: int) -> None:
    x, y = BATCHES[number]
    F.mse_loss(engine.module(x.to(engine.module.outlet.weight.dtype)).float(), y).backward()


def one_each(engine: Any) -> None:
    for step in range(5):
        backward(engine, step)
        engine.step()
        engine.zero_grad()


def several_each(engine: Any) -> None:
    for step, count in enumerate((3, 1, 2, 3)):
        for micro_batch in range(count):
            backward(engine, 4 * step + micro_batch)
        engine.step()
        engine.zero_grad()


def accumulating(engine: Any) -> None:
    for step in range(4):
        with engine.no_sync():
            backward(engine, 2 * step)
        backward(engine, 2 * step + 1)
        engine.clip_grad_norm_(0.05)
        engine.step()
        engine.zero_grad()


def cut_short(engine: Any) -> None:
    """Of each second backward only half goes through, and the next adds to what it brought."""

    def fail(_: torch.Tensor) -> None:
        raise ArithmeticError("of the loop")

    for step in range(4):
        if step % 2:
            x, y = BATCHES[step]
            loss = F.mse_loss(engine.module(x.to(engine.module.outlet.weight.dtype)).float(), y)
            handle = engine.module.middle.register_hook(fail)
            with pytest.raises(ArithmeticError):
                loss.backward()
            handle.remove()
        backward(engine, step + 4)
        engine.step()
        engine.zero_grad()


def dropped(engine: Any) -> None:
    """Gradients are forgotten, all or one of them, and come anew; one is the user's own."""
    for step in range(4):
        backward(engine, step)
        engine.module.blocks[step].up.weight.grad = None
        engine.module.blocks[0].norm.bias.grad = None
        if step % 2:
            engine.zero_grad()
        backward(engine, step + 4)
        bias = engine.module.outlet.bias
        bias.grad = torch.full((16,), 0.01, dtype=bias.dtype)
        engine.step()
        engine.zero_grad()


LOOPS = (one_each, several_each, accumulating, cut_short, dropped)


@lru_cache
def in_memory(loop: Callable[[Any], None], recomputes: bool | None = None, **fields: Any) -> dict[str, torch.Tensor]:
    """The weights after it there, where it matters to nobody how many gradients wait."""
    torch.manual_seed(3)
    model = Twice(recomputes)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("OFFLOAD_ACCELERATOR", "cpu")
        with offload.initialize(model, adamw(model), offload.Config(**IN_MEMORY.fields(Path("."), **fields))) as engine:
            loop(engine)
            return {name: value.clone() for name, value in engine.state_dict().items()}


# A loop decides how many gradients wait for each other, a place where they go to, a dtype how long they are.
@pytest.mark.parametrize(("setup", "loop", "dtype"), in_pairs(SETUPS, LOOPS, ("fp32", "bf16")))
def test_they_have_the_bits_of_training_in_memory(
    opened: Any, packed: list[int], setup: Setup, loop: Callable[[Any], None], dtype: str
) -> None:
    expected = in_memory(loop, dtype=dtype)
    packed.clear()
    engine = built(opened, setup, dtype=dtype)
    loop(engine)
    assert max(packed) >= 4 or loop is accumulating, "they came one at a time"  # as they do for sums
    assert_same_bits(engine.state_dict(), expected)


@pytest.mark.parametrize("reentrant", [True, False])
@beside_a_device
def test_so_have_those_of_recomputed_blocks(opened: Any, packed: list[int], setup: Setup, reentrant: bool) -> None:
    expected = in_memory(several_each, reentrant)
    packed.clear()
    engine = built(opened, setup, reentrant)
    several_each(engine)
    assert max(packed) >= 4
    assert_same_bits(engine.state_dict(), expected)


@pytest.mark.parametrize("loop", LOOPS, ids=lambda loop: loop.__name__)
@beside_a_device
def test_updates_that_began_with_them_are_undone(
    opened: Any, setup: Setup, loop: Callable[[Any], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    expected = in_memory(loop, update="step", max_grad_norm=1.0)
    at_once(monkeypatch)
    engine = built(opened, setup, update="auto", max_grad_norm=1.0)
    loop(engine)
    assert_same_bits(engine.state_dict(), expected)


# What stays on the device may do so in a chunk of its own; on the way from it that leaves by itself.
@pytest.mark.parametrize(
    ("setup", "most_nbytes", "at_once"),
    [
        *((setup, *one) for setup in (*LEAVING, STAYING[1]) for one in ((1 << 20, 6), (1000, 4), (100, 1))),
        *((STAYING[0], *one) for one in ((1 << 20, 7), (1000, 4), (100, 1))),
    ],
    ids=lambda one: one.name if isinstance(one, Setup) else str(one),
)
def test_no_more_waits_than_is_worth_a_word(
    opened: Any, packed: list[int], setup: Setup, monkeypatch: pytest.MonkeyPatch, most_nbytes: int, at_once: int
) -> None:
    """Of units with more the small ones wait, and each of the others leaves by itself, to the same bits."""
    expected = in_memory(several_each)
    packed.clear()
    small(monkeypatch, gradients_together_nbytes=most_nbytes)
    engine = built(opened, setup)
    several_each(engine)
    assert max(packed) == at_once
    assert_same_bits(engine.state_dict(), expected)


@pytest.mark.parametrize("setup", (ON_NVME, ON_NVME_IN_PLACE), ids=lambda setup: setup.name)
def test_large_gradients_do_not_wait_for_each_other(opened: Any, setup: Setup, monkeypatch: pytest.MonkeyPatch) -> None:
    """What waits takes no more memory than is worth a word, however large the gradients of other units are."""
    small(monkeypatch, gradients_together_nbytes=1000)
    engine, waiting = built(opened, setup), list[int]()
    parameters = list(engine.module.parameters())
    for parameter in parameters:
        parameter.register_hook(lambda _: waiting.append(sum(p.grad.nbytes for p in parameters if _is_there(p.grad))))
    several_each(engine)
    assert max(p.nbytes for p in parameters) > 10 * 1000
    assert 0 < max(waiting) <= 1000


class Towers(nn.Module):
    """Two stacks side by side, whose first blocks get inputs without gradients."""

    def __init__(self) -> None:
        super().__init__()
        self.left, self.right = (nn.ModuleList(Block() for _ in range(3)) for _ in range(2))
        for block in (*self.left, *self.right):
            offload.unit(block)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        left, right = x, x.flip(-1)
        for block in self.left:
            left = block(left)
        self.left_output = left * 1.0  # whose gradient comes after all of the other tower's
        for block in self.right:
            right = block(right)
        return self.left_output + right


@of_units_that_leave
def test_what_ends_with_its_gradients_ends_when_they_come(opened: Any, packed: list[int], setup: Setup) -> None:
    """No gradient of an input says that backward is through with the first block of the tower that it takes first: it is let go
    before backward goes through the other. Its gradients say so, and leave together all the same."""
    weights, found = [], list[list[int]]()
    for where in (IN_MEMORY, setup):
        torch.manual_seed(4)
        engine = opened(model := Towers(), adamw(model), where, prefetch=0)
        right = [unit for unit in units_of(engine) if unit.name.startswith("right")]
        for number in range(4):
            x, y = BATCHES[number]
            output = engine.module(x)
            left = engine.module.left_output
            left.register_hook(lambda _, right=right: found.append([unit.uses.count for unit in right]))
            F.mse_loss(output, y).backward()
            engine.step()
            engine.zero_grad()
        weights.append(engine.state_dict())
    assert found[4:] == [[0, 0, 0]] * 4
    assert not packed, "each is the first of its parameter, and they fill their chunk"
    assert_same_bits(weights[1], weights[0])


@of_units_that_leave
def test_only_the_unit_that_backward_is_in_has_gradients_of_its_own(opened: Any, setup: Setup) -> None:
    engine = built(opened, setup)
    assert all(len(blocks) <= 1 for blocks in seen_in_backward(engine))
    assert not any(_is_there(p.grad) for p in engine.module.parameters())


@pytest.mark.parametrize("setup", STAYING, ids=lambda setup: setup.name)
def test_only_the_block_that_backward_came_from_has_gradients_of_its_own(opened: Any, setup: Setup) -> None:
    """Beside what comes after a call, as the gradient of a parameter that is used outside its block: that waits for the end."""
    engine = built(opened, setup)
    first, *others = seen_in_backward(engine)
    assert not first and all(len(blocks - {"1"}) <= 1 for blocks in others) and "3" not in others[-1]
    assert not any(_is_there(p.grad) for p in engine.module.parameters())


def seen_in_backward(engine: Any) -> list[set[str]]:
    """Whenever backward reaches a block, the blocks with gradients that were not taken over."""
    found: list[set[str]] = []

    def look(*_: Any) -> None:
        gradients = {name: p.grad for name, p in engine.module.blocks.named_parameters()}
        found.append({name.split(".")[0] for name, one in gradients.items() if _is_there(one)})

    for block in engine.module.blocks:
        block.register_full_backward_pre_hook(look)
    backward(engine, 0)
    assert len(found) == BLOCKS + 1
    return found


def _is_there(gradient: torch.Tensor | None) -> bool:
    return gradient is not None and not isinstance(gradient, TakenGradient)


@of_units_that_leave
def test_what_fails_as_they_leave_fails_the_engine(opened: Any, setup: Setup, monkeypatch: pytest.MonkeyPatch) -> None:
    left: list[int] = []

    def fails(_: torch.Tensor, __: torch.Tensor) -> None:
        if left and left.pop() == 0:
            raise MemoryError("of the device")

    before_each_copy(monkeypatch, DeferredAccelerator, "copy_out", fails)
    engine = built(opened, setup)
    one_each(engine)
    left += range(3)
    with pytest.raises(MemoryError):
        backward(engine, 0)
    with pytest.raises(offload.EngineFailedError, match="of the device"):
        engine.step()
