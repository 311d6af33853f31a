# SPDX-License-Identifier: Apache-2.0
"""Small blocks that follow each other are one unit, and `offload.unit` marks one: nothing but the number of units changes."""

from __future__ import annotations

import copy
import random
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings, strategies as st
from torch import nn
from torch.utils.checkpoint import checkpoint

import offload
from offload.model.partition import join_neighbours, partition, uses_of
from offload.planning.use_trace import Expected
from tests.crosses import in_turn
from tests.inside import units_of
from tests.small_sizes import small

from .models import (
    IN_MEMORY,
    IN_PLACE_IN_BACKWARD,
    ON_CPU,
    ON_CPU_IN_PLACE,
    ON_NVME,
    ON_NVME_AT_STEP,
    ON_NVME_IN_BACKWARD,
    ON_NVME_IN_PLACE,
    Setup,
)

SETUPS = (
    IN_MEMORY, ON_CPU, ON_CPU_IN_PLACE, ON_NVME, ON_NVME_AT_STEP, ON_NVME_IN_BACKWARD, ON_NVME_IN_PLACE, IN_PLACE_IN_BACKWARD,
)  # fmt: skip
WIDTH = 6
STEPS = 4
BOUND = 200
"""Elements: some blocks of the models here."""


def names(units: list[Any]) -> dict[str, list[str]]:
    return {unit.name: [fqn for fqn, _ in unit.parameters] for unit in units}


class Block(nn.Module):
    """One of many kinds. `other`: a block that it calls, or whose weight it reads, without holding it."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind, self.other = kind, list[Any]()
        self.mix = nn.Linear(WIDTH, WIDTH, bias=kind != "bare")
        if kind == "wide":
            self.up = nn.Linear(WIDTH, 3 * WIDTH)
        if kind == "attention":
            self.attention = nn.MultiheadAttention(WIDTH, 2, batch_first=True)
        if kind == "frozen":
            self.mix.requires_grad_(False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = torch.tanh(self.mix(x))
        if self.kind == "wide":
            y = y + self.up(y)[..., :WIDTH]
        if self.kind == "attention":
            y = y + self.attention(y, y, y)[0]
        if self.kind == "calls" and self.other:
            y = y + 0.5 * self.other[0](y)
        if self.kind == "reads" and self.other:
            y = y * self.other[0].mix.weight.sum(0)
        return x + 0.5 * y


class Rows(nn.Embedding):
    """A lookup in a block, by where its input is positive."""

    def __init__(self) -> None:
        super().__init__(2, WIDTH)

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = super().__call__((x[..., 0] > 0).long())
        return found


class Tree(nn.Module):
    """Blocks in lists, called in the order of a plan: twice, never, recomputed, by the batch's number, without a graph."""

    def __init__(self, kinds: list[list[str]], plan: list[tuple[int, int, str]], *, shares: bool) -> None:
        super().__init__()
        self.key = repr((kinds, plan, shares))
        self.parts = nn.ModuleDict({str(number): nn.ModuleList(map(Block, some)) for number, some in enumerate(kinds)})
        self.plan, self.turn = plan, 0
        blocks = [block for part in self.parts.values() for block in part]
        for index, block in enumerate(blocks):
            block.other.extend(blocks[index + 1 : index + 2])
            if block.kind in ("calls", "reads") and block.other and block.other[0].kind in ("calls", "reads"):
                block.kind = "bare"
        if shares and len(blocks) > 1:
            blocks[-1].mix.weight = blocks[0].mix.weight
        self.scale = nn.Parameter(torch.ones(WIDTH))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for part, index, how in self.plan:
            block = self.parts[str(part)][index]
            if how == "routed" and (self.turn + index) % 3 == 0:
                continue
            if how == "looked at":
                with torch.no_grad():
                    block(x)
            elif how == "read":
                x = x * block.mix.weight.mean()
            elif how in ("reentrant", "recomputed") and x.requires_grad:
                x = checkpoint(block, x, use_reentrant=how == "reentrant")
            else:
                x = block(x)
        return x * self.scale


KINDS = st.sampled_from(["bare", "plain", "wide", "attention", "frozen", "calls", "reads"])
WAYS = st.sampled_from(["called", "called", "routed", "looked at", "read", "reentrant", "recomputed"])


@st.composite
def trees(draw: st.DrawFn) -> Tree:
    kinds = draw(st.lists(st.lists(KINDS, min_size=1, max_size=5), min_size=1, max_size=3))
    places = [(part, index) for part, some in enumerate(kinds) for index in range(len(some))]
    order = draw(st.one_of(st.just(places), st.lists(st.sampled_from(places), min_size=1, max_size=8)))
    plan = [(*place, draw(WAYS)) for place in order]
    torch.manual_seed(0)
    return Tree(kinds, plan, shares=draw(st.booleans()))


