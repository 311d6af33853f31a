# SPDX-License-Identifier: Apache-2.0
"""Buffers for gradients that run out: who waits for the drive, and what becomes of them where a step has more micro-batches."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import offload
from offload.device.pending import Pending
from offload.tiers import open_backend
from offload.tiers.io.backend import OpenFile, Priority
from tests.drives import drive_is
from tests.inside import parts_of, placement_of
from tests.small_sizes import small

from .runs import assert_same_bits

WIDTH, LAYERS, STEPS = 64, 40, 3


def model() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(*(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(LAYERS)))


class Written(Pending):
    """A write that is over when somebody waits for it, or when a later backward runs."""

    def __init__(self, drive: SlowDrive, write: Pending) -> None:
        self._drive, self._write = drive, write
        self._backward, self._was_waited_for = drive.backward_count, False

    def wait(self) -> None:
        self._drive.waited()
        self._write.wait()
        self._was_waited_for = True

    def done(self) -> bool:
        return self._was_waited_for or (self._drive.backward_count > self._backward and self._write.done())


class SlowDrive:
    """Is waited for whenever buffers run out. `blocked_count`: whether backward once did so while updates could not go on."""

    def __init__(self) -> None:
        self._drive: Any = open_backend()
        self._thread = threading.get_ident()
        self.engine: offload.Engine | None = None
        self.backward_count = self.waited_count = self.blocked_count = 0
        self.in_backward = False

    def write(self, file: OpenFile, source: torch.Tensor, offset_nbytes: int, *, priority: Priority) -> Pending:
        write = self._drive.write(file, source, offset_nbytes, priority=priority)
        return Written(self, write) if "gradients" in file.path.name and self.in_backward else write

    def waited(self) -> None:
        if not self.in_backward or threading.get_ident() != self._thread:
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
    drive = SlowDrive()
    drive_is(monkeypatch, drive)
    trained = model()
    config = offload.Config(parameters="nvme", optimizer_states="nvme", nvme=str(tmp_path), dtype=dtype, update="step")
    with offload.initialize(trained, torch.optim.AdamW(trained.parameters()), config) as engine:
        drive.engine = engine
        for _ in range(STEPS):
            loss = trained(torch.ones(2, WIDTH)).float().square().mean()
            drive.in_backward, drive.backward_count = True, drive.backward_count + 1
            loss.backward()
            drive.in_backward = False
            engine.step()
            engine.zero_grad()
        drive.backward_count += 1
    assert drive.waited_count > LAYERS, "nothing is waited for here"
    assert drive.blocked_count == 0


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
