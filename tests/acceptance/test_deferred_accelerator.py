# SPDX-License-Identifier: Apache-2.0
"""The deferred accelerator catches a wait that was taken out.

On it device memory is separate, copies run only when somebody waits for them, and evicted memory is NaN. These tests
take waits out and see training go wrong; with the waits in place the same runs have the reference's bits.
"""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import offload
from offload.device.deferred import DeferredAccelerator
from offload.device.pending import Pending
from tests.devices import computed_on

from .models import IN_MEMORY, Setup, llama, two_groups
from .runs import CLIP, assert_same_bits, bitwise_loop, run_engine

STEPS = 4
BLOCKS = 3
SETUPS = tuple(Setup(p, s, "deferred") for p, s in (("cpu", "cpu"), ("cpu", "nvme"), ("nvme", "nvme")))
some = pytest.mark.parametrize("setup", SETUPS, ids=lambda s: s.name)


@pytest.fixture
def right(opened: Any) -> list[Any]:
    return train(opened, IN_MEMORY)


def train(opened: Any, setup: Setup, steps: int = STEPS) -> list[Any]:
    model = llama(BLOCKS)
    engine = opened(model, two_groups(model), setup, dtype="bf16", max_grad_norm=CLIP)
    return list(run_engine(engine, lambda run: bitwise_loop(run, steps)))


def goes_wrong(directory: Path, setup: Setup, right: list[Any], steps: int = STEPS) -> bool:
    """Whether training raises, or its losses or weights hold NaN or are others than the right ones."""
    model = llama(BLOCKS)
    config = offload.Config(**setup.fields(directory, dtype="bf16", max_grad_norm=CLIP))
    engine = None
    try:
        engine = offload.initialize(model, two_groups(model), config)
        losses, weights = run_engine(engine, lambda run: bitwise_loop(run, steps))
    except (offload.OffloadError, RuntimeError, ArithmeticError, AssertionError):
        return True
    finally:
        if engine is not None:
            with contextlib.suppress(Exception):  # without its waits not even the end can be right
                engine.close()
    return losses != right[0] or not all(torch.equal(weights[name], right[1][name]) for name in weights)


def joining(patch: pytest.MonkeyPatch, really: Callable[[int], bool]) -> None:
    """Whether compute waits, asked at each of its waits with the wait's number."""
    numbers = itertools.count()

    class Joining(DeferredAccelerator):
        def join(self, pending: Any) -> None:
            if really(next(numbers)):
                super().join(pending)

    computed_on(patch, DeferredAccelerator, lambda _: Joining)


@some
def test_the_waits_are_there(opened: Any, right: list[Any], monkeypatch: pytest.MonkeyPatch, setup: Setup) -> None:
    """Compute joins fetches in every step, and with all waits in place the numbers are right."""
    joined: list[int] = []
    joining(monkeypatch, lambda number: joined.append(number) is None)
    assert_same_bits(train(opened, setup), right)
    micro_batches = 2 * STEPS  # in each, every block is fetched for forward and, but for the last, for backward again
    fetches = micro_batches * (2 * BLOCKS - 1)
    assert len(joined) >= fetches, f"only {len(joined)} joins: this run does not exercise the waits"


@some
def test_no_join_at_all(nvme: Path, right: list[Any], monkeypatch: pytest.MonkeyPatch, setup: Setup) -> None:
    """H2D: compute that does not wait for its fetches meets poison."""
    monkeypatch.setenv("OFFLOAD_ACCELERATOR", "deferred")
    joining(monkeypatch, lambda number: False)
    assert goes_wrong(nvme, setup, right), "the waits were taken out and the deferred accelerator let it pass"


def test_one_join_is_missing(opened: Any, nvme: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One wait among many. Some may be there twice over; most of them must be missed when they are gone."""
    right = train(opened, IN_MEMORY, steps=1)
    monkeypatch.setenv("OFFLOAD_ACCELERATOR", "deferred")
    passed = []
    for missing in range(10):
        count = 0

        def all_but_one(number: int, missing: int = missing) -> bool:
            nonlocal count
            count += 1
            return number != missing

        with monkeypatch.context() as patch:
            joining(patch, all_but_one)
            if not goes_wrong(nvme, Setup("nvme", "nvme", "deferred"), right, steps=1):
                passed.append(missing)
        assert count > missing, "fewer joins than this test takes out"
    assert len(passed) < 5, f"joins {passed} of 10 are not missed"


@pytest.mark.parametrize(
    "setup",
    [Setup("device", "cpu", "deferred"), Setup("device", "nvme", "deferred"), Setup("nvme", "nvme", "deferred")],
    ids=lambda s: s.name,
)
def test_the_host_does_not_wait_for_gradients(
    nvme: Path, right: list[Any], monkeypatch: pytest.MonkeyPatch, setup: Setup
) -> None:
    """D2H: a host that reads gradients before their copy settled gets what lay there before."""
    monkeypatch.setenv("OFFLOAD_ACCELERATOR", "deferred")
    waited: list[Any] = []

    class Untrue(Pending):
        def wait(self) -> None:
            waited.append(self)

        def done(self) -> bool:
            return True  # who polls is told the same untruth

    class Hasty(DeferredAccelerator):
        def copy_out(self, destination: torch.Tensor, source: torch.Tensor) -> Pending:
            super().copy_out(destination, source)
            return Untrue()

    with monkeypatch.context() as patch:
        computed_on(patch, DeferredAccelerator, lambda _: Hasty)
        assert goes_wrong(nvme, setup, right), "the host's waits were taken out and training went right"
    assert waited, "the host waited for no copy: this run does not exercise the waits"


def test_evicted_memory_is_poisoned(opened: Any) -> None:
    """A view kept from within a forward is empty, or NaN, once its unit was evicted; never the right numbers."""
    model = llama(BLOCKS)
    engine = opened(model, two_groups(model), Setup("nvme", "nvme", "deferred"), dtype="bf16", prefetch=0)
    kept: list[tuple[torch.Tensor, torch.Tensor]] = []
    projection = model.model.layers[0].mlp.up_proj

    def keep(module: Any, args: Any, out: Any) -> None:
        kept.append((module.weight.data.view(-1), module.weight.detach().clone()))

    hook = projection.register_forward_hook(keep)
    with torch.no_grad():
        engine.module(input_ids=torch.arange(24)[None])
    hook.remove()
    view, truth = kept[0]
    assert truth.isfinite().all()
    if view.untyped_storage().nbytes() > 0:  # otherwise it was emptied, and there is nothing to read
        assert not torch.equal(view, truth.view(-1)), "the memory of an evicted unit still holds its weights"
