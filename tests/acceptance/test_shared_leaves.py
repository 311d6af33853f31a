# SPDX-License-Identifier: Apache-2.0
"""Embeddings tied to a head: a unit of their own that comes and goes, and whose gradient is taken over in parts."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

from offload.model.partition import ModuleUnit, fold_for_ranks, partition, uses_of
from offload.planning.use_trace import Edge, Use
from offload.step.hooks import shared_gradients
from tests.inside import parts_of, residency_of
from tests.small_sizes import small

from .models import (
    IN_MEMORY,
    IN_PLACE_IN_BACKWARD,
    ON_CPU,
    ON_CPU_IN_PLACE,
    ON_NVME,
    ON_NVME_IN_BACKWARD,
    ON_NVME_IN_PLACE,
    Setup,
    adamw,
    gpt2,
    llama,
)
from .runs import Run, assert_same_bits, bitwise_loop, run_engine, run_plain, simple_loop, token_loop

SETUPS = (IN_MEMORY, ON_CPU, ON_CPU_IN_PLACE, ON_NVME, ON_NVME_IN_BACKWARD, ON_NVME_IN_PLACE, IN_PLACE_IN_BACKWARD)
everywhere = pytest.mark.parametrize("setup", SETUPS, ids=lambda setup: setup.name)

VOCABULARY, WIDTH = 512, 32


class Reader(nn.Module):
    """An embedding and a head of the same weight, with blocks and a norm of the root's between. `bias`: the head's own."""

    def __init__(self, *, bias: bool = False, checkpointed: str = "", by_weight: bool = False) -> None:
        super().__init__()
        self.checkpointed, self.by_weight = checkpointed, by_weight
        self.words = nn.Embedding(VOCABULARY, WIDTH)
        self.blocks = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(3))
        self.norm = nn.LayerNorm(WIDTH)
        self.head = nn.Linear(WIDTH, VOCABULARY, bias=bias)
        self.head.weight = self.words.weight

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self._read(tokens)
        for block in self.blocks:
            x = x + torch.tanh(block(x))
        x = self.norm(x)
        if self.by_weight:
            return F.linear(x, self.words.weight)
        if self.checkpointed:
            result: torch.Tensor = checkpoint(self.head, x, use_reentrant=self.checkpointed == "reentrant")
            return result
        logits: torch.Tensor = self.head(x)
        return logits

    def _read(self, tokens: torch.Tensor) -> torch.Tensor:
        return torch.as_tensor(self.words(tokens))


class Decoder(Reader):
    """Reads its words twice, as an encoder and a decoder with one vocabulary do."""

    def _read(self, tokens: torch.Tensor) -> torch.Tensor:
        return torch.as_tensor(self.words(tokens) + torch.tanh(self.words(tokens.flip(-1))))


def sgd(model: nn.Module) -> torch.optim.Optimizer:
    """Steps of exactly a power of two times the gradient: what the weights become says what the gradient was, to the bit."""
    return torch.optim.SGD(model.parameters(), lr=0.25)


def token_batches(count: int) -> list[torch.Tensor]:
    draw = torch.Generator().manual_seed(3)
    return [torch.randint(0, VOCABULARY, (2, 9), generator=draw) for _ in range(count)]


def loss_of(model: nn.Module, tokens: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(model(tokens[:, :-1]).flatten(0, 1), tokens[:, 1:].flatten())


def loop(run: Run, micro_batches: int = 1, steps: int = 3) -> list[float]:
    losses = []
    for index, tokens in enumerate(token_batches(steps * micro_batches)):
        last = index % micro_batches == micro_batches - 1
        if last:
            loss = loss_of(run.model, tokens)
            loss.backward()
        else:
            with run.no_sync():
                loss = loss_of(run.model, tokens)
                loss.backward()
        losses.append(loss.item())
        if last:
            run.optimizer.step()
            run.optimizer.zero_grad()
    return losses


class Additions(TorchDispatchMode):
    """Of tensors of that shape, while it is entered."""

    def __init__(self, shape: torch.Size) -> None:
        super().__init__()
        self.shape, self.seen = shape, list[Any]()

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if function in (torch.ops.aten.add.Tensor, torch.ops.aten.add_.Tensor) and args[0].shape == self.shape:
            self.seen.append(function)
        return function(*args, **(kwargs or {}))


class Taken:
    """Counts the parts that are taken over while it is in place."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.count = 0
        before = shared_gradients._may_be_taken

        def counted(*arguments: Any) -> bool:
            taken = before(*arguments)
            self.count += taken
            return taken

        monkeypatch.setattr(shared_gradients, "_may_be_taken", counted)


