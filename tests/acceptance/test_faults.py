# SPDX-License-Identifier: Apache-2.0
"""Faults of the drive under a whole engine: right data or the right error, never a silent one, never a hang.

The faulty backend runs a transfer only when somebody waits for it and in an order drawn from a seed, so these runs also
show that every wait on a file is there.
"""

from __future__ import annotations

import errno
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch.nn.functional as F

import offload
from tests.drives import drive_is
from tests.inside import placement_of
from tests.small_sizes import small
from tests.tiers.faulty_io import Fault, FaultyBackend, seeded_faults

from ..scratch_files import scratch_files
from .models import IN_MEMORY, ON_NVME, ON_NVME_IN_BACKWARD, Setup, adamw, stack, vector_batches
from .runs import assert_same_bits

STEPS = 3
FEWER = 2
"""Of a run that is repeated for each of its transfers: a third step moves what the second did."""


def steps(engine: offload.Engine, count: int = STEPS) -> list[float]:
    losses = []
    for x, y in vector_batches(count):
        loss = F.mse_loss(engine.module(x), y)
        loss.backward()
        engine.step()
        engine.zero_grad()
        losses.append(loss.item())
    return losses


def run(
    nvme: Path, setup: Setup, monkeypatch: pytest.MonkeyPatch, backend: FaultyBackend | None, count: int = STEPS
) -> tuple[Any, Any]:
    monkeypatch.setenv("OFFLOAD_ACCELERATOR", setup.accelerator)
    if backend is not None:
        drive_is(monkeypatch, backend)
    model = stack()
    with offload.initialize(model, adamw(model), setup.fields(nvme)) as engine:
        return steps(engine, count), engine.state_dict()


@pytest.fixture
def right(tmp_path: Path) -> tuple[Any, Any]:
    with pytest.MonkeyPatch.context() as patch:
        return run(tmp_path, IN_MEMORY, patch, None)


@pytest.mark.parametrize("setup", [ON_NVME, ON_NVME_IN_BACKWARD, Setup("nvme", "nvme", "cpu")], ids=lambda s: s.name)
@pytest.mark.parametrize("seed", range(6))
def test_short_transfers_delays_and_any_order_change_nothing(
    nvme: Path, right: tuple[Any, Any], monkeypatch: pytest.MonkeyPatch, setup: Setup, seed: int
) -> None:
    faults = seeded_faults(seed, 2000, 0.5, (Fault("short"), Fault("delay")))
    assert_same_bits(run(nvme, setup, monkeypatch, FaultyBackend(seed, faults)), right)


@pytest.mark.parametrize(
    ("setup", "code"),
    [
        (ON_NVME, errno.EIO),
        (ON_NVME, errno.ENOSPC),
        (ON_NVME_IN_BACKWARD, errno.EIO),
        (Setup("nvme", "nvme", "cpu"), errno.EIO),
        (Setup("device", "nvme", "deferred"), errno.EIO),
        (Setup("nvme", "device", "deferred"), errno.EIO),
    ],
    ids=lambda value: value.name if isinstance(value, Setup) else errno.errorcode[value],
)
def test_a_failed_transfer_is_an_error_that_names_it(
    nvme: Path, monkeypatch: pytest.MonkeyPatch, setup: Setup, code: int
) -> None:
    """At every transfer of a run: a StorageError with the errno, then an engine that refuses to go on."""
    whole, count = FaultyBackend(1), STEPS if setup.parameters == "device" else FEWER  # with less to move
    run(nvme, setup, monkeypatch, whole, count)
    assert whole.submitted_count > 30
    for index in range(whole.submitted_count):
        backend = FaultyBackend(1, {index: Fault("errno", code)})
        drive_is(monkeypatch, backend)
        model = stack()
        try:
            engine = offload.initialize(model, adamw(model), setup.fields(nvme))
        except offload.StorageError as error:
            assert error.errno == code
            continue
        with pytest.raises(offload.StorageError) as caught:  # transfer `index`
            try:
                steps(engine, count)
                engine.state_dict()
            finally:
                if engine.stats()["failure"] is not None:
                    with pytest.raises(offload.EngineFailedError):
                        engine.step()
                engine.close()
        assert caught.value.errno == code, f"transfer {index}"


@pytest.fixture
def spilling(monkeypatch: pytest.MonkeyPatch) -> None:
    """Chunks so small that a block has many, and the gradients of the first layers push those of the last out."""
    small(monkeypatch, chunk_numel=4096)


