"""Accelerate's own loop on an engine: accumulation, clipping, saves that go on to the bit, `save_model`, and two ranks."""

from __future__ import annotations

import gc
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from accelerate import Accelerator
from accelerate.state import AcceleratorState, GradientState, PartialState
from torch.utils.data import DataLoader
from transformers import AutoModelForCausalLM

import offload
from offload.integrations.accelerate import attach, prepare

from ..acceptance.models import llama
from ..acceptance.runs import assert_close, assert_same_bits, refused
from .conftest import Distances
from .test_trainer import settled
from .trainers import ON_NVME, adapted, own_loop, rows

__all__ = ["settled"]


@pytest.fixture(autouse=True)
def fresh() -> Iterator[None]:
    """Accelerate keeps its state in the process."""
    yield
    for state in (AcceleratorState, GradientState, PartialState):
        state._shared_state.clear()
    gc.collect()


class Loop:
    """A script: three steps of two micro-batches, from `first` on; `config`: of the engine, None without one."""

    def __init__(self, model: Any, config: Any, *, known: bool = True, **options: Any) -> None:
        """`known`: whether the accelerator is told of the engine."""
        self.accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2, **options)
        torch.manual_seed(4)
        self.optimizer: Any = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-2)
        self.scheduler: Any = torch.optim.lr_scheduler.LambdaLR(self.optimizer, lambda step: 0.9**step)
        self.engine = None
        if config is not None:
            self.engine = (
                prepare(self.accelerator, model, self.optimizer, config)
                if known
                else offload.initialize(model, self.optimizer, config)
            )
            self.optimizer = self.engine.optimizer
        loader = DataLoader(rows(24), batch_size=2)  # type: ignore[arg-type]
        self.model, self.optimizer, self.loader, self.scheduler = self.accelerator.prepare(
            model, self.optimizer, loader, self.scheduler
        )
        self.losses: list[float] = []

    def run(self, first: int, last: int) -> None:
        for number, batch in enumerate(self.loader):
            if not first <= number < last:
                continue
            with self.accelerator.accumulate(self.model):
                loss = self.model(**batch).loss
                self.accelerator.backward(loss)
                if self.accelerator.sync_gradients:
                    self.accelerator.clip_grad_norm_(self.model.parameters(), 0.5)
                self.optimizer.step()
                self.scheduler.step()
                self.optimizer.zero_grad()
            self.losses.append(loss.item())


def plain_batches() -> list[Any]:
    return list(DataLoader(rows(24), batch_size=2))  # type: ignore[arg-type]


def on_nvme(tmp_path: Path, **fields: Any) -> dict[str, Any]:
    return {**ON_NVME, "nvme": str(tmp_path / "nvme"), **fields}


def test_the_loop_its_saves_and_what_is_saved(tmp_path: Path, distances: Distances) -> None:
    plain, ours = Loop(llama(), None), Loop(llama(), on_nvme(tmp_path))
    for loop in (plain, ours):
        loop.run(0, 4)
        loop.accelerator.save_state(str(tmp_path / f"{loop.engine is None}"))
        loop.run(4, 8)
    assert ours.engine is not None and ours.model is ours.engine.module
    assert ours.accelerator.unwrap_model(ours.model) is ours.engine.module
    assert_close(ours.losses, plain.losses)
    assert_close(ours.engine.state_dict(), dict(plain.model.state_dict()))
    distances.note("Accelerate", (ours.losses, ours.engine.state_dict()), (plain.losses, plain.model.state_dict()))
    assert_same_bits([ours.losses, ours.engine.state_dict()], list(own_loop(plain_batches()[:8], share=0.5, decay=0.9)))
    assert not list((tmp_path / "False").glob("*.safetensors"))
    ours.accelerator.save_model(ours.model, str(tmp_path / "saved"))
    ours.engine.module.config.save_pretrained(tmp_path / "saved")
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "saved")
    assert_same_bits(dict(loaded.state_dict()), ours.engine.state_dict())
    again = Loop(llama(), on_nvme(tmp_path))
    again.run(0, 2)  # what it did before is gone
    again.losses.clear()
    again.accelerator.load_state(str(tmp_path / "False"))
    again.run(4, 8)
    assert again.engine is not None and again.losses == ours.losses[4:]
    assert_same_bits(again.engine.state_dict(), ours.engine.state_dict())
    for loop in (ours, again):
        loop.engine.close()  # type: ignore[union-attr]


