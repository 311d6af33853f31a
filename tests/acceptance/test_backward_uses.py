# SPDX-License-Identifier: Apache-2.0
"""How long backward keeps a unit: until it reaches what forward computed before it, whatever else the unit shares with others;
and how it goes on meanwhile, with room for two units, while an update still has one of them."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from transformers import BartConfig, BartForConditionalGeneration, T5Config, T5ForConditionalGeneration

import offload
from offload.model.unit import Unit
from offload.model.unit_state import UnitState
from offload.planning.use_trace import Edge, UseEvent
from tests.crosses import in_pairs
from tests.inside import residency_of, units_of
from tests.updates import before_each_update

from .models import IN_MEMORY, IN_PLACE_IN_BACKWARD, ON_NVME, ON_NVME_IN_PLACE, Setup, adamw
from .runs import assert_same_bits, digest, refused, run_engine, token_loop

BLOCKS = 5
TEXT = {"vocab_size": 256, "d_model": 32}


class Half(nn.Module):
    """Stands between the two layers of a block: backward is half through with it."""

    def __init__(self) -> None:
        super().__init__()
        self.reached: list[threading.Event] = []
        """One for each step."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.reached.append(reached := threading.Event())
        x.register_hook(lambda _: reached.set())
        return x.tanh()


def train(engine: Any, model: nn.Sequential) -> str:
    for step in range(4):
        inputs = torch.randn(3, 32, generator=torch.Generator().manual_seed(step))
        model(inputs).square().mean().backward()
        engine.step()
        engine.zero_grad()
    return digest(engine.state_dict())


def blocks() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(*(nn.Sequential(nn.Linear(32, 64), Half(), nn.Linear(64, 32)) for _ in range(BLOCKS)))


def opened_with(model: nn.Module, **config: Any) -> Any:
    return offload.initialize(model, torch.optim.AdamW(model.parameters(), lr=0.01), config)


