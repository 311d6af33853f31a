# SPDX-License-Identifier: Apache-2.0
"""What the plan says of a machine against what was measured there: docs/performance/predicted.json (benchmarks/predicted.py).

The table is held to its goals. Virtual time is the same everywhere: bytes that are said now are held beside those measured."""

from __future__ import annotations

import importlib
import json
import statistics
import sys
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parent.parent.parent
TABLE = json.loads((ROOT / "docs" / "performance" / "predicted.json").read_text())["results"]
PEAK_ERROR = 0.05
MEDIAN_ERROR, WORST_ERROR, LEAST_CASES = 0.10, 0.20, 12
QUICK = 2


def moved_is_equal(result: dict[str, Any], said: dict[str, int]) -> bool:
    return all(said[link] == nbytes for link, nbytes in result["measured"]["moved_nbytes"].items())


def peaks_are_near(result: dict[str, Any], said: dict[str, int]) -> bool:
    return all(abs(said[tier] - nbytes) <= PEAK_ERROR * nbytes for tier, nbytes in result["measured"]["peak_nbytes"].items())


def test_the_table_is_within_its_goals() -> None:
    errors = [abs(one["predicted"]["step_seconds"] / one["measured"]["step_seconds"] - 1) for one in TABLE]
    assert len(errors) >= LEAST_CASES
    assert statistics.median(errors) <= MEDIAN_ERROR and max(errors) <= WORST_ERROR
    for one in TABLE:
        assert moved_is_equal(one, one["predicted"]["moved_nbytes"]), one["case"]
        assert peaks_are_near(one, one["predicted"]["peak_nbytes"]), one["case"]


@pytest.mark.parametrize(
    "index", [pytest.param(index, marks=() if index < QUICK else (pytest.mark.slow,)) for index in range(len(TABLE))]
)
def test_what_is_said_of_bytes_now_is_right_too(index: int, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(sys, "path", [str(ROOT / "benchmarks"), *sys.path])
    benchmark, result = importlib.import_module("predicted"), TABLE[index]
    machine = tmp_path / "machine.json"
    machine.write_text(json.dumps(result["rates"]))
    said = benchmark.predicted(benchmark.Case(**result["case"]), str(tmp_path), str(machine))
    assert moved_is_equal(result, said["moved_nbytes"])
    assert peaks_are_near(result, said["peak_nbytes"])
