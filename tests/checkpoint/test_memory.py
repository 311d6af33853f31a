# SPDX-License-Identifier: Apache-2.0
"""Loading, exporting and saves beside training take one chunk's buffers beside what is there, a save that waits takes two
chunks': counted by the ledger, seen by the system."""

from __future__ import annotations

import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from offload.device.host_memory.freed_memory import freed_memory
from tests.inside import parts_of
from tests.small_sizes import small

from ..acceptance.models import ON_CPU, ON_CPU_IN_PLACE, ON_NVME, adamw, stack
from ..acceptance.worker import resident_nbytes

CHUNK_NUMEL = 1 << 18
RECORD_NBYTES, VALUES_NBYTES = 12 * CHUNK_NUMEL, 2 * CHUNK_NUMEL
READING_NBYTES = 4 << 20  # the slab that checksums are computed in
HUGE_PAGE_NBYTES = 2 << 20
SLAB_NBYTES = READING_NBYTES + HUGE_PAGE_NBYTES  # where the system backs it with huge pages it takes up to one more
OVERHEAD_NBYTES = 4 << 20  # small objects, the manifest, the allocator's slack


def grown(action: Callable[[], Any]) -> int:
    """By how many bytes the process's resident size rises above what it is now, at the most."""
    freed_memory.give_back()
    Path("/proc/self/clear_refs").write_text("5")  # the peak is the present size again
    before = resident_nbytes("VmRSS")
    action()
    return resident_nbytes("VmHWM") - before


def least_grown(action: Callable[[int], Any]) -> int:
    """The least of three runs of the action, given their number: whatever else the process does meanwhile only adds."""
    return min(grown(functools.partial(action, attempt)) for attempt in range(3))


@pytest.fixture
def engine(opened: Any, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> Any:
    """7 M parameters in units of 1.6 M, with 84 MB of masters and moments."""
    small(monkeypatch, chunk_numel=CHUNK_NUMEL)
    model = stack(width=512, blocks=4)
    return opened(model, adamw(model), request.param, dtype="bf16")


@pytest.mark.parametrize("engine", [ON_NVME, ON_CPU, ON_CPU_IN_PLACE], ids=lambda setup: setup.name, indirect=True)
def test_extra_host_memory(engine: Any, tmp_path: Path) -> None:
    ledger = parts_of(engine).ledger
    counted = ledger.total_nbytes
    in_place = "nvme" not in [engine.stats()["placement"][state] for state in ("parameters", "optimizer_states")]
    buffers = 0 if in_place else RECORD_NBYTES + VALUES_NBYTES
    assert engine.stats()["placement"]["optimizer_states"] == "nvme" or in_place
    actions = {
        "load": (1, lambda _: engine.load_checkpoint(tmp_path / "saved")),
        "export": (1, lambda attempt: engine.export(tmp_path / f"out-{attempt}", "fp32")),
        "save beside": (1, lambda _: engine.save_checkpoint(tmp_path / "saved", wait=False).wait()),
        "save": (2, lambda _: engine.save_checkpoint(tmp_path / "saved")),
    }
    engine.save_checkpoint(tmp_path / "saved", wait=False).wait()
    for name, (at_once, action) in actions.items():
        limit = at_once * buffers + OVERHEAD_NBYTES + (SLAB_NBYTES if name == "load" else 0)
        assert least_grown(action) <= limit, name
        assert ledger.total_nbytes == counted, name
        assert ledger.peak_nbytes <= counted + at_once * buffers, name
    saved = sum(path.stat().st_size for path in (tmp_path / "saved").iterdir())
    assert saved > 80e6  # else the limits above would say nothing


def test_the_limit_is_that_of_one_unit() -> None:
    model = stack(width=512, blocks=4)
    unit_nbytes = 12 * sum(parameter.numel() for parameter in model.blocks[0].parameters())
    chunk_nbytes = RECORD_NBYTES + VALUES_NBYTES
    assert unit_nbytes >= max(chunk_nbytes + SLAB_NBYTES, 2 * chunk_nbytes) + OVERHEAD_NBYTES
