# SPDX-License-Identifier: Apache-2.0
"""What `device_memory` leaves beyond the least is used: with more less moves, to nothing, as planned and to the same bits."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import offload
from offload.cli.plans.outline import Outline
from tests.inside import accelerator_of, parts_of

from .models import adamw, vector_batches
from .runs import assert_same_bits

WIDTH, BLOCKS, STEPS = 64, 6, 2
POINTS = 5
CASES = [
    ("cpu", "cpu", "bf16", "fp32"),
    ("device", "cpu", "fp32", "fp32"),
    ("cpu", "nvme", "bf16", "split"),
    ("nvme", "nvme", "fp32", "fp32"),
    ("nvme", "nvme", "bf16", "fp32"),
]


def blocks() -> nn.Module:
    """Multiples of 4096 elements: no padding to count."""
    torch.manual_seed(3)
    pairs = ((nn.Linear(WIDTH, 2 * WIDTH, bias=False), nn.Linear(2 * WIDTH, WIDTH, bias=False)) for _ in range(BLOCKS))
    return nn.Sequential(*(nn.Sequential(first, nn.Tanh(), second) for first, second in pairs))


def outline(fields: dict[str, Any], **more: Any) -> Outline:
    model = blocks()
    return Outline(model, adamw(model), offload.Config(**fields, **more))


def counted(engine: Any) -> list[int]:
    accelerator, backend = accelerator_of(engine), parts_of(engine).backend
    engine._training.settle()
    for places in (parts_of(engine).parameter_store, parts_of(engine).records):
        places.settle_writes()
    io = backend.stats() if backend is not None else None
    return [
        accelerator.copied_in_nbytes,
        accelerator.copied_out_nbytes,
        *((io.read_nbytes, io.written_nbytes) if io else (0, 0)),
    ]


def trained(fields: dict[str, Any], **more: Any) -> tuple[list[int], int, list[Any]]:
    """Bytes that a step moved, the most device memory in use, losses and weights."""
    model = blocks()
    with offload.initialize(model, adamw(model), offload.Config(**fields, **more)) as engine:
        losses, before = [], [0, 0, 0, 0]
        for index, (x, y) in enumerate(vector_batches(1 + STEPS, WIDTH)):
            loss = F.mse_loss(model(x).float(), y)
            engine.backward(loss)
            engine.step()
            engine.optimizer.zero_grad()
            losses.append(loss.item())
            if index == 0:  # planned from a guess
                before = counted(engine)
        moved = [(after - first) // STEPS for after, first in zip(counted(engine), before, strict=True)]
        return moved, engine.stats()["device_peak_nbytes"], [losses, engine.state_dict()]


@pytest.mark.parametrize(("parameters", "states", "dtype", "state_format"), CASES)
def test_each_step_up_moves_less(
    nvme: Path, monkeypatch: pytest.MonkeyPatch, parameters: str, states: str, dtype: str, state_format: str
) -> None:
    monkeypatch.setenv("OFFLOAD_ACCELERATOR", "deferred")
    fields = {"parameters": parameters, "optimizer_states": states, "nvme": str(nvme), "dtype": dtype}
    fields["state_format"] = state_format
    with outline(fields, device_memory=1 << 40) as generous:
        placement, unit = generous.placement(), 2 * 2 * WIDTH * WIDTH * 4
        least, most = generous.smallest_nbytes(placement, "device_memory"), placement.with_sums().plan.total_nbytes("device")
    assert least is not None and least < most
    expected = trained(fields)[2]
    before: list[int] | None = None
    for index in range(POINTS):
        budget = least + (most - least) * index // (POINTS - 1)
        with outline(fields, device_memory=budget) as known:
            placement = known.placement()
            planned, squares = known.traffic(placement, 1, scheduled=True), 8 * BLOCKS * 4 * WIDTH * WIDTH // 4096
        moved, peak, found = trained(fields, device_memory=budget)
        assert_same_bits(found, expected)
        taken = placement.plan.total_nbytes("device")
        assert taken - unit < peak <= taken <= budget  # room that no further unit fits into stays empty
        assert moved == [
            planned.to_device_nbytes, planned.from_device_nbytes + squares, planned.read_nbytes, planned.written_nbytes,
        ]  # fmt: skip
        assert before is None or sum(moved) <= sum(before)
        before = moved
    assert before == [0, squares, 0, 0]


@pytest.mark.parametrize(
    ("nbytes", "chosen"), [(1 << 30, ("device", "device")), (3 << 20, ("device", "cpu")), (1_800_000, ("cpu", "cpu"))]
)
def test_auto_takes_what_the_device_has_free(monkeypatch: pytest.MonkeyPatch, nbytes: int, chosen: tuple[str, str]) -> None:
    monkeypatch.setenv("OFFLOAD_ACCELERATOR", "deferred")
    monkeypatch.setenv("OFFLOAD_DEVICE_NBYTES", str(nbytes))
    losses = trained({}, cpu_memory=1 << 30)[2]
    assert_same_bits(losses, trained({"parameters": "cpu", "optimizer_states": "cpu"})[2])
    with outline({}) as known:
        placement = known.placement()
    assert (placement.parameters, placement.optimizer_states) == chosen
    assert placement.plan.total_nbytes("device") <= nbytes


def test_more_gathered_than_the_budget_holds_is_refused_and_training_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OFFLOAD_ACCELERATOR", "deferred")
    fields = {"parameters": "cpu", "optimizer_states": "cpu"}
    model = blocks()
    with pytest.raises(offload.BudgetError) as least:
        offload.initialize(model, adamw(model), offload.Config(**fields, device_memory=1))
    found = []
    for budget in ({}, {"device_memory": least.value.smallest_nbytes}):
        model = blocks()
        with offload.initialize(model, adamw(model), offload.Config(**fields, **budget)) as engine:
            losses = []
            for x, y in vector_batches(3, WIDTH):
                if budget:
                    with pytest.raises(
                        offload.BudgetError, match=r"Gather those of fewer units.*raise device_memory by at least"
                    ):
                        engine.gathered(model.parameters()).__enter__()
                with engine.gathered(model[0].parameters()), torch.no_grad():
                    model[0][0].weight.mul_(0.5)
                loss = F.mse_loss(model(x), y)
                loss.backward()
                engine.step()
                engine.zero_grad()
                losses.append(loss.item())
            found.append([losses, engine.state_dict()])
    assert_same_bits(*found)


class _Reading(nn.Module):
    """Computes with the weights of its last block without calling that."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = blocks()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks[:-1]:
            x = block(x)
        return F.linear(x, self.blocks[-1][0].weight) @ self.blocks[-1][2].weight.T