def trained(tree: Tree, setup: Setup, folder: Path, monkeypatch: pytest.MonkeyPatch, joined: int, **fields: Any) -> Any:
    """Losses and weights of a loop with everything in it, and how many units it had."""
    monkeypatch.setenv("OFFLOAD_ACCELERATOR", setup.accelerator)
    small(monkeypatch, joined_numel=joined)
    model = copy.deepcopy(tree)
    draw = random.Random(0)
    trainable = [one for one in model.parameters() if one.requires_grad]
    losses = []
    config = offload.Config(**setup.fields(folder, **fields))
    with offload.initialize(model, torch.optim.AdamW(trainable, lr=0.01), config) as engine:
        for step in range(STEPS):
            for micro in range(1 + step % 2):
                model.turn = step
                x = torch.randn(2, 3, WIDTH, generator=torch.Generator().manual_seed(10 * step + micro))
                loss = model(x).square().mean()
                losses.append(loss.detach().clone())
                loss.backward()
            if draw.random() < 0.3:
                with torch.no_grad():
                    losses.append(model(x).sum())
            engine.step()
            losses.append(torch.tensor(engine.grad_norm))
            engine.zero_grad()
        return losses, engine.state_dict(), len(engine.stats()["units"])


_ALONE: dict[str, Any] = {}
"""By tree, losses and weights where each block is a unit and everything lies in memory. For all setups the same are drawn."""


def alone(tree: Tree) -> Any:
    if tree.key not in _ALONE:
        with pytest.MonkeyPatch.context() as patch:
            _ALONE[tree.key] = trained(tree, IN_MEMORY, Path("."), patch, 0, max_grad_norm=0.05)
    return _ALONE[tree.key]


@settings(max_examples=12)
@given(tree=trees())
@pytest.mark.parametrize("setup", SETUPS, ids=lambda setup: setup.name)
@pytest.mark.filterwarnings("error:module forward hook")
def test_random_trees_train_to_the_same_bits(setup: Setup, tree: Tree, tmp_path_factory: Any) -> None:
    with pytest.MonkeyPatch.context() as patch:
        folder = tmp_path_factory.mktemp("scratch")
        losses, weights, count = alone(tree)
        for bound in (BOUND, 1 << 20):
            other, found, fewer = trained(tree, setup, folder, patch, bound, max_grad_norm=0.05)
            assert fewer <= count
            assert all(torch.equal(a, b) for a, b in zip(losses, other, strict=True))
            assert all(torch.equal(weights[name], value) for name, value in found.items())


def stacked(count: int) -> Tree:
    torch.manual_seed(0)
    return Tree([["plain"] * count], [(0, index, "called") for index in range(count)], shares=False)


# ---- which ----------------------------------------------------------------------------------------------------------


def test_neighbours_in_one_list_are_joined_up_to_the_bound(monkeypatch: pytest.MonkeyPatch) -> None:
    small(monkeypatch, joined_numel=4 * (WIDTH + 1) * WIDTH)
    units = join_neighbours(partition(stacked(10)))
    assert [unit.name for unit in units] == ["", "parts.0.0-3", "parts.0.4-7", "parts.0.8-9"]
    assert [len(unit.modules) for unit in units] == [1, 4, 4, 2]
    assert [use.unit_index for use in uses_of(units)] == [1] * 4 + [2] * 4 + [3] * 2
    assert Expected.of(0, uses_of(units)).late_units == {0}


def test_of_two_lists_none_are_joined_and_nothing_is_lost(monkeypatch: pytest.MonkeyPatch) -> None:
    small(monkeypatch, joined_numel=1 << 20)
    model = Tree([["plain", "wide"], ["plain", "attention"]], [], shares=False)
    units = join_neighbours(partition(model))
    assert [unit.name for unit in units] == ["", "parts.0.0-1", "parts.1.0-1"]
    assert sorted(fqn for some in names(units).values() for fqn in some) == sorted(dict(model.named_parameters()))


def test_lookups_and_what_is_large_stay_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    small(monkeypatch, joined_numel=100)
    model = nn.Sequential(
        nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(20, 20), nn.Linear(4, 4), nn.Embedding(3, 4), nn.Linear(4, 4)
    )
    assert [unit.name for unit in join_neighbours(partition(model))] == ["", "0-1", "2", "3", "4", "5"]


# ---- offload.unit ---------------------------------------------------------------------------------------------------


