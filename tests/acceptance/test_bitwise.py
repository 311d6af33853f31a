# SPDX-License-Identifier: Apache-2.0
"""Where things lie never changes a bit: every run equals the same engine with everything on the device.

Each run is a small Llama on bytes of text: 8 steps of two micro-batches, clipping that strikes, weight decay, two
groups and a schedule. The reference is checked against PyTorch in test_against_torch.py.
"""

from __future__ import annotations

from functools import lru_cache
from pathlib import Path
from typing import Any

import pytest
import torch

import offload
from offload.tiers.nvme import STRIPE_NBYTES
from tests.crosses import in_pairs

from . import worker
from .models import IN_MEMORY, ON_NVME, PLACEMENTS, Setup, llama, two_groups
from .runs import BITWISE_STEPS, CLIP, LONG_STEPS, Run, allocated_nbytes, assert_same_bits, bitwise_loop, run_engine

KINDS = {"adamw": torch.optim.AdamW, "adam": torch.optim.Adam}
OVERFLOW_STEP = 4


@lru_cache
def reference(dtype: str, kind: str = "adamw", steps: int = BITWISE_STEPS) -> tuple[list[float], dict[str, torch.Tensor]]:
    """Losses and final weights with everything on the device of the cpu accelerator."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("OFFLOAD_ACCELERATOR", "cpu")
        model = llama()
        start = {name: value.clone() for name, value in model.state_dict().items()}
        fields = IN_MEMORY.fields(Path("."), dtype=dtype, max_grad_norm=CLIP)
        with offload.initialize(model, two_groups(model, KINDS[kind]), offload.Config(**fields)) as engine:
            losses, weights = run_engine(engine, lambda run: bitwise_loop(run, steps, overflow_step=_overflow(dtype)))
    assert losses[-1] < losses[0], "the reference does not learn"
    assert all(not torch.equal(start[name], weights[name]) for name, _ in llama().named_parameters())
    return losses, weights


def _overflow(dtype: str) -> int | None:
    return OVERFLOW_STEP if dtype == "fp16" else None


def check(opened: Any, setup: Setup, dtype: str, kind: str = "adamw", *, steps: int = BITWISE_STEPS, **fields: Any) -> Any:
    """Train in `setup`; assert the reference's bits; return the engine, still open."""
    model = llama()
    engine = opened(model, two_groups(model, KINDS[kind]), setup, dtype=dtype, max_grad_norm=CLIP, **fields)
    losses, weights = run_engine(engine, lambda run: bitwise_loop(run, steps, overflow_step=_overflow(dtype)))
    expected_losses, expected_weights = reference(dtype, kind, steps)
    assert_same_bits(losses, expected_losses, "losses")
    assert_same_bits(weights, expected_weights, "weights")
    return engine


def test_the_clipping_strikes(opened: Any) -> None:
    """Without the clipping the numbers are others, so the runs of this file do exercise it."""
    model = llama()
    engine = opened(model, two_groups(model), IN_MEMORY, dtype="fp32")
    losses, _ = run_engine(engine, bitwise_loop)
    assert losses[:2] == reference("fp32")[0][:2] and losses[-1] != reference("fp32")[0][-1]


# A placement has its own ways in place and from a device, and its own records in each dtype.
@pytest.mark.parametrize(
    ("parameters", "states", "dtype", "accelerator"), in_pairs(PLACEMENTS, ("fp32", "bf16"), ("cpu", "deferred"))
)
def test_placement(opened: Any, nvme: Path, parameters: str, states: str, dtype: str, accelerator: str) -> None:
    check(opened, Setup(parameters, states, accelerator), dtype)
    # What was asked to lie on NVMe does lie there: a placement that is quietly ignored would have the right bits too.
    numel = sum(p.numel() for p in llama().parameters())
    expected = numel * ((2 if dtype == "bf16" else 4) * (parameters == "nvme") + 8 * (states == "nvme"))
    assert allocated_nbytes(nvme) >= expected


