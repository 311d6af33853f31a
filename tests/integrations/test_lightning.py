# SPDX-License-Identifier: Apache-2.0
"""Lightning's Fabric and Trainer on an engine: their scripts, without and with it, and going on to the bit."""

from __future__ import annotations

import logging
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import lightning
import pytest
import torch
from peft import PeftModel
from torch.utils.data import DataLoader
from transformers import AutoModelForCausalLM

import offload
from offload.integrations import fabric as on_fabric, lightning as on_trainer

from ..acceptance.models import llama
from ..acceptance.runs import assert_close, assert_same_bits, refused
from .conftest import Distances
from .test_trainer import settled
from .trainers import ON_NVME, adapted, own_loop, rows

__all__ = ["settled"]
pytestmark = pytest.mark.filterwarnings("ignore")


@pytest.fixture(autouse=True)
def quiet() -> Iterator[None]:
    for name in ("lightning.pytorch", "lightning.fabric"):
        logging.getLogger(name).setLevel(logging.ERROR)
    yield


def on_nvme(tmp_path: Path, **fields: Any) -> dict[str, Any]:
    return {**ON_NVME, "nvme": str(tmp_path / "nvme"), **fields}


def loader() -> Any:
    return DataLoader(rows(24), batch_size=2)  # type: ignore[arg-type]


# ---- Fabric


class Script:
    """Steps of two micro-batches; `config`: of the engine, None without one."""

    def __init__(self, config: Any = None, devices: int = 1) -> None:
        strategy: Any = on_fabric.OffloadStrategy(config) if config is not None else "auto" if devices == 1 else "ddp"
        self.fabric = lightning.Fabric(accelerator="cpu", devices=devices, strategy=strategy)
        self.fabric.launch()
        model = llama()
        self.model, self.optimizer = self.fabric.setup(model, torch.optim.AdamW(model.parameters(), lr=1e-2))
        self.loader = self.fabric.setup_dataloaders(loader())
        self.losses: list[float] = []
        self.engine = getattr(self.fabric.strategy, "engine", None)

    def run(self, first: int, last: int) -> None:
        for number, batch in enumerate(self.loader):
            if first <= number < last:
                with self.fabric.no_backward_sync(self.model, enabled=number % 2 == 0 and self.engine is not None):
                    loss = self.model(**batch).loss
                    self.fabric.backward(loss)
                self.losses.append(loss.item())
                if number % 2:
                    self.fabric.clip_gradients(self.model, self.optimizer, max_norm=0.5)
                    self.optimizer.step()
                    self.optimizer.zero_grad()


def test_fabric(tmp_path: Path, distances: Distances) -> None:
    plain, ours = Script(), Script(on_nvme(tmp_path))
    plain.run(0, 8)
    ours.run(0, 4)
    state = {"model": ours.model, "optimizer": ours.optimizer, "step": 2}
    ours.fabric.save(tmp_path / "saved", state)
    ours.run(4, 8)
    with ours.engine:  # type: ignore[union-attr]
        assert_close(ours.losses, plain.losses)
        assert_close(ours.engine.state_dict(), dict(plain.model.state_dict()))  # type: ignore[union-attr]
        expected = ours.engine.state_dict()  # type: ignore[union-attr]
        distances.note("Fabric", (ours.losses, expected), (plain.losses, plain.model.state_dict()))
    assert_same_bits([ours.losses, expected], list(own_loop(list(loader())[:8])))
    again = Script(on_nvme(tmp_path))
    again.run(0, 2)
    again.losses.clear()
    state = {"model": again.model, "optimizer": again.optimizer, "step": 0}
    again.fabric.load(tmp_path / "saved", state)
    assert state["step"] == 2
    again.run(4, 8)
    with again.engine:  # type: ignore[union-attr]
        assert again.losses == ours.losses[4:]
        assert_same_bits(again.engine.state_dict(), expected)  # type: ignore[union-attr]


def test_fabric_in_other_places_has_the_same_bits(tmp_path: Path) -> None:
    runs = []
    for fields in ({}, {"parameters": "device", "optimizer_states": "device"}):
        script = Script(on_nvme(tmp_path, dtype="fp16", update="backward", **fields))
        script.run(0, 6)
        with script.engine:  # type: ignore[union-attr]
            runs.append([script.losses, script.engine.state_dict()])  # type: ignore[union-attr]
    assert_same_bits(*runs)


