# SPDX-License-Identifier: Apache-2.0
"""Buffers for gradients that run out: who waits for the drive, and what becomes of them where a step has more micro-batches."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import offload
from offload.device.deferred import DeferredAccelerator
from offload.device.lane import HostLane
from offload.device.pending import Pending
from offload.planning.purposes import LANDING
from offload.tiers import open_backend
from offload.tiers.io.backend import OpenFile, Priority
from tests.devices import at_lane
from tests.drives import drive_is
from tests.inside import parts_of, placement_of
from tests.small_sizes import small

from .runs import assert_same_bits

WIDTH, LAYERS, STEPS = 64, 40, 3


def model() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(*(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(LAYERS)))


class Backward:
    """Whether the model is in backward, and how often that waits. `blocked_count`: while updates could not go on meanwhile."""

    def __init__(self) -> None:
        self._thread = threading.get_ident()
        self.engine: offload.Engine | None = None
        self.count = self.waited_count = self.blocked_count = 0
        self.is_running = False

    @contextmanager
    def runs(self) -> Iterator[None]:
        self.is_running, self.count = True, self.count + 1
        yield
        self.is_running = False

    def waits(self) -> None:
        """Is called in whichever thread waits, before it does."""
        if not self.is_running or threading.get_ident() != self._thread:
            return
        self.waited_count += 1
        if self.blocked_count:
            return  # once is enough
        assert self.engine is not None
        gradients = parts_of(self.engine).gradients
        assert gradients is not None
        update = threading.Thread(target=gradients.release_all, args=((),), daemon=True)  # of nothing, as each of them begins
        update.start()
        update.join(timeout=5.0)
        self.blocked_count += update.is_alive()


class Awaited(Pending):
    """What is over when somebody waits for it, or, if it was by itself, when a later backward runs."""

    def __init__(self, backward: Backward, inner: Pending) -> None:
        self._backward, self._inner = backward, inner
        self._begun_in, self._was_waited_for = backward.count, False

    def wait(self) -> None:
        if not self.done():
            self._backward.waits()
        self._inner.wait()
        self._was_waited_for = True

    def done(self) -> bool:
        return self._was_waited_for or (self._backward.count > self._begun_in and self._inner.done())


class SlowDrive:
    """Writes of gradients are over when backward waits for them."""

    def __init__(self, backward: Backward) -> None:
        self._drive: Any = open_backend()
        self._backward = backward

    def write(self, file: OpenFile, source: torch.Tensor, offset_nbytes: int, *, priority: Priority) -> Pending:
        write = self._drive.write(file, source, offset_nbytes, priority=priority)
        return Awaited(self._backward, write) if "gradients" in file.path.name and self._backward.is_running else write

    def __getattr__(self, name: str) -> Any:
        return getattr(self._drive, name)


@pytest.mark.parametrize("together_nbytes", [0, 1 << 20])
@pytest.mark.parametrize("accelerator", ["cpu", "deferred"])
@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_updates_go_on_while_backward_waits_for_the_drive(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, accelerator: str, dtype: Any, together_nbytes: int
) -> None:
    small(monkeypatch, chunk_numel=WIDTH * WIDTH, gradients_together_nbytes=together_nbytes)
    monkeypatch.setenv("OFFLOAD_ACCELERATOR", accelerator)
    backward = Backward()
    drive_is(monkeypatch, SlowDrive(backward))
    trained = model()
    config = offload.Config(parameters="nvme", optimizer_states="nvme", nvme=str(tmp_path), dtype=dtype, update="step")
    with offload.initialize(trained, torch.optim.AdamW(trained.parameters()), config) as engine:
        backward.engine = engine
        for _ in range(STEPS):
            loss = trained(torch.ones(2, WIDTH)).float().square().mean()
            with backward.runs():
                loss.backward()
            engine.step()
            engine.zero_grad()
        backward.count += 1
        told = engine.stats()["seconds"]
    assert told["wait: room for gradients"] > 0
    assert backward.waited_count > LAYERS, "nothing is waited for here"
    assert backward.blocked_count == 0


@pytest.mark.parametrize("states", ["cpu", "nvme"])
@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_updates_go_on_while_backward_waits_for_additions(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, dtype: Any, states: Any
) -> None:
    """In the last of several micro-batches, added up in host memory, where few buffers are for what comes over for that."""
    small(monkeypatch, chunk_numel=WIDTH * WIDTH)
    monkeypatch.setenv("OFFLOAD_ACCELERATOR", "deferred")
    backward = Backward()

    def slow(lane: HostLane, job: Callable[[], None], about: object, nbytes: int) -> Pending:
        return Awaited(backward, lane.submit(job, about, nbytes))

    at_lane(monkeypatch, DeferredAccelerator, "gradients", slow)
    trained = model()
    config = offload.Config(parameters="cpu", optimizer_states=states, nvme=str(tmp_path), dtype=dtype, update="step")
    with offload.initialize(trained, torch.optim.AdamW(trained.parameters()), config) as engine:
        backward.engine = engine
        for _ in range(STEPS):
            for is_last in (False, False, True):
                loss = trained(torch.ones(2, WIDTH)).float().square().mean()
                with backward.runs() if is_last else nullcontext():
                    loss.backward()
            engine.step()
            engine.zero_grad()
        landing = placement_of(engine).staging[LANDING]
        assert landing[0] < LAYERS
        assert engine.stats()["seconds"]["wait: room for gradients"] > 0
    assert backward.waited_count > LAYERS, "nothing is waited for here"
    assert backward.blocked_count == 0


def losses_and_weights(config: offload.Config, micro_batches: tuple[int, ...]) -> list[Any]:
    trained = model()
    with offload.initialize(trained, torch.optim.AdamW(trained.parameters()), config) as engine:
        losses = []
        for step, count in enumerate(micro_batches):
            for index in range(count):
                loss = trained(torch.full((2, WIDTH), 1.0 + step + index)).float().square().mean()
                losses.append(loss.item())
                engine.backward(loss)
            engine.step()
            engine.zero_grad()
        if config.optimizer_states == "nvme":
            retained = placement_of(engine).staging["gradients"]
            assert retained[1] == 2 * WIDTH * WIDTH and retained[0] < LAYERS, "sums take several buffers each, which run out"
        return [losses, engine.state_dict()]


@pytest.mark.parametrize("update", ["step", "auto"])
@pytest.mark.parametrize("accelerator", ["cpu", "deferred"])
def test_sums_that_nobody_said_would_come(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, accelerator: str, update: Any
) -> None:
    """Buffers are cut for 16-bit gradients; sums in fp32 take two each, and after them 16-bit gradients one again."""
    small(monkeypatch, chunk_numel=WIDTH * WIDTH)
    monkeypatch.setenv("OFFLOAD_ACCELERATOR", accelerator)
    counts = (1, 1, 3, 1, 2, 2, 1)
    fields: Any = {"dtype": "bf16", "update": update}
    in_memory = losses_and_weights(offload.Config(parameters="device", optimizer_states="cpu", **fields), counts)
    spilled = offload.Config(parameters="nvme", optimizer_states="nvme", nvme=str(tmp_path), **fields)
    assert_same_bits(losses_and_weights(spilled, counts), in_memory)