@pytest.fixture
def taken(monkeypatch: pytest.MonkeyPatch) -> Taken:
    return Taken(monkeypatch)


def same_as_plain(build: Any, setup: Setup, opened: Any, loop: Any = loop, **fields: Any) -> None:
    torch.manual_seed(1)
    plain = build()
    model = copy.deepcopy(plain)
    expected = run_plain(plain, sgd(plain), loop)
    assert_same_bits(run_engine(opened(model, sgd(model), setup, **fields), loop), expected)


# ---- units --------------------------------------------------------------------------------------------------------------


def names(units: list[ModuleUnit]) -> dict[str, list[str]]:
    return {unit.name: [name for name, _ in unit.parameters] for unit in units}


def test_tied_leaves_are_one_unit_with_two_uses() -> None:
    model = gpt2(layers=2)
    units = partition(model)
    assert [unit.name for unit in units] == ["", "transformer.wte", "transformer.h.0", "transformer.h.1"]
    assert units[1].modules == [model.transformer.wte, model.lm_head]
    assert names(units)["transformer.wte"] == ["transformer.wte.weight"]
    assert uses_of(units) == [Use(1, read_in_backward=False), Use(2), Use(3), Use(1)]


def test_a_head_that_is_not_tied_is_read_once() -> None:
    units = partition(llama(layers=1))
    assert [unit.name for unit in units] == ["", "model.embed_tokens", "model.layers.0", "lm_head"]
    assert [len(unit.modules) for unit in units[1:]] == [1, 1, 1]
    assert uses_of(units) == [Use(1, read_in_backward=False), Use(2), Use(3)]


def test_a_bias_of_one_of_them_comes_along() -> None:
    assert names(partition(Reader(bias=True)))["words"] == ["words.weight", "head.bias"]


def test_a_chain_of_ties_is_one_unit() -> None:
    model = nn.Module()
    model.first, model.second, model.third = (nn.Bilinear(20, 20, 4, bias=False) for _ in range(3))
    model.third.weight = model.first.weight
    model.second.register_parameter("other", model.first.weight)
    model.blocks = nn.ModuleList(nn.Linear(8, 8) for _ in range(2))
    units = partition(model)
    assert [unit.name for unit in units] == ["", "first", "blocks.0", "blocks.1"]
    assert units[1].modules == [model.first, model.second, model.third]
    assert names(units)["first"] == ["first.weight", "second.weight"]


def test_between_ranks_what_is_shared_is_the_roots() -> None:
    units = fold_for_ranks(partition(Reader()), 0)
    assert names(units)[""] == ["norm.weight", "norm.bias", "words.weight"]
    assert uses_of(units) == [Use(1), Use(2), Use(3)]


def test_a_parameter_that_is_used_without_its_module_is_the_roots() -> None:
    model = Reader()
    model.register_parameter("words_too", model.words.weight)
    assert names(partition(model)) == {
        "": ["words_too", "norm.weight", "norm.bias"],
        **{f"blocks.{index}": [f"blocks.{index}.weight", f"blocks.{index}.bias"] for index in range(3)},
    }


# ---- gradients ----------------------------------------------------------------------------------------------------------


@everywhere
def test_gradients_in_parts_are_pytorchs_to_the_bit(opened: Any, setup: Setup, taken: Taken) -> None:
    same_as_plain(Reader, setup, opened)
    assert taken.count == 2 * 3


def over_micro_batches(run: Run) -> list[float]:
    return loop(run, micro_batches=3)


