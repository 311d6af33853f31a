# SPDX-License-Identifier: Apache-2.0
"""Saves that run beside training: what is written is the state of the moment at which they began, and training is as it was.

On the deferred accelerator the lane of the save runs only when somebody waits for it, so there the first update that would
overwrite something has it run. On the CPU the lane is a thread.
"""

from __future__ import annotations

import errno
import os
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import offload
from offload.device.pending import Pending
from offload.tiers import HostMemory
from tests.crosses import in_turn
from tests.drives import drive_is, drives_from
from tests.file_systems import free_room
from tests.inside import finish_updates, parts_of, residency_of, units_of
from tests.small_sizes import small
from tests.tiers.faulty_io import Fault, FaultyBackend, seeded_faults

from ..acceptance.models import (
    IN_MEMORY,
    ON_CPU,
    ON_CPU_IN_PLACE,
    ON_NVME,
    ON_NVME_IN_BACKWARD,
    Normalized,
    Setup,
    Sometimes,
    adamw,
    stack,
)
from ..acceptance.runs import Run, assert_same_bits, one_step, refused
from .loops import Resumable, files_of
from .standing import FillingDrive, Held, begun_at_the_end, chunk_count
from .test_memory import CHUNK_NUMEL, OVERHEAD_NBYTES, RECORD_NBYTES, VALUES_NBYTES, least_grown

SETUPS = (
    IN_MEMORY,
    ON_CPU,
    ON_CPU_IN_PLACE,
    ON_NVME,
    ON_NVME_IN_BACKWARD,
    Setup("nvme", "nvme", "cpu"),
    Setup("cpu", "nvme", "cpu", "backward"),
    Setup("device", "nvme", "deferred"),
    Setup("nvme", "device", "deferred"),
    Setup("device", "cpu", "deferred"),
)


# How a chunk is read depends on where it lies; in bf16 there are masters beside the values, which lie where the moments do.
@pytest.mark.parametrize(("setup", "dtype"), in_turn(SETUPS, ("fp32", "bf16")))
def test_the_bytes_of_a_save_that_was_waited_for(
    opened: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, setup: Setup, dtype: str
) -> None:
    small(monkeypatch, chunk_numel=4096)
    run = Resumable(opened, setup, dtype=dtype)
    losses = run.train(range(2))
    run.save(tmp_path / "waited")
    run.save(tmp_path / "beside", wait=False)
    losses += run.train(range(2, 5))
    run.save(tmp_path / "last")
    assert files_of(tmp_path / "beside") == files_of(tmp_path / "waited")
    alone = Resumable(opened, setup, dtype=dtype)
    assert_same_bits(alone.train(range(5)), losses)
    assert_same_bits(alone.weights(), run.weights())
    alone.load(tmp_path / "beside")
    assert_same_bits(alone.train(range(2, 5)), losses[4:])
    assert_same_bits(alone.weights(), run.weights())


@pytest.mark.parametrize("at", [1, 3])
def test_what_updates_in_memory_wait_for_comes_next(
    opened: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, at: int
) -> None:
    """The lane begins at the end and stands before a chunk; then it takes what the first update is about to overwrite."""
    run = Resumable(opened, ON_CPU_IN_PLACE)
    run.train(range(2))
    run.save(tmp_path / "waited")
    held = Held(monkeypatch, at)
    save = begun_at_the_end(run, tmp_path / "beside", monkeypatch)
    assert held.reached.wait(60) and not save.done()
    held.go_when_an_update_waits()
    run.train(range(2, 4))
    save.wait()
    assert save.done() and save.path == tmp_path / "beside"
    assert files_of(tmp_path / "beside") == files_of(tmp_path / "waited")
    assert len(set(held.read)) == len(held.read) == chunk_count(run)
    in_order = [chunk for unit in residency_of(run.engine).next_order() for chunk in unit.chunks]
    assert held.read[:at] == in_order[::-1][:at] and (held.read[at:] + in_order)[0] is in_order[0]


def test_what_changes_at_once_is_that_of_the_beginning(opened: Any, tmp_path: Path) -> None:
    """Buffers, random states, numbers of groups, frozen parameters written in `gathered`."""
    torch.manual_seed(1)
    model = Normalized()
    model.frozen = nn.Parameter(torch.arange(5.0), requires_grad=False)
    engine = opened(model, adamw(model), ON_NVME)
    one_step(Run(model, engine.optimizer, engine))
    engine.save_checkpoint(tmp_path / "waited")
    engine.save_checkpoint(tmp_path / "beside", wait=False)
    torch.rand(3)
    engine.optimizer.param_groups[0]["lr"] = 0.5
    one_step(Run(model, engine.optimizer, engine), seed=1)
    with engine.gathered(list(model.parameters())), torch.no_grad():
        for parameter in model.parameters():
            parameter.fill_(7.0)
    engine.close()
    assert files_of(tmp_path / "beside") == files_of(tmp_path / "waited")


