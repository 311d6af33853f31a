# SPDX-License-Identifier: Apache-2.0
"""That the search comes to what the engine has: counted in what it draws, and in what a program of it does."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, Phase, given, seed, settings
from torch import nn
from torch.nn.modules.module import register_module_forward_pre_hook

from tests.inside import sums_on_device_of
from tests.small_sizes import small

from .drawing import programs
from .engines import DrawnPlayer
from .judging import Stage
from .programs import Model, Program, Setup, op
from .searching import AT_ONCE

COUNT = 300


def test_what_the_engine_has_is_drawn() -> None:
    found: Counter[str] = Counter()

    def look(program: Program) -> None:
        first = program.setups[0]
        sums = first.accelerator == "deferred" and "device" not in (first.parameters, first.states)
        several = [one for one in program.operations if one.values.get("micro", 1) > 1 or one.values.get("sync") is False]
        found["expects several"] += first.expects > 1
        found["narrow sums on a device"] += bool(sums and several and program.model.narrow_sums)
        found["marked"] += first.marked != ""
        found["sums on a device without a budget"] += bool(sums and several and first.room and first.on_device is None)
        found["sums within a budget of a device"] += bool(sums and several and first.on_device)
        names = {one.name for one in program.operations}
        found["a parameter is frozen"] += "freeze_one" in names
        found["sums are given up"] += bool(sums and several and first.room and first.on_device is None and "crowd" in names)

    rules = settings(
        max_examples=AT_ONCE, database=None, deadline=None, phases=(Phase.generate,), suppress_health_check=list(HealthCheck)
    )
    for number in range(COUNT // AT_ONCE):
        seed(number)(rules(given(programs(widely=True))(look)))()
    assert min(found.values()) >= COUNT // 60, found


KEPT_AND_GIVEN_UP = Program(
    Model(blocks=("large", "mlp"), dtype="bf16"),
    (Setup("cpu", "cpu", "deferred", room=1e6),),
    (
        op("train", batch=0, micro=3),
        op("train", batch=1, micro=3),
        op("forward", batch=2),
        op("backward", sync=False),
        op("crowd", room=1.3),
        op("train", batch=3, micro=2),
        op("crowd", room=None),
        op("train", batch=4, micro=2),
        op("train", batch=5, micro=2),
    ),
)


def test_a_program_keeps_sums_on_the_device_and_gives_them_up(
    stage: Stage, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    verdict = stage.verdict(KEPT_AND_GIVEN_UP)
    assert verdict is None, verdict
    small(monkeypatch, least_unit_numel=0)
    player = DrawnPlayer(KEPT_AND_GIVEN_UP, tmp_path, (0,))
    player.begin()
    script = KEPT_AND_GIVEN_UP.script
    after_crowding = next(position for position, one in enumerate(script) if one.values.get("batch") == 3)
    found: list[list[int]] = []
    """Of each forward then, the first in the middle of a step, the bytes of the sums as each of its modules begins."""

    def look(module: nn.Module, _: Any) -> None:
        if player.position == after_crowding:
            if module is player.model:
                found.append([])
            found[-1].append(sums_on_device_of(player.engine).nbytes)

    with register_module_forward_pre_hook(look):
        for position, operation in enumerate(script):
            player.position = position
            assert player.take(operation)["is"] in ("ok", "nothing")
        player.finish()
    assert found[0][0] > found[0][-1], found