def twice(run: Run) -> list[float]:
    """Each graph is gone through two times."""
    losses = []
    for tokens in token_batches(3):
        loss = loss_of(run.model, tokens)
        with run.no_sync():
            loss.backward(retain_graph=True)
        loss.backward()
        run.optimizer.step()
        run.optimizer.zero_grad()
        losses.append(loss.item())
    return losses


@everywhere
@pytest.mark.parametrize("accumulating", [over_micro_batches, twice])
def test_parts_of_several_backwards(opened: Any, setup: Setup, accumulating: Any, taken: Taken) -> None:
    """Those of each backward are added first."""
    same_as_plain(Reader, setup, opened, accumulating)
    assert taken.count == 2 * 3 * (3 if accumulating is over_micro_batches else 2)


@everywhere
def test_three_uses(opened: Any, setup: Setup, taken: Taken) -> None:
    same_as_plain(Decoder, setup, opened)
    assert taken.count == 3 * 3


@pytest.mark.parametrize("how", ["reentrant", "other"])
@pytest.mark.parametrize("setup", [ON_CPU, ON_NVME_IN_BACKWARD, IN_PLACE_IN_BACKWARD], ids=lambda setup: setup.name)
def test_a_head_inside_a_checkpoint(opened: Any, setup: Setup, taken: Taken, how: str) -> None:
    """A reentrant checkpoint's backward is one inside another, which accumulates a first time."""
    same_as_plain(lambda: Reader(checkpointed=how), setup, opened)
    assert taken.count == 2 * 3


@everywhere
def test_a_parent_that_computes_with_the_weight_itself(opened: Any, setup: Setup, taken: Taken) -> None:
    """It is not seen as a use: its part goes PyTorch's way, and is added to the other."""
    same_as_plain(lambda: Reader(by_weight=True), setup, opened)
    assert taken.count == 3


@everywhere
def test_hooks_of_the_users_see_the_whole_gradient(opened: Any, setup: Setup, taken: Taken) -> None:
    def hooked(run: Run) -> list[torch.Tensor]:
        seen: list[torch.Tensor] = []

        def halve(gradient: torch.Tensor) -> torch.Tensor:
            seen.append(gradient.clone())
            return gradient / 2

        handle = run.model.words.weight.register_hook(halve)
        loop(run, steps=2)
        handle.remove()
        loop(run, steps=1)
        return seen

    same_as_plain(Reader, setup, opened, hooked)
    assert taken.count == 2


@everywhere
def test_a_gradient_that_is_asked_for_is_whole(opened: Any, setup: Setup) -> None:
    """`torch.autograd.grad` accumulates nothing, and gets all parts."""

    def asked(run: Run) -> list[torch.Tensor]:
        tokens = token_batches(1)[0]
        weight = run.model.words.weight
        with run.gathered([weight]), run.no_sync():
            (alone,) = torch.autograd.grad(loss_of(run.model, tokens), [weight])
        loop(run)
        return [alone]

    same_as_plain(Reader, setup, opened, asked)


def test_sixteen_bit_gradients_are_rounded_after_each_addition(opened: Any, taken: Taken) -> None:
    """As PyTorch does."""
    torch.manual_seed(1)
    plain = Reader().bfloat16()
    model = copy.deepcopy(plain)
    run_plain(plain, sgd(plain), lambda run: loop(run, steps=1))
    _, masters = run_engine(opened(model, sgd(model), ON_CPU_IN_PLACE), lambda run: loop(run, steps=1))
    assert torch.equal(masters["words.weight"].bfloat16(), plain.words.weight)
    assert taken.count == 2


