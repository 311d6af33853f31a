# SPDX-License-Identifier: Apache-2.0
"""Lion, Adagrad and SGD against plain PyTorch; split, bf16 and 8-bit states: the same bits wherever they lie, through
checkpoints, and within rounding of fp32 states."""

from __future__ import annotations

from functools import lru_cache
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F

import offload
from tests.crosses import in_turn
from tests.small_sizes import small

from .models import IN_MEMORY, ON_CPU, ON_NVME, Setup, llama, stack, two_groups, vector_batches
from .runs import CLIP, Run, assert_close, assert_same_bits, bitwise_loop, compare, refused, run_engine, simple_loop

few = pytest.mark.parametrize("setup", (IN_MEMORY, ON_CPU, ON_NVME), ids=lambda s: s.name)
RULES: dict[str, Any] = {
    "sgd": lambda m: torch.optim.SGD(m.parameters(), lr=0.05, foreach=False),
    "momentum": lambda m: torch.optim.SGD(m.parameters(), 0.05, 0.9, dampening=0.1, weight_decay=0.01, foreach=False),
    "nesterov": lambda m: torch.optim.SGD(m.parameters(), lr=0.05, momentum=0.9, nesterov=True, foreach=False),
    "adagrad": lambda m: torch.optim.Adagrad(m.parameters(), 0.05, 0.01, 0.01, 0.1, eps=1e-4, foreach=False),
    "lion": lambda m: offload.Lion(m.parameters(), lr=1e-3, weight_decay=0.1),
    "maximize": lambda m: torch.optim.AdamW(m.parameters(), lr=1e-3, eps=1e-4, maximize=True, foreach=False),
}
FORMATS = ("split", "bf16", "8bit")
SMALL = 8
"""Steps of two micro-batches."""


@few
@pytest.mark.parametrize("rule", RULES)
def test_a_rule_trains_as_plain_torch_does(opened: Any, setup: Setup, rule: str) -> None:
    compare(stack, simple_loop(8, clip=1.0), setup, opened, RULES[rule], max_grad_norm=1.0)


@few
def test_state_that_an_optimizer_has_already_is_taken_over(opened: Any, setup: Setup) -> None:
    """Two steps of plain torch, then the engine goes on as plain torch does."""
    for rule in ("momentum", "adagrad", "lion"):
        plain, model = stack(), stack()
        plain_optimizer, optimizer = RULES[rule](plain), RULES[rule](model)
        for run in (Run(plain, plain_optimizer), Run(model, optimizer)):
            simple_loop(2)(run)
        simple_loop(5)(Run(plain, plain_optimizer))
        _, weights = run_engine(opened(model, optimizer, setup), simple_loop(5))
        assert_close(weights, dict(plain.state_dict()))


def test_adagrad_of_a_deferred_model_begins_with_its_accumulator() -> None:
    with offload.deferred_init():
        model = stack()
    optimizer = RULES["adagrad"](model)
    with offload.initialize(model, optimizer, IN_MEMORY.fields(Path("."))) as engine:
        _, weights = run_engine(engine, simple_loop(3))
    plain = stack()
    simple_loop(3)(Run(plain, RULES["adagrad"](plain)))
    assert_close(weights, dict(plain.state_dict()))


def test_momentum_that_comes_later_is_refused(opened: Any) -> None:
    model = stack()
    engine = opened(model, RULES["sgd"](model), IN_MEMORY)
    x, y = vector_batches(1)[0]
    F.mse_loss(model(x), y).backward()
    engine.optimizer.param_groups[0]["momentum"] = 0.9
    with refused(offload.UsageError, "momentum", "0.9"):
        engine.step()


# ---- state formats


