# SPDX-License-Identifier: Apache-2.0
"""Nothing of the engine's grows with the number of engines and of saves that a process has behind it."""

from __future__ import annotations

import gc
from collections import Counter
from pathlib import Path
from typing import Any

import offload

from .models import ON_CPU, adamw, stack
from .runs import Run, one_step


def held() -> Counter[str]:
    """Objects of this package's classes, and what tells of files, by the names of their classes."""
    gc.collect()
    kinds = [type(one) for one in gc.get_objects()]
    return Counter(
        one.__name__ for one in kinds if str(one.__module__).startswith("offload.") or issubclass(one, (frozenset, Path))
    )


def test_many_engines_after_each_other(nvme: Path) -> None:
    kept: list[Any] = []  # so that no model has the addresses of one before

    def train_one() -> None:
        model = stack()
        with offload.initialize(model, adamw(model), ON_CPU.fields(nvme)) as engine:
            one_step(Run(model, engine.optimizer, engine))
        kept.append([bytearray(200) for _ in range(1000)])

    for _ in range(3):
        train_one()
    before = held()
    for _ in range(5):
        train_one()
    assert held() - before == Counter()


def test_many_saves_of_which_the_last_are_kept(opened: Any, tmp_path: Path) -> None:
    model = stack(blocks=1)
    engine = opened(model, adamw(model), ON_CPU)

    def save(numbers: range) -> None:
        for number in numbers:
            engine.save_checkpoint(tmp_path / f"step-{number}", keep_last=2)

    save(range(5))
    before = held()
    save(range(5, 12))
    assert held() - before == Counter()
