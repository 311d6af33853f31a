# SPDX-License-Identifier: Apache-2.0
"""Where states lie never changes a bit: every placement equals the run with everything on the device."""

from __future__ import annotations

import functools
import itertools
from pathlib import Path
from typing import Any

import pytest
import torch

from .conftest import Where
from .loops import Language, Result, assert_same_bits, train

PLACES = ("device", "cpu", "nvme")
PLACEMENTS = list(itertools.product(PLACES, PLACES))
# The deferred accelerator has tests of its own (tests/acceptance): here it only shows that these tests run.
ON_CPU_TOO = {("cpu", "cpu"), ("nvme", "nvme")}


def _only_a_few_without_a_gpu(where: Where, parameters: str, states: str, dtype: str) -> None:
    if not where.is_gpu and ((parameters, states) not in ON_CPU_TOO or dtype == "fp32"):
        pytest.skip("tests/acceptance has it for the deferred accelerator")


_references: dict[Any, Result] = {}


def reference(where: Where, nvme: Path, key: str, **options: Any) -> Result:
    """Everything on the device, updates at the step; computed once for each key."""
    if (where, key) not in _references:
        _references[where, key] = train(where, nvme, "device", "device", **options)
    return _references[where, key]


@pytest.mark.parametrize("update", ["step", "backward"])
@pytest.mark.parametrize("dtype", ["fp32", "bf16", "fp16"])
@pytest.mark.parametrize(("parameters", "states"), PLACEMENTS)
def test_placement(where: Where, tmp_path: Path, parameters: str, states: str, dtype: str, update: str) -> None:
    _only_a_few_without_a_gpu(where, parameters, states, dtype)
    expected = reference(where, tmp_path, dtype, dtype=dtype)
    assert_same_bits(train(where, tmp_path, parameters, states, dtype=dtype, update=update), expected)


@pytest.mark.parametrize("update", ["step", "backward"])
@pytest.mark.parametrize(("parameters", "states"), [("cpu", "cpu"), ("nvme", "nvme"), ("device", "cpu")])
def test_without_clipping(where: Where, tmp_path: Path, parameters: str, states: str, update: str) -> None:
    """With update="backward" updates then begin within backward."""
    options = {"dtype": "bf16", "max_grad_norm": None, "evaluate": True}
    expected = reference(where, tmp_path, "unclipped", **options)
    assert_same_bits(train(where, tmp_path, parameters, states, update=update, **options), expected)


@pytest.mark.parametrize("on_host", [False, True])
@pytest.mark.parametrize("checkpointing", ["reentrant", "plain"])
@pytest.mark.parametrize(("parameters", "states"), [("cpu", "cpu"), ("nvme", "nvme")])
def test_activation_checkpointing(
    where: Where, tmp_path: Path, parameters: str, states: str, checkpointing: str, on_host: bool
) -> None:
    """Both kinds; with `on_host` the checkpoints themselves lie in (pinned) host memory. Nothing of it changes a number."""
    plain = reference(where, tmp_path, "bf16", dtype="bf16")
    build = functools.partial(Language, checkpointing=checkpointing, on_host=on_host)
    assert_same_bits(train(where, tmp_path, parameters, states, build=build, dtype="bf16"), plain)


@pytest.mark.parametrize(("parameters", "states"), [("cpu", "cpu"), ("nvme", "nvme")])
def test_activations_on_the_host_without_checkpointing(where: Where, tmp_path: Path, parameters: str, states: str) -> None:
    """`save_on_cpu` then also copies the weights that autograd saves out and in: right, if not what it is for."""
    plain = reference(where, tmp_path, "bf16", dtype="bf16")
    build = functools.partial(Language, on_host=True)
    assert_same_bits(train(where, tmp_path, parameters, states, build=build, dtype="bf16"), plain)


@pytest.mark.parametrize(("parameters", "states"), [("cpu", "cpu"), ("nvme", "nvme"), ("cpu", "device")])
def test_frozen_base_with_trained_additions(where: Where, tmp_path: Path, parameters: str, states: str) -> None:
    options: dict[str, Any] = {"build": functools.partial(Language, adapted=True), "dtype": "bf16"}
    expected = reference(where, tmp_path, "adapted", **options)
    assert_same_bits(train(where, tmp_path, parameters, states, **options), expected)


@pytest.mark.parametrize(("parameters", "states"), [("cpu", "cpu"), ("nvme", "nvme")])
def test_compiled_blocks(where: Where, tmp_path: Path, parameters: str, states: str) -> None:
    backend = "inductor" if where.is_gpu else "aot_eager"

    def compiled(model: Language) -> None:
        for block in model.blocks:
            block.compile(backend=backend)

    options: dict[str, Any] = {"prepare": compiled, "steps": 2, "dtype": "bf16"}
    torch.compiler.reset()
    expected = reference(where, tmp_path, "compiled", **options)
    assert_same_bits(train(where, tmp_path, parameters, states, **options), expected)


@pytest.mark.parametrize("update", ["step", "backward"])
@pytest.mark.parametrize(("parameters", "states"), [("cpu", "cpu"), ("nvme", "nvme"), ("device", "nvme")])
def test_evaluation_and_generation(where: Where, tmp_path: Path, parameters: str, states: str, update: str) -> None:
    expected = reference(where, tmp_path, "evaluated", dtype="bf16", evaluate=True)
    ours = train(where, tmp_path, parameters, states, dtype="bf16", evaluate=True, update=update)
    assert_same_bits(ours, expected)


def test_on_a_stream_of_the_users(where: Where, tmp_path: Path) -> None:
    """Compute is the stream that is current, whichever that is."""
    expected = reference(where, tmp_path, "bf16", dtype="bf16")
    if not where.is_gpu:
        pytest.skip("tests/device/test_stream_order.py has it without a GPU")
    chosen = torch.cuda.Stream()
    for parameters, states in (("cpu", "cpu"), ("cpu", "device"), ("nvme", "nvme")):
        with torch.cuda.stream(chosen):
            ours = train(where, tmp_path, parameters, states, dtype="bf16")
        assert_same_bits(ours, expected)


@pytest.mark.parametrize(("parameters", "states"), [("device", "device"), ("device", "cpu"), ("cpu", "device"), ("cpu", "cpu")])
def test_another_stream_at_once_after_initialize(where: Where, tmp_path: Path, parameters: str, states: str) -> None:
    """Nothing that `initialize` gave its own stream is still under way. Wide, so that it would be."""
    if not where.is_gpu:
        pytest.skip("tests/device/test_stream_order.py has it without a GPU")
    build = functools.partial(Language, width=512, depth=6)
    expected = reference(where, tmp_path, "wide", build=build, dtype="bf16", steps=1)
    torch.cuda.synchronize()  # the batches, which are made on the current stream, are small and early
    for _ in range(3):
        ours = train(where, tmp_path, parameters, states, build=build, dtype="bf16", steps=1, stream=torch.cuda.Stream())
        assert_same_bits(ours, expected)
