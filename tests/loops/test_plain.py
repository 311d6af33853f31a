# SPDX-License-Identifier: Apache-2.0
"""The oracle does what a user of any torch does who trains the same."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from .plain import PlainPlayer, adagrad_gives_states_late
from .programs import Model, Program, Setup, op


def _trained(folder: Path) -> dict[str, torch.Tensor]:
    program = Program(Model(blocks=("lora",), optimizer="adagrad", frozen=(0,)), (Setup(),), ())
    player = PlainPlayer(program, folder, (0,), [])
    player._began(0)
    for operation in (op("train", batch=0), op("add_group"), op("train", batch=1), op("save", number=0)):
        player.perform(operation)
    player.load_at(player.position)
    player.perform(op("train", batch=2))
    return player.state()


def test_a_group_is_added_to_an_adagrad_that_gives_states_when_it_is_made_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As torch's did, 2.11 among them."""
    expected = _trained(tmp_path)
    init_group = torch.optim.Adagrad._init_group

    def early(self: Any, group: Any, *lists: Any) -> Any:
        for parameter in group["params"]:
            if parameter.grad is not None:
                _ = self.state[parameter]["sum"]
        return init_group(self, group, *lists)

    monkeypatch.setattr(torch.optim.Adagrad, "_init_group", early)
    adagrad_gives_states_late.cache_clear()
    assert not adagrad_gives_states_late()
    found = _trained(tmp_path)
    adagrad_gives_states_late.cache_clear()
    assert all(torch.equal(found[name], value) for name, value in expected.items())
