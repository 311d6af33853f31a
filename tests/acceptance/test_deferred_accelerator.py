"""The deferred accelerator catches a wait that was taken out.

On it device memory is separate, copies run only when somebody waits for them, and evicted memory is NaN. These tests
take waits out and see training go wrong; with the waits in place the same runs have the reference's bits.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch

import offload

from .models import IN_MEMORY, Setup, llama, two_groups
from .runs import CLIP, assert_same_bits, bitwise_loop, run_engine

STEPS = 4
SETUPS = tuple(Setup(p, s, "deferred") for p, s in (("cpu", "cpu"), ("cpu", "nvme"), ("nvme", "nvme")))
some = pytest.mark.parametrize("setup", SETUPS, ids=lambda s: s.name)


def train(opened: Any, setup: Setup) -> list[Any]:
    model = llama()
    engine = opened(model, two_groups(model), setup, dtype="bf16", max_grad_norm=CLIP)
    return list(run_engine(engine, lambda run: bitwise_loop(run, STEPS)))


def expect_wrong(opened: Any, setup: Setup, right: list[Any]) -> None:
    """Training raises, or its losses or weights hold NaN or are others than the right ones."""
    try:
        losses, weights = train(opened, setup)
    except (offload.OffloadError, RuntimeError, ArithmeticError, AssertionError):
        return
    same = losses == right[0] and all(torch.equal(weights[name], right[1][name]) for name in weights)
    assert not same, "a wait was taken out and the deferred accelerator let it pass"


@pytest.fixture
def right(opened: Any) -> list[Any]:
    return train(opened, IN_MEMORY)


@pytest.fixture
def accelerator_class() -> type:
    return pytest.importorskip("offload.device.deferred").DeferredAccelerator


@some
def test_the_waits_are_there(
    opened: Any, right: list[Any], accelerator_class: type, monkeypatch: pytest.MonkeyPatch, setup: Setup
) -> None:
    """Compute joins fetches in every step, and with all waits in place the numbers are right."""
    joined: list[Any] = []
    join = accelerator_class.join

    def counted(self: Any, pending: Any) -> Any:
        joined.append(pending)
        return join(self, pending)

    monkeypatch.setattr(accelerator_class, "join", counted)
    assert_same_bits(train(opened, setup), right)
    units = 3  # decoder layers, each fetched for forward and for backward of 2 micro-batches of every step
    assert len(joined) >= units * 2 * 2 * STEPS, f"only {len(joined)} joins: this run does not exercise the waits"


@some
def test_no_join_at_all(
    opened: Any, right: list[Any], accelerator_class: type, monkeypatch: pytest.MonkeyPatch, setup: Setup
) -> None:
    """H2D: compute that does not wait for its fetch meets poison."""
    monkeypatch.setattr(accelerator_class, "join", lambda self, pending: None)
    expect_wrong(opened, setup, right)


@pytest.mark.parametrize("missing", [0, 1, 7, 30])
def test_one_join_is_missing(
    opened: Any, right: list[Any], accelerator_class: type, monkeypatch: pytest.MonkeyPatch, missing: int
) -> None:
    """One wait among many, here or there: each is seen, so none of them is there for nothing."""
    join = accelerator_class.join
    count = [0]

    def all_but_one(self: Any, pending: Any) -> Any:
        count[0] += 1
        return None if count[0] - 1 == missing else join(self, pending)

    monkeypatch.setattr(accelerator_class, "join", all_but_one)
    expect_wrong(opened, Setup("nvme", "nvme", "deferred"), right)
    assert count[0] > missing


@pytest.mark.parametrize(
    "setup",
    [Setup("device", "cpu", "deferred"), Setup("device", "nvme", "deferred"), Setup("nvme", "nvme", "deferred")],
    ids=lambda s: s.name,
)
def test_the_host_does_not_wait_for_gradients(
    opened: Any, right: list[Any], accelerator_class: type, monkeypatch: pytest.MonkeyPatch, setup: Setup
) -> None:
    """D2H: a host that reads gradients before their copy settled gets what lay there before."""
    import offload.device.deferred as deferred
    from offload.device.pending import Pending

    kinds = [
        kind
        for kind in vars(deferred).values()
        if isinstance(kind, type) and issubclass(kind, Pending) and kind.__module__ == deferred.__name__
    ]
    assert kinds, "the deferred accelerator has no completion of its own"
    waited: list[Any] = []
    for kind in kinds:
        monkeypatch.setattr(kind, "wait", lambda self: waited.append(self))
        # A host that polls instead of waiting would be told the same untruth.
        monkeypatch.setattr(kind, "done", lambda self: True)
    expect_wrong(opened, setup, right)
    assert waited, "the host waited for no copy: this run does not exercise the waits"


def test_evicted_memory_is_poisoned(opened: Any, right: list[Any]) -> None:
    """A view kept from within a forward holds NaN, or refuses, once its unit was evicted; never the right numbers."""
    model = llama()
    engine = opened(model, two_groups(model), Setup("nvme", "nvme", "deferred"), dtype="bf16", prefetch=0)
    kept: list[tuple[torch.Tensor, torch.Tensor]] = []
    block = model.model.layers[0]
    weight = block.mlp.up_proj.weight
    hook = block.mlp.up_proj.register_forward_hook(
        lambda module, args, out: kept.append((weight.data.view(-1), weight.detach().clone()))
    )
    tokens = torch.arange(24)[None]
    with torch.no_grad():
        model(input_ids=tokens)
    hook.remove()
    view, truth = kept[0]
    assert truth.isfinite().all()
    if view.untyped_storage().nbytes() == 0:
        return  # emptied: torch has nothing to read there, and the engine's guards answer for the parameter
    assert not torch.equal(view, truth.view(-1)), "the memory of an evicted unit still holds its weights"
    assert engine.module is model
