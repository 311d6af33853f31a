# SPDX-License-Identifier: Apache-2.0
"""How far steps on described machines are from what bounds them: what was reached is kept, cell by cell.

The table is docs/performance/floors.json (benchmarks/floors.py): virtual time is the same everywhere."""

from __future__ import annotations

import importlib
import json
import sys
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parent.parent.parent
TABLE = json.loads((ROOT / "docs" / "performance" / "floors.json").read_text())["results"]
GOAL = 1.15
NEAR_DEVICE = 1.10
QUICK = {("1 B", "h100", 2048, 1), ("1 B", "rtx4090", 2048, 1)}
FIELDS = ("size", "machine", "tokens", "micro_batches")


def key(line: dict[str, Any]) -> tuple[Any, ...]:
    return tuple(line[field] for field in FIELDS)


@pytest.mark.parametrize(
    "line",
    [pytest.param(line, id=str(key(line)), marks=() if key(line) in QUICK else (pytest.mark.slow,)) for line in TABLE],
)
def test_a_step_takes_no_longer_than_the_table_says(line: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """In seconds: better places may have a lower floor, and be further from it."""
    monkeypatch.setattr(sys, "path", [str(ROOT / "benchmarks"), *sys.path])
    found = importlib.import_module("floors").Cell(*key(line)).run()
    assert found.fits == line["fits"]
    if found.fits:
        assert found.floor_seconds <= found.step_seconds <= line["step_seconds"] * 1.005


def test_cells_beyond_the_goal_say_what_bounds_them() -> None:
    """What they wait for is longer than what they miss it by, and without that, alone or together, they are within it."""
    assert {key(line) for line in TABLE} >= QUICK
    for line in TABLE:
        if line["fits"] and line["ratio"] > GOAL:
            assert line["exposed"][line["bound"]] > 0
            missed = line["step_seconds"] - GOAL * line["floor_seconds"]
            assert sum(line["waits"].values()) >= missed, key(line)
            assert min(way["ratio"] for way in line["without"]) <= GOAL, key(line)


def test_7_b_on_the_h100_is_near_the_same_with_everything_in_device_memory() -> None:
    """From 8,192 tokens a micro-batch on; below them what compute stood still for is what it is longer by."""
    compared = [line for line in TABLE if line.get("on_device_seconds")]
    assert compared
    for line in compared:
        if line["tokens"] >= 8192:
            assert line["step_seconds"] <= NEAR_DEVICE * line["on_device_seconds"], key(line)
        else:
            longer = line["step_seconds"] - NEAR_DEVICE * line["on_device_seconds"]
            assert sum(line["waits"].values()) >= longer, key(line)
