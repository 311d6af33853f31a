# SPDX-License-Identifier: Apache-2.0
"""A resumed run equals the uninterrupted one to the bit, wherever the states lie now and lay when they were saved."""

from __future__ import annotations

from functools import lru_cache
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import offload
from offload import layout
from tests.crosses import in_turn
from tests.inside import parts_of, units_of
from tests.small_sizes import small

from ..acceptance.models import (
    IN_MEMORY,
    ON_CPU,
    ON_CPU_IN_PLACE,
    ON_NVME,
    ON_NVME_IN_BACKWARD,
    PLACEMENTS,
    Normalized,
    Setup,
    Sometimes,
    adamw,
    gpt2,
    stack,
    two_groups,
    vector_batches,
)
from ..acceptance.runs import Run, assert_same_bits, one_step, simple_loop
from .loops import SAVED_AT, STEPS, Resumable, byte_model

OVERFLOW_STEP = 1
CLIP = 0.5


@lru_cache
def reference(dtype: str) -> tuple[list[float], dict[str, torch.Tensor]]:
    """Losses and final weights of the uninterrupted run with everything on the device."""

    def open_plain(model: nn.Module, optimizer: Any, setup: Setup, **fields: Any) -> Any:
        return offload.initialize(model, optimizer, offload.Config(**setup.fields(Path("."), **fields)))

    whole = Resumable(open_plain, IN_MEMORY, dtype=dtype, max_grad_norm=CLIP)
    with whole.engine:
        losses = whole.train(range(STEPS), overflow_step=_overflow(dtype))
        return losses, whole.weights()


def _overflow(dtype: str) -> int | None:
    return OVERFLOW_STEP if dtype == "fp16" else None


def check(opened: Any, tmp_path: Path, before: Setup, after: Setup, dtype: str) -> tuple[Resumable, Resumable]:
    """Train, save in `before`, go on in `after` from other weights and another learning rate; the bits are the reference's."""
    first = Resumable(opened, before, dtype=dtype, max_grad_norm=CLIP)
    losses = first.train(range(SAVED_AT), overflow_step=_overflow(dtype))
    first.save(tmp_path / "saved")
    second = Resumable(opened, after, seed=9, dtype=dtype, max_grad_norm=CLIP)
    second.train(range(2))  # moments and step counts that the checkpoint must replace
    second.load(tmp_path / "saved")
    losses += second.train(range(SAVED_AT, STEPS))
    assert_same_bits(losses, reference(dtype)[0], "losses")
    assert_same_bits(second.weights(), reference(dtype)[1], "weights")
    return first, second


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
@pytest.mark.parametrize("index", range(len(PLACEMENTS)), ids=["+".join(pair) for pair in PLACEMENTS])
def test_every_placement_to_another(opened: Any, tmp_path: Path, index: int, dtype: str) -> None:
    before = Setup(*PLACEMENTS[index], accelerator="cpu" if index % 2 else "deferred")
    after = Setup(*PLACEMENTS[(index + 4) % len(PLACEMENTS)], accelerator="deferred" if index % 2 else "cpu")
    check(opened, tmp_path, before, after, dtype)


# To another is the longer way, in all pairs above.
@pytest.mark.parametrize(("parameters", "states", "dtype"), in_turn(PLACEMENTS, ("bf16", "fp32")))
def test_every_placement_to_itself(opened: Any, tmp_path: Path, parameters: str, states: str, dtype: str) -> None:
    setup = Setup(parameters, states, "deferred")
    check(opened, tmp_path, setup, setup, dtype)


@pytest.mark.parametrize("setup", [IN_MEMORY, ON_CPU, ON_NVME], ids=lambda setup: setup.name)
def test_saving_changes_nothing(opened: Any, tmp_path: Path, setup: Setup) -> None:
    run = Resumable(opened, setup, dtype="bf16", max_grad_norm=CLIP)
    losses = []
    for step in range(STEPS):
        losses += run.train([step])
        run.save(tmp_path / "saved")
    assert_same_bits(losses, reference("bf16")[0], "losses")
    assert_same_bits(run.weights(), reference("bf16")[1], "weights")


@pytest.mark.parametrize("setup", [ON_CPU, ON_NVME], ids=lambda setup: setup.name)
def test_loss_scale_after_an_overflow(opened: Any, tmp_path: Path, setup: Setup) -> None:
    first, second = check(opened, tmp_path, setup, setup, "fp16")
    assert second.engine.loss_scale == first.engine.loss_scale < 2.0**16
    assert second.engine.stats()["skipped_steps"] == first.engine.stats()["skipped_steps"] >= 1
    assert second.engine.stats()["steps"] == STEPS - second.engine.stats()["skipped_steps"]


