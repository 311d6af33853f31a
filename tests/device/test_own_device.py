# SPDX-License-Identifier: Apache-2.0
"""Which GPU a process computes on, where there are several."""

from __future__ import annotations

import pytest
import torch

from offload.device.cuda import CudaAccelerator
from tests.device.kernel_files import no_kernels_loaded
from tests.device.played_cuda import play


@pytest.fixture
def chosen(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The current device of a machine with two, at its end."""
    current = [0]
    play(monkeypatch)
    no_kernels_loaded(monkeypatch, missing=[0, 1])
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "set_device", current.append)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: current[-1])
    return current


@pytest.mark.parametrize(("number", "expected"), [("0", 0), ("1", 1), ("2", 0), (None, 0)])
def test_each_process_of_a_launcher_takes_its_own(
    monkeypatch: pytest.MonkeyPatch, chosen: list[int], number: str | None, expected: int
) -> None:
    """Of a number that it has no GPU for, where each process sees another one, the only one."""
    if number is None:
        monkeypatch.delenv("LOCAL_RANK", raising=False)
    else:
        monkeypatch.setenv("LOCAL_RANK", number)
    assert CudaAccelerator().device == torch.device("cuda", expected)


def test_the_one_that_a_process_uses_already_stays_its_own(monkeypatch: pytest.MonkeyPatch, chosen: list[int]) -> None:
    """As after torch.cuda.set_device."""
    monkeypatch.setenv("LOCAL_RANK", "1")
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    assert CudaAccelerator().device == torch.device("cuda", 0)
