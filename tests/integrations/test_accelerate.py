# SPDX-License-Identifier: Apache-2.0
"""Accelerate's own loop on an engine: accumulation, clipping, saves that go on to the bit, `save_model`, and two ranks."""

from __future__ import annotations

import copy
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
from safetensors.torch import load_file
from torch.utils.data import DataLoader
from transformers import AutoModelForCausalLM

import offload
from offload.integrations.accelerate import attach, prepare

from ..acceptance.models import llama
from ..acceptance.runs import assert_close, assert_same_bits, refused
from .conftest import Distances
from .test_trainer import settled
from .trainers import IN_MEMORY, ON_NVME, adapted, own_loop, rows

__all__ = ["settled"]


@pytest.fixture(autouse=True)
def fresh() -> Iterator[None]:
    """Accelerate keeps its state in the process: also that of other modules' tests."""
    _forget()
    yield
    _forget()
    gc.collect()


def _forget() -> None:
    for state in (AcceleratorState, GradientState, PartialState):
        state._shared_state.clear()


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


@pytest.mark.parametrize("how", ["fp32", "autocast", "bf16"])
def test_an_engine_as_it_is(tmp_path: Path, how: str) -> None:
    """Made by `offload.initialize`: the accelerator finds it when it prepares the model."""
    options: dict[str, Any] = {} if how == "fp32" else {"mixed_precision": "bf16"}
    fields = {"dtype": "bf16"} if how == "bf16" else {}
    ours = Loop(llama(), on_nvme(tmp_path, **fields), known=False, **options)
    ours.run(0, 4)
    assert ours.accelerator.unwrap_model(ours.model) is ours.engine.module  # type: ignore[union-attr]
    ours.accelerator.save_state(str(tmp_path / "state"))
    assert (tmp_path / "state" / "offload").is_dir() and not list((tmp_path / "state").glob("*.safetensors"))
    ours.run(4, 8)
    again = Loop(llama(), on_nvme(tmp_path, **fields), known=False, **options)
    again.accelerator.load_state(str(tmp_path / "state"))
    again.run(4, 8)
    with ours.engine, again.engine:  # type: ignore[union-attr]
        expected = ours.engine.state_dict()  # type: ignore[union-attr]
        if how == "fp32":
            assert_same_bits([ours.losses, expected], list(own_loop(plain_batches()[:8], share=0.5, decay=0.9)))
        assert_same_bits([again.losses, again.engine.state_dict()], [ours.losses[4:], expected])  # type: ignore[union-attr]
        ours.accelerator.save_model(ours.model, str(tmp_path / "saved"))
        assert_same_bits(load_file(tmp_path / "saved" / "model.safetensors"), expected)


def test_two_engines_under_one_accelerators_autocast(tmp_path: Path) -> None:
    accelerator, models = Accelerator(cpu=True, mixed_precision="bf16"), [llama(), llama()]
    engines = [offload.initialize(model, torch.optim.AdamW(model.parameters()), on_nvme(tmp_path)) for model in models]
    with engines[0], engines[1]:
        engines[1].load_state_dict({name: value + 1 for name, value in engines[0].state_dict().items()})
        accelerator.prepare(*models)
        accelerator.save_state(str(tmp_path / "state"))
        saved = [engine.state_dict() for engine in engines]
        for engine in engines:
            engine.load_state_dict({name: torch.zeros_like(value) for name, value in saved[0].items()})
        accelerator.load_state(str(tmp_path / "state"))
        assert_same_bits([engine.state_dict() for engine in engines], saved)


def test_autocast_around_an_engine_is_accelerates(tmp_path: Path) -> None:
    plain = Loop(llama(), None, mixed_precision="bf16")
    ours = Loop(llama(), on_nvme(tmp_path), known=False, mixed_precision="bf16")
    plain.run(0, 4)
    ours.run(0, 4)
    with ours.engine:  # type: ignore[union-attr]
        assert_close(ours.losses, plain.losses, 1e-2)