def test_fabric_says_what_cannot_be(tmp_path: Path) -> None:
    fabric = lightning.Fabric(accelerator="cpu", devices=1, strategy=on_fabric.OffloadStrategy(on_nvme(tmp_path)))
    fabric.launch()
    model = llama()
    optimizer = torch.optim.AdamW(model.parameters())
    with refused(offload.UsageError, "fabric.setup"):
        fabric.backward(torch.ones(1, requires_grad=True).sum())
    with refused(offload.UsageError, "2 optimizers", "groups"):
        fabric.setup(model, optimizer, torch.optim.AdamW(model.parameters()))
    with refused(offload.UsageError, "at once"):
        fabric.setup_optimizers(optimizer)
    model = fabric.setup(model)
    with fabric.strategy.engine:
        assert torch.isfinite(model(**next(iter(loader()))).loss)
        with refused(offload.UsageError, "has an engine"):
            fabric.setup(llama())


def test_fabric_goes_on_within_an_epoch_of_shuffled_data(tmp_path: Path) -> None:
    stateful = pytest.importorskip("torchdata.stateful_dataloader")

    def run(start: bool) -> tuple[list[float], dict[str, torch.Tensor]]:
        torch.manual_seed(6)
        script = Script(on_nvme(tmp_path))
        data = rows(20)
        sampler = stateful.sampler.RandomSampler(data)
        given = stateful.StatefulDataLoader(data, batch_size=2, sampler=sampler, generator=torch.Generator())
        loader = script.fabric.setup_dataloaders(given)
        state = {"model": script.model, "optimizer": script.optimizer, "loader": loader}
        if not start:
            script.fabric.load(tmp_path / "saved", state)
        for number, batch in enumerate((one for _ in range(2) for one in loader), 0 if start else 4):
            loss = script.model(**batch).loss * torch.rand(()).add(0.5)
            script.fabric.backward(loss)
            script.optimizer.step()
            script.optimizer.zero_grad()
            script.losses.append(loss.item())
            if start and number == 3:
                script.fabric.save(tmp_path / "saved", state)
        with script.engine:  # type: ignore[union-attr]
            return script.losses, script.engine.state_dict()  # type: ignore[union-attr]

    losses, weights = run(True)
    assert_same_bits(list(run(False)), [losses[4:], weights])


# ---- Trainer


class Module(lightning.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.model = llama()
        self.losses: list[float] = []

    def training_step(self, batch: Any, _: int) -> torch.Tensor:
        loss: torch.Tensor = self.model(**batch).loss
        self.losses.append(loss.item())
        return loss

    def validation_step(self, batch: Any, _: int) -> None:
        self.log("valid", self.model(**batch).loss)

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.AdamW(self.parameters(), lr=1e-2)
        scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 0.9**step)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "interval": "step"}}


def trainer_of(folder: Path, config: Any = None, devices: int = 1, every: int = 3) -> Any:
    keep = lightning.pytorch.callbacks.ModelCheckpoint(folder, every_n_train_steps=every, save_top_k=-1, filename="{step}")
    strategy: Any = on_trainer.OffloadStrategy(config) if config is not None else "auto" if devices == 1 else "ddp"
    return lightning.Trainer(
        accelerator="cpu", devices=devices, strategy=strategy, max_steps=12, accumulate_grad_batches=2, gradient_clip_val=0.5,
        logger=False, enable_progress_bar=False, enable_model_summary=False, callbacks=[keep],
        use_distributed_sampler=False,  # which shuffles
    )  # fmt: skip


