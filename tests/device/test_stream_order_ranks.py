# SPDX-License-Identifier: Apache-2.0
"""Of several ranks: what the communication thread does on a stream of its own is ordered with compute; see `played_cuda`."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.ranks.crew import Crew

PLACES: list[dict[str, Any]] = [
    {"stage": stage, "parameters": parameters, "optimizer_states": states}
    for stage in (0, 1, 2, 3)
    for parameters, states in (("device", "device"), ("device", "cpu"), ("cpu", "device"), ("cpu", "cpu"))
    if stage == 3 or parameters == "device"
]


class Pair:
    """Two ranks, and what they give in device memory on the cpu accelerator."""

    def __init__(self, folder: Path) -> None:
        self.crew = Crew(2, folder, jobs="tests.device.rank_jobs")
        self._in_memory: dict[tuple[float | None, bool], list[Any]] = {}

    def in_memory(self, norm: float | None, uneven: bool) -> list[Any]:
        if (norm, uneven) not in self._in_memory:
            config = {"parameters": "device", "optimizer_states": "device", "max_grad_norm": norm}
            self._in_memory[norm, uneven] = self.crew.do("train", config=config, played=False, uneven=uneven)
        return self._in_memory[norm, uneven]


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Pair]:
    pair = Pair(tmp_path_factory.mktemp("pair"))
    yield pair
    pair.crew.close()


def named(places: list[dict[str, Any]]) -> Any:
    return pytest.mark.parametrize("place", places, ids=["-".join(map(str, place.values())) for place in places])


@pytest.mark.parametrize("norm", [0.5, None], ids=["clipped", "unclipped"])
@named(PLACES)
def test_no_race(pair: Pair, place: dict[str, Any], norm: float | None) -> None:
    _train(pair, place, norm, uneven=False)


@named([place for place in PLACES if place["parameters"] == place["optimizer_states"]])
def test_no_race_where_a_rank_has_no_gradients(pair: Pair, place: dict[str, Any]) -> None:
    _train(pair, place, None, uneven=True)


def _train(pair: Pair, place: dict[str, Any], norm: float | None, *, uneven: bool) -> None:
    found = pair.crew.do("train", config=place | {"max_grad_norm": norm}, played=True, uneven=uneven)
    assert found == pair.in_memory(norm, uneven)
