# SPDX-License-Identifier: Apache-2.0
"""What "auto" chooses takes no longer than any tiers that a user might name, within the same budgets: in virtual time."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
import transformers

import offload
from offload.cli.plans.forecast import Work, forecast, training_loop
from offload.device.virtual.description import read_machine
from offload.device.virtual.machine import VirtualMachine
from offload.errors import ConfigError
from offload.forecast import simulate
from offload.planning.budget import Tier
from offload.planning.deciding import PAIRINGS

WORK = Work(batch=1, sequence=2048, micro_batches=1, checkpointing=False)
LIMIT = 1.05
QUICK = [(1.2, 2.5)]
SLOW = [(1.2, 8.0), (1.2, 14.0), (4.0, 2.5), (4.0, 8.0), (4.0, 14.0), (9.0, 2.5), (9.0, 8.0), (9.0, 14.0)]
CELLS = [*QUICK, *(pytest.param(*cell, marks=pytest.mark.slow) for cell in SLOW)]
"""Budgets in bytes of a parameter: of the device, of host memory. What does not fit lies on NVMe."""


def llama(**shape: int) -> transformers.PreTrainedModel:
    with torch.device("meta"):
        config = transformers.LlamaConfig(**shape)
        config.use_cache = False
        return transformers.LlamaForCausalLM(config).to(torch.bfloat16)


def small() -> transformers.PreTrainedModel:
    return llama(hidden_size=1024, intermediate_size=2816, num_hidden_layers=8, num_attention_heads=8, vocab_size=8192)


def wide() -> transformers.PreTrainedModel:
    """Of few units, whose records come in chunks of which buffers hold a good part."""
    heads = {"num_attention_heads": 16, "num_key_value_heads": 4}
    return llama(hidden_size=2048, intermediate_size=8192, num_hidden_layers=6, vocab_size=32000, **heads)


def deep() -> transformers.PreTrainedModel:
    return llama(hidden_size=1280, intermediate_size=3328, num_hidden_layers=9, num_attention_heads=10, vocab_size=50304)


def seconds(
    make: Callable[[], transformers.PreTrainedModel] = small, machine: str = "rtx4090", work: Work = WORK, **fields: Any
) -> tuple[float, bool] | None:
    """Of a step, and whether several micro-batches would find room for their sums; None where it does not fit."""
    model, has_room = make(), set[bool]()
    config = offload.Config(dtype="bf16", nvme=".", **{"max_grad_norm": 1.0, **fields})
    loop = training_loop(model, torch.optim.AdamW(model.parameters()), config, work)

    def end(engine: offload.Engine) -> None:
        loop.end(engine)
        has_room.add(engine.stats()["decision"]["room_for_micro_batches"])

    try:
        numbers = {"tokens": work.tokens, "micro_batches": work.micro_batches}
        found = simulate(VirtualMachine(read_machine(machine)), replace(loop, end=end), **numbers)
    except ConfigError:
        return None
    return found.step_seconds, has_room.pop()


@pytest.mark.parametrize(("on_device", "in_memory"), CELLS)
def test_auto_is_as_fast_as_the_best_fixed_placement(on_device: float, in_memory: float) -> None:
    """Of those that leave room for the sums of several micro-batches, where "auto" found one that does."""
    numel = sum(parameter.numel() for parameter in small().parameters())
    compare({"device_memory": int(on_device * numel), "cpu_memory": int(in_memory * numel)})


@pytest.mark.parametrize(
    ("machine", "on_device", "in_memory", "micro_batches"), [("rtx5090", 2.5, 10.0, 2), ("rtx3090", 1.6, 13.0, 4)]
)
def test_chunks_are_no_smaller_than_pays(machine: str, on_device: float, in_memory: float, micro_batches: int) -> None:
    """Smaller ones leave more of the memory to records, and each of them costs."""
    numel = sum(parameter.numel() for parameter in wide().parameters())
    budgets = {"device_memory": int(on_device * numel), "cpu_memory": int(in_memory * numel)}
    compare(budgets, make=wide, machine=machine, work=Work(1, 2048, micro_batches, checkpointing=True))


@pytest.mark.parametrize(
    ("make", "on_device", "in_memory", "work", "best", "fields"),
    [
        (small, 4.0, 16.0, Work(1, 2048, 8, checkpointing=False), ("device", "cpu"), {}),
        (wide, 5.0, 5.0, Work(4, 2048, 4, checkpointing=True), ("cpu", "nvme"), {}),
        (wide, 6.5, 2.0, Work(4, 2048, 4, checkpointing=True), ("device", "nvme"), {}),
        (
            deep,
            10.05,
            3.11,
            Work(4, 2048, 4, checkpointing=True),
            ("device", "nvme"),
            {"state_format": "split", "max_grad_norm": None},
        ),
    ],
)
def test_each_part_of_a_step_hides_what_moves_in_it(
    make: Callable[[], transformers.PreTrainedModel],
    on_device: float,
    in_memory: float,
    work: Work,
    best: tuple[Tier, Tier],
    fields: dict[str, Any],
) -> None:
    """Updates in backward are hidden by the last one, not by those of the other micro-batches; units that stay once they were
    fetched move nothing that they could hide, and other units' gradients may be late under them."""
    numel = sum(parameter.numel() for parameter in make().parameters())
    budgets = {"device_memory": int(on_device * numel), "cpu_memory": int(in_memory * numel)}
    compare(budgets, [best], make=make, work=work, **fields)


def compare(budgets: dict[str, int], pairings: Sequence[tuple[Tier, Tier]] = PAIRINGS, **run: Any) -> None:
    auto = seconds(**run, **budgets)
    assert auto is not None
    fixed = [seconds(parameters=parameters, optimizer_states=states, **run, **budgets) for parameters, states in pairings]
    possible = [one for one in fixed if one is not None]
    assert possible
    compared = [one for one, has_room in possible if has_room >= auto[1]]
    assert auto[0] <= LIMIT * min(compared)


def test_updates_that_read_what_stays_on_the_device_run_under_the_forward() -> None:
    """With split states: backward, and then the longer of the forward and the updates. A twentieth for what they begin with."""
    model, work = small(), Work(batch=2, sequence=2048, micro_batches=1, checkpointing=False)
    config = offload.Config(dtype="bf16", parameters="device", optimizer_states="cpu", state_format="split")
    found = forecast(model, torch.optim.AdamW(model.parameters()), config, read_machine("rtx4090"), work)
    forward, memory = found.floors["compute"] / 3, found.floors["host memory"]
    assert found.step_seconds <= 1.05 * (2 * forward + max(forward, memory))


def test_what_was_decided_is_said_and_told(caplog: pytest.LogCaptureFixture) -> None:
    """In the log in five lines, in `stats` in full."""
    model = torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.Linear(64, 64))
    with (
        caplog.at_level("INFO", logger="offload"),
        offload.initialize(model, torch.optim.AdamW(model.parameters()), offload.Config()) as engine,
    ):
        decision = engine.stats()["decision"]
    lines = [record.message for record in caplog.records if record.name == "offload.build.assembly"]
    begins = ("placement: parameters on ", "memory: ", "a step moves what takes ", "weighed: parameters on ", "rates: ")
    assert len(lines) == 5 and all(line.startswith(begin) for line, begin in zip(lines, begins, strict=True))
    assert decision["weighed"] and decision["rates"]["source"] in lines[-1]
    assert decision["seconds"] == pytest.approx(max(decision["forward"].values()) + max(decision["backward"].values()))
    caplog.clear()
    with offload.initialize(torch.nn.Linear(8, 8), config=offload.Config()):
        assert not caplog.records  # nothing is said unasked