@pytest.mark.parametrize("dtype", ["fp32", "bf16", "fp16"])
@pytest.mark.parametrize(("parameters", "states"), [("device", "cpu"), ("cpu", "nvme"), ("nvme", "nvme")])
def test_update_in_backward(opened: Any, parameters: str, states: str, dtype: str) -> None:
    """The norm is known only after the last gradient; updates issued before it are clipped all the same."""
    check(opened, Setup(parameters, states, "deferred", "backward"), dtype)


@pytest.mark.parametrize(("parameters", "states"), [("cpu", "cpu"), ("nvme", "nvme"), ("device", "nvme")])
def test_fp16_with_a_skipped_overflow(opened: Any, parameters: str, states: str) -> None:
    check(opened, Setup(parameters, states, "deferred"), "fp16")


def test_the_overflow_is_skipped_and_the_scale_halved(opened: Any) -> None:
    """The scale is seen as a user can see it: as the gradient of the loss itself."""
    model = llama()
    engine = opened(model, two_groups(model), ON_NVME, dtype="fp16", loss_scale="dynamic", max_grad_norm=CLIP)
    run = Run(engine.module, engine.optimizer, engine)
    tokens = torch.arange(48).reshape(2, 24)

    def one_step(factor: float) -> tuple[float, dict[str, torch.Tensor]]:
        scales: list[float] = []
        loss = model(input_ids=tokens, labels=tokens).loss * factor
        loss.register_hook(lambda grad: scales.append(grad.item()))
        engine.backward(loss)
        engine.step()
        engine.optimizer.zero_grad()
        assert len(scales) == 1
        return scales[0], run.weights()

    before = run.weights()
    for _ in range(20):  # a natural overflow may come first
        earlier, (normal_scale, before) = before, one_step(1.0)
        if not torch.equal(earlier["lm_head.weight"], before["lm_head.weight"]):
            break
    overflow_scale, after = one_step(1e8)
    next_scale, moved = one_step(1.0)
    assert normal_scale > 1.0 and overflow_scale == normal_scale
    assert next_scale == overflow_scale / 2
    assert_same_bits(after, before, "weights over the skipped step")
    assert all(not torch.equal(moved[name], after[name]) for name, _ in model.named_parameters())


def test_static_loss_scale(opened: Any) -> None:
    model = llama()
    engine = opened(model, two_groups(model), ON_NVME, dtype="fp16", loss_scale=128.0)
    tokens = torch.arange(48).reshape(2, 24)
    loss = model(input_ids=tokens, labels=tokens).loss
    scales: list[float] = []
    loss.register_hook(lambda grad: scales.append(grad.item()))
    engine.backward(loss)
    engine.step()
    assert scales == [128.0]


@pytest.mark.parametrize("prefetch", [0, 1, 3])
@pytest.mark.parametrize("accelerator", ["cpu", "deferred"])
def test_prefetch_depth(opened: Any, prefetch: int, accelerator: str) -> None:
    check(opened, Setup("nvme", "nvme", accelerator), "bf16", prefetch=prefetch)


@pytest.mark.parametrize("backend", ["io_uring", "threads", "aiofiles"])
def test_io_backend(opened: Any, monkeypatch: pytest.MonkeyPatch, backend: str) -> None:
    """Where the kernel forbids io_uring the engine may refuse, but must then say so."""
    monkeypatch.setenv("OFFLOAD_IO", backend)
    try:
        check(opened, ON_NVME, "fp32")
    except offload.OffloadError as error:
        if backend != "io_uring" or "io_uring" not in str(error):
            raise
        pytest.skip(f"io_uring cannot be had here: {error}")


