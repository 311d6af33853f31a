# SPDX-License-Identifier: Apache-2.0
"""coming-from-deepspeed.md: its configs become what it says, its loop runs with each; deepspeed.md is as the code is."""

from __future__ import annotations

import json
import re
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch

import offload
from offload.deepspeed_config import translate
from tests.warm import WarmProcess

from .conftest import small

DOCS = Path(__file__).parents[2] / "docs"
BLOCKS = re.findall(r"```(json|python loop|python)\n(.*?)```", (DOCS / "coming-from-deepspeed.md").read_text(), re.DOTALL)
PAIRS = [(one, other) for (kind, one), (_, other) in pairwise(BLOCKS) if kind == "json"]
LOOP = next(text for kind, text in BLOCKS if kind == "python loop")


def test_the_page_has_five_configs() -> None:
    assert len(PAIRS) == 5 and all(other.startswith("offload.Config(") for _, other in PAIRS)


@pytest.mark.parametrize("number", range(5))
def test_a_config_becomes_what_the_page_says(number: int) -> None:
    theirs, ours = PAIRS[number]
    assert translate(json.loads(theirs), 1).config == eval(ours, {"offload": offload})


@pytest.mark.parametrize("number", range(5))
@pytest.mark.filterwarnings("ignore:DeepSpeed's config")
def test_the_loop_runs_with_it(number: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With DeepSpeed's words and with ours, to the same bits."""
    monkeypatch.setenv("OFFLOAD_ACCELERATOR", "cpu")
    theirs, ours = (text.replace("/mnt/nvme0", str(tmp_path / "nvme")) for text in PAIRS[number])
    found = []
    for index, config in enumerate((json.loads(theirs), eval(ours, {"offload": offload}))):
        batches = [torch.randn(3, 4, generator=torch.Generator().manual_seed(seed)) for seed in range(3)]
        scope: dict[str, Any] = {"make_model": _Model, "batches": batches, "config": config, "folder": tmp_path / str(index)}
        exec(LOOP, scope)
        found.append(scope["engine"].state_dict())
        scope["engine"].close()
    assert found[0].keys() == found[1].keys() and all(torch.equal(found[0][name], found[1][name]) for name in found[0])


class _Model(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = small()

    def forward(self, batch: torch.Tensor) -> torch.Tensor:
        return self.inner(batch.to(next(self.inner.parameters()).dtype)).float().square().mean()


def test_the_tables_are_made_of_the_code() -> None:
    done = WarmProcess.run([str(DOCS / "deepspeed_page.py"), "--check"], 60)
    assert done.returncode == 0, done.stderr
