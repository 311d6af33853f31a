# SPDX-License-Identifier: Apache-2.0
"""On a GPU: copies from our registered memory are as fast as bare ones, in both directions at once, and run beside compute."""

from __future__ import annotations

import importlib
import json
from pathlib import Path
from typing import Any

import pytest
import torch

from offload.device.cuda import CudaAccelerator
from offload.tiers.memory import HostMemory
from tests.devices import before_each_copy

from .conftest import Where
from .loops import train

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="torch finds no CUDA device")]
BENCHMARKS = Path(__file__).resolve().parents[2] / "benchmarks"
NBYTES = 256 * 2**20
LARGE_NBYTES = 2**30
"""At 50 GB/s the wait by a blocking event, after which a virtual machine wakes the thread 0.3 ms late, is 1.5 % of it."""


@pytest.fixture
def report(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Imports a part of the GPU report."""
    monkeypatch.setenv("OFFLOAD_ACCELERATOR", "cuda")
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    return lambda name: importlib.import_module(f"gpu_report.{name}")


def test_registered_memory_counts_as_pinned() -> None:
    accelerator = CudaAccelerator()
    memory = HostMemory(1 << 22, "a test", register=accelerator.pin)
    assert memory.tensor.is_pinned() and not torch.empty(1 << 22, dtype=torch.uint8).is_pinned()
    memory.close()
    accelerator.close()


def test_a_large_copy_reaches_95_percent_of_a_bare_one(report: Any) -> None:
    """As the engine copies a unit: in one transfer. Each direction alone, and both at once; the best of several, so that a busy
    machine does not decide."""
    accelerator = CudaAccelerator()
    found = [report("rates").links(accelerator, LARGE_NBYTES) for _ in range(3)]
    for name in ("h2d", "d2h", "both"):
        assert max(one["share_of_bare"][name] for one in found) >= 0.95, (name, found)
    accelerator.close()


@pytest.mark.parametrize(("parameters", "states"), [("cpu", "cpu"), ("device", "cpu"), ("cpu", "device"), ("nvme", "nvme")])
@pytest.mark.parametrize("update", ["step", "backward"])
def test_every_copy_of_a_step_knows_its_host_memory(
    where: Where, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, parameters: str, states: str, update: str
) -> None:
    """By its address: else the driver would copy through a buffer of its own and hold the thread."""
    if not where.is_gpu:
        pytest.skip("tests/device/played_cuda.py has it without a GPU")
    unknown: list[int] = []

    def into(destination: torch.Tensor, source: torch.Tensor) -> None:
        unknown.extend([] if source.is_pinned() else [source.nbytes])

    def out(destination: torch.Tensor, source: torch.Tensor) -> None:
        unknown.extend([] if destination.is_pinned() else [destination.nbytes])

    before_each_copy(monkeypatch, CudaAccelerator, "copy_in", into)
    before_each_copy(monkeypatch, CudaAccelerator, "copy_out", out)
    before_each_copy(monkeypatch, CudaAccelerator, "copy_out_beside_compute", out)
    # What initialize copies it waits for.
    train(where, tmp_path, parameters, states, prepare=lambda model: unknown.clear(), dtype="bf16", update=update)
    assert not unknown


def test_copies_run_beside_compute_and_beside_each_other(report: Any, tmp_path: Path) -> None:
    accelerator = CudaAccelerator()
    host = [HostMemory(NBYTES, "a test", register=accelerator.pin, prefault=True) for _ in range(2)]
    device = [torch.empty(NBYTES, dtype=torch.uint8, device="cuda") for _ in range(2)]
    a = torch.randn(4096, 4096, device="cuda", dtype=torch.bfloat16)

    def computed(value: torch.Tensor, count: int) -> torch.Tensor:
        for _ in range(count):
            value = torch.mm(value, value).clamp_(-1, 1)
        return value

    def copied_beside(before: int, beside: int) -> None:
        """Both copies wait for the products before them, so that the host is ahead of the device: those beside wait there."""
        first = computed(a, before)
        accelerator.copy_in_after_compute()
        pending = [accelerator.copy_out(host[1].tensor, device[1]), accelerator.copy_in(device[0], host[0].tensor)]
        computed(first, beside)
        for one in pending:
            one.wait()
        torch.cuda.synchronize()

    copied_beside(1, 1)  # a kernel that runs for the first time is loaded first
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profiler:
        copied_beside(100, 400)
    profiler.export_chrome_trace(str(tmp_path / "trace.json"))
    found = report("overlap").summarize(json.loads((tmp_path / "trace.json").read_text()))
    for link in found["links"].values():
        assert link["nbytes"] == NBYTES and link["pageable_nbytes"] == 0, found
        assert link["overlap_percent"] > 80 and link["duplex_percent"] > 60, found
    accelerator.close()
