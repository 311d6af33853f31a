# SPDX-License-Identifier: Apache-2.0
"""Each rank writes a profile of its own, with what the ranks send each other."""

from __future__ import annotations

from pathlib import Path

from .crew import Crew


def test_each_rank_writes_its_own(pair: Crew, tmp_path: Path) -> None:
    fields = {"stage": 3, "parameters": "cpu", "optimizer_states": "cpu"}
    found = pair.do("profiled", fields=fields, path=str(tmp_path / "trace.json"))
    assert [one["name"] for one in found] == ["trace.rank0.json", "trace.rank1.json"]
    assert [one["rank"] for one in found] == [0, 1]
    for one in found:
        ops = {tuple(op) for op in one["collectives"]}
        assert {("gather", "model.layers.0"), ("reduce", "model.layers.1")} <= ops