def test_backward_computes_while_the_unit_behind_it_is_updated(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = blocks()
    with opened_with(model, parameters="device", optimizer_states="cpu") as engine:
        in_memory = train(engine, model)
    model = blocks()
    waited: dict[tuple[int, int], bool] = {}  # an update that is recalled is begun twice

    def late(unit: Unit, update: Any) -> None:
        index = unit.index - 1  # units 1 to 5 are the blocks 0 to 4
        if index:
            step = update.chunks[0].pieces[0].step
            reached = model[index - 1][1].reached[step - 1].wait(30)
            waited[index, step] = reached and waited.get((index, step), True)

    before_each_update(monkeypatch, late)
    with opened_with(model, parameters="nvme", optimizer_states="nvme", nvme=tmp_path, update="backward") as engine:
        stats = engine.stats()
        two_blocks = 2 * stats["units"][1]["nbytes"]
        assert stats["resident_capacity_nbytes"] == two_blocks
        assert train(engine, model) == in_memory
        stats = engine.stats()
        assert stats["resident_peak_nbytes"] == stats["resident_capacity_nbytes"] == two_blocks
    assert waited == {(index, step): True for index in range(1, BLOCKS) for step in range(1, 5)}


# ---- order --------------------------------------------------------------------------------------------------------------


def test_where_one_gradient_ends_a_use_and_starts_the_next_the_end_comes_first(tmp_path: Path) -> None:
    model = blocks()
    with opened_with(model, parameters="nvme", optimizer_states="cpu", nvme=tmp_path) as engine:
        train(engine, model)
        trace = [event for event in residency_of(engine).schedule.trace if event.unit_index]
        open_units: set[int] = set()
        for event in trace:
            open_units ^= {event.unit_index}
            assert len(open_units) <= 1
        assert len(trace) == 2 * 2 * BLOCKS


def t5() -> Any:
    """Every layer of the decoder reads what the encoder ends with, and all share a bias that the first of them computes."""
    sizes = {"num_layers": 4, "num_decoder_layers": 5, "num_heads": 2, "d_kv": 16, "d_ff": 64}
    torch.manual_seed(0)
    return T5ForConditionalGeneration(T5Config(**TEXT, **sizes, dropout_rate=0.0, decoder_start_token_id=0))


def bart() -> Any:
    """The same without the bias."""
    sides = {f"{side}_{what}": size for side in ("encoder", "decoder") for what, size in (("layers", 4), ("ffn_dim", 64))}
    heads = {"encoder_attention_heads": 2, "decoder_attention_heads": 2}
    torch.manual_seed(0)
    return BartForConditionalGeneration(BartConfig(**TEXT, **sides, **heads, max_position_embeddings=32, dropout=0.0))


CHECKPOINTS = (
    pytest.param(None, id="whole"),
    pytest.param(False, id="recomputed"),
    pytest.param(True, id="recomputed reentrant"),
)


# How backward is told of a use's end depends on the model and on the checkpoints: each of both, and in each place.
@pytest.mark.parametrize(
    ("setup", "build", "checkpointing"),
    in_pairs([ON_NVME_IN_PLACE, IN_PLACE_IN_BACKWARD, ON_NVME], [t5, bart], CHECKPOINTS),
)
def test_a_decoder_goes_as_backward_leaves_its_layers(
    opened: Any, setup: Setup, build: Any, checkpointing: bool | None
) -> None:
    """The gradient of the encoder's output is complete only when backward is through with the decoder."""
    runs = []
    for where in (IN_MEMORY, setup):
        model = build()
        if checkpointing is not None:
            model.gradient_checkpointing_enable({"use_reentrant": checkpointing})
        engine = opened(model, adamw(model), where, max_grad_norm=0.5)
        planned = engine.stats()["resident_capacity_nbytes"]
        runs.append(run_engine(engine, token_loop(steps=4)))
    assert_same_bits(runs[1], runs[0])
    stats = engine.stats()
    sizes = [unit["nbytes"] for unit in stats["units"]]
    assert stats["resident_peak_nbytes"] <= stats["resident_capacity_nbytes"] == planned
    assert planned <= sizes[0] + 2 * max(sizes[1:]) < sum(sizes) / 2


class Towers(nn.Module):
    """Two stacks that take turns, and meet at the end."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(16, 16) for _ in range(8))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        left, right = x, -x
        for index in range(0, 8, 2):
            left, right = self.layers[index](left).tanh(), self.layers[index + 1](right).tanh()
        return left * right


def test_branches_end_in_the_order_in_which_forward_began_them(tmp_path: Path) -> None:
    model = Towers()
    with opened_with(model, parameters="nvme", optimizer_states="cpu", nvme=tmp_path) as engine:
        for _ in range(2):
            model(torch.ones(2, 16)).sum().backward()
            engine.step()
            engine.zero_grad()
        events = [event for event in residency_of(engine).schedule.trace if event.unit_index]
        assert [event.unit_index for event in events] == [unit for unit in (*range(1, 9), *range(8, 0, -1)) for _ in range(2)]
        stats = engine.stats()
        assert stats["resident_peak_nbytes"] == 2 * stats["units"][1]["nbytes"]


class Slow(nn.Module):
    """Autograd numbers what a thread records; this makes the second layer's number higher than any of `above`."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.above = nn.Linear(16, 16), nn.Linear(16, 16), 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.first(x)
        while number(torch.ones(1, requires_grad=True) * 1) < self.above:
            pass
        return self.second(h)


def number(made: torch.Tensor) -> int:
    assert made.grad_fn is not None
    return int(made.grad_fn._sequence_nr())


def test_what_another_thread_recorded_is_in_no_order_with_the_rest(tmp_path: Path) -> None:
    """Backward reaches the quick call while it is in the middle of the slow one, which forward made later."""
    model = nn.Sequential(nn.Linear(16, 16), Slow())
    quick, slow = model
    x = torch.ones(2, 16, requires_grad=True) * 1
    with opened_with(model, parameters="nvme", optimizer_states="cpu", nvme=tmp_path) as engine:
        found: list[torch.Tensor] = []
        y = quick(x)
        slow.above = number(y) + 100
        thread = threading.Thread(target=lambda: found.append(slow(x)))
        thread.start()
        thread.join()
        (y * found[0]).sum().backward()
        events = residency_of(engine)._recorder.take().events[4:]
        assert events[:2] == (UseEvent(Edge.START, 2), UseEvent(Edge.START, 1))
        assert {event.edge for event in events[2:]} == {Edge.END}


def test_a_stale_graph_is_refused_each_time() -> None:
    """Not only by the first backward, which its refusal cut short."""
    torch.manual_seed(0)
    model = nn.Linear(4, 4)
    with opened_with(model) as engine:
        old = model(torch.ones(2, 4)).square().mean()
        model(torch.ones(2, 4)).sum().backward()
        engine.step()
        engine.zero_grad()
        with torch.no_grad():
            model(torch.ones(2, 4))  # the update has ended
        for _ in range(3):
            with refused(offload.UsageError, "through a forward that ran before"):
                old.backward(retain_graph=True)
        assert model.weight.grad is None


def test_a_backward_that_was_cut_short_before_a_step_leaves_no_use(tmp_path: Path) -> None:
    """The step ends its uses; the next backward, of a graph that was there before, must not end them again."""
    model = blocks()

    def stop(_: torch.Tensor) -> None:
        raise RuntimeError("stop here")

    with opened_with(model, parameters="nvme", optimizer_states="cpu", nvme=tmp_path) as engine:
        x = torch.ones(3, 32)
        inside: list[torch.Tensor] = []
        handle = model[2][0].register_forward_hook(lambda _, __, output: inside.append(output))
        first, second = model(x).sum(), model(x).sum()
        handle.remove()
        inside[0].register_hook(stop)
        with pytest.raises(RuntimeError, match="stop here"):
            first.backward()
        engine.step()
        engine.zero_grad()
        with refused(offload.UsageError, "through a forward that ran before"):
            second.backward()
        reference = blocks()
        reference.load_state_dict(engine.state_dict())
        kinds: list[type] = []
        for block in model:
            block[0].register_forward_pre_hook(lambda module, _: kinds.append(type(module.weight)))
        assert torch.equal(model(x), reference(x))
        assert kinds == [nn.Parameter] * BLOCKS, "a unit was used that was not open"
        assert all(
            type(parameter).__torch_function__ is not torch.Tensor.__torch_function__ for parameter in model.parameters()
        )


def test_a_second_backward_that_was_cut_short_leaves_no_use(tmp_path: Path) -> None:
    """Nor a parameter that could be written to without a word, in whichever of its functions it ended."""
    model = blocks()

    def stop(_: Any) -> None:
        raise RuntimeError("stop here")

    with opened_with(model, parameters="nvme", optimizer_states="cpu", nvme=tmp_path) as engine:
        for count in range(4, 24, 3):
            x = torch.ones(3, 32, requires_grad=True)
            (slope,) = torch.autograd.grad(model(x).square().sum(), x, create_graph=True)
            nodes = [slope.grad_fn]
            for node in nodes:
                nodes += [one for one, _ in node.next_functions if one is not None and one not in nodes]
            nodes[count].register_prehook(stop)
            with pytest.raises(RuntimeError, match="stop here"):
                slope.square().sum().backward()
            engine.state_dict()
            assert not any(unit.uses.count for unit in units_of(engine))
            with refused(offload.ParameterAccessError, "written outside"), torch.no_grad():
                model[2][0].weight.zero_()
            engine.zero_grad()


def least(build: Any, **config: Any) -> int:
    """The smallest budget of device memory."""
    with pytest.raises(offload.BudgetError) as refusal:
        opened_with(build(), **config, device_memory=1)
    found = refusal.value.smallest_nbytes
    assert found is not None
    return found


AFTER_AN_INTERRUPT: dict[str, Any] = {
    "state_dict": lambda engine, loss: engine.state_dict(),
    "gathered": lambda engine, loss: engine.gathered(engine.module[4].parameters()).__enter__(),
    "read": lambda engine, loss: engine.read(engine.module[4][0].weight),
    "a backward of another forward": lambda engine, loss: loss.backward(),
    "step": lambda engine, loss: engine.step(),
}


@pytest.mark.parametrize("verb", AFTER_AN_INTERRUPT)
def test_what_an_interrupted_forward_used_has_no_room(verb: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """PyTorch calls no hook of a module whose forward Ctrl-C ended. With the smallest budget that there is, which has room for
    one block."""
    monkeypatch.setenv("OFFLOAD_ACCELERATOR", "deferred")
    config: dict[str, Any] = {"parameters": "nvme", "optimizer_states": "cpu", "nvme": tmp_path, "prefetch": 0}
    nbytes = least(blocks, **config)
    model = blocks()
    with opened_with(model, **config, device_memory=nbytes) as engine:
        train(engine, model)
        loss = model(torch.ones(3, 32)).sum()
        if verb == "step":
            loss.backward()

        def stop(*_: Any) -> None:
            raise KeyboardInterrupt

        handle = model[2][0].register_forward_hook(stop)
        with pytest.raises(KeyboardInterrupt):
            model(torch.ones(3, 32))
        handle.remove()
        AFTER_AN_INTERRUPT[verb](engine, loss)
        assert sum(unit.uses.count - unit.uses.held_count for unit in units_of(engine)) == 0


class Leaving(nn.Module):
    """Leaves a block by what is no `Exception`, and goes on with the next."""

    class Left(BaseException):
        pass

    def __init__(self) -> None:
        super().__init__()
        self.blocks = blocks()
        self.leaves = False

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for index, block in enumerate(self.blocks):
            handle = block[0].register_forward_hook(self._leave) if self.leaves and index == 1 else None
            try:
                x = block(x)
            except Leaving.Left:
                pass
            finally:
                if handle is not None:
                    handle.remove()
        return x

    def _leave(self, *_: Any) -> None:
        raise Leaving.Left


def test_a_block_that_forward_left_by_an_interrupt_which_it_caught_is_in_use_no_more(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """PyTorch calls no hook there. The rest of forward, backward, step and state_dict find room with the smallest budget."""
    monkeypatch.setenv("OFFLOAD_ACCELERATOR", "deferred")
    config: dict[str, Any] = {"parameters": "nvme", "optimizer_states": "cpu", "nvme": tmp_path, "prefetch": 0}
    found = []
    for placed in ({}, config | {"device_memory": least(Leaving, **config)}):
        model = Leaving()
        with opened_with(model, **placed) as engine:
            for leaves in (False, True, False):
                model.leaves = leaves
                model(torch.ones(3, 32)).sum().backward()
                assert not any(unit.uses.count for unit in units_of(engine))
                engine.step()
                engine.zero_grad()
            found.append(digest(engine.state_dict()))
    assert found[0] == found[1]


class Mixing(nn.Module):
    """Between trained blocks it computes with values that have no gradient: a frozen weight of its own, or of a child that it
    does not call, or one that is trained and detached there. What it trains itself comes last, so that it has its gradient
    first."""

    def __init__(self, weight: str) -> None:
        super().__init__()
        self.is_detached = weight == "detached"
        self.before, self.behind = blocks(), blocks()
        self.mixes = nn.ModuleList(nn.Sequential(nn.Linear(32, 64), Half(), nn.Linear(64, 32)) for _ in range(2))
        self.mixes.requires_grad_(False)
        self.own = None if weight == "of a child" else nn.Parameter(torch.randn(32, 32), requires_grad=self.is_detached)
        self.out = nn.Parameter(torch.randn(32, 32))
        self.on_gradient: Any = lambda _: None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.before(x)
        x = x @ self.own.detach() if self.own is not None else x @ self.mixes[0][0].weight.T @ self.mixes[0][2].weight.T
        if x.requires_grad:
            x.register_hook(self.on_gradient)
        x = self.behind(x) @ self.out
        return x @ self.own if self.is_detached else x


@pytest.mark.parametrize("weight", ["own", "of a child", "detached"])
def test_what_is_frozen_stays_until_backward_is_through_with_it(weight: str, tmp_path: Path) -> None:
    def mixing() -> Mixing:
        torch.manual_seed(1)
        return Mixing(weight)

    model = mixing()
    with opened_with(model, parameters="device", optimizer_states="cpu", dtype="bf16") as engine:
        in_memory = train(engine, model)
    model = mixing()
    with opened_with(model, parameters="nvme", optimizer_states="nvme", prefetch=0, dtype="bf16", nvme=tmp_path) as engine:
        (unit,) = {
            one
            for one in units_of(engine)
            for info in one.parameters
            if info.parameter is (model.mixes[0][0].weight if weight == "of a child" else model.own)
        }
        stayed = []

        def evict_all(_: torch.Tensor) -> None:
            """What may leave leaves: to go on without the weight would end the process."""
            residency_of(engine).evict_all()
            stayed.append(unit.residency.state is UnitState.RESIDENT)
            assert stayed[-1]

        model.on_gradient = evict_all
        assert train(engine, model) == in_memory
    assert stayed == [True] * 4