def test_trainer(tmp_path: Path, distances: Distances) -> None:
    plain, ours, again = Module(), Module(), Module()
    trainer_of(tmp_path / "plain").fit(plain, loader(), loader())
    trainer = trainer_of(tmp_path / "ours", on_nvme(tmp_path))
    trainer.fit(ours, loader(), loader())
    engine = trainer.strategy.engine
    assert_close(ours.losses, plain.losses)
    assert_close(engine.state_dict(), dict(plain.state_dict()))
    distances.note("Lightning's Trainer", (ours.losses, engine.state_dict()), (plain.losses, plain.state_dict()))
    losses, weights = own_loop([*loader(), *loader()], share=0.5, decay=0.9)
    assert_same_bits([ours.losses, engine.state_dict()], [losses, {f"model.{name}": one for name, one in weights.items()}])
    resumed = trainer_of(tmp_path / "again", on_nvme(tmp_path))
    resumed.fit(again, loader(), loader(), ckpt_path=str(tmp_path / "ours" / "step=6.ckpt"))
    with engine, resumed.strategy.engine:
        assert again.losses == ours.losses[12:]  # the second time over the data
        assert_same_bits(resumed.strategy.engine.state_dict(), engine.state_dict())


class Noisy(Module):
    """With a dropout of its own: the random states matter."""

    def training_step(self, batch: Any, index: int) -> torch.Tensor:
        loss: torch.Tensor = super().training_step(batch, index)
        return loss * torch.rand(()).add(0.5)


def shuffled(resumable: bool) -> Any:
    if not resumable:
        return DataLoader(rows(20), batch_size=2, shuffle=True)  # type: ignore[arg-type]
    from torchdata.stateful_dataloader import StatefulDataLoader

    return StatefulDataLoader(rows(20), batch_size=2, shuffle=True)


@pytest.mark.parametrize("resumable", [True, False], ids=["within an epoch", "between epochs"])
def test_trainer_goes_on_over_shuffled_data(tmp_path: Path, resumable: bool) -> None:
    """Ten batches make an epoch of five steps; the saves are at 3, 6, 9 and 12, or at 5 and 10."""
    if resumable:
        pytest.importorskip("torchdata")

    def run(folder: str, file: Path | None = None) -> tuple[list[float], dict[str, torch.Tensor]]:
        trainer = trainer_of(tmp_path / folder, on_nvme(tmp_path), every=3 if resumable else 5)
        torch.manual_seed(5)
        module = Noisy()
        trainer.fit(module, shuffled(resumable), ckpt_path=file)
        with trainer.strategy.engine as engine:
            return module.losses, engine.state_dict()

    losses, weights = run("whole")
    for step in (3, 6, 9) if resumable else (5, 10):
        assert_same_bits(list(run(f"from {step}", tmp_path / "whole" / f"step={step}.ckpt")), [losses[2 * step :], weights])


def test_trainer_validates_and_forgets_what_it_removes(tmp_path: Path) -> None:
    module = Module()
    trainer = trainer_of(tmp_path, on_nvme(tmp_path))
    [found] = trainer.validate(module, loader())
    [expected] = trainer_of(tmp_path).validate(Module(), loader())
    assert abs(found["valid"] - expected["valid"]) < 1e-5
    trainer.fit(module, loader())
    trainer.validate(module, loader())
    with refused(offload.UsageError, "trained already", "ckpt_path"):
        trainer.fit(module, loader())
    with trainer.strategy.engine:
        file = tmp_path / "step=6.ckpt"
        assert file.exists() and (tmp_path / "step=6.ckpt.offload").is_dir()
        trainer.strategy.remove_checkpoint(str(file))
        assert not file.exists() and not (tmp_path / "step=6.ckpt.offload").exists()


def test_one_device_has_the_data_in_the_scripts_order(tmp_path: Path) -> None:
    modules = [Module(), Module()]
    for module, strategy in zip(modules, ("auto", on_trainer.OffloadStrategy(on_nvme(tmp_path))), strict=True):
        trainer = lightning.Trainer(
            accelerator="cpu", devices=1, strategy=strategy, max_steps=3, logger=False, enable_progress_bar=False,
            enable_model_summary=False, enable_checkpointing=False,
        )  # fmt: skip
        trainer.fit(module, loader())
    trainer.strategy.engine.close()
    assert_close(modules[1].losses, modules[0].losses)


