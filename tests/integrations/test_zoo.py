# SPDX-License-Identifier: Apache-2.0
"""Every architecture of the zoo has the same bits in every framework and place. `make zoo` writes the table."""

from __future__ import annotations

import os
from collections.abc import Iterator
from importlib import metadata
from pathlib import Path
from typing import Any

import pytest

from ..acceptance.runs import assert_same_bits
from .test_trainer import settled
from .zoo import FRAMEWORKS, MODELS, STEPS

__all__ = ["settled"]
pytestmark = pytest.mark.filterwarnings("ignore")
PAGE = Path(__file__).parents[2] / "docs" / "model-zoo.md"
COLUMNS = [(framework, place) for framework in FRAMEWORKS for place in ("cpu", "nvme")]
START, END = "<!-- table: zoo -->\n", "<!-- end -->"


@pytest.fixture(scope="module")
def results() -> Iterator[dict[tuple[str, str, str], str]]:
    """What became of each; written to the page where ZOO_TABLE is set and all were run."""
    found: dict[tuple[str, str, str], str] = {}
    yield found
    if os.environ.get("ZOO_TABLE") and len(found) == len(MODELS) * len(COLUMNS):
        head = ["model", *(f"{framework}, {place}" for framework, place in COLUMNS)]
        lines = [head, ["---"] * len(head), *([name, *(found[(name, *column)] for column in COLUMNS)] for name in MODELS)]
        before, _, rest = PAGE.read_text(encoding="utf-8").partition(START)
        table = "".join(f"| {' | '.join(line)} |\n" for line in lines)
        versions = ", ".join(
            f"{name} {metadata.version(name)}" for name in ("transformers", "accelerate", "diffusers", "torch")
        )
        table = f"With {versions}.\n\n{table}"
        PAGE.write_text(before + START + table + END + rest.partition(END)[2], encoding="utf-8")


@pytest.mark.parametrize("framework", FRAMEWORKS)
@pytest.mark.parametrize("name", [pytest.param(name, marks=[] if name == "Mamba 2" else [pytest.mark.slow]) for name in MODELS])
def test_the_same_bits_everywhere(results: Any, tmp_path: Path, name: str, framework: str) -> None:
    run = FRAMEWORKS[framework]
    expected = run(name, "device", tmp_path)
    assert len(expected[0]) == STEPS
    for place in ("cpu", "nvme"):
        results[name, framework, place] = "differs"
        try:
            assert_same_bits(list(run(name, place, tmp_path)), list(expected))
        except Exception as error:
            results[name, framework, place] = f"{type(error).__name__}: {error}".splitlines()[0][:80]
            raise
        results[name, framework, place] = "passed"


def test_the_page_lists_them_all() -> None:
    page = PAGE.read_text(encoding="utf-8")
    assert all(f"\n| {name} |" in page for name in MODELS)