def test_a_marked_block_is_a_unit_by_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    small(monkeypatch, joined_numel=1 << 20)
    model = stacked(6)
    assert offload.unit(model.parts["0"][2]) is model.parts["0"][2]
    assert [unit.name for unit in join_neighbours(partition(copy.deepcopy(model)))] == [
        "", "parts.0.0-1", "parts.0.2", "parts.0.3-5",
    ]  # fmt: skip


def test_a_mark_takes_the_blocks_inside_it_and_the_marks(monkeypatch: pytest.MonkeyPatch) -> None:
    model = Tree([["plain"] * 3, ["plain"] * 2], [], shares=False)
    offload.unit(model.parts["0"])
    offload.unit(model.parts["0"][1])
    units = names(partition(model))
    assert list(units) == ["", "parts.0", "parts.1.0", "parts.1.1"]
    assert units["parts.0"] == [f"parts.0.{index}.mix.{name}" for index in range(3) for name in ("weight", "bias")]


def test_of_a_block_around_a_mark_large_leaves_are_units_and_the_rest_is_the_roots() -> None:
    model = Tree([["attention"], ["wide"]], [], shares=False)
    offload.unit(model.parts["1"][0].mix)
    units = names(partition(model))
    assert units["parts.1.0.mix"] == ["parts.1.0.mix.weight", "parts.1.0.mix.bias"]
    assert units["parts.1.0.up"] == ["parts.1.0.up.weight", "parts.1.0.up.bias"]


