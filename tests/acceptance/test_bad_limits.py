# SPDX-License-Identifier: Apache-2.0
"""Limits of the process: each is told by name, with what to do about it, and the engine goes on when it is raised."""

from __future__ import annotations

import os
import re
import resource
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch

import offload
from offload.device import lane
from offload.tiers.memory import HostMemory
from tests.threads import no_more_threads
from tests.warm import WarmProcess

from .interrupting import Net, train
from .runs import digest


def engine_of(tmp_path: Path) -> offload.Engine:
    torch.manual_seed(0)
    model, config = Net(), offload.Config(parameters="nvme", optimizer_states="nvme", nvme=tmp_path / "nvme")
    return offload.initialize(model, torch.optim.AdamW(model.parameters()), config)


@contextmanager
def files_at_most(more: int) -> Iterator[None]:
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    highest = max(int(name) for name in os.listdir("/proc/self/fd"))
    resource.setrlimit(resource.RLIMIT_NOFILE, (highest + 1 + more, before[1]))
    filled = []
    try:
        while True:
            try:
                filled.append(os.open("/dev/null", os.O_RDONLY))
            except OSError:
                break
        for fileno in filled[-more:] if more else ():
            os.close(fileno)
            filled.remove(fileno)
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, before)
        for fileno in filled:
            os.close(fileno)


def test_too_many_open_files_in_a_save_and_a_load(tmp_path: Path) -> None:
    with engine_of(tmp_path) as engine:
        train(engine, 1)
        engine.save_checkpoint(tmp_path / "saves" / "step-1")
        engine.save_checkpoint(tmp_path / "saves" / "step-2")
        calls: list[Callable[[], object]] = [
            lambda: engine.save_checkpoint(tmp_path / "saves" / "step-3"),
            lambda: engine.load_checkpoint(tmp_path / "saves" / "step-1"),
            lambda: engine.resume_or_start(tmp_path / "saves"),
        ]
        for more in range(4):
            for call in calls:
                with files_at_most(more):
                    try:
                        call()
                    except offload.StorageError as error:
                        assert "ulimit -n" in str(error) and "dmesg" not in str(error), error
                    else:
                        assert more > 1, "a save or load opens files"
        train(engine, 1)
        engine.save_checkpoint(tmp_path / "saves" / "step-4")
        engine.resume_or_start(tmp_path / "saves")


def test_no_more_threads(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with engine_of(tmp_path) as engine:
        train(engine, 1)
        expected = digest(engine.state_dict())
    monkeypatch.setenv("OFFLOAD_IO", "threads")
    refused = pytest.raises(offload.ConfigError, match=r"refuses a thread .*ulimit -u")
    with engine_of(tmp_path) as engine, monkeypatch.context() as patched, refused:
        no_more_threads(patched)
        train(engine, 1)
    with engine_of(tmp_path) as engine:
        train(engine, 1)
        assert digest(engine.state_dict()) == expected


ADDRESS_SPACE = """
import resource, sys
import torch, offload
torch.set_num_threads(1)
model = torch.nn.Linear(4096, 4096)
optimizer = torch.optim.AdamW(model.parameters())
used = int(next(line.split()[1] for line in open("/proc/self/status") if line.startswith("VmSize"))) * 1024
resource.setrlimit(resource.RLIMIT_AS, (used + 48 * 2**20, resource.RLIM_INFINITY))
try:
    offload.initialize(model, optimizer, offload.Config(parameters=sys.argv[1], optimizer_states=sys.argv[1], nvme=sys.argv[2]))
except offload.BudgetError as error:
    print(error)
"""


@pytest.mark.parametrize("tier", ["cpu", "nvme"])
def test_an_address_space_that_is_too_small(tier: str, tmp_path: Path) -> None:
    done = WarmProcess.run(["-c", ADDRESS_SPACE, tier, str(tmp_path)], 120)
    assert "RLIMIT_AS" in done.stdout and "ulimit -v" in done.stdout, done.stdout + done.stderr


@contextmanager
def mapped_at_most(limit: int, field: str, more_nbytes: int) -> Iterator[None]:
    """So much beyond what is mapped now, which the system counts as `field`."""
    before, status = resource.getrlimit(limit), Path("/proc/self/status").read_text()
    mapped_nbytes = 1024 * int(re.findall(rf"^{field}:\s*(\d+) kB$", status, re.MULTILINE)[0])
    resource.setrlimit(limit, (mapped_nbytes + more_nbytes, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(limit, before)


def left_nbytes(said: str, limit: str) -> int:
    return int(re.findall(rf"(\d+) bytes are left, by {limit}\b", said)[0])


def test_refused_memory_names_the_bound_that_is_met() -> None:
    with mapped_at_most(resource.RLIMIT_DATA, "VmData", 16 << 20), pytest.raises(offload.BudgetError) as refused:
        HostMemory(1 << 30, "gradients")
    said = str(refused.value)
    assert "1073741824 bytes" in said and "for gradients" in said and "ulimit -d" in said
    assert 0 <= left_nbytes(said, "RLIMIT_DATA") <= 16 << 20


def test_a_thread_that_is_refused_names_the_limit_that_is_met(monkeypatch: pytest.MonkeyPatch) -> None:
    no_more_threads(monkeypatch)
    for more_nbytes, remedy in ((16 << 20, "ulimit -v"), (1 << 30, "ulimit -u")):
        with mapped_at_most(resource.RLIMIT_AS, "VmSize", more_nbytes), pytest.raises(offload.ConfigError) as refused:
            lane.start_thread(threading.Thread(target=print, name="offload-test"))
        said = str(refused.value)
        assert remedy in said and ("RLIMIT_AS" in said) == (remedy == "ulimit -v")
        assert remedy == "ulimit -u" or 0 <= left_nbytes(said, "RLIMIT_AS") <= more_nbytes