def test_parameters_without_gradients(opened: Any, tmp_path: Path) -> None:
    torch.manual_seed(1)
    model = Sometimes()
    engine = opened(model, adamw(model), ON_NVME)

    def step(use: bool) -> None:
        model(torch.ones(3, 16), use).square().mean().backward()
        engine.step()
        engine.zero_grad()

    for use in (True, False):
        step(use)
        engine.save_checkpoint(tmp_path / "waited")
        engine.save_checkpoint(tmp_path / "beside", wait=False)
        step(not use)
        step(use)
        engine.load_checkpoint(tmp_path / "beside")
        assert files_of(tmp_path / "beside") == files_of(tmp_path / "waited")


@pytest.mark.parametrize("seed", range(3))
def test_any_order_of_transfers(opened: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, seed: int) -> None:
    faults = seeded_faults(seed, 5000, 0.5, (Fault("short"), Fault("delay")))
    drives_from(monkeypatch, lambda: FaultyBackend(seed, faults))
    small(monkeypatch, chunk_numel=4096)
    run = Resumable(opened, Setup("nvme", "nvme", "cpu"))
    for n in range(3):
        run.train([n])
        run.save(tmp_path / "waited")
        run.save(tmp_path / "beside", wait=False)
        run.train([n + 1])
        run.load(tmp_path / "beside")
        assert files_of(tmp_path / "beside") == files_of(tmp_path / "waited")


# ---- one after another -----------------------------------------------------------------------------------------------


def test_numbered_saves_of_every_step(opened: Any, tmp_path: Path) -> None:
    run = Resumable(opened, Setup("nvme", "nvme", "cpu"))
    weights = {}
    for n in range(5):
        run.train([n])
        run.save(tmp_path / f"step-{n + 1}", keep_last=2, wait=False)
        weights[n + 1] = run.weights()
    run.engine.close()
    assert sorted(name for name in os.listdir(tmp_path) if name != "nvme") == ["step-4", "step-5"]
    again = Resumable(opened, ON_CPU)
    for n in (4, 5):
        again.load(tmp_path / f"step-{n}")
        assert_same_bits(again.weights(), weights[n])


def test_resume_waits_for_a_save_that_runs(opened: Any, tmp_path: Path) -> None:
    run = Resumable(opened, Setup("nvme", "nvme", "cpu"))
    run.train(range(1))
    run.save(tmp_path / "saves" / "step-1", wait=False)
    assert run.engine.resume_or_start(tmp_path / "saves") is not None


def test_what_is_in_the_way_is_known_at_once(opened: Any, tmp_path: Path) -> None:
    run = Resumable(opened, ON_NVME)
    (tmp_path / "file").write_text("mine")
    with refused(offload.CheckpointError, "file"):
        run.save(tmp_path / "file", wait=False)
    with refused(offload.UsageError, "client_state"):
        run.engine.save_checkpoint(tmp_path / "saved", client_state={"x": object()}, wait=False)
    run.train(range(1))


# ---- failures --------------------------------------------------------------------------------------------------------


HOW_IT_IS_SEEN: dict[str, Callable[[Any, Any, Path], Any]] = {
    "wait": lambda run, save, folder: save.wait(),
    "step": lambda run, save, folder: (save.settle(), run.train(range(3, 4))),
    "save": lambda run, save, folder: (save.settle(), run.save(folder / "next")),
    "load": lambda run, save, folder: run.engine.load_checkpoint(folder / "earlier"),
    "close": lambda run, save, folder: run.engine.close(),
}


@pytest.mark.parametrize("updates_wait", [False, True])
@pytest.mark.parametrize("seen_by", HOW_IT_IS_SEEN)
def test_a_full_disk(opened: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, seen_by: str, updates_wait: bool) -> None:
    alone = Resumable(opened, ON_CPU)
    losses = alone.train(range(5))
    drive = FillingDrive()
    drive_is(monkeypatch, drive)
    # At the step: an update that began in backward would wait for the save while that waits for `held`.
    run = Resumable(opened, Setup("nvme", "nvme", "cpu", "step"))
    run.train(range(2))
    run.save(tmp_path / "earlier")
    done = 2
    with monkeypatch.context() as patch:
        held = Held(patch, 1)
        drive.room = 0
        if updates_wait:
            free_room(patch, 0)
        save = begun_at_the_end(run, tmp_path / "beside", patch)
        assert held.reached.wait(60)
        if updates_wait:
            run.train(range(2, 3))
            threading.Timer(0.2, held.go.set).start()
            finish_updates(run.engine)
            done = 3
        held.go.set()
        with refused(offload.StorageError, "ENOSPC", "free space") as caught:
            HOW_IT_IS_SEEN[seen_by](run, save, tmp_path)
        assert caught.value.errno == errno.ENOSPC
        drive.room = None
    assert sorted(name for name in os.listdir(tmp_path) if name != "nvme") == ["earlier"]
    if seen_by == "close":
        return
    if seen_by == "step":  # it broke off before anything of the step was done
        run.load(tmp_path / "earlier")
        done = 2
    assert_same_bits(run.train(range(done, 5)), losses[2 * done :])
    assert_same_bits(run.weights(), alone.weights())
    run.save(tmp_path / "beside", wait=False)
    run.engine.close()
    assert (tmp_path / "beside" / "MANIFEST.json").exists()