@pytest.mark.parametrize("setup", [IN_MEMORY, Setup("cpu", "cpu"), ON_NVME], ids=lambda s: s.name)
def test_adam(opened: Any, setup: Setup) -> None:
    """Adam's weight decay is another arithmetic than AdamW's."""
    assert reference("fp32", "adam")[0] != reference("fp32")[0]
    check(opened, setup, "fp32", "adam")


@pytest.mark.parametrize("setup", [Setup("nvme", "nvme"), Setup("cpu", "nvme", "deferred")], ids=lambda s: s.name)
def test_two_drives(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, setup: Setup) -> None:
    """Of a model whose embeddings are as large as a stripe."""
    drives = [tmp_path / "one", tmp_path / "two"]
    for drive in drives:
        drive.mkdir()
    monkeypatch.setenv("OFFLOAD_ACCELERATOR", setup.accelerator)
    found = []
    for one in (IN_MEMORY, setup):
        model = llama(layers=1, vocabulary=STRIPE_NBYTES // (4 * 32))
        config = offload.Config(**one.fields(drives, dtype="fp32", max_grad_norm=CLIP))
        with offload.initialize(model, two_groups(model), config) as engine:
            found.append(run_engine(engine, lambda run: bitwise_loop(run, 2)))
            held = [allocated_nbytes(drive) for drive in drives]
    assert_same_bits(*found)
    assert min(held) > 0, f"the stripes lie on one drive only: {held}"


def test_a_second_run_in_one_process(opened: Any) -> None:
    """An engine leaves nothing behind that changes the next one."""
    check(opened, ON_NVME, "bf16").close()
    check(opened, ON_NVME, "bf16")


@pytest.fixture(scope="module")
def worker_reference(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("OFFLOAD_ACCELERATOR", "cpu")
        return worker.train_bytes(**_arguments(tmp_path_factory.mktemp("reference"), IN_MEMORY))


def _arguments(directory: Path, setup: Setup) -> dict[str, Any]:
    fields = setup.fields(directory, dtype="bf16", max_grad_norm=CLIP)
    return {"fields": fields, "steps": BITWISE_STEPS, "width": 64, "announce": False, "seed": 5}


@pytest.mark.parametrize("threads", ["1", "2"])
def test_thread_count(nvme: Path, worker_reference: dict[str, Any], threads: str) -> None:
    result = worker.run(_arguments(nvme, ON_NVME), OFFLOAD_ACCELERATOR="deferred", OFFLOAD_THREADS=threads)
    assert_same_bits([result["losses"], result["weights"]], [worker_reference["losses"], worker_reference["weights"]])


def test_without_the_native_library(nvme: Path, worker_reference: dict[str, Any]) -> None:
    result = worker.run(_arguments(nvme, ON_NVME), OFFLOAD_ACCELERATOR="deferred", OFFLOAD_NATIVE="0")
    assert_same_bits([result["losses"], result["weights"]], [worker_reference["losses"], worker_reference["weights"]])
    said = [one for one in result["warnings"] + result["stderr"].splitlines() if "native" in one.lower()]
    assert len([one for one in said if "warn" in one.lower() or one in result["warnings"]]) >= 1, "no warning"


@pytest.mark.slow
@pytest.mark.parametrize("backend", ["io_uring", "threads", "aiofiles"])
@pytest.mark.parametrize("prefetch", [0, 1, 3])
@pytest.mark.parametrize("update", ["step", "backward"])
@pytest.mark.parametrize("dtype", ["fp32", "bf16", "fp16"])
@pytest.mark.parametrize(("parameters", "states"), [one for one in PLACEMENTS if "nvme" in one])
def test_whole_cross(
    opened: Any,
    monkeypatch: pytest.MonkeyPatch,
    parameters: str,
    states: str,
    dtype: str,
    update: str,
    prefetch: int,
    backend: str,
) -> None:
    monkeypatch.setenv("OFFLOAD_IO", backend)
    check(opened, Setup(parameters, states, "deferred", update), dtype, steps=LONG_STEPS, prefetch=prefetch)