def test_a_function_without_a_gradient_for_a_parameter(opened: Any) -> None:
    """PyTorch reports such a parameter as accumulated, with nothing in `grad`: it is left alone."""

    class Silent(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
            return x + weight.sum() * 0

        @staticmethod
        def backward(ctx: Any, *gradients: torch.Tensor) -> Any:
            return gradients[0], None

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.silent = nn.Linear(4, 4), nn.Parameter(torch.ones(4))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return torch.as_tensor(Silent.apply(self.first(x), self.silent))  # type: ignore[no-untyped-call]

    def once(run: Run) -> float:
        loss = run.model(torch.ones(2, 4)).square().sum()
        loss.backward()
        run.optimizer.step()
        run.optimizer.zero_grad()
        return float(loss.item())

    same_as_plain(Model, ON_NVME, opened, once)


class Shift(nn.Module):
    """Passes its gradient on to its input and its weight: one tensor for both."""

    def __init__(self, weight: nn.Parameter) -> None:
        super().__init__()
        self.weight = weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.weight


class Shifts(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        weight = nn.Parameter(torch.randn(64, 64))
        self.first, self.second, self.third = Shift(weight), Shift(weight), Shift(weight)
        self.outlet = nn.Linear(64, 64)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        kept = self.second(self.first(x))
        return torch.as_tensor(self.outlet(torch.tanh(kept) * self.third(kept)))


@everywhere
def test_a_part_that_others_hold_is_not_added_to(opened: Any, setup: Setup, taken: Taken) -> None:
    same_as_plain(Shifts, setup, opened, simple_loop(3, width=64, rows=64))
    assert taken.count == 3 * 3


def test_the_gradient_is_there_twice_at_most(opened: Any) -> None:
    """Every part after the first is added in place: nobody else holds what a matrix product or a lookup computes."""
    model = Decoder()
    with Additions(model.words.weight.shape) as additions:
        run_engine(opened(model, sgd(model), ON_NVME), loop)
    assert additions.seen == [torch.ops.aten.add_.Tensor] * 2 * 3


@pytest.mark.parametrize("setup", [one for one in SETUPS if one.update != "backward"], ids=lambda setup: setup.name)
def test_a_backward_that_is_cut_short_leaves_no_part(opened: Any, setup: Setup) -> None:
    def interrupted(run: Run) -> list[float]:
        def refuse(*_: Any) -> None:
            raise RuntimeError("stop here")

        handle = run.model.blocks[1].register_full_backward_hook(refuse)
        with pytest.raises(RuntimeError, match="stop here"):
            loss_of(run.model, token_batches(1)[0]).backward()
        handle.remove()
        run.optimizer.zero_grad()
        return loop(run)

    same_as_plain(Reader, setup, opened, interrupted)


# ---- residency ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("setup", [ON_NVME_IN_PLACE, IN_PLACE_IN_BACKWARD, ON_NVME], ids=lambda setup: setup.name)
@pytest.mark.parametrize("prefetch", [0, 1])
def test_a_budget_below_embedding_and_blocks_keeps_the_bits(
    opened: Any, setup: Setup, prefetch: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The weight comes for the embedding, goes for the blocks, comes for the head, and goes again."""
    small(monkeypatch, chunk_numel=4096)
    fields: dict[str, Any] = {"max_grad_norm": 0.5, "prefetch": prefetch}
    runs = []
    for where in (IN_MEMORY, setup):
        model = gpt2(layers=6)
        engine = opened(model, adamw(model), where, **fields)
        runs.append(run_engine(engine, lambda run: bitwise_loop(run, steps=4)))
    assert_same_bits(runs[1], runs[0])
    stats = engine.stats()
    root, words, *blocks = (unit["nbytes"] for unit in stats["units"])
    assert stats["resident_peak_nbytes"] <= stats["resident_capacity_nbytes"]
    assert stats["resident_capacity_nbytes"] < root + words + (2 + prefetch) * max(blocks)


@pytest.mark.parametrize("setup", [ON_NVME_IN_PLACE, ON_NVME], ids=lambda setup: setup.name)
@pytest.mark.parametrize("build", [gpt2, llama])
def test_steps_go_as_the_structure_says(opened: Any, setup: Setup, build: Any) -> None:
    """The guess is right but for the end of the root's use, and backward does not fetch for a lookup."""
    model = build()
    engine = opened(model, adamw(model), setup)
    run_engine(engine, token_loop(steps=3))
    expected, residency = parts_of(engine).expected, residency_of(engine)
    seen, guessed = ([event for event in trace if event.unit_index] for trace in (residency.schedule.trace, expected.trace))
    assert seen == guessed
    words = [event.edge for event in guessed if event.unit_index == 1]
    uses = 3 if build is gpt2 else 1  # embedding, head, and backward of the head
    assert words == [Edge.START, Edge.END] * uses
