# SPDX-License-Identifier: Apache-2.0
"""What is known beforehand of the computing that hides what moves: lookups compute nothing, and what is checkpointed is
computed again."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper

import offload
from offload.cli.plans.forecast import Work, forecast
from offload.device.deferred import DeferredAccelerator
from offload.device.virtual.description import read_machine
from offload.model.partition import partition, uses_of
from offload.planning.cost import computing_seconds
from offload.planning.use_trace import Expected, Use
from offload.planning.weighing import Weight, largest_that_pays
from tests.virtual.test_auto import llama


def model(width: int = 256) -> nn.Module:
    shape = {"hidden_size": width, "intermediate_size": 3 * width, "num_attention_heads": 4, "vocab_size": 512}
    return llama(num_hidden_layers=2, **shape)


def transformers_checkpointing() -> nn.Module:
    one = model()
    one.gradient_checkpointing_enable()
    return one


def wrapped_layers() -> nn.Module:
    one = model()
    layers = one.get_submodule("model.layers")
    for index, layer in enumerate(layers.children()):
        layers[index] = checkpoint_wrapper(layer)
    return one


class Switch(nn.Module):
    """As models of older releases have it: the switch is theirs, and the layers do not know of it."""

    def __init__(self) -> None:
        super().__init__()
        self.gradient_checkpointing = True
        self.embedding = nn.Embedding(2048, 64)
        self.layers = nn.ModuleList(nn.Linear(64, 64) for _ in range(2))


def expected_of(one: nn.Module) -> tuple[Expected, list[str]]:
    units = partition(one)
    return Expected.of(0, uses_of(units)), [unit.name for unit in units]


@pytest.mark.parametrize(
    ("make", "recomputed"),
    [
        (transformers_checkpointing, {"model.layers.0", "model.layers.1"}),
        (wrapped_layers, {"model.layers.0", "model.layers.1"}),
        (Switch, {"embedding", "layers.0", "layers.1"}),
        (model, set[str]()),
    ],
)
def test_what_backward_computes_again_is_known_beforehand(make: Callable[[], nn.Module], recomputed: set[str]) -> None:
    expected, names = expected_of(make())
    assert {names[index].removesuffix("._checkpoint_wrapped_module") for index in expected.recomputed} == recomputed


def test_it_is_not_once_checkpointing_is_disabled() -> None:
    one = transformers_checkpointing()
    one.gradient_checkpointing_disable()
    assert not expected_of(one)[0].recomputed


def test_a_unit_counts_only_if_all_its_uses_do() -> None:
    lookup = Use(1, read_in_backward=False)
    expected = Expected.of(
        0, [lookup, Use(2, recomputed=True), Use(3, recomputed=True), Use(3), Use(4, read_in_backward=False)]
    )
    assert expected.recomputed == {2} and expected.looked_up == {1, 4}
    assert Expected.of(0, [lookup, Use(2), Use(1)]).looked_up == set()  # a tied head


def test_seconds_of_computing() -> None:
    rates = DeferredAccelerator().rates()
    expected = Expected.of(0, [Use(1, read_in_backward=False), Use(2, recomputed=True), Use(3)])
    once = 2 * 100 * 1000 / rates.flops

    def seconds(unit_index: int, trained_share: float, tokens: int = 100, numel: int = 1000) -> tuple[float, float]:
        return computing_seconds(tokens, rates, expected, unit_index, numel, trained_share)

    assert seconds(1, 1.0) == (0.0, 0.0)
    assert seconds(2, 1.0) == pytest.approx((once, 3 * once)) and seconds(2, 0.0) == pytest.approx((once, 2 * once))
    assert seconds(3, 1.0) == pytest.approx((once, 2 * once))
    assert seconds(3, 1.0, tokens=0) == (rates.launch_seconds, 2 * rates.launch_seconds)
    assert seconds(2, 1.0, tokens=0) == (rates.launch_seconds, 3 * rates.launch_seconds)
    assert seconds(3, 0.0, numel=0) == seconds(3, 0.0, tokens=0, numel=0) == (0.0, 0.0)


@pytest.mark.parametrize("checkpointing", [False, True])
def test_it_is_what_the_machine_computes(checkpointing: bool) -> None:
    """As the virtual one counts it, operation by operation. Products are known, which take most of it where the model is wide
    and sequences are short: not what lies between them, nor that the last of a block is not computed again."""
    work = Work(batch=128, sequence=64, micro_batches=1, checkpointing=checkpointing)
    one, machine = model(4096), read_machine("rtx4090")
    config = offload.Config(dtype="bf16", parameters="cpu", optimizer_states="cpu")
    counted = forecast(one, torch.optim.AdamW(one.parameters()), config, machine, work).floors["compute"]
    (expected, _), units = expected_of(one), partition(one)
    rates = replace(DeferredAccelerator().rates(), flops=machine.flops)
    numels = [sum(parameter.numel() for _, parameter in unit.parameters) for unit in units]
    known = [computing_seconds(work.tokens, rates, expected, index, numel, 1.0) for index, numel in enumerate(numels)]
    assert 0.75 * counted <= sum(map(sum, known)) <= counted


@pytest.mark.parametrize(
    ("seconds", "moved", "best"),
    [
        ((1.0, 1.0, 1.0), (100, 95, 93), 0),
        ((1.0, 1.0, 1.0), (100, 95, 85), 2),
        ((1.0, 0.9, 0.9), (100, 100, 95), 1),
        ((1.0, 1.1, 1.1), (100, 50, 0), 0),
    ],
)
def test_smaller_chunks_pay_where_they_are_quicker_or_save_a_tenth(
    seconds: tuple[float, ...], moved: tuple[int, ...], best: int
) -> None:
    assert largest_that_pays([Weight(False, one, (nbytes, 0, 0)) for one, nbytes in zip(seconds, moved, strict=True)]) == best