@pytest.mark.parametrize("setup", [ON_NVME, ON_CPU, ON_NVME_IN_PLACE], ids=lambda setup: setup.name)
def test_marks_change_no_bit(setup: Setup, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    losses, weights, _ = trained(stacked(5), setup, tmp_path, monkeypatch, 0)
    marked = stacked(5)
    offload.unit(marked.parts["0"][1].mix)
    offload.unit(marked.parts["0"][3])
    other, found, _ = trained(marked, setup, tmp_path, monkeypatch, 1 << 20)
    assert all(torch.equal(a, b) for a, b in zip(losses, other, strict=True))
    assert all(torch.equal(weights[name], value) for name, value in found.items())


# How it is marked decides what its unit holds; where that lies, how it comes: as any unit does.
@pytest.mark.parametrize(("setup", "how"), in_turn(SETUPS, ("list", "dict", "shared", "lookups")))
def test_a_list_that_is_marked_comes_for_the_calls_of_what_it_holds(
    setup: Setup, how: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """A list is never called. Its unit comes for the calls of its modules, and is no companion of their caller's."""
    torch.manual_seed(0)
    plan = [(0, 0, "called"), (1, 0, "called"), (0, 2, "recomputed"), (0, 1, "routed"), (1, 1, "called"), (0, 0, "reentrant")]
    tree = Tree([["plain", "wide", "attention"], ["plain"] * 2], plan, shares=False)
    if how == "shared":
        tree.parts["0"][2].mix.weight = tree.parts["0"][0].mix.weight
    if how == "lookups":
        tree.parts["0"][1].mix = Rows()
    losses, weights, _ = trained(tree, setup, tmp_path, monkeypatch, 0)
    offload.unit(tree.parts if how == "dict" else tree.parts["0"])
    marked = "parts" if how == "dict" else "parts.0"
    assert marked in names(partition(tree)) and len(names(partition(tree))[marked]) > 8
    other, found, _ = trained(tree, setup, tmp_path, monkeypatch, 1 << 20)
    assert all(torch.equal(a, b) for a, b in zip(losses, other, strict=True))
    assert all(torch.equal(weights[name], value) for name, value in found.items())
    assert "without a call" not in caplog.text


def test_what_lies_in_a_list_of_lists_are_blocks() -> None:
    """As in a U-Net: an element of the outer list is never called."""
    levels = [nn.ModuleList([nn.Linear(4, 4), nn.Sequential(nn.Linear(4, 4)), nn.Identity()]) for _ in range(2)]
    model = nn.ModuleDict({"down": nn.ModuleList(levels), "out": nn.Linear(4, 4)})
    assert list(names(partition(model))) == ["", "down.0.0", "down.0.1", "down.1.0", "down.1.1", "out"]
    assert list(names(partition(nn.ModuleList(copy.deepcopy(levels))))) == ["", "0.0", "0.1", "1.0", "1.1"]


def test_a_marked_model_is_one_unit() -> None:
    assert [unit.name for unit in partition(offload.unit(stacked(3)))] == [""]


def test_a_unit_that_is_read_and_never_called_is_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The layers of a block that is gone through by hand."""
    monkeypatch.setenv("OFFLOAD_ACCELERATOR", "deferred")

    class ByHand(nn.Sequential):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            for block in self:
                for layer in block:
                    x = layer(x)
            return x

    torch.manual_seed(0)
    model = ByHand(*(nn.Sequential(nn.Linear(4, 4), nn.Tanh()) for _ in range(2)))
    with offload.initialize(offload.unit(model[0]) and model, torch.optim.AdamW(model.parameters()), ON_NVME.fields(tmp_path)):
        for _ in range(2):
            model(torch.ones(1, 4)).sum().backward()
    said = [record.getMessage() for record in caplog.records if "without a call" in record.getMessage()]
    assert len(said) == 2 and "computes with 0.0.weight without a call of 0, which is a unit" in said[0]


def test_what_is_no_module_cannot_be_marked() -> None:
    with pytest.raises(offload.UsageError, match=r"offload\.unit was given Tensor: it marks a module"):
        offload.unit(torch.zeros(1))  # type: ignore[arg-type]


# ---- what a block of a joined unit sees --------------------------------------------------------------------------------


def test_inside_a_call_the_blocks_own_parameters_are_plain_and_the_others_guarded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OFFLOAD_ACCELERATOR", "deferred")
    small(monkeypatch, joined_numel=1 << 20)
    model, seen = stacked(3), list[tuple[bool, bool]]()
    first, second = model.parts["0"][0].mix.weight, model.parts["0"][1].mix.weight
    model.parts["0"][1].mix.register_forward_hook(
        lambda *_: seen.append((type(first) is nn.Parameter, type(second) is nn.Parameter))
    )
    with offload.initialize(model, torch.optim.AdamW(model.parameters()), offload.Config(**ON_NVME.fields(tmp_path))) as engine:
        model(torch.ones(1, 2, WIDTH)).sum().backward()
        assert seen == [(False, True)]
        assert type(first) is not nn.Parameter and type(second) is not nn.Parameter
        with engine.gathered([first]):
            assert type(first) is nn.Parameter and type(second) is not nn.Parameter
            model(torch.ones(1, 2, WIDTH))
            assert type(first) is nn.Parameter
        assert type(first) is not nn.Parameter
        with pytest.raises(offload.ParameterAccessError):
            first.sum()


def test_updates_of_joined_units_begin_in_backward(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OFFLOAD_ACCELERATOR", "cpu")
    small(monkeypatch, joined_numel=4 * (WIDTH + 1) * WIDTH)
    model = stacked(12)
    with offload.initialize(
        model, torch.optim.AdamW(model.parameters()), offload.Config(**ON_NVME_IN_PLACE.fields(tmp_path))
    ) as engine:
        for _ in range(3):
            model(torch.ones(1, 2, WIDTH)).sum().backward()
            assert [unit.early is not None for unit in units_of(engine)] == [False, True, True, True]
            engine.step()
            engine.zero_grad()


def test_a_checkpoint_of_joined_units_is_read_by_separate_ones(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OFFLOAD_ACCELERATOR", "deferred")
    states = []
    for bound, action in ((1 << 20, "save_checkpoint"), (0, "load_checkpoint"), (BOUND, "load_checkpoint")):
        small(monkeypatch, joined_numel=bound)
        model = stacked(5)
        with offload.initialize(
            model, torch.optim.AdamW(model.parameters()), offload.Config(**ON_NVME.fields(tmp_path / "nvme"))
        ) as engine:
            if action == "save_checkpoint":
                model(torch.ones(1, 2, WIDTH)).sum().backward()
                engine.step()
                engine.zero_grad()
            getattr(engine, action)(tmp_path / "saved")
            model(torch.ones(1, 2, WIDTH)).sum().backward()
            engine.step()
            states.append(engine.state_dict())
    assert all(torch.equal(states[0][name], other[name]) for other in states[1:] for name in states[0])


def test_where_a_budget_holds_no_joined_unit_they_stay_apart(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The least that a model needs is what it needs apart, as a refusal says it."""
    setup, tree = Setup("nvme", "nvme", "cpu"), stacked(10)
    least = {}
    for joined in (0, 1 << 20):
        with pytest.raises(offload.BudgetError) as refusal:
            trained(tree, setup, tmp_path, monkeypatch, joined, cpu_memory=1)
        least[joined] = refusal.value.smallest_nbytes
    assert least[0] == least[1 << 20]
    expected, weights, apart = trained(tree, setup, tmp_path, monkeypatch, 0, cpu_memory=least[0], max_grad_norm=0.05)
    losses, found, count = trained(tree, setup, tmp_path, monkeypatch, 1 << 20, cpu_memory=least[0], max_grad_norm=0.05)
    assert count == apart
    assert all(torch.equal(one, other) for one, other in zip(losses, expected, strict=True))
    assert all(torch.equal(weights[name], value) for name, value in found.items())
