# SPDX-License-Identifier: Apache-2.0
"""Saves that share blocks with scratch files, on a file system that has them: XFS, made here and mounted if we may."""

from __future__ import annotations

import array
import errno
import fcntl
import os
import shutil
import struct
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import offload
from tests.file_systems import sharing_blocks
from tests.inside import parts_of

from ..acceptance.models import ON_CPU, Setup, adamw
from ..acceptance.runs import assert_same_bits, refused
from .test_sharing import OWN_NBYTES, data_nbytes, files_of, held_nbytes, saves_of

XFS_NBYTES = 320 << 20
"""mkfs makes none below 300 MiB; a sparse file of which a test uses some."""
ON_NVME = Setup("nvme", "nvme", "cpu")


@pytest.fixture(scope="module")
def mounted(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    make = shutil.which("mkfs.xfs")
    if make is None or os.geteuid() != 0:
        pytest.skip("needs root and mkfs.xfs (xfsprogs) to mount an XFS of its own")
    root = tmp_path_factory.mktemp("xfs")
    image, place = root / "image", root / "mounted"
    with open(image, "wb") as file:
        file.truncate(XFS_NBYTES)
    place.mkdir()
    subprocess.run([make, "-q", "-m", "reflink=1", str(image)], check=True, capture_output=True)
    done = subprocess.run(["mount", "-o", "loop", str(image), str(place)], capture_output=True, text=True)
    if done.returncode != 0:
        pytest.skip(f"an XFS in a file cannot be mounted here: {done.stderr.strip()}")
    yield place
    subprocess.run(["umount", str(place)], check=True)
    image.unlink()


@pytest.fixture
def xfs(mounted: Path) -> Iterator[Path]:
    """Empty, and empty again after the engines of the test were closed."""
    yield mounted
    for path in mounted.iterdir():
        shutil.rmtree(path) if path.is_dir() else path.unlink()


@pytest.fixture
def nvme(xfs: Path) -> Path:
    folder = xfs / "nvme"
    folder.mkdir()
    return folder


class Trained:
    """1.3 M parameters, 16 MB of states, and a loop."""

    def __init__(self, opened: Any, setup: Setup = ON_NVME, **fields: Any) -> None:
        torch.manual_seed(1)
        self.model = nn.Sequential(*(nn.Linear(512, 512) for _ in range(5)))
        self.engine = opened(self.model, adamw(self.model), setup, **fields)
        self.n = 0

    def train(self, count: int = 1) -> None:
        for _ in range(count):
            x = torch.randn(4, 512, generator=torch.Generator().manual_seed(self.n))
            self.model(x).square().mean().backward()
            self.engine.step()
            self.engine.zero_grad()
            self.n += 1

    def settle(self) -> None:
        parts = parts_of(self.engine)
        parts.residency.finish_updates()
        for places in (parts.parameter_store, parts.records):
            places.settle_writes()


def shared_nbytes(path: Path) -> int:
    """Bytes of the file in extents that the file system says are shared (FIEMAP)."""
    count = 1000
    request = array.array("B", struct.pack("=QQIIII", 0, 2**63, 1, 0, count, 0) + bytes(56 * count))
    with open(path, "rb") as file:
        fcntl.ioctl(file.fileno(), 0xC020660B, request)
    content = request.tobytes()
    mapped = struct.unpack_from("=I", content, 20)[0]
    assert mapped < count
    extents = [struct.unpack_from("=QQQQQI", content, 32 + 56 * index) for index in range(mapped)]
    return sum(length for _, _, length, _, _, flags in extents if flags & 0x2000)


def used_nbytes(place: Path) -> int:
    os.sync()
    status = os.statvfs(place)
    return (status.f_blocks - status.f_bfree) * status.f_frsize


def test_blocks_are_shared(opened: Any, xfs: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """By every save of one state; training goes on, and takes the room that was held for it."""
    run = Trained(opened)
    run.train(2)
    run.settle()
    with monkeypatch.context() as patch:
        sharing_blocks(patch, lambda *_: False)
        run.engine.save_checkpoint(xfs / "copied")
    data = data_nbytes(xfs / "copied")
    assert data > 15e6 and all(shared_nbytes(path) == 0 for path in (xfs / "copied").iterdir())
    before = used_nbytes(xfs)
    for index in range(3):
        run.engine.save_checkpoint(xfs / f"shared-{index}")
    assert data <= held_nbytes(xfs) < data + OWN_NBYTES
    assert used_nbytes(xfs) - before - data < 0.02 * data
    for index in range(3):
        assert sum(shared_nbytes(path) for path in (xfs / f"shared-{index}").glob("unit*")) == data
    saved = files_of(xfs / "copied")
    save = run.engine.save_checkpoint(xfs / "beside", wait=False)
    run.train(3)
    save.wait()
    run.settle()
    assert held_nbytes(xfs) < OWN_NBYTES
    for name in ("shared-0", "shared-1", "shared-2", "beside"):
        assert files_of(xfs / name) == saved, name
    weights = run.engine.state_dict()
    run.engine.close()
    again = Trained(opened, ON_CPU)
    again.engine.load_checkpoint(xfs / "beside")
    again.n = 2
    again.train(3)
    assert_same_bits(again.engine.state_dict(), weights)


def test_another_file_system(opened: Any, xfs: Path, tmp_path: Path) -> None:
    """One of two drives is the checkpoint's: its stripes are shared."""
    # With one place for each record: what lies in two alternates between the drives in an order of its own.
    run = Trained(opened, nvme=[str(xfs / "nvme"), str(tmp_path)], update="step")
    run.train(2)
    run.engine.save_checkpoint(xfs / "saved")
    data, shared = data_nbytes(xfs / "saved"), sum(shared_nbytes(path) for path in (xfs / "saved").iterdir())
    assert 0.3 * data < shared < 0.7 * data
    run.engine.save_checkpoint(tmp_path / "saved")
    assert files_of(tmp_path / "saved") == files_of(xfs / "saved")
    run.engine.load_checkpoint(xfs / "saved")


def fill_up(place: Path, left_nbytes: int) -> None:
    """Take all room but so much."""
    free = os.statvfs(place).f_bavail * 4096
    with open(place / f"ballast-{len(os.listdir(place))}", "wb") as file:
        os.posix_fallocate(file.fileno(), 0, free - left_nbytes)


def test_a_full_drive_ends_saves_and_not_training(opened: Any, xfs: Path) -> None:
    run = Trained(opened)
    run.train(2)
    run.settle()
    need = 12 * sum(parameter.numel() for parameter in run.model.parameters())
    fill_up(xfs, need // 2)
    with refused(offload.StorageError, "ENOSPC") as caught:
        run.engine.save_checkpoint(xfs / "saved", wait=False).wait()
    assert caught.value.errno == errno.ENOSPC
    run.train()
    run.settle()
    assert [name for name in saves_of(xfs) if not name.startswith("ballast")] == []
    for path in xfs.glob("ballast*"):
        os.truncate(path, 0)  # gives the room back now; what XFS is to remove, it removes in the background
        path.unlink()
    run.engine.save_checkpoint(xfs / "saved")
    fill_up(xfs, 2 << 20)  # what is held is all that the next step has
    run.train(2)
    run.settle()
    weights = run.engine.state_dict()
    run.engine.load_checkpoint(xfs / "saved")
    run.n = 3
    run.train(2)
    assert_same_bits(run.engine.state_dict(), weights)
