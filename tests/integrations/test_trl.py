"""TRL's trainers with the mixin: what they give without it, and going on to the bit."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

from ..acceptance.runs import assert_close, assert_same_bits
from . import preferences
from .test_trainer import settled
from .trainers import logged

__all__ = ["settled"]
pytestmark = pytest.mark.filterwarnings("ignore")
CASES = [(kind, lora) for kind in preferences.KINDS for lora in (False, True)]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("model")
    preferences.save_model(folder)
    return folder


def _figures(trainer: Any) -> list[Any]:
    names = ("loss", "grad_norm") if "reward" not in trainer.state.log_history[0] else ("loss", "grad_norm", "reward")
    return logged(trainer, *names)


@pytest.mark.parametrize(
    "kind, lora",
    [pytest.param(*case, marks=[] if case == ("sft", True) else [pytest.mark.slow]) for case in CASES],
    ids=[f"{kind}{' with lora' if lora else ''}" for kind, lora in CASES],
)
def test_trainers_do_what_they_do_in_memory(model: Path, tmp_path: Path, kind: str, lora: bool) -> None:
    plain = preferences.trainer(kind, tmp_path / "plain", model, lora=lora, offloaded=False)
    plain.train()
    ours = preferences.trainer(kind, tmp_path / "ours", model, lora=lora, offloaded=True)
    ours.train()
    again = preferences.trainer(kind, tmp_path / "again", model, lora=lora, offloaded=True)
    shutil.copytree(tmp_path / "ours" / "checkpoint-2", tmp_path / "again" / "checkpoint-2")
    again.train(resume_from_checkpoint=True)
    with ours.engine, again.engine:
        assert len(_figures(ours)) == 3 and (ours.reference_engine is not None) == (kind == "dpo" and not lora)
        assert_close(torch.tensor(_figures(ours)), torch.tensor(_figures(plain)), 1e-4)
        assert_close(ours.engine.state_dict(), dict(plain.model.state_dict()), 1e-3)
        assert_same_bits(again.engine.state_dict(), ours.engine.state_dict())
        assert _figures(again) == _figures(ours)
