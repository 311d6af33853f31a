# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from .crew import Crew


@pytest.fixture(scope="session")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Crew]:
    crew = Crew(2, tmp_path_factory.mktemp("pair"))
    yield crew
    crew.close()


@pytest.fixture(scope="session")
def four(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Crew]:
    crew = Crew(4, tmp_path_factory.mktemp("four"))
    yield crew
    crew.close()


@pytest.fixture
def fresh(tmp_path: Path) -> Iterator[type[Crew]]:
    """For crews that do not survive their test: `fresh(2, seconds=8)`."""
    made: list[Crew] = []

    def make(size: int, seconds: int = 8, **variables: str) -> Crew:
        folder = tmp_path / f"crew-{len(made)}"
        folder.mkdir()
        made.append(Crew(size, folder, seconds=seconds, **variables))
        return made[-1]

    yield make  # type: ignore[misc]
    for crew in made:
        crew.close()