def test_a_failing_scratch_file_ends_the_save_and_then_the_engine(
    opened: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    backend = FaultyBackend(1)
    drive_is(monkeypatch, backend)
    run = Resumable(opened, Setup("nvme", "nvme", "cpu"))
    run.train(range(2))
    run.save(tmp_path / "earlier")
    expected = run.weights()
    backend.faults.update({backend.submitted_count + n: Fault("errno", errno.EIO) for n in range(200)})
    save = run.engine.save_checkpoint(tmp_path / "beside", wait=False)
    with refused(offload.StorageError, "optimizer-states", "EIO"):
        save.wait()
    with pytest.raises(offload.OffloadError):
        run.train(range(2, 4))
    with refused(offload.EngineFailedError, "EIO"):
        run.save(tmp_path / "beside")
    run.engine.close()
    assert sorted(name for name in os.listdir(tmp_path) if name != "nvme") == ["earlier"]
    again = Resumable(opened, ON_CPU)
    again.load(tmp_path / "earlier")
    assert_same_bits(again.weights(), expected)


# ---- memory ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("setup", [Setup("nvme", "nvme", "cpu"), ON_CPU_IN_PLACE], ids=lambda setup: setup.name)
def test_extra_host_memory(opened: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, setup: Setup) -> None:
    """84 MB of states saved under a step: beyond what a step takes, one chunk's buffers."""
    small(monkeypatch, chunk_numel=CHUNK_NUMEL)
    model = stack(width=512, blocks=4)
    engine = opened(model, adamw(model), setup, dtype="bf16")

    def step() -> None:
        model(torch.ones(2, 512, dtype=torch.bfloat16)).float().square().mean().backward()
        engine.step()
        engine.zero_grad()
        finish_updates(engine)

    step()
    plain = least_grown(lambda _: step())
    ledger = parts_of(engine).ledger
    counted = ledger.total_nbytes

    def both(_: int) -> None:
        engine.save_checkpoint(tmp_path / "saved", wait=False)
        step()
        engine._checkpointing.saver.finish()

    in_place = "nvme" not in (setup.parameters, setup.optimizer_states)
    buffers = 0 if in_place else RECORD_NBYTES + VALUES_NBYTES
    assert least_grown(both) <= plain + buffers + OVERHEAD_NBYTES
    assert ledger.total_nbytes == counted
    assert sum(path.stat().st_size for path in (tmp_path / "saved").iterdir()) > 80e6


class _SlowWrite(Pending):
    """A write that is over when it is told so."""

    def __init__(self, write: Pending) -> None:
        self.over, self.waiters, self._write = threading.Event(), threading.Semaphore(0), write

    def wait(self) -> None:
        self.waiters.release()
        assert self.over.wait(60)
        self._write.wait()

    def done(self) -> bool:
        return self.over.is_set()


class _SlowDrive(FaultyBackend):
    """Its writes are over when they are told so, once it is slow."""

    def __init__(self) -> None:
        super().__init__()
        self.slow: list[_SlowWrite] | None = None

    def write(self, *given: Any, **named: Any) -> Pending:
        write = super().write(*given, **named)
        if self.slow is None:
            return write
        self.slow.append(_SlowWrite(write))
        return self.slow[-1]


def test_every_thread_waits_for_a_write_that_one_of_them_waits_for(opened: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """The lane of the save and that of the updates may come to one chunk at once."""
    drive = _SlowDrive()
    drive_is(monkeypatch, drive)
    model = stack(blocks=1)
    engine = opened(model, adamw(model), Setup("nvme", "nvme", "cpu"))
    records = parts_of(engine).records
    chunk = next(chunk for chunk in units_of(engine)[0].chunks if chunk.flat.layout.trainable)
    record = HostMemory(records.nbytes(chunk), "a test").tensor
    drive.slow = []
    records.write(chunk, record)
    (write,) = drive.slow
    threads = [threading.Thread(target=records.settle_write, args=(chunk,)) for _ in range(3)]
    for thread in threads:
        thread.start()
    for _ in threads:
        assert write.waiters.acquire(timeout=60)
    write.over.set()
    for thread in threads:
        thread.join(60)
    assert chunk.record.write is None