def test_a_checkpoint_of_weights_alone_is_lightnings(tmp_path: Path) -> None:
    module = Module()
    trainer = trainer_of(tmp_path, on_nvme(tmp_path))
    trainer.fit(module, loader())
    trainer.save_checkpoint(tmp_path / "weights.ckpt", weights_only=True)
    assert not (tmp_path / "weights.ckpt.offload").exists()
    with trainer.strategy.engine:
        expected = trainer.strategy.engine.state_dict()
        assert_same_bits(dict(Module.load_from_checkpoint(tmp_path / "weights.ckpt").state_dict()), expected)
    other = trainer_of(tmp_path / "other", on_nvme(tmp_path))
    other.validate(Module(), loader(), ckpt_path=str(tmp_path / "weights.ckpt"))
    with other.strategy.engine:
        assert_same_bits(other.strategy.engine.state_dict(), expected)


class ByHand(Module):
    automatic_optimization = False

    def training_step(self, batch: Any, index: int) -> torch.Tensor:
        optimizer: Any = self.optimizers()
        loss = super().training_step(batch, index)
        self.manual_backward(loss)
        if index % 2:
            self.clip_gradients(optimizer, gradient_clip_val=0.5, gradient_clip_algorithm="norm")
            optimizer.step()
            optimizer.zero_grad()
        return loss


@pytest.mark.parametrize("how", ["the last step of an epoch is of fewer", "by hand", "bf16-true"])
def test_trainers_other_ways(tmp_path: Path, how: str) -> None:
    fields: dict[str, Any] = {"max_epochs": 2, "accumulate_grad_batches": 5, "gradient_clip_val": 0.5}
    fields = {"by hand": {"max_steps": 4}, "bf16-true": {"precision": how, "max_steps": 3}}.get(how, fields)
    runs = []
    for strategy in ("auto", on_trainer.OffloadStrategy(on_nvme(tmp_path))):
        module = ByHand() if how == "by hand" else Module()
        trainer = lightning.Trainer(
            accelerator="cpu", devices=1, strategy=strategy, logger=False, enable_progress_bar=False,
            enable_model_summary=False, enable_checkpointing=False, **fields,
        )  # fmt: skip
        trainer.fit(module, loader())
        runs.append(module.losses)
    engine = trainer.strategy.engine
    with engine:
        dtype = torch.bfloat16 if how == "bf16-true" else torch.float32
        assert {parameter.dtype for parameter in module.parameters()} == {dtype}
        if how == "bf16-true":  # masters are fp32 here
            assert_close(runs[1], runs[0], 0.05)
        else:
            assert_close(runs[1], runs[0])


def test_clipping_under_autocast(tmp_path: Path) -> None:
    runs = []
    for strategy in ("auto", on_trainer.OffloadStrategy(on_nvme(tmp_path))):
        module = Module()
        trainer = lightning.Trainer(
            accelerator="cpu", devices=1, strategy=strategy, max_steps=4, precision="bf16-mixed", gradient_clip_val=0.05,
            logger=False, enable_progress_bar=False, enable_model_summary=False, enable_checkpointing=False,
        )  # fmt: skip
        trainer.fit(module, loader())
        runs.append(module.losses)
    trainer.strategy.engine.close()
    assert_close(runs[1], runs[0], 0.02)


def test_gradients_that_another_would_scale_are_refused(tmp_path: Path) -> None:
    """What Lightning does for "16-mixed" on a GPU."""
    from lightning.fabric.plugins import MixedPrecision as OfFabric
    from lightning.pytorch.plugins import MixedPrecision

    scaler = torch.amp.GradScaler("cpu")
    plugins: Any = [MixedPrecision("16-mixed", "cpu", scaler)]
    strategy = on_trainer.OffloadStrategy(on_nvme(tmp_path))
    trainer = lightning.Trainer(accelerator="cpu", devices=1, strategy=strategy, plugins=plugins, logger=False)
    with refused(offload.UsageError, "precision='16-mixed'", "dtype='fp16'"):
        trainer.fit(Module(), loader())
    plugins = [OfFabric("16-mixed", "cpu", scaler)]
    given = on_fabric.OffloadStrategy(on_nvme(tmp_path))
    fabric = lightning.Fabric(accelerator="cpu", devices=1, strategy=given, plugins=plugins)
    fabric.launch()
    model = llama()
    with refused(offload.UsageError, "precision='16-mixed'", "dtype='fp16'"):
        fabric.setup(model, torch.optim.AdamW(model.parameters()))