@lru_cache
def reference(state_format: str, kind: str = "adamw") -> tuple[list[float], dict[str, torch.Tensor]]:
    """Losses and final weights with everything in place."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("OFFLOAD_ACCELERATOR", "cpu")
        model = llama()
        fields = IN_MEMORY.fields(Path("."), dtype="bf16", max_grad_norm=CLIP, state_format=state_format)
        with offload.initialize(model, _optimizer(model, kind), offload.Config(**fields)) as engine:
            return run_engine(engine, lambda run: bitwise_loop(run, SMALL))


def _optimizer(model: torch.nn.Module, kind: str) -> torch.optim.Optimizer:
    if kind == "lion":
        return offload.Lion(model.parameters(), lr=1e-3, weight_decay=0.1)
    return two_groups(model)


def _train(opened: Any, setup: Setup, state_format: str, kind: str = "adamw") -> tuple[Any, Any]:
    model = llama()
    engine = opened(model, _optimizer(model, kind), setup, dtype="bf16", max_grad_norm=CLIP, state_format=state_format)
    return run_engine(engine, lambda run: bitwise_loop(run, SMALL))


PARTLY = (
    Setup("cpu", "nvme", "cpu"),
    Setup("nvme", "nvme", "cpu"),
    Setup("device", "cpu", "deferred"),
    Setup("cpu", "device", "deferred"),
    Setup("nvme", "device", "deferred"),
    Setup("nvme", "cpu", "deferred"),
    Setup("nvme", "nvme", "deferred", "backward"),
)


# A format is what an update reads and writes, a placement where that lies: test_routes.py has both in all pairs.
@pytest.mark.parametrize(("setup", "state_format"), in_turn(PARTLY, FORMATS))
def test_placement_never_shows(opened: Any, setup: Setup, state_format: str) -> None:
    losses, weights = _train(opened, setup, state_format)
    expected_losses, expected_weights = reference(state_format)
    assert_same_bits(losses, expected_losses, "losses")
    assert_same_bits(weights, expected_weights, "weights")


@pytest.mark.parametrize("state_format", FORMATS)
def test_lion_in_every_format(opened: Any, state_format: str) -> None:
    losses, weights = _train(opened, ON_NVME, state_format, "lion")
    assert_same_bits(weights, reference(state_format, "lion")[1], "weights")
    assert losses[-1] < losses[0]


def test_chunks_never_show(opened: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Stochastic rounding takes its bits by the parameter's element, not by where a chunk begins."""

    small(monkeypatch, chunk_numel=4096)
    for state_format in ("bf16", "8bit"):
        _, weights = _train(opened, ON_NVME, state_format)
        assert_same_bits(weights, reference(state_format)[1], "weights")


def test_how_far_the_formats_are_from_fp32_states() -> None:
    """split differs where a weight is half way between two bf16 numbers, which is rare; the others by their rounding."""
    fp32_losses, fp32 = reference("fp32")
    moved = torch.cat([(fp32[name] - value).flatten() for name, value in llama().state_dict().items()]).norm()
    distances = {}
    for state_format in FORMATS:
        losses, weights = reference(state_format)
        assert abs(losses[-1] - fp32_losses[-1]) < 0.05 * fp32_losses[-1]
        distances[state_format] = float(torch.cat([(weights[name] - fp32[name]).flatten() for name in fp32]).norm() / moved)
    assert distances["split"] < 0.05 and 0 < distances["bf16"] < 0.2 and 0 < distances["8bit"] < 0.5


@pytest.mark.parametrize("after", ["same", "fp32"])
@pytest.mark.parametrize("state_format", FORMATS)
def test_a_checkpoint_resumes_to_the_bit(opened: Any, tmp_path: Path, state_format: str, after: str) -> None:
    """And is read by a run with fp32 states, with the very numbers that it held."""
    model = llama()
    options = {"dtype": "bf16", "max_grad_norm": CLIP}
    engine = opened(model, two_groups(model), ON_NVME, state_format=state_format, **options)
    run_engine(engine, lambda run: bitwise_loop(run, 3))
    engine.save_checkpoint(tmp_path / "saved")
    held = engine.state_dict()
    fresh = llama()
    resumed_format = state_format if after == "same" else "fp32"
    resumed = opened(fresh, two_groups(fresh), IN_MEMORY, state_format=resumed_format, **options)
    resumed.load_checkpoint(tmp_path / "saved")
    assert_same_bits(resumed.state_dict(), held, "masters")
    if after == "same":
        expected = run_engine(engine, lambda run: bitwise_loop(run, 3))
        assert_same_bits(run_engine(resumed, lambda run: bitwise_loop(run, 3)), expected, "resumed")


@pytest.mark.parametrize("setup", [IN_MEMORY, ON_NVME], ids=lambda s: s.name)
def test_what_is_written_inside_gathered_is_the_master(opened: Any, setup: Setup) -> None:
    model = llama()
    engine = opened(model, two_groups(model), setup, dtype="bf16", state_format="split")
    run_engine(engine, lambda run: bitwise_loop(run, 2))
    before = engine.state_dict()
    weight = model.lm_head.weight
    with engine.gathered([weight]), torch.no_grad():
        weight[3, 5:9] = 0.25
    after = engine.state_dict()
    expected = before["lm_head.weight"].clone()
    expected[3, 5:9] = 0.25
    assert_same_bits(after, before | {"lm_head.weight": expected}, "masters")


def test_split_states_take_two_bytes_less(opened: Any) -> None:
    """Of each parameter; bf16 moments four more, 8-bit moments six, save a byte for every 32."""
    sizes = {}
    for state_format in ("fp32", *FORMATS):
        model = llama(width=64)
        engine = opened(model, two_groups(model), Setup("cpu", "cpu", "cpu"), dtype="bf16", state_format=state_format)
        lines = engine.stats()["planned"]
        numel = sum(line["nbytes"] for line in lines if line["purpose"] == "parameters") // 2
        sizes[state_format] = sum(line["nbytes"] for line in lines if line["purpose"] == "optimizer states") / numel
    assert sizes["fp32"] == 12 and sizes["split"] == 10 and sizes["bf16"] == 6
    assert 4 < sizes["8bit"] < 5  # extents are whole pages, which shows in a model this small
