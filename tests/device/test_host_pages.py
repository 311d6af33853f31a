# SPDX-License-Identifier: Apache-2.0
"""Pages of large host memory are made by several threads, before registration, and nobody's else."""

from __future__ import annotations

import ctypes
import errno
import os
import threading
from collections import Counter

import pytest
import torch

import offload
from offload.device.host_memory import host_pages
from offload.errors import BudgetError
from offload.layout import round_up
from offload.planning.purposes import ACCUMULATED
from offload.tiers.memory import PAGE_NBYTES, HostMemory, MemoryLedger
from tests.acceptance.models import stack
from tests.device import played_cuda
from tests.small_sizes import small
from tests.tiers.test_memory import resident_nbytes

NBYTES = 32 << 20


@pytest.fixture
def slices(monkeypatch: pytest.MonkeyPatch) -> None:
    """Four slices and two cores."""
    small(monkeypatch, page_slice_nbytes=NBYTES // 4)
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {0, 1})


class Madvise:
    """`madvise`, of which calls in pairs wait for each other; `code`: fails with it as often as `times` says."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, code: int = 0, times: int = 1 << 30, *, meets: bool = False) -> None:
        self._code, self._times, self._real = code, times, host_pages._libc.madvise
        self._barrier = threading.Barrier(2) if meets else None
        self.asked: dict[int, int] = {}
        """How many bytes from where."""
        monkeypatch.setattr(host_pages, "_libc", self)

    def madvise(self, address: int, nbytes: int, advice: int) -> int:
        if self._barrier is not None:
            self._barrier.wait(20.0)
        self.asked[address] = nbytes
        if self._code and self._times > 0:
            self._times -= 1
            ctypes.set_errno(self._code)
            return -1
        return int(self._real(address, nbytes, advice))


@pytest.mark.usefixtures("slices")
def test_two_threads_make_the_pages_before_they_are_registered(monkeypatch: pytest.MonkeyPatch) -> None:
    played_cuda.play(monkeypatch)
    Madvise(monkeypatch, meets=True)  # would wait for ever for one thread alone
    resident = [resident_nbytes()]

    def noted(address: int, nbytes: int) -> int:
        resident.append(resident_nbytes())
        return 0

    played_cuda.at_registration(monkeypatch, noted)
    made = HostMemory(NBYTES, "a test", register=played_cuda.PlayedAccelerator().pin)
    assert resident[1] - resident[0] >= NBYTES and not made.tensor.any()


def test_only_what_is_registered_is_made(monkeypatch: pytest.MonkeyPatch) -> None:
    """Optimizer states that the CPU updates take no memory before they are used."""
    played_cuda.play(monkeypatch)
    made = Madvise(monkeypatch).asked
    registered: dict[int, int] = {}

    def refused(address: int, nbytes: int) -> int:
        registered[address] = nbytes
        return 2

    played_cuda.at_registration(monkeypatch, refused)
    model = stack(width=16, blocks=3)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    config = {"parameters": "cpu", "optimizer_states": "cpu", "dtype": "bf16"}
    with pytest.warns(RuntimeWarning, match="cudaHostRegister"), offload.initialize(model, optimizer, config) as engine:
        assert made == registered
        assert engine.stats()["host_nbytes"]["optimizer states"] not in made.values()


def test_sums_of_micro_batches_are_made_and_registered_when_a_second_one_comes(monkeypatch: pytest.MonkeyPatch) -> None:
    """The device may copy them there. They take what the plan says, and nothing before that."""
    detector = played_cuda.play(monkeypatch)
    model = stack(width=16, blocks=3)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    config = {"parameters": "cpu", "optimizer_states": "cpu", "dtype": "bf16"}
    with offload.initialize(model, optimizer, config) as engine:
        before = list(detector.registered.values())
        for number in range(2):
            assert ACCUMULATED not in engine.stats()["host_nbytes"] or number
            engine.backward(model(torch.ones(2, 16, dtype=torch.bfloat16)).float().sum())
        (made,) = (Counter(detector.registered.values()) - Counter(before)).elements()
        (planned,) = (line["nbytes"] for line in engine.stats()["planned"] if line["purpose"] == ACCUMULATED)
        assert made == engine.stats()["host_nbytes"][ACCUMULATED] == round_up(planned, PAGE_NBYTES)


@pytest.mark.usefixtures("slices")
@pytest.mark.parametrize("code", [errno.EINVAL, errno.EAGAIN, errno.EINTR], ids=errno.errorcode.get)
def test_a_kernel_without_the_call_or_one_that_is_busy(monkeypatch: pytest.MonkeyPatch, code: int) -> None:
    Madvise(monkeypatch, code, times=1 << 30 if code == errno.EINVAL else 3)
    before = resident_nbytes()
    made = HostMemory(NBYTES, "a test", prefault=True)
    assert resident_nbytes() - before >= NBYTES and not made.tensor.any()


@pytest.mark.usefixtures("slices")
@pytest.mark.parametrize("code", [errno.ENOMEM, errno.EFAULT], ids=errno.errorcode.get)
def test_memory_that_is_not_there_is_an_error_that_says_what_for(monkeypatch: pytest.MonkeyPatch, code: int) -> None:
    played_cuda.play(monkeypatch)
    Madvise(monkeypatch, code)
    ledger = MemoryLedger()
    with pytest.raises(BudgetError, match=r"Cannot allocate memory.*lower cpu_memory") as raised:
        HostMemory(NBYTES, "parameters", ledger=ledger, register=played_cuda.PlayedAccelerator().pin)
    assert "for parameters" in str(raised.value) and ledger.total_nbytes == 0


def test_what_takes_long_is_announced(caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch) -> None:
    small(monkeypatch, pages_said_from_nbytes=NBYTES)
    with caplog.at_level("INFO", "offload"):
        HostMemory(NBYTES, "a test", prefault=True)
    assert "taking 0.0 GiB of host memory" in caplog.text
