# SPDX-License-Identifier: Apache-2.0
"""The room that sums of several micro-batches take: not before there are several, and refused without losing anything."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

import offload
from tests.inside import layout_of
from tests.small_sizes import small

from .models import IN_MEMORY, ON_CPU, ON_CPU_IN_PLACE, ON_NVME, ON_NVME_IN_PLACE, Setup, Stack, adamw, vector_batches
from .runs import assert_same_bits, refused

SETUPS = (ON_CPU_IN_PLACE, ON_CPU, ON_NVME_IN_PLACE, ON_NVME, Setup("device", "device", "deferred"))
anywhere = pytest.mark.parametrize("setup", SETUPS, ids=lambda setup: setup.name)
SUMS = "accumulated gradients"
FIRST, SECOND = vector_batches(2)


class Later(Stack):
    """With a layer that only some micro-batches use."""

    def __init__(self) -> None:
        super().__init__(blocks=4)
        self.later = nn.Linear(16, 16)

    def forward(self, x: torch.Tensor, use: bool = False) -> torch.Tensor:
        x = super().forward(x)
        return x + self.later(x) if use else x


@pytest.fixture(autouse=True)
def small_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    small(monkeypatch, chunk_numel=4096)


def built(opened: Any, setup: Setup, **fields: Any) -> Any:
    torch.manual_seed(3)
    model = Later()
    return opened(model, adamw(model), setup, dtype="bf16", **fields)


def backward(engine: Any, batch: tuple[torch.Tensor, torch.Tensor], use: bool = False) -> None:
    x, y = batch
    F.mse_loss(engine.module(x, use).float(), y).backward()


def planned(engine: Any) -> dict[str, int]:
    """By purpose, where the gradients lie."""
    lines = engine.stats()["planned"]
    home = engine.stats()["placement"]["gradients"]
    return {line["purpose"]: line["nbytes"] for line in lines if line["tier"] == home}


def test_one_micro_batch_moves_two_bytes_and_keeps_two(opened: Any) -> None:
    engine = built(opened, ON_NVME_IN_PLACE, state_format="8bit", update="step")  # takes no room to undo updates with
    numel = sum(flat.numel for flat in layout_of(engine).flats)
    on_nvme = sum(line["nbytes"] for line in engine.stats()["planned"] if line["tier"] == "nvme")
    assert on_nvme <= 8.2 * numel + 4096 * len(list(layout_of(engine).flats))  # each record ends at a page
    assert planned(engine)["gradients"] == 2 * numel and SUMS not in planned(engine)


@anywhere
def test_the_room_is_taken_when_a_second_one_comes(opened: Any, setup: Setup) -> None:
    weights = []
    for where in (IN_MEMORY, setup):
        engine = built(opened, where)
        for step in range(3):
            backward(engine, FIRST)
            engine.step()
            engine.zero_grad()
            assert (SUMS in planned(engine)) == (step > 0)
            for batch in (FIRST, SECOND, FIRST):
                backward(engine, batch, use=batch is SECOND)
            engine.step()
            engine.zero_grad()
        weights.append(engine.state_dict())
        assert planned(engine)[SUMS] == 2 * planned(engine)["gradients"]
    assert_same_bits(weights[1], weights[0])


@anywhere
def test_where_several_are_expected_there_is_room_for_sums_alone(opened: Any, setup: Setup) -> None:
    """Of steps with one, with as many, and with more; of parameters that only some micro-batches use, and clipped."""
    weights = []
    for where, expected in ((IN_MEMORY, 1), (setup, 3)):
        engine = built(opened, where, micro_batches=expected, max_grad_norm=0.1)
        numel = sum(flat.numel for flat in layout_of(engine).flats)
        for step in range(8):
            for batch in (FIRST, SECOND, FIRST, SECOND)[: step % 4 + 1]:
                backward(engine, batch, use=batch is SECOND)
            engine.step()
            engine.zero_grad()
        weights.append(engine.state_dict())
    assert planned(engine)["gradients"] == 4 * numel and SUMS not in planned(engine)
    assert_same_bits(weights[1], weights[0])


@pytest.mark.parametrize("setup", [ON_CPU, ON_NVME, Setup("nvme", "cpu")], ids=lambda setup: setup.name)
@pytest.mark.parametrize("beyond", [1.0, 1.3, 2.0, 6.0])
def test_whatever_budgets_hold_of_them_the_bits_are_the_same(opened: Any, setup: Setup, beyond: float) -> None:
    """With sums on the device, in memory and on the drive, as the least and more allow."""
    fields, known = dict[str, Any](), {"micro_batches": 3, "update": "auto", "state_format": "split"}
    for field in ("device_memory", "cpu_memory"):
        with pytest.raises(offload.BudgetError) as refusal:
            built(opened, setup, **known, **fields, **{field: 1})
        assert refusal.value.smallest_nbytes is not None
        fields[field] = int(beyond * refusal.value.smallest_nbytes)
    weights = []
    for engine in (built(opened, IN_MEMORY, state_format="split"), built(opened, setup, **known, **fields)):
        for count in (3, 3, 1, 3):
            for batch in (FIRST, SECOND, FIRST)[:count]:
                backward(engine, batch, use=batch is SECOND)
            engine.step()
            engine.zero_grad()
        weights.append(engine.state_dict())
    assert_same_bits(weights[1], weights[0])


def smallest(opened: Any, setup: Setup, field: str) -> int:
    with pytest.raises(offload.BudgetError) as refusal:
        built(opened, setup, **{field: 1})
    assert refusal.value.smallest_nbytes is not None
    return refusal.value.smallest_nbytes


BUDGETS = [
    pytest.param(ON_CPU_IN_PLACE, "cpu_memory", id="cpu, in place"),
    pytest.param(ON_CPU, "cpu_memory", id="cpu"),
    pytest.param(Setup("nvme", "cpu"), "cpu_memory", id="parameters on nvme"),
    pytest.param(Setup("device", "device", "deferred"), "device_memory", id="device"),
]


@pytest.mark.parametrize(("setup", "field"), BUDGETS)
def test_without_room_a_second_one_is_refused_and_the_first_is_still_there(opened: Any, setup: Setup, field: str) -> None:
    budget = smallest(opened, setup, field)
    weights = []
    for refuses in (False, True):
        engine = built(opened, setup, **{field: budget})
        backward(engine, FIRST)
        if refuses:
            for _ in range(2):
                with refused(offload.BudgetError, "second micro-batch", "one micro-batch a step", field):
                    backward(engine, SECOND, use=True)
            with refused(offload.BudgetError, "second micro-batch"), engine.no_sync():
                pass
            assert engine.module.later.weight.grad is None and engine.module.inlet.weight.grad is not None
        for _ in range(2):
            engine.step()
            engine.zero_grad()
            backward(engine, SECOND, use=True)
        engine.step()
        weights.append(engine.state_dict())
        assert engine.stats()["steps"] == 3
    assert_same_bits(weights[1], weights[0])


@pytest.mark.parametrize(("setup", "field"), BUDGETS)
def test_what_a_budget_leaves_for_them_nothing_else_takes(opened: Any, setup: Setup, field: str) -> None:
    engine = built(opened, setup)
    sums = 2 * planned(engine)["gradients"]
    engine = built(opened, setup, **{field: smallest(opened, setup, field) + sums})
    backward(engine, FIRST)
    backward(engine, SECOND)
    engine.step()
    totals = dict.fromkeys(("device", "cpu", "nvme"), 0)
    for line in engine.stats()["planned"]:
        totals[line["tier"]] += line["nbytes"]
    assert totals["cpu" if field == "cpu_memory" else "device"] <= getattr(engine.config, field)


class Twice(nn.Module):
    """Calls its block twice, through checkpoints of that kind (None: none). `later`: what the block computes besides."""

    def __init__(self, use_reentrant: bool | None) -> None:
        super().__init__()
        self.use_reentrant = use_reentrant
        self.inlet, self.block = nn.Linear(16, 16), Later()

    def forward(self, x: torch.Tensor, later: bool = False) -> torch.Tensor:
        x = self.inlet(x)
        for _ in range(2):
            x = self.block(x, later) if self.use_reentrant is None else self.checkpointed(x, later)
        return x

    def checkpointed(self, x: torch.Tensor, later: bool) -> torch.Tensor:
        return checkpoint(self.block, x, later, use_reentrant=self.use_reentrant)


@pytest.mark.parametrize("setup", (IN_MEMORY, *SETUPS), ids=lambda setup: setup.name)
def test_the_parts_of_one_backward_are_added_as_without_checkpoints(opened: Any, setup: Setup) -> None:
    """Also where the second micro-batch brings parts of what shares a chunk with sums of both."""
    weights = []
    for use_reentrant, where in ((None, IN_MEMORY), (True, setup)):
        torch.manual_seed(3)
        model = Twice(use_reentrant)
        engine = opened(model, adamw(model), where, dtype="bf16")
        for later in (True, False):
            backward(engine, FIRST, use=later)
            engine.step()
            engine.zero_grad()
        weights.append(engine.state_dict())
        assert SUMS not in planned(engine)
        with engine.no_sync():
            backward(engine, FIRST)
        backward(engine, SECOND, use=True)
        engine.step()
        weights.append(engine.state_dict())
    assert_same_bits(weights[2], weights[0])
    # Of the second micro-batch each part is a rounding apart: the sum it is added to is in fp32.
    new = [name for name in weights[1] if "later" in name]
    assert_same_bits({name: weights[3][name] for name in new}, {name: weights[1][name] for name in new})


def test_no_sync_takes_the_room_at_once(opened: Any) -> None:
    engine = built(opened, ON_NVME)
    with engine.no_sync():
        assert planned(engine)[SUMS]


@pytest.mark.parametrize("said", [None, "fp32"])
def test_deepspeed_says_so_beforehand(said: str | None, nvme: Path) -> None:
    """Of sums in fp32; those in the parameters' dtype, its default, need no room of their own."""
    import offload.deepspeed

    model = Later().bfloat16()
    for steps in (1, 2):
        config = {"train_micro_batch_size_per_gpu": 1, "gradient_accumulation_steps": steps, "bf16": {"enabled": True}}
        config["data_types"] = {"grad_accum_dtype": said}
        engine, *_ = offload.deepspeed.initialize(model=model, optimizer=adamw(model), config=config)
        inner = engine.offload_engine
        numel = sum(flat.numel for flat in layout_of(inner).flats)
        is_wide = steps > 1 and said == "fp32"
        assert planned(inner)["gradients"] == (4 if is_wide else 2) * numel and SUMS not in planned(inner)
        engine.destroy()
