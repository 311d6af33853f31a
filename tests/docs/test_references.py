# SPDX-License-Identifier: Apache-2.0
"""What docstrings, comments and pages name is there: modules and what is in them, files of the repository."""

from __future__ import annotations

import importlib
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent.parent
SOURCES = sorted((ROOT / "offload").rglob("*.py"))
PAGES = [*SOURCES, *sorted((ROOT / "docs").rglob("*.md")), ROOT / "README.md", *sorted((ROOT / "benchmarks").rglob("*.py"))]
NAMED = re.compile(r"`(offload(?:\.\w+)+)")
FILES = re.compile(r"(?<![\w/.-])((?:offload|native|benchmarks|tests|docs)/[\w/.-]+\.(?:py|cpp|h|md|json|mjs|sh))\b")
MADE = ("docs/performance/gpu.json",)
"""By a benchmark on a machine with a GPU."""


def is_there(name: str) -> bool:
    parts = name.split(".")
    for count in range(len(parts), 0, -1):
        try:
            found: object = importlib.import_module(".".join(parts[:count]))
        except ModuleNotFoundError:
            continue
        return has(found, parts[count:])
    return False


def has(found: object, names: list[str]) -> bool:
    for position, name in enumerate(names):
        if isinstance(found, type) and name in getattr(found, "__annotations__", {}):
            return position == len(names) - 1
        if not hasattr(found, name):
            return False
        found = getattr(found, name)
    return True


def named_in_pages(pattern: re.Pattern[str]) -> Iterator[tuple[str, str]]:
    for path in PAGES:
        for name in pattern.findall(path.read_text(encoding="utf-8")):
            yield str(path.relative_to(ROOT)), name


def test_what_is_named_in_backticks_is_there() -> None:
    names = list(named_in_pages(NAMED))
    assert len(names) > 100
    assert not [one for one in names if not is_there(one[1])]


def test_files_that_are_named_are_there() -> None:
    names = list(named_in_pages(FILES))
    assert len(names) > 50
    assert not [
        (where, name)
        for where, name in names
        if name not in MADE and not any((folder / name).exists() for folder in (ROOT, ROOT / "tests"))
    ]


@pytest.mark.parametrize("name", ["offload.planning.budget.Kept", "offload.no_such_room", "offload.Config.no_such_field"])
def test_what_is_gone_is_seen(name: str) -> None:
    assert not is_there(name)