def test_an_engine_that_was_made_after_the_model_was_prepared(tmp_path: Path) -> None:
    accelerator, model = Accelerator(cpu=True), llama()
    accelerator.prepare(model)
    with offload.initialize(model, torch.optim.AdamW(model.parameters()), on_nvme(tmp_path)) as engine:
        with refused(offload.ParameterAccessError, "Accelerator.save_state()", "attach(accelerator, engine)"):
            accelerator.save_state(str(tmp_path / "refused"))
        attach(accelerator, engine)
        accelerator.save_state(str(tmp_path / "state"))
        assert (tmp_path / "state" / "offload").is_dir()


def test_an_optimizer_that_the_accelerator_has_wrapped_is_named_and_stays(tmp_path: Path) -> None:
    accelerator, model = Accelerator(cpu=True), llama()
    optimizer = torch.optim.AdamW(model.parameters())
    wrapped = accelerator.prepare(optimizer)
    groups = optimizer.param_groups
    with refused(offload.ConfigError, "AcceleratedOptimizer", "wraps another, AdamW", "before"):
        offload.initialize(model, wrapped, on_nvme(tmp_path))
    assert optimizer.param_groups is groups and wrapped.param_groups is groups
    assert [id(one) for one in groups[0]["params"]] == [id(one) for one in model.parameters()]


def test_a_precision_that_the_engine_has_not_is_named(tmp_path: Path) -> None:
    model = llama()
    with offload.initialize(model, torch.optim.AdamW(model.parameters()), on_nvme(tmp_path)) as engine:
        accelerator = Accelerator(cpu=True, mixed_precision="bf16")
        with refused(offload.UsageError, "mixed_precision='bf16'", "Config(dtype='bf16')"):
            attach(accelerator, engine)


def test_a_copy_and_a_model_without_its_engine_are_not_prepared(tmp_path: Path) -> None:
    model = llama()
    engine = offload.initialize(model, torch.optim.AdamW(model.parameters()), IN_MEMORY)
    with engine, engine.gathered(model.parameters()):
        copied = copy.deepcopy(model)
    assert Accelerator(cpu=True).prepare(copied) is copied and not getattr(model, "_is_accelerate_prepared", False)


def test_another_model_beside_it_is_accelerates_own(tmp_path: Path) -> None:
    loop = Loop(llama(), on_nvme(tmp_path))
    other = loop.accelerator.prepare(torch.nn.Linear(3, 3))
    assert loop.engine is not None and set(loop.accelerator.get_state_dict(other)) == {"weight", "bias"}
    with loop.engine, loop.accelerator.no_sync(other):
        loop.accelerator.backward(other(torch.ones(1, 3)).sum())
    assert other.weight.grad is not None


def test_two_engines_under_one_accelerator(tmp_path: Path) -> None:
    """A discriminator beside a generator, say: clipped, saved and loaded each."""
    accelerator, models = Accelerator(cpu=True), [llama(), llama()]
    engines = [prepare(accelerator, model, torch.optim.AdamW(model.parameters()), on_nvme(tmp_path)) for model in models]
    other = torch.nn.Linear(2, 2)
    with engines[0], engines[1]:
        assert all(accelerator.prepare(model) is model for model in models)
        accelerator.prepare(other)
        batch = plain_batches()[0]
        accelerator.backward(models[0](**batch).loss + 2 * models[1](**batch).loss)
        norms = [float(accelerator.clip_grad_norm_(model.parameters(), 0.5)) for model in models]
        assert_close(norms[1], 2 * norms[0])
        engines[1].step()  # the other's gradients are dropped
        for engine in engines:
            engine.zero_grad()
        accelerator.save_state(str(tmp_path / "state"))
        saved = [engine.state_dict() for engine in engines]
        assert not torch.equal(saved[0]["lm_head.weight"], saved[1]["lm_head.weight"])
        for model, engine in zip(models, engines, strict=True):
            accelerator.backward(model(**batch).loss)
            engine.step()
            engine.zero_grad()
        with torch.no_grad():
            before = other.weight.clone()
            other.weight.zero_()
        accelerator.load_state(str(tmp_path / "state"))
        assert_same_bits([engine.state_dict() for engine in engines], saved)
        assert torch.equal(other.weight, before)


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
