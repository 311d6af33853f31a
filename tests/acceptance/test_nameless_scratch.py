# SPDX-License-Identifier: Apache-2.0
"""Scratch files have no name: whatever becomes of their folders, training and saves go on."""

from __future__ import annotations

import os
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

import offload

from .interrupting import Net, train
from .runs import digest


def run(tmp_path: Path, cleans: bool, update: Any) -> str:
    nvme = [tmp_path / "a" / "run", tmp_path / "b"]
    for path in nvme:
        path.mkdir(parents=True, exist_ok=True)
    torch.manual_seed(0)
    model, config = Net(), offload.Config(parameters="nvme", optimizer_states="nvme", nvme=nvme, update=update)
    with offload.initialize(model, torch.optim.AdamW(model.parameters()), config) as engine:
        train(engine, 2)
        if cleans:
            assert [os.listdir(path) for path in nvme] == [[], []]
            shutil.rmtree(tmp_path / "a")
            shutil.rmtree(tmp_path / "b")
        for index in range(2):
            save = engine.save_checkpoint(tmp_path / f"saves-{cleans}" / f"step-{index}", wait=False)
            train(engine, 2)
            save.wait()
        if update == "step":
            for _ in range(2):  # the room for sums of micro-batches is taken now
                engine.module(torch.ones(2, 64)).square().mean().backward()
            engine.step()
            engine.zero_grad()
        engine.save_checkpoint(tmp_path / f"saves-{cleans}" / "step-9")
        engine.resume_or_start(tmp_path / f"saves-{cleans}")
        train(engine, 1)
        return digest(engine.state_dict())


@pytest.mark.parametrize("update", ["step", "backward"])
def test_a_cleaner_of_temporary_files_takes_nothing_away(tmp_path: Path, update: Any) -> None:
    assert run(tmp_path, True, update) == run(tmp_path, False, update)
