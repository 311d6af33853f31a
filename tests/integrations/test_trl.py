# SPDX-License-Identifier: Apache-2.0
"""TRL's trainers with the mixin: what they give without it, and going on to the bit."""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from datasets import Dataset
from transformers import AutoModelForCausalLM

import offload

from ..acceptance.runs import assert_close, assert_same_bits, refused
from . import preferences
from .conftest import Distances
from .test_trainer import settled
from .test_trainer_arguments import NEWEST
from .trainers import IN_MEMORY, as_logged, logged

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


def _own_loop(trainer: Any, steps: int = 3) -> tuple[list[Any], dict[str, torch.Tensor]]:
    """Losses, norms and weights of an engine's own loop with everything in memory: what a batch and its loss are is the
    trainer's, who has no engine."""
    optimizer = trainer.create_optimizer()
    with offload.initialize(trainer.model, optimizer, IN_MEMORY) as engine:
        trainer.model_wrapped, trainer.current_gradient_accumulation_steps = trainer.model, 1
        scheduler = trainer.create_scheduler(steps, engine.optimizer)
        trainer.model.train()
        batches, figures = iter(trainer.get_train_dataloader()), []
        for step in range(steps):
            trainer.state.global_step = step
            [batch], count = trainer.get_batch_samples(batches, 1, torch.device("cpu"))
            loss = trainer.compute_loss(trainer.model, trainer._prepare_inputs(batch), num_items_in_batch=count)
            loss.backward()
            norm = engine.clip_grad_norm_(trainer.args.max_grad_norm)
            engine.step()
            scheduler.step()
            engine.zero_grad()
            figures.append([as_logged(loss.item()), float(norm)])
        return figures, engine.state_dict()


@pytest.mark.parametrize(
    "kind, lora",
    [pytest.param(*case, marks=[] if case == ("sft", True) else [pytest.mark.slow]) for case in CASES],
    ids=[f"{kind}{' with lora' if lora else ''}" for kind, lora in CASES],
)
def test_trainers_do_what_they_do_in_memory(model: Path, tmp_path: Path, distances: Distances, kind: str, lora: bool) -> None:
    plain = preferences.trainer(kind, tmp_path / "plain", model, lora=lora, offloaded=False)
    plain.train()
    ours = preferences.trainer(kind, tmp_path / "ours", model, lora=lora, offloaded=True)
    ours.train()
    again = preferences.trainer(kind, tmp_path / "again", model, lora=lora, offloaded=True)
    shutil.copytree(tmp_path / "ours" / "checkpoint-2", tmp_path / "again" / "checkpoint-2")
    again.train(resume_from_checkpoint=True)
    own = _own_loop(preferences.trainer(kind, tmp_path / "own", model, lora=lora, offloaded=False))
    with ours.engine, again.engine:
        assert len(_figures(ours)) == 3 and (ours.reference_engine is not None) == (kind == "dpo" and not lora)
        assert_close(torch.tensor(_figures(ours)), torch.tensor(_figures(plain)), 1e-4)
        assert_close(ours.engine.state_dict(), dict(plain.model.state_dict()), 1e-3)
        assert_same_bits(again.engine.state_dict(), ours.engine.state_dict())
        assert _figures(again) == _figures(ours)
        assert_same_bits([logged(ours, "loss", "grad_norm"), ours.engine.state_dict()], list(own))
        name = f"TRL's {preferences.KINDS[kind][0].__name__}{', LoRA' if lora else ''}"
        distances.note(name, (_figures(ours), ours.engine.state_dict()), (_figures(plain), plain.model.state_dict()))


@pytest.mark.parametrize(
    "kind", [kind if kind == "sft" else pytest.param(kind, marks=pytest.mark.slow) for kind in preferences.KINDS]
)
def test_adapters_of_the_trainers_own_on_a_model_that_never_was_in_memory(model: Path, tmp_path: Path, kind: str) -> None:
    runs = []
    for deferred in (False, True):
        trainer = preferences.trainer(kind, tmp_path / str(deferred), model, lora=True, offloaded=True, deferred=deferred)
        assert all(parameter.is_meta == deferred for parameter in trainer.model.parameters())
        trainer.train()
        with trainer.engine:
            runs.append([_figures(trainer), trainer.engine.state_dict()])
    assert_same_bits(*runs)


