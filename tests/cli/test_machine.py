# SPDX-License-Identifier: Apache-2.0
"""info, probe and bench: each in a process, bounded small; what they print is about this machine."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch

import offload
from offload import _native
from offload.cli.main import main
from offload.cli.plans.rates import Drive
from offload.tiers.io import open_backend

from .conftest import is_empty, run

SMALL = ("--size", "128MiB", "--seconds", "0.05")


def positive_rates(text: str) -> list[float]:
    found = [float(value) for value in re.findall(r"([0-9.]+) [GM]B/s", text)]
    assert all(value > 0 for value in found)
    return found


def test_info_says_what_is_here() -> None:
    done = run("info", OFFLOAD_IO="threads" if _native.available() else "aiofiles")
    assert done.code == 0, done.err
    assert re.search(rf"offload +{re.escape(offload.__version__)}", done.out)
    assert re.search(rf"torch +{re.escape(str(torch.__version__))}", done.out)
    if _native.available():
        assert _native.build_info() in done.out and re.search(rf"SIMD in use +{_native.simd_level()}", done.out)
    assert re.search(r"used +(threads|aiofiles)", done.out)
    assert re.search(r"OFFLOAD_ACCELERATOR +'cpu'", done.out)
    for name in ("OFFLOAD_NATIVE", "OFFLOAD_IO"):
        assert name in done.out


def test_info_without_the_native_library_says_why() -> None:
    done = run("info", OFFLOAD_NATIVE="0")
    assert done.code == 0, done.err
    assert "missing: switched off by OFFLOAD_NATIVE=0" in done.out
    assert re.search(r"io_uring +the native library is missing", done.out)
    assert re.search(r"used +aiofiles", done.out)


def test_probe_measures_memory_and_drive(nvme: Path) -> None:
    done = run("probe", "--nvme", nvme, *SMALL)
    assert done.code == 0, done.err
    assert len(positive_rates(done.out)) >= 4  # memory; write, read, both
    for word in ("physical cores", "locked memory limit", "transparent huge pages", "backend", "buffers"):
        assert word in done.out
    assert is_empty(nvme)


def test_bench_adam_compares_with_the_stream_and_with_torch() -> None:
    done = run("bench", "adam", "--numel", 100_000, "--seconds", 0.02)
    assert done.code == 0, done.err
    rows = [line for line in done.out.splitlines() if "B/s" in line]
    assert len(rows) == (4 if _native.available() else 3)
    assert any("torch.optim.AdamW(fused=True)" in row for row in rows)
    if _native.available():
        assert rows[0].rstrip().endswith("100 %")


def test_bench_io_measures_each_direction(nvme: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "io", "--nvme", str(nvme), "--size", "128MiB", "--seconds", "0.05"]) == 0
    rates = re.findall(r"^  (read|write|both, summed) +[0-9.]+ .B/s", capsys.readouterr().out, re.M)
    assert sorted(rates) == ["both, summed", "read", "write"]
    assert is_empty(nvme)


def test_a_drive_moves_what_it_counts(nvme: Path) -> None:
    backend = open_backend()
    try:
        with Drive(nvme, 1) as drive:
            for direction in ("write", "read", "both"):
                before = backend.stats()
                rate = drive.bytes_per_second(backend, direction, 0.02)
                after = backend.stats()
                assert rate > 0
                assert (after.read_nbytes > before.read_nbytes) == (direction != "write")
                assert (after.written_nbytes > before.written_nbytes) == (direction != "read" or before.written_nbytes == 0)
    finally:
        backend.close()
    assert is_empty(nvme)
