# SPDX-License-Identifier: Apache-2.0
"""Saves that share blocks with scratch files, on any file system: in the place of the call is one that copies the range.

What is shared, what is written all the same, that nobody can tell from the files, and what happens where the call fails.
On a file system that has such blocks: test_sharing_xfs.py.
"""

from __future__ import annotations

import errno
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import offload
from tests.crosses import in_turn
from tests.drives import Told, drives_from
from tests.file_systems import at_call, path_of, reservations, sharing_blocks
from tests.inside import finish_updates, parts_of, settle_writes, units_of
from tests.small_sizes import small

from ..acceptance.models import ON_CPU, ON_NVME, ON_NVME_IN_BACKWARD, ON_NVME_IN_PLACE, Setup, adamw, stack
from ..acceptance.runs import Run, assert_same_bits, one_step, refused
from ..scratch_files import scratch_files
from .loops import Resumable, byte_model, files_of

SETUPS = (
    ON_NVME,
    ON_NVME_IN_PLACE,
    ON_NVME_IN_BACKWARD,
    Setup("cpu", "nvme", "cpu"),
    Setup("nvme", "cpu", "cpu"),
    Setup("device", "nvme", "deferred"),
    Setup("nvme", "device", "deferred"),
)


class Shared:
    """The call's stand-in. `refuse(path of the scratch file, number of the call)`: whether it says that it cannot."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.nbytes, self.written_nbytes, self.calls = 0, 0, 0
        self.refuse: Callable[[str, int], bool] = lambda path, call: False
        self.failure = 0
        sharing_blocks(monkeypatch, self._clone)
        at_call(monkeypatch, "pwrite", after=lambda written, fileno, _, offset: self._writes(path_of(fileno), written, offset))
        drives_from(monkeypatch, lambda: Told(self._writes))

    def _writes(self, path: Path, nbytes: int, offset: int) -> None:
        self.written_nbytes += nbytes if path.name.startswith("unit") and offset else 0

    def _clone(self, source: int, source_offset: int, nbytes: int, target: int, target_offset: int) -> bool:
        path = os.readlink(f"/proc/self/fd/{source}")
        self.calls += 1
        assert source_offset % 4096 == nbytes % 4096 == target_offset % 4096 == 0 < nbytes
        if self.refuse(path, self.calls):
            return False
        if self.failure:
            raise OSError(self.failure, os.strerror(self.failure))
        with open(f"/proc/self/fd/{source}", "rb") as file:
            file.seek(source_offset)
            assert os.pwritev(target, [file.read(nbytes)], target_offset) == nbytes
        self.nbytes += nbytes
        return True

    def counts(self) -> tuple[int, int, int]:
        """(shared, written, calls) since the last time."""
        found = self.nbytes, self.written_nbytes, self.calls
        self.nbytes = self.written_nbytes = self.calls = 0
        return found


@pytest.fixture
def shared(monkeypatch: pytest.MonkeyPatch) -> Shared:
    small(monkeypatch, chunk_numel=4096)
    return Shared(monkeypatch)


def saves_of(folder: Path) -> list[str]:
    return sorted(name for name in os.listdir(folder) if name != "nvme")


def data_nbytes(folder: Path) -> int:
    return sum(path.stat().st_size - 4096 * -(-int.from_bytes(path.read_bytes()[:8], "little") // 4096)
               for path in folder.glob("unit*"))  # fmt: skip


# What may share blocks depends on the place; in bf16 the values are no longer among the masters.
@pytest.mark.parametrize(("setup", "dtype"), in_turn(SETUPS, ("fp32", "bf16")))
def test_the_files_are_the_same(opened: Any, tmp_path: Path, shared: Shared, setup: Setup, dtype: str) -> None:
    run = Resumable(opened, setup, dtype=dtype)
    losses = run.train(range(2))
    shared.refuse = lambda path, call: True
    run.save(tmp_path / "copied")
    copied = shared.counts()
    shared.refuse = lambda path, call: False
    run.save(tmp_path / "shared")
    nbytes, written, _ = shared.counts()
    run.save(tmp_path / "beside", wait=False)
    losses += run.train(range(2, 5))
    run.engine.close()
    assert files_of(tmp_path / "shared") == files_of(tmp_path / "beside") == files_of(tmp_path / "copied")
    # Of 12 bytes of a parameter that which lies on NVMe as it is in the file: its master, its moments, or all.
    on_nvme = {"parameters": setup.parameters == "nvme", "optimizer_states": setup.optimizer_states == "nvme"}
    own_master = dtype == "bf16" or setup.accelerator == "deferred"
    share = (8 + 4 * own_master) * on_nvme["optimizer_states"] + 4 * (not own_master) * on_nvme["parameters"]
    assert copied[0] == 0 and nbytes == data_nbytes(tmp_path / "shared") * share // 12
    assert written <= copied[1] * (12 - share) // 12
    alone = Resumable(opened, ON_CPU, dtype=dtype)
    assert_same_bits(alone.train(range(2)), losses[:4])
    alone.load(tmp_path / "beside")
    assert_same_bits(alone.train(range(2, 5)), losses[4:])
    assert_same_bits(alone.weights(), run_weights(opened, setup, tmp_path, dtype))


def run_weights(opened: Any, setup: Setup, folder: Path, dtype: str) -> dict[str, torch.Tensor]:
    """The same placement resumed from the shared save."""
    run = Resumable(opened, setup, dtype=dtype)
    run.load(folder / "shared")
    run.train(range(2, 5))
    return run.weights()


def test_frozen_parameters_and_other_formats(opened: Any, tmp_path: Path, shared: Shared) -> None:
    """Frozen ones are shared in their own dtype, and by every save; encoded states are written."""
    model = stack(blocks=2)
    for parameter in model.blocks.parameters():
        parameter.requires_grad_(False)
    engine = opened(model, adamw(model), ON_NVME_IN_PLACE, dtype="bf16", state_format="split")
    for name in ("first", "second"):
        engine.save_checkpoint(tmp_path / name)
        nbytes, written, _ = shared.counts()
        frozen = {info.unit_index for info in parts_of(engine).parameters if not info.trainable}
        chunks = [one for unit in units_of(engine) if unit.index in frozen for one in unit.chunks]
        assert nbytes == sum(2 * one.numel for one in chunks if not one.flat.layout.trainable) > 0
        assert written > 0
        one_step(Run(model, engine.optimizer, engine))


CUT_NUMEL = 33 * 4096
"""Of the arrays of a chunk: the end of a stripe lies within one."""


def test_two_drives_of_which_one_can(opened: Any, tmp_path: Path, shared: Shared, monkeypatch: pytest.MonkeyPatch) -> None:
    """Stripes are no multiple of arrays, so some are shared in part: they are written whole over that."""
    small(monkeypatch, chunk_numel=CUT_NUMEL)
    drives = [tmp_path / "nvme" / name for name in ("a", "b")]
    run = Resumable(opened, ON_NVME_IN_PLACE, model=byte_model(width=256), nvme=[str(one) for one in drives])
    run.train(range(2))
    shared.refuse = lambda path, call: True
    run.save(tmp_path / "copied")
    assert shared.counts()[2] == 2  # of each of two stores one
    shared.refuse = lambda path, call: path.startswith(str(drives[1]))
    run.save(tmp_path / "shared")
    assert shared.counts()[0] > 0
    run.save(tmp_path / "beside", wait=False)
    run.train(range(2, 4))
    run.engine.close()
    assert files_of(tmp_path / "shared") == files_of(tmp_path / "beside") == files_of(tmp_path / "copied")


def test_what_suddenly_cannot_any_more(opened: Any, tmp_path: Path, shared: Shared) -> None:
    """From the middle on it is copied, and not asked again."""
    run = Resumable(opened, ON_NVME)
    run.train(range(2))
    shared.refuse = lambda path, call: call > 5
    run.save(tmp_path / "shared")
    assert shared.counts()[2] == 5 + 2  # one refusal of each store
    shared.refuse = lambda path, call: True
    run.save(tmp_path / "copied")
    assert files_of(tmp_path / "shared") == files_of(tmp_path / "copied")


@pytest.mark.parametrize("wait", [True, False])
@pytest.mark.parametrize("code", [errno.EIO, errno.ENOSPC, errno.EDQUOT])
def test_a_call_that_fails(opened: Any, tmp_path: Path, shared: Shared, code: int, wait: bool) -> None:
    alone = Resumable(opened, ON_CPU)
    losses = alone.train(range(4))
    run = Resumable(opened, ON_NVME_IN_PLACE)
    run.train(range(2))
    run.save(tmp_path / "earlier")
    shared.refuse = lambda path, call: setattr(shared, "failure", code if call > 5 else 0) or False
    shared.counts()
    with refused(offload.StorageError, errno.errorcode[code], "sharing blocks") as caught:
        run.engine.save_checkpoint(tmp_path / "beside", wait=wait).wait()
    assert caught.value.errno == code and saves_of(tmp_path) == ["earlier"]
    assert_same_bits(run.train(range(2, 4)), losses[4:])
    assert_same_bits(run.weights(), alone.weights())
    shared.refuse, shared.failure = (lambda path, call: False), 0
    run.save(tmp_path / "beside", wait=wait)
    run.engine.close()
    assert saves_of(tmp_path) == ["beside", "earlier"]


def test_what_comes_after_has_its_room(opened: Any, tmp_path: Path, shared: Shared, monkeypatch: pytest.MonkeyPatch) -> None:
    """Blocks are shared only where others are reserved for the next write, and those are taken by it; else they are copied."""
    alone = Resumable(opened, ON_CPU)
    losses = alone.train(range(5))
    run = Resumable(opened, ON_NVME_IN_PLACE)
    run.train(range(2))
    finish_updates(run.engine)
    with monkeypatch.context() as patch:
        reservations(patch, lambda reserves: errno.ENOSPC if reserves else None)
        run.save(tmp_path / "copied")
    assert shared.counts()[0] == 0 and held_nbytes(tmp_path) < OWN_NBYTES
    for _ in range(2):
        run.save(tmp_path / "shared")
        nbytes = shared.counts()[0]
        assert nbytes == data_nbytes(tmp_path / "shared") <= held_nbytes(tmp_path) < nbytes + OWN_NBYTES
    assert_same_bits(run.train(range(2, 5)), losses[4:])
    finish_updates(run.engine)
    settle_writes(run.engine)
    assert held_nbytes(tmp_path) < OWN_NBYTES
    assert files_of(tmp_path / "shared") == files_of(tmp_path / "copied")
    assert_same_bits(run.weights(), alone.weights())


OWN_NBYTES = 8 * 4096
"""What a file system may take for its own account of where files lie."""


def held_nbytes(folder: Path) -> int:
    """What scratch files take of the drive beyond what lies in them."""
    files = scratch_files(folder)
    own = sum(path.stat().st_size for path in set(files) - set(scratch_files(folder, "*-aside")))
    return sum(path.stat().st_blocks * 512 for path in files) - own


def test_a_bit_that_changed_on_the_drive(opened: Any, tmp_path: Path, shared: Shared) -> None:
    """It is shared, and found when it is read for the checksum: no checkpoint holds it."""
    run = Resumable(opened, ON_NVME_IN_PLACE)
    run.train(range(2))
    finish_updates(run.engine)
    settle_writes(run.engine)
    (path,) = scratch_files(tmp_path / "nvme", "optimizer-states")
    with open(path, "r+b") as file:
        file.seek(16384 + 5)
        before = file.read(1)
        file.seek(16384 + 5)
        file.write(bytes([before[0] ^ 4]))
        file.flush()
        os.fsync(file.fileno())
    with refused(offload.StorageError, "not those that were written"):
        run.save(tmp_path / "saved")
    assert shared.nbytes > 0 and saves_of(tmp_path) == []


def test_padding_is_zeros_whatever_the_drive_holds(opened: Any, tmp_path: Path, shared: Shared) -> None:
    run = Resumable(opened, ON_NVME_IN_PLACE)
    run.train(range(2))
    run.save(tmp_path / "before")
    parts = parts_of(run.engine)
    for unit in parts.units:
        for chunk in unit.chunks:
            for places in (parts.records, parts.parameter_store):
                buffer = offload.tiers.memory.HostMemory(places.nbytes(chunk), "test").tensor
                places.read(chunk, buffer).wait()
                for array in buffer.view(torch.float32).split(chunk.numel):
                    for gap in chunk.flat.layout.gaps(chunk.start, chunk.stop):
                        array[gap.start - chunk.start : gap.stop - chunk.start] = float("nan")
                places.write(chunk, buffer).wait()
    shared.counts()
    run.save(tmp_path / "after")
    assert shared.nbytes == data_nbytes(tmp_path / "after")
    assert files_of(tmp_path / "after") == files_of(tmp_path / "before")
    run.load(tmp_path / "after")