def _whole_step(model: nn.Module, engine: Any, x: torch.Tensor, y: torch.Tensor) -> float:
    loss = F.mse_loss(model(x), y)
    loss.backward()
    engine.step()
    engine.zero_grad()
    return loss.item()


@pytest.mark.parametrize(
    ("where", "what"),
    [
        ("cpu", "forward"),
        ("nvme", "evaluation"),
        ("nvme", "step"),
        ("cpu", "backward"),
        ("nvme", "state_dict"),
        ("cpu", "reading"),
    ],
)
def test_what_finds_no_room_beside_what_is_gathered_is_refused_and_training_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, where: str, what: str
) -> None:
    monkeypatch.setenv("OFFLOAD_ACCELERATOR", "deferred")
    fields = {"parameters": where, "optimizer_states": where, "nvme": str(tmp_path)}
    made = _Reading if what == "reading" else blocks
    model = made()
    with pytest.raises(offload.BudgetError) as least:
        offload.initialize(model, adamw(model), offload.Config(**fields, device_memory=1))
    config = offload.Config(**fields, device_memory=least.value.smallest_nbytes)
    found = []
    for gathers in (False, True):
        model = made()
        with offload.initialize(model, adamw(model), config) as engine:
            units = getattr(model, "blocks", model)
            losses = []
            for x, y in vector_batches(4, WIDTH):
                loss = F.mse_loss(model(x), y) if what == "backward" else None
                if gathers:
                    with (
                        pytest.raises(offload.BudgetError, match=r"Leave engine.gathered \([\w, .]+\) first, or raise it by"),
                        engine.gathered(list(units[:2].parameters())),
                    ):
                        if loss is not None:
                            loss.backward()
                        elif what == "step":
                            _whole_step(model, engine, x, y)
                        elif what == "state_dict":
                            engine.state_dict()
                        else:
                            with torch.set_grad_enabled(what != "evaluation"):
                                model(x)
                engine.zero_grad()
                losses.append(_whole_step(model, engine, x, y))
            found.append([losses, engine.state_dict()])
    assert_same_bits(*found)


def test_a_forward_that_raises_leaves_no_unit_in_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What a block computed before it raised is reached by no backward: the block came with the model from then on."""
    monkeypatch.setenv("OFFLOAD_ACCELERATOR", "deferred")
    fields = {"parameters": "cpu", "optimizer_states": "cpu"}
    model = blocks()
    with pytest.raises(offload.BudgetError) as least:
        offload.initialize(model, adamw(model), offload.Config(**fields, device_memory=1))
    found = []
    for fails in (False, True):
        model = blocks()
        config = offload.Config(**fields, device_memory=least.value.smallest_nbytes)
        with offload.initialize(model, adamw(model), config) as engine:
            losses = []
            for index, (x, y) in enumerate(vector_batches(3, WIDTH)):
                if fails:
                    hook = model[index][2].register_forward_pre_hook(lambda *_: [][0])
                    with pytest.raises(IndexError):
                        model(x)
                    hook.remove()
                loss = F.mse_loss(model(x), y)
                loss.backward()
                engine.step()
                engine.zero_grad()
                losses.append(loss.item())
            found.append([losses, engine.state_dict()])
        assert not any(unit.uses.companions for unit in parts_of(engine).units)
    assert_same_bits(*found)


def test_a_unit_whose_parameters_are_empty_comes_and_goes_within_the_budget(monkeypatch: pytest.MonkeyPatch) -> None:
    """It has no element that would have to stay whole (`Config.kept_numel`), and a flat all the same."""
    monkeypatch.setenv("OFFLOAD_ACCELERATOR", "deferred")
    fields = {"parameters": "cpu", "optimizer_states": "cpu", "update": "step"}

    def started(device_memory: int) -> offload.Engine:
        model = blocks()
        model.register_parameter("empty", nn.Parameter(torch.empty(0)))
        return offload.initialize(model, adamw(model), offload.Config(**fields, device_memory=device_memory))

    with pytest.raises(offload.BudgetError) as least:
        started(1)
    assert least.value.smallest_nbytes is not None
    with started(least.value.smallest_nbytes) as engine:
        for x, y in vector_batches(2, WIDTH):
            engine.backward(F.mse_loss(engine.module(x), y))
            engine.step()
            engine.zero_grad()
        stats = engine.stats()
    (planned,) = (line["nbytes"] for line in stats["planned"] if line["purpose"] == "parameters in use")
    assert stats["resident_capacity_nbytes"] == planned
    assert stats["device_peak_nbytes"] <= least.value.smallest_nbytes