@pytest.mark.parametrize("how", ["mixed precision", "fp16", "adapters", "in backward"])
def test_placements_are_the_same_to_the_bit(tmp_path: Path, how: str) -> None:
    fields = {"fp16": {"dtype": "fp16"}, "in backward": {"update": "backward"}}.get(how, {})
    options = {"mixed_precision": "bf16"} if how == "mixed precision" else {}
    runs = []
    for places in ({}, {"parameters": "device", "optimizer_states": "device"}):
        loop = Loop(adapted() if how == "adapters" else llama(), on_nvme(tmp_path, **fields, **places), **options)
        loop.run(0, 8)
        with loop.engine:  # type: ignore[union-attr]
            runs.append([loop.losses, loop.engine.state_dict()])  # type: ignore[union-attr]
            assert (loop.engine.config.dtype == "bf16") == (how == "mixed precision")  # type: ignore[union-attr]
    assert_same_bits(*runs)


def test_an_engine_as_it_is_and_its_saves_once_the_accelerator_knows_it(tmp_path: Path) -> None:
    ours = Loop(llama(), on_nvme(tmp_path), known=False)
    ours.run(0, 4)
    assert ours.accelerator.unwrap_model(ours.model) is ours.engine.module  # type: ignore[union-attr]
    with refused(offload.ParameterAccessError, "Accelerator.save_state()", "attach(accelerator, engine)"):
        ours.accelerator.save_state(str(tmp_path / "refused"))
    attach(ours.accelerator, ours.engine)  # type: ignore[arg-type]
    ours.accelerator.save_state(str(tmp_path / "state"))
    ours.run(4, 8)
    again = Loop(llama(), on_nvme(tmp_path), known=False)
    attach(again.accelerator, again.engine)  # type: ignore[arg-type]
    again.accelerator.load_state(str(tmp_path / "state"))
    again.run(4, 8)
    with ours.engine, again.engine:  # type: ignore[union-attr]
        expected = list(own_loop(plain_batches()[:8], share=0.5, decay=0.9))
        assert_same_bits([ours.losses, ours.engine.state_dict()], expected)  # type: ignore[union-attr]
        assert_same_bits([again.losses, again.engine.state_dict()], [ours.losses[4:], expected[1]])  # type: ignore[union-attr]


def test_another_model_beside_it_is_accelerates_own(tmp_path: Path) -> None:
    loop = Loop(llama(), on_nvme(tmp_path))
    other = loop.accelerator.prepare(torch.nn.Linear(3, 3))
    assert loop.engine is not None and set(loop.accelerator.get_state_dict(other)) == {"weight", "bias"}
    with loop.engine, loop.accelerator.no_sync(other):
        loop.accelerator.backward(other(torch.ones(1, 3)).sum())
    assert other.weight.grad is not None


RANKS = """
import sys, torch
from pathlib import Path
from tests.acceptance.models import llama
from tests.integrations.test_accelerate import Loop, on_nvme
torch.set_num_threads(1)
folder, kind = Path(sys.argv[1]), sys.argv[2]
loop = Loop(llama(), None if kind == "plain" else on_nvme(folder))
loop.run(0, 6)
state = loop.accelerator.unwrap_model(loop.model).state_dict() if kind == "plain" else loop.engine.state_dict()
if loop.accelerator.is_main_process:
    torch.save([loop.losses, dict(state)], folder / f"{kind}.pt")
if loop.engine is not None:
    loop.engine.close()
"""


@pytest.mark.slow
def test_two_ranks(tmp_path: Path) -> None:
    (tmp_path / "script.py").write_text(RANKS)
    environment = os.environ | {
        "PYTHONPATH": str(Path(__file__).parents[2]),
        "OFFLOAD_ACCELERATOR": "cpu",
        "OMP_NUM_THREADS": "1",
    }
    found = {}
    for kind in ("plain", "ours"):
        command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
        subprocess.run([*command, str(tmp_path / "script.py"), str(tmp_path), kind], env=environment, check=True, timeout=300)
        found[kind] = torch.load(tmp_path / f"{kind}.pt")
    assert_close(found["ours"][0], found["plain"][0])
    assert_close(found["ours"][1], found["plain"][1])