def test_updates_in_backward(opened: Any, tmp_path: Path) -> None:
    check(opened, tmp_path, ON_NVME_IN_BACKWARD, ON_CPU, "bf16")
    check(opened, tmp_path, ON_CPU, ON_NVME_IN_BACKWARD, "bf16")


def test_other_chunks(opened: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Saved in chunks that split parameters, loaded in chunks that hold many, and the other way round."""
    few, usual = (4096,), layout.CHUNK_NUMELS
    wide = lambda: stack(width=64)  # noqa: E731 - a weight of 3 chunks

    def states(chunks: tuple[int, ...], setup: Setup) -> Any:
        small(monkeypatch, chunk_numels=chunks)
        model = wide()
        return opened(model, adamw(model), setup)

    for first_chunks, second_chunks in ((few, usual), (usual, few)):
        first = states(first_chunks, ON_NVME)
        simple_loop(3, width=64)(Run(first.module, first.optimizer, first))
        first.save_checkpoint(tmp_path / "saved")
        second = states(second_chunks, ON_CPU)
        second.load_checkpoint(tmp_path / "saved")
        for engine in (first, second):
            simple_loop(2, width=64)(Run(engine.module, engine.optimizer, engine))
        assert_same_bits(second.state_dict(), first.state_dict())


@pytest.mark.parametrize("backends", [("threads", "aiofiles"), ("aiofiles", "threads")])
def test_other_io_backend(opened: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, backends: tuple[str, str]) -> None:
    runs = []
    for backend in backends:
        monkeypatch.setenv("OFFLOAD_IO", backend)
        runs.append(Resumable(opened, ON_NVME, dtype="bf16", max_grad_norm=CLIP))
    runs[0].train(range(SAVED_AT))
    runs[0].save(tmp_path / "saved")
    runs[1].load(tmp_path / "saved")
    runs[1].train(range(SAVED_AT, STEPS))
    assert_same_bits(runs[1].weights(), reference("bf16")[1])


def test_step_counts_of_parameters_that_are_not_always_used(opened: Any, tmp_path: Path) -> None:
    def make(setup: Setup) -> Any:
        torch.manual_seed(1)
        model = Sometimes()
        return opened(model, two_groups(model), setup)

    def train(engine: Any, steps: range) -> None:
        batches = vector_batches(steps.stop)
        for step in steps:
            x, y = batches[step]
            F.mse_loss(engine.module(x, step % 2 == 1), y).backward()
            engine.step()
            engine.zero_grad()

    whole, first, second = make(ON_CPU), make(ON_NVME), make(ON_CPU_IN_PLACE)
    train(whole, range(8))
    train(first, range(4))
    first.save_checkpoint(tmp_path / "saved")
    second.load_checkpoint(tmp_path / "saved")
    train(second, range(4, 8))
    assert_same_bits(second.state_dict(), whole.state_dict())


def test_dropout_draws_what_it_would_have_drawn(opened: Any, tmp_path: Path) -> None:
    def make() -> Any:
        torch.manual_seed(1)
        model = nn.Sequential(nn.Linear(16, 16), nn.Dropout(0.5), nn.Linear(16, 16))
        return opened(model, adamw(model), ON_CPU)

    first = make()
    run = Run(first.module, first.optimizer, first)
    one_step(run)
    first.save_checkpoint(tmp_path / "saved")
    for seed in range(3):
        one_step(run, seed)
    expected = first.state_dict()
    second = make()
    torch.manual_seed(77)
    second.load_checkpoint(tmp_path / "saved")
    for seed in range(3):
        one_step(Run(second.module, second.optimizer, second), seed)
    assert_same_bits(second.state_dict(), expected)


def test_buffers(opened: Any, tmp_path: Path) -> None:
    def make() -> Any:
        torch.manual_seed(1)
        model = Normalized()
        return opened(model, adamw(model), ON_NVME)

    first, second = make(), make()
    one_step(Run(first.module, first.optimizer, first))
    first.save_checkpoint(tmp_path / "saved")
    second.load_checkpoint(tmp_path / "saved")
    for engine in (first, second):
        one_step(Run(engine.module, engine.optimizer, engine), seed=1)
    assert_same_bits(second.state_dict(), first.state_dict())
    assert second.state_dict()["blocks.0.1.num_batches_tracked"].item() == 2


def test_elements_in_another_order(opened: Any, tmp_path: Path) -> None:
    """A weight that lay channels-last goes into one that lies row by row, and back."""

    def make(format: torch.memory_format) -> Any:
        torch.manual_seed(1)
        model = nn.Conv2d(3, 4, 3).to(memory_format=format)
        return opened(model, adamw(model), ON_NVME)

    def step(engine: Any) -> None:
        engine.module(torch.ones(1, 3, 5, 5)).square().mean().backward()
        engine.step()
        engine.zero_grad()

    formats = (torch.channels_last, torch.contiguous_format)
    for before, after in (formats, formats[::-1]):
        first, second = make(before), make(after)
        assert first.module.weight.stride() != second.module.weight.stride()
        step(first)
        first.save_checkpoint(tmp_path / "saved")
        second.load_checkpoint(tmp_path / "saved")
        assert_same_bits(second.state_dict(), first.state_dict())
        moments = _moments(first), _moments(second)
        for name, moment in moments[0].items():
            assert torch.equal(moment, moments[1][name]), name


def _moments(engine: Any) -> dict[str, torch.Tensor]:
    """exp_avg of the only weight, in its own shape."""
    unit = next(unit for unit in units_of(engine) if unit.parameters)
    found = {}
    for chunk in unit.chunks:
        records = parts_of(engine).records
        buffer = offload.tiers.memory.HostMemory(records.nbytes(chunk), "test").tensor
        records.read(chunk, buffer).wait()
        record = records.over(chunk, buffer)
        for info, piece in chunk.pieces:
            low = piece.start - chunk.start
            found[info.fqn] = info.shaped(record.moment("exp_avg", low, low + piece.numel)).contiguous()
    return found


def test_another_compute_dtype(opened: Any, tmp_path: Path) -> None:
    """The masters go over in full; what forward computes with is rounded from them."""
    first = Resumable(opened, ON_NVME, dtype="bf16")
    first.train(range(2))
    first.save(tmp_path / "saved")
    second = Resumable(opened, ON_CPU, seed=9, dtype="fp32")
    second.load(tmp_path / "saved")
    assert_same_bits(second.weights(), first.weights())
    third = Resumable(opened, IN_MEMORY, seed=9, dtype="bf16")
    second.save(tmp_path / "again")
    third.load(tmp_path / "again")
    first.train(range(2, 4))
    third.train(range(2, 4))
    assert_same_bits(third.weights(), first.weights())


@pytest.mark.parametrize("setup", [ON_CPU, ON_NVME], ids=lambda setup: setup.name)
def test_frozen_parameters_and_ties(opened: Any, tmp_path: Path, setup: Setup) -> None:
    def make(seed: int) -> Any:
        model = gpt2(layers=2)
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.mul_(seed)
        for name, parameter in model.named_parameters():
            parameter.requires_grad_("attn" in name or "wte" in name)
        return opened(model, adamw(model), setup, dtype="bf16")

    tokens = torch.arange(32).reshape(2, 16)

    def step(engine: Any) -> None:
        engine.module(input_ids=tokens, labels=tokens).loss.backward()
        engine.step()
        engine.zero_grad()

    first, second = make(1), make(2)
    step(first)
    first.save_checkpoint(tmp_path / "saved")
    second.load_checkpoint(tmp_path / "saved")
    step(first)
    step(second)
    assert_same_bits(second.state_dict(), first.state_dict())


def test_weights_alone_without_an_optimizer(opened: Any, tmp_path: Path) -> None:
    first = Resumable(opened, ON_NVME, dtype="bf16")
    first.train(range(2))
    first.save(tmp_path / "saved")
    model = byte_model(seed=9)
    with offload.initialize(model, None, offload.Config(parameters="cpu", dtype="bf16")) as engine:
        engine.load_checkpoint(tmp_path / "saved")
        expected = {name: value.bfloat16() for name, value in first.weights().items()}
        assert_same_bits(engine.state_dict(), expected)
        assert model.embedding.weight.dtype is torch.bfloat16


def test_a_parameter_without_elements(opened: Any, tmp_path: Path) -> None:
    def make() -> Any:
        model = stack()
        model.nothing = nn.Parameter(torch.empty(0, 4))
        return opened(model, adamw(model), ON_NVME)

    first, second = make(), make()
    one_step(Run(first.module, first.optimizer, first))
    first.save_checkpoint(tmp_path / "saved")
    second.load_checkpoint(tmp_path / "saved")
    assert_same_bits(second.state_dict(), first.state_dict())