def run_wide(
    nvme: Path, setup: Setup, monkeypatch: pytest.MonkeyPatch, backend: FaultyBackend, width: int = 128, **fields: Any
) -> Any:
    monkeypatch.setenv("OFFLOAD_ACCELERATOR", setup.accelerator)
    drive_is(monkeypatch, backend)
    model = stack(width, 2)
    losses = []
    with offload.initialize(model, adamw(model), setup.fields(nvme, max_grad_norm=0.5, **fields)) as engine:
        placement = placement_of(engine)
        for x, y in vector_batches(2 * STEPS, width=width):
            loss = F.mse_loss(model(x), y)
            loss.backward()
            losses.append(loss.item())
            if len(losses) % 2 == 0:
                engine.step()
                engine.zero_grad()
        written = bool(scratch_files(nvme, "gradients*"))
        return (losses, engine.state_dict()), placement, written


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
@pytest.mark.parametrize("setup", [ON_NVME, Setup("nvme", "nvme", "cpu")], ids=lambda s: s.name)
def test_spilled_gradients_are_the_same_bits(
    nvme: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, spilling: None, setup: Setup, dtype: str
) -> None:
    """Two micro-batches, so gradients are read back to be added to (in fp32 from then on), spilled again, and read back."""
    right, _, _ = run_wide(tmp_path, IN_MEMORY, monkeypatch, FaultyBackend(0), dtype=dtype)
    backend = FaultyBackend(3, seeded_faults(3, 5000, 0.3, (Fault("short"), Fault("delay"))))
    result, placement, written = run_wide(nvme, setup, monkeypatch, backend, dtype=dtype)
    assert written and placement.retained_gradient_buffers < 16 * 2, "nothing is spilled here"
    assert_same_bits(result, right)


@pytest.mark.parametrize("setup", [ON_NVME, Setup("nvme", "nvme", "cpu")], ids=lambda s: s.name)
def test_a_failed_transfer_of_a_spilled_gradient_is_raised(
    nvme: Path, monkeypatch: pytest.MonkeyPatch, spilling: None, setup: Setup
) -> None:
    whole = FaultyBackend(1)
    _, _, written = run_wide(nvme, setup, monkeypatch, whole, width=48)
    assert written, "nothing is spilled here"
    for index in range(0, whole.submitted_count, max(whole.submitted_count // 16, 1)):
        with pytest.raises(offload.StorageError) as caught:
            run_wide(nvme, setup, monkeypatch, FaultyBackend(1, {index: Fault("errno", errno.EIO)}), width=48)
        assert caught.value.errno == errno.EIO, f"transfer {index}"


@pytest.mark.parametrize(
    "setup",
    [ON_NVME, Setup("nvme", "nvme", "cpu"), Setup("device", "nvme", "deferred"), Setup("nvme", "device", "deferred")],
    ids=lambda s: s.name,
)
def test_a_flipped_bit_is_an_error_that_names_the_parameter(
    nvme: Path, right: tuple[Any, Any], monkeypatch: pytest.MonkeyPatch, setup: Setup
) -> None:
    """At transfers of a run: found when somebody looks at it, or nobody does, and then nothing depends on it."""
    whole = FaultyBackend(1)
    run(nvme, setup, monkeypatch, whole)
    found = set[str]()
    for index in range(whole.submitted_count):
        backend = FaultyBackend(1, {index: Fault("bit_flip")})
        try:
            result = run(nvme, setup, monkeypatch, backend)
        except offload.CorruptDataError as error:
            assert backend.was_looked_at(index)
            found.update(moved.kind for moved in backend.log if moved.index == index)
            text = str(error)
            assert ".swap" in text and "expected" in text and "last checkpoint" in text
            assert ("parameters of" in text or "optimizer states of" in text) and (".weight" in text or ".bias" in text)
        else:
            assert not backend.was_looked_at(index)
            assert_same_bits(result, right)
    assert found == {"read", "write"}


class Boom(Exception):
    """The user's own."""


def told_beside_an_error_of_the_users(nvme: Path, setup: Setup, *, goes_on: bool) -> list[str]:
    """A step, and a forward that raises at its end; then another call, or none but the close. What was raised, in order."""
    model, told = stack(), list[str]()

    def end(*_: Any) -> None:
        raise Boom

    def attempt(call: Callable[[], Any]) -> None:
        try:
            call()
        except (Boom, offload.OffloadError) as error:
            told.append(type(error).__name__)

    engine = offload.initialize(model, adamw(model), setup.fields(nvme))
    attempt(lambda: steps(engine, 1))
    model.outlet.register_forward_pre_hook(end)
    ((x, _),) = vector_batches(1)
    attempt(lambda: model(x))
    if goes_on:
        attempt(engine.state_dict)
    attempt(engine.close)
    return told


@pytest.mark.filterwarnings("ignore:module forward hook with")
@pytest.mark.parametrize("goes_on", [True, False], ids=["another call", "close"])
@pytest.mark.parametrize("setup", [ON_NVME, Setup("cpu", "nvme", "cpu")], ids=lambda s: s.name)
def test_a_drive_that_fails_behind_an_error_of_the_users_is_told(
    nvme: Path, monkeypatch: pytest.MonkeyPatch, setup: Setup, goes_on: bool
) -> None:
    """PyTorch makes a warning of what a hook raises behind an error in forward: the next call raises it, as itself."""
    monkeypatch.setenv("OFFLOAD_ACCELERATOR", setup.accelerator)
    whole = FaultyBackend(1)
    drive_is(monkeypatch, whole)
    assert told_beside_an_error_of_the_users(nvme, setup, goes_on=goes_on) == ["Boom"]
    seen = []
    for index in range(whole.submitted_count):
        backend = FaultyBackend(1, {index: Fault("errno", errno.EIO)})
        drive_is(monkeypatch, backend)
        try:
            seen.append(told_beside_an_error_of_the_users(nvme, setup, goes_on=goes_on))
        except offload.StorageError:
            continue  # in initialize
        assert seen[-1].count("StorageError") == 1, f"transfer {index}: {seen[-1]}"
    assert ["Boom", "StorageError"] in [told[:2] for told in seen], "none failed behind the user's error"