@pytest.mark.parametrize(
    "kind, settings",
    [
        ("dpo", {"precompute_ref_log_probs": True}),
        pytest.param("sft", {"packing": True}, marks=pytest.mark.slow),
        pytest.param("sft", {"completion_only_loss": True}, marks=pytest.mark.slow),
        pytest.param("grpo", {"num_generations": 4, "gradient_accumulation_steps": 2, "beta": 0.1}, marks=pytest.mark.slow),
    ],
    ids=["log-probs before training", "packed", "completions only", "four generations, a reference model"],
)
def test_arguments_do_what_they_do(model: Path, tmp_path: Path, kind: str, settings: dict[str, Any]) -> None:
    others: dict[str, Any] = {}
    if "completion_only_loss" in settings:
        columns = {"prompt": preferences.PAIRS["prompt"], "completion": preferences.PAIRS["chosen"]}
        others["train_dataset"] = Dataset.from_dict(columns)
    for lora in (False, True):
        runs = []
        for offloaded in (False, True):
            folder = tmp_path / f"{lora} {offloaded}"
            trainer = preferences.trainer(kind, folder, model, lora=lora, offloaded=offloaded, settings=settings, **others)
            if "precompute_ref_log_probs" in settings and NEWEST:  # by a model that lies where the engine has it
                assert (getattr(trainer, "engine", None) is not None) == offloaded
            trainer.train()
            runs.append(_figures(trainer))
        with trainer.engine:
            assert len(runs[1]) == 3 and (trainer.reference_engine is not None) == (kind == "grpo" and not lora)
            assert_close(torch.tensor(runs[1]), torch.tensor(runs[0]), 1e-4)


def test_log_probs_of_a_model_without_values_are_refused(model: Path, tmp_path: Path) -> None:
    settings = {"precompute_ref_log_probs": True}
    for lora in (False, True):
        with refused(offload.UsageError, "precompute_ref_log_probs", "outside of deferred_init"):
            preferences.trainer("dpo", tmp_path, model, lora=lora, offloaded=True, deferred=True, settings=settings)


def test_a_reference_model_that_follows_the_policy(model: Path, tmp_path: Path) -> None:
    """And one that never was in memory."""
    runs = []
    for offloaded in (False, True):
        settings = {"sync_ref_model": True, "ref_model_sync_steps": 1}
        folder = tmp_path / str(offloaded)
        trainer = preferences.trainer("dpo", folder, model, lora=False, offloaded=offloaded, settings=settings)
        trainer.train()
        runs.append(_figures(trainer))
    trainer.engine.close()
    assert_close(torch.tensor(runs[1]), torch.tensor(runs[0]), 1e-4)
    figures = []
    for deferred in (False, True):
        with offload.deferred_init() if deferred else contextlib.nullcontext():
            reference = AutoModelForCausalLM.from_pretrained(model)
        trainer = preferences.trainer(
            "dpo", tmp_path / f"given {deferred}", model, lora=False, offloaded=True, deferred=deferred, ref_model=reference
        )
        trainer.train()
        with trainer.engine, trainer.reference_engine:
            figures.append([_figures(trainer), trainer.engine.state_dict()])
    assert_same_bits(*figures)


RANKS = """
import sys, torch
from pathlib import Path
from tests.integrations import preferences
from tests.integrations.trainers import logged
torch.set_num_threads(1)
folder, deferred = Path(sys.argv[1]), sys.argv[2] == "deferred"
trainer = preferences.trainer("sft", folder / sys.argv[2], folder / "model", lora=True, offloaded=True, deferred=deferred)
trainer.train()
weights = trainer.engine.state_dict()
trainer.engine.close()
if trainer.is_world_process_zero():
    torch.save([logged(trainer, "loss", "grad_norm"), weights], folder / f"{sys.argv[2]}.pt")
"""


@pytest.mark.slow
def test_two_ranks(tmp_path: Path) -> None:
    preferences.save_model(tmp_path / "model")
    (tmp_path / "script.py").write_text(RANKS)
    settings = {"PYTHONPATH": str(Path(__file__).parents[2]), "OFFLOAD_ACCELERATOR": "cpu", "OMP_NUM_THREADS": "1"}
    for kind in ("deferred", "in-memory"):
        command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
        command += [str(tmp_path / "script.py"), str(tmp_path), kind]
        subprocess.run(command, env=os.environ | settings, check=True, timeout=300)
    assert_same_bits(torch.load(tmp_path / "deferred.pt"), torch.load(tmp_path / "in-memory.pt"))
