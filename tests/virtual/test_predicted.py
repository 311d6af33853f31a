# SPDX-License-Identifier: Apache-2.0
"""What the plan says of a machine against what was measured there: docs/performance/predicted.json (benchmarks/predicted.py).

Virtual time is the same everywhere, so that the said part of the table is what is said now; what of it was right is held."""

from __future__ import annotations

import importlib
import json
import sys
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parent.parent.parent
TABLE = json.loads((ROOT / "docs" / "performance" / "predicted.json").read_text())["results"]
PEAK_ERROR = 0.05
QUICK = 2


def moved_is_equal(result: dict[str, Any], said: dict[str, int]) -> bool:
    return all(said[link] == nbytes for link, nbytes in result["measured"]["moved_nbytes"].items())


def peaks_are_near(result: dict[str, Any], said: dict[str, int]) -> bool:
    return all(abs(said[tier] - nbytes) <= PEAK_ERROR * nbytes for tier, nbytes in result["measured"]["peak_nbytes"].items())


@pytest.mark.parametrize(
    "index", [pytest.param(index, marks=() if index < QUICK else (pytest.mark.slow,)) for index in range(len(TABLE))]
)
def test_what_was_right_of_bytes_is_still_said(index: int, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(sys, "path", [str(ROOT / "benchmarks"), *sys.path])
    benchmark, result = importlib.import_module("predicted"), TABLE[index]
    machine = tmp_path / "machine.json"
    machine.write_text(json.dumps(result["rates"]))
    said = benchmark.predicted(benchmark.Case(**result["case"]), str(tmp_path), str(machine))
    if moved_is_equal(result, result["predicted"]["moved_nbytes"]):
        assert moved_is_equal(result, said["moved_nbytes"])
    if peaks_are_near(result, result["predicted"]["peak_nbytes"]):
        assert peaks_are_near(result, said["peak_nbytes"])