class Adapted(Module):
    def __init__(self) -> None:
        super().__init__()
        with offload.deferred_init():
            self.model = adapted()

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW([one for one in self.parameters() if one.requires_grad], lr=1e-2)


@pytest.mark.parametrize("kind", [Adapted, Module], ids=["adapters", "the whole"])
def test_the_library_model_that_a_module_holds_is_saved_by_its_own_name(tmp_path: Path, kind: Any) -> None:
    module = kind()
    trainer = trainer_of(tmp_path, on_nvme(tmp_path))
    trainer.fit(module, loader())
    with trainer.strategy.engine as engine:
        for _ in range(2):  # over the first
            module.model.save_pretrained(tmp_path / "saved")
        prompt = rows(1)[0]["input_ids"][None, :4]
        generated = module.model.generate(input_ids=prompt, max_new_tokens=4, do_sample=False)
        expected = {name.removeprefix("model."): value for name, value in engine.state_dict().items()}
        if kind is Module:
            loaded: Any = AutoModelForCausalLM.from_pretrained(tmp_path / "saved")
            with refused(offload.UsageError, "no PEFT adapters"):
                engine.export(tmp_path / "merged", merged=True)
        else:
            loaded = PeftModel.from_pretrained(llama(), tmp_path / "saved")
            engine.export(tmp_path / "merged", merged=True)
    assert_same_bits(dict(loaded.state_dict()), expected)
    assert torch.equal(loaded.eval().generate(input_ids=prompt, max_new_tokens=4, do_sample=False), generated)
    if kind is Adapted:
        merged = AutoModelForCausalLM.from_pretrained(tmp_path / "merged")
        assert_same_bits(dict(merged.state_dict()), dict(loaded.merge_and_unload().state_dict()))


# ---- several devices

RANKS = """
import sys, torch
from pathlib import Path
from tests.integrations.test_lightning import Module, Script, loader, on_nvme, trainer_of
torch.set_num_threads(1)
folder, framework, kind = Path(sys.argv[1]), *sys.argv[2:]
config = None if kind == "plain" else on_nvme(folder)
if framework == "fabric":
    script = Script(config, devices=2)
    state = {"model": script.model, "optimizer": script.optimizer}
    if kind == "again":
        script.fabric.load(folder / "saved", state)
    else:
        script.run(0, 4)
        if kind == "ours":
            script.fabric.save(folder / "saved", state)
    script.run(4, 6)
    losses, engine, model, rank = script.losses[-2:], script.engine, script.model, script.fabric.global_rank
else:
    model, trainer = Module(), trainer_of(folder / kind, config, devices=2)
    trainer.fit(model, loader(), ckpt_path=str(folder / "ours" / "step=6.ckpt") if kind == "again" else None)
    losses, engine, rank = model.losses[-12:], getattr(trainer.strategy, "engine", None), trainer.global_rank
weights = dict(model.state_dict()) if engine is None else engine.state_dict()
if rank == 0:
    torch.save([losses, {name.removeprefix("module."): value for name, value in weights.items()}], folder / f"{kind}.pt")
if engine is not None:
    engine.close()
"""


@pytest.mark.slow
@pytest.mark.parametrize("framework", ["fabric", "trainer"])
def test_two_devices(tmp_path: Path, framework: str) -> None:
    (tmp_path / "script.py").write_text(RANKS)
    settings = {"PYTHONPATH": str(Path(__file__).parents[2]), "OFFLOAD_ACCELERATOR": "cpu", "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    found = {}
    for kind in ("plain", "ours", "again"):
        arguments = [str(tmp_path / "script.py"), str(tmp_path), framework, kind]
        subprocess.run([*command, *arguments], env=os.environ | settings, check=True, timeout=280)
        found[kind] = torch.load(tmp_path / f"{kind}.pt")
    assert_close(found["ours"][0], found["plain"][0])
    assert_close(found["ours"][1], found["plain"][1])
    assert_same_bits(found["again"], found["ours"])
