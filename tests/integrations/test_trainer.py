# SPDX-License-Identifier: Apache-2.0
"""Trainer on an engine: what it does elsewhere, with the engine's own bits, going on to the bit from its checkpoints."""

from __future__ import annotations

import gc
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from peft import PeftModel
from transformers import AutoModelForCausalLM, Trainer, TrainerCallback

import offload
from offload.integrations.settings import settings_of
from offload.integrations.transformers import OffloadMixin, OffloadTrainer, enable

from ..acceptance.models import llama
from ..acceptance.runs import assert_close, assert_same_bits, refused
from .conftest import Distances
from .trainers import ON_NVME, STEPS, adapted, arguments, as_logged, logged, offloaded, plain, rows

pytestmark = [pytest.mark.filterwarnings("ignore::UserWarning"), pytest.mark.filterwarnings("ignore::FutureWarning")]


@pytest.fixture(autouse=True, scope="module")
def settled() -> Iterator[None]:
    threads, accelerator = torch.get_num_threads(), os.environ.get("OFFLOAD_ACCELERATOR")
    os.environ["OFFLOAD_ACCELERATOR"] = "cpu"
    torch.set_num_threads(1)
    transformers.utils.logging.set_verbosity_error()
    gc.freeze()  # Accelerate collects garbage before each run
    yield
    gc.unfreeze()
    torch.set_num_threads(threads)
    os.environ.pop("OFFLOAD_ACCELERATOR") if accelerator is None else os.environ.update(OFFLOAD_ACCELERATOR=accelerator)


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    """A whole run with everything on NVMe, with evaluations and checkpoints 2, 4 and 6."""
    trainer = offloaded(tmp_path_factory.mktemp("trained"), eval_strategy="steps", eval_steps=2)
    trainer.train()
    yield trainer
    trainer.engine.close()


@pytest.fixture(scope="module")
def trained_adapters(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    trainer = offloaded(tmp_path_factory.mktemp("adapters"), adapted())
    trainer.train()
    yield trainer
    trainer.engine.close()


def folder_of(trainer: Any) -> Path:
    return Path(trainer.args.output_dir)


def continued(trainer: Any, tmp_path: Path, step: int, model: Any = None) -> Any:
    """A new process's Trainer, so to say, that goes on from one checkpoint of a run."""
    folder = tmp_path / "run"
    shutil.copytree(folder_of(trainer) / f"checkpoint-{step}", folder / f"checkpoint-{step}")
    fields = {"eval_strategy": trainer.args.eval_strategy, "eval_steps": trainer.args.eval_steps}
    again = offloaded(folder, model, **fields)
    again.train(resume_from_checkpoint=True)
    return again


def test_it_is_the_engines_own_loop_to_the_bit(trained: Any, tmp_path: Path) -> None:
    """The batches, the scale of the loss and the scheduler are Trainer's; everything else is written out here."""
    trainer = plain(tmp_path)
    batches = [trainer._prepare_inputs(batch) for batch in trainer.get_train_dataloader()]
    model = llama()
    trainer.model = model
    optimizer = trainer.create_optimizer()
    with offload.initialize(model, optimizer, {"parameters": "device", "optimizer_states": "device"}) as engine:
        scheduler = trainer.create_scheduler(STEPS, engine.optimizer)
        losses, norms = [], []
        model.train()
        for step in range(STEPS):
            pair = batches[2 * step : 2 * step + 2]
            items = int(trainer._get_num_items_in_batch(pair, torch.device("cpu")))  # counted otherwise by other versions
            parts = []
            for batch in pair:
                loss = model(**batch, num_items_in_batch=torch.tensor(items)).loss
                loss.backward()
                parts.append(loss.detach())
            norms.append(float(torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)))
            engine.step()
            scheduler.step()
            engine.zero_grad()
            losses.append((torch.tensor(0.0) + parts[0] + parts[1]).item())
        assert_same_bits(trained.engine.state_dict(), engine.state_dict())
    assert logged(trained, "loss") == [[as_logged(loss)] for loss in losses]
    assert logged(trained, "grad_norm") == [[norm] for norm in norms]


def test_it_is_a_plain_trainer_within_rounding(trained: Any, tmp_path: Path, distances: Distances) -> None:
    trainer = plain(tmp_path, eval_strategy="steps", eval_steps=2)
    trainer.train()
    assert_close(trained.engine.state_dict(), dict(trainer.model.state_dict()))
    ours, theirs = (logged(one, "loss", "grad_norm") for one in (trained, trainer))
    distances.note("Trainer", (ours, trained.engine.state_dict()), (theirs, trainer.model.state_dict()))
    for names in (["loss", "grad_norm", "learning_rate"], ["eval_loss", "epoch"]):
        ours, theirs = logged(trained, *names), logged(trainer, *names)
        assert len(ours) == len(theirs) > 2
        assert_close(torch.tensor(ours), torch.tensor(theirs), 1e-4)


@pytest.mark.parametrize("step", [2, 4])
def test_it_goes_on_to_the_bit(trained: Any, tmp_path: Path, step: int) -> None:
    again = continued(trained, tmp_path, step)
    with again.engine:
        assert logged(again, "loss", "grad_norm") == logged(trained, "loss", "grad_norm")
        assert logged(again, "eval_loss") == logged(trained, "eval_loss")
        assert_same_bits(again.engine.state_dict(), trained.engine.state_dict())


def test_adapters_go_on_to_the_bit(trained_adapters: Any, tmp_path: Path) -> None:
    """Dropout too: the random states are Trainer's."""
    again = continued(trained_adapters, tmp_path, 2, adapted())
    with again.engine:
        assert logged(again, "loss", "grad_norm") == logged(trained_adapters, "loss", "grad_norm")
        assert_same_bits(again.engine.state_dict(), trained_adapters.engine.state_dict())


def test_what_is_saved_is_what_the_libraries_load(trained: Any, trained_adapters: Any, tmp_path: Path) -> None:
    trained.save_model()
    folder = folder_of(trained)
    assert {"config.json", "generation_config.json", "model.safetensors", "training_args.bin"} <= set(os.listdir(folder))
    assert not [name for name in os.listdir(folder) if name.startswith(".")]
    for saved in (folder, folder / f"checkpoint-{STEPS}"):
        assert_same_bits(dict(AutoModelForCausalLM.from_pretrained(saved).state_dict()), trained.engine.state_dict())
    trained_adapters.save_model(str(tmp_path / "adapter"))
    loaded = PeftModel.from_pretrained(llama(), tmp_path / "adapter")
    found = {name: value for name, value in trained_adapters.engine.state_dict().items() if "lora_" in name}
    assert_same_bits({name: loaded.state_dict()[name] for name in found}, found)


def test_logs_have_memory_and_links(trained: Any) -> None:
    for line in trained.state.log_history[1:-1]:
        if "loss" in line:
            assert line["offload/host_gib"] > 0 and line["offload/nvme_read_gb"] >= 0 and "offload/adam_hidden" in line


def test_the_figures_reach_tensorboard(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Through the callback of Transformers, which has a prefix for what is logged in training."""
    accumulator = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    monkeypatch.setenv("TENSORBOARD_LOGGING_DIR", str(tmp_path / "events"))
    trainer = offloaded(tmp_path / "run", report_to=["tensorboard"], save_strategy="no", max_steps=2)
    trainer.train()
    trainer.engine.close()
    [folder] = {path.parent for path in (tmp_path / "events").rglob("events.*")}
    events = accumulator.EventAccumulator(str(folder))
    events.Reload()
    found = {name: events.Scalars(name)[-1].value for name in events.Tags()["scalars"]}
    assert found["train/offload/host_gib"] > 0 and found["train/offload/nvme_read_gb"] > 0
    assert {"train/loss", "train/grad_norm", "train/offload/nvme_write_gb", "train/offload/adam_hidden"} <= set(found)


WANDB = """
import json, sys
from pathlib import Path
import wandb
from tests.integrations.trainers import offloaded
trainer = offloaded(Path(sys.argv[1]) / "run", report_to=["wandb"], save_strategy="no", max_steps=2)
trainer.train()
print(json.dumps({name: value for name, value in dict(wandb.run.summary).items() if isinstance(value, float)}))
trainer.engine.close()
wandb.finish()
"""


def test_the_figures_reach_wandb(tmp_path: Path) -> None:
    """In a process of its own: wandb takes over what a process prints and logs."""
    pytest.importorskip("wandb")
    settings = {"WANDB_MODE": "offline", "WANDB_SILENT": "true", "WANDB_DIR": str(tmp_path), "OFFLOAD_ACCELERATOR": "cpu"}
    settings["PYTHONPATH"] = os.pathsep.join([str(Path(__file__).parents[2]), os.environ.get("PYTHONPATH", "")])
    command = [sys.executable, "-c", WANDB, str(tmp_path)]
    done = subprocess.run(command, env=os.environ | settings, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr[-3000:]
    found = json.loads(next(line for line in done.stdout.splitlines() if line.startswith('{"')))
    assert {"train/loss", "train/offload/host_gib", "train/offload/nvme_read_gb", "train/offload/nvme_write_gb"} <= set(found)


def test_evaluation_prediction_and_generation_before_training(tmp_path: Path) -> None:
    ours, theirs = offloaded(tmp_path / "ours"), plain(tmp_path / "theirs")
    assert_close(torch.tensor(ours.evaluate()["eval_loss"]), torch.tensor(theirs.evaluate()["eval_loss"]))
    with ours.engine:
        assert_close(torch.tensor(ours.predict(rows(4)).predictions), torch.tensor(theirs.predict(rows(4)).predictions))
        prompt = rows(1)[0]["input_ids"][None, :4]
        generated = [one.model.generate(prompt, max_new_tokens=4, do_sample=False) for one in (ours, theirs)]
        assert torch.equal(*generated)
        ours.train()
        theirs.train()
        assert_close(ours.engine.state_dict(), dict(theirs.model.state_dict()))


class Watching(TrainerCallback):
    def __init__(self) -> None:
        self.seen: list[str] = []

    def on_save(self, args: Any, state: Any, control: Any, **others: Any) -> None:
        self.seen = sorted(name for name in os.listdir(args.output_dir) if name.startswith("checkpoint"))


def test_a_limit_of_checkpoints_and_the_best_of_them(tmp_path: Path) -> None:
    """A learning rate with which it gets worse: the best is not the last."""
    watching = Watching()
    fields = {"eval_strategy": "steps", "eval_steps": 2, "load_best_model_at_end": True, "save_total_limit": 1}
    trainer = offloaded(tmp_path, learning_rate=3.0, lr_scheduler_type="constant", **fields)
    trainer.add_callback(watching)
    trainer.train()
    with trainer.engine:
        losses = {line["step"]: line["eval_loss"] for line in trainer.state.log_history if "eval_loss" in line}
        best = min(losses, key=losses.__getitem__)
        assert best < STEPS and trainer.state.best_model_checkpoint.endswith(f"checkpoint-{best}")
        assert watching.seen == [f"checkpoint-{best}", f"checkpoint-{STEPS}"]
        assert [name for name in os.listdir(tmp_path) if name.startswith("checkpoint")] == [f"checkpoint-{best}"]
        assert trainer.evaluate()["eval_loss"] == losses[best]


def test_the_best_where_only_models_are_saved(tmp_path: Path) -> None:
    fields = {"eval_strategy": "steps", "eval_steps": 2, "load_best_model_at_end": True, "save_only_model": True}
    trainer = offloaded(tmp_path, adapted(), learning_rate=3.0, lr_scheduler_type="constant", **fields)
    trainer.train()
    with trainer.engine:
        losses = {line["step"]: line["eval_loss"] for line in trainer.state.log_history if "eval_loss" in line}
        assert not (tmp_path / "checkpoint-2" / "offload").exists()
        assert trainer.evaluate()["eval_loss"] == min(losses.values())
    with refused(offload.UsageError, "checkpoint-2", "save_only_model"):
        offloaded(tmp_path, adapted()).train(resume_from_checkpoint=str(tmp_path / "checkpoint-2"))
    with refused(offload.UsageError, "no checkpoint to go on from"):
        offloaded(tmp_path, adapted()).train(resume_from_checkpoint=True)


@pytest.mark.parametrize("made", ["mixin", "enabled"])
def test_the_other_ways_to_have_it(trained: Any, tmp_path: Path, made: str) -> None:
    class Own(Trainer):
        def compute_loss(self, model: Any, inputs: Any, *args: Any, **keywords: Any) -> Any:
            self.used = True
            return super().compute_loss(model, inputs, *args, **keywords)

    class Mixed(OffloadMixin, Own):
        pass

    config = offload.Config(**ON_NVME, nvme=str(tmp_path / "nvme"))  # type: ignore[arg-type]
    if made == "mixin":
        trainer: Any = Mixed(model=llama(), args=arguments(tmp_path), train_dataset=rows(), offload=config)
    else:
        trainer = enable(Own(model=llama(), args=arguments(tmp_path), train_dataset=rows()), config)
    trainer.train()
    with trainer.engine:
        assert trainer.used and isinstance(trainer, Own) and isinstance(trainer, OffloadMixin)
        assert_same_bits(trainer.engine.state_dict(), trained.engine.state_dict())


def test_a_model_that_never_was_in_memory(tmp_path: Path) -> None:
    llama().save_pretrained(tmp_path / "weights")
    with offload.deferred_init():
        model = adapted(AutoModelForCausalLM.from_pretrained(tmp_path / "weights"))
    trainer = offloaded(tmp_path / "ours", model)
    trainer.train()
    other = offloaded(tmp_path / "theirs", adapted(AutoModelForCausalLM.from_pretrained(tmp_path / "weights")))
    other.train()
    with trainer.engine, other.engine:
        assert logged(trainer, "loss") == logged(other, "loss")
        assert_same_bits(trainer.engine.state_dict(), other.engine.state_dict())


@pytest.mark.parametrize(
    "fields, config",
    [
        ({"bf16": True}, {}),
        ({"fp16": True}, {}),
        ({}, {"dtype": "fp16"}),
        ({"gradient_checkpointing": True}, {}),
        ({}, {"update": "backward"}),
        ({"max_grad_norm": 0}, {"update": "backward"}),
    ],
    ids=["bf16", "fp16", "fp16 by the config", "checkpointing", "in backward", "in backward, not clipped"],
)
def test_placements_are_the_same_to_the_bit(tmp_path: Path, fields: dict[str, Any], config: dict[str, Any]) -> None:
    runs, losses = [], []
    for name, places in (("nvme", {}), ("device", {"parameters": "device", "optimizer_states": "device"})):
        trainer = offloaded(tmp_path / name, config={**config, **places}, **fields, save_strategy="no")
        trainer.train()
        with trainer.engine:
            assert trainer.engine.config.dtype == next(
                (name for name in ("bf16", "fp16") if fields.get(name)), config.get("dtype")
            )
            losses.append(logged(trainer, "loss"))
            runs.append([losses[-1], logged(trainer, "grad_norm"), trainer.engine.state_dict()])
    assert_same_bits(*runs)
    reference = plain(tmp_path / "plain", save_strategy="no", max_grad_norm=fields.get("max_grad_norm", 0.5))
    reference.train()
    assert_close(torch.tensor(losses[0]), torch.tensor(logged(reference, "loss")), 0.02)


def test_a_batch_size_is_found(tmp_path: Path) -> None:
    class Small(OffloadTrainer):
        def compute_loss(self, model: Any, inputs: Any, *args: Any, **keywords: Any) -> Any:
            loss = super().compute_loss(model, inputs, *args, **keywords)
            if len(inputs["input_ids"]) > 2 and self.state.global_step == 1:
                raise RuntimeError("DefaultCPUAllocator: can't allocate memory")
            return loss

    config = {**ON_NVME, "nvme": str(tmp_path / "nvme")}
    fields = {"auto_find_batch_size": True, "per_device_train_batch_size": 4, "save_strategy": "no"}
    trainer = Small(model=llama(), args=arguments(tmp_path, **fields), train_dataset=rows(), offload=config)
    trainer.train()
    with trainer.engine:
        assert trainer._train_batch_size == 2 and trainer.state.global_step == STEPS
        assert trainer.engine.stats()["steps"] == STEPS + 2  # one with 4, one with 3


RANKS = """
import sys, torch, transformers
from pathlib import Path
from tests.integrations.trainers import adapted, logged, offloaded, plain
torch.set_num_threads(1)
transformers.utils.logging.set_verbosity_error()
folder, kind = Path(sys.argv[1]), sys.argv[2]
if kind == "plain":
    trainer = plain(folder / kind)
    trainer.train()
    weights = trainer.model.state_dict()
else:
    trainer = offloaded(folder / kind)
    trainer.train(resume_from_checkpoint=True if kind == "again" else None)
    weights = trainer.engine.state_dict()
    trainer.engine.close()
if trainer.is_world_process_zero():
    torch.save([logged(trainer, "loss", "grad_norm"), dict(weights)], folder / f"{kind}.pt")
"""


@pytest.mark.slow
def test_two_ranks(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(RANKS)
    root = str(Path(__file__).parents[2])
    environment = os.environ | {"PYTHONPATH": root, "OFFLOAD_ACCELERATOR": "cpu", "OMP_NUM_THREADS": "1"}

    def run(kind: str) -> Any:
        command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
        subprocess.run([*command, str(script), str(tmp_path), kind], env=environment, check=True, timeout=300)
        return torch.load(tmp_path / f"{kind}.pt")

    ours = run("ours")
    theirs = run("plain")
    assert_close(torch.tensor(ours[0]), torch.tensor(theirs[0]), 1e-4)
    assert_close(ours[1], theirs[1])
    shutil.copytree(tmp_path / "ours" / "checkpoint-4", tmp_path / "again" / "checkpoint-4")
    assert_same_bits(run("again"), ours)


@pytest.mark.slow
def test_blocks_are_compiled(tmp_path: Path) -> None:
    trainer = offloaded(tmp_path, save_strategy="no", torch_compile=True, max_steps=3)
    trainer.train()
    with trainer.engine:
        layers = trainer.model.model.layers
        assert all(layer._compiled_call_impl is not None for layer in layers) and trainer.model._compiled_call_impl is None
        other = plain(tmp_path / "plain", save_strategy="no", max_steps=3)
        other.train()
        assert_close(torch.tensor(logged(trainer, "loss")), torch.tensor(logged(other, "loss")), 1e-3)


def test_evaluation_in_16_bits_is_that_of_training(tmp_path: Path) -> None:
    trainer = offloaded(tmp_path / "bf16", bf16=True, bf16_full_eval=True, save_strategy="no")
    first = trainer.evaluate()["eval_loss"]
    trainer.train()
    with trainer.engine:
        assert trainer.evaluate()["eval_loss"] < first and trainer.args.bf16_full_eval
    other = offloaded(tmp_path / "fp32", bf16_full_eval=True)
    with refused(offload.UsageError, "bf16_full_eval", "bf16=True"):
        other.evaluate()
    other.engine.close()


def test_one_that_has_trained_is_not_enabled(tmp_path: Path) -> None:
    trainer = plain(tmp_path, save_strategy="no", max_steps=1)
    trainer.train()
    with refused(offload.UsageError, "Trainer has trained already"):
        enable(trainer, ON_NVME)


def test_the_arguments_precision_and_a_config_in_a_file(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({**ON_NVME, "nvme": str(tmp_path / "nvme")}))
    fields: dict[str, Any] = {"bf16": True, "max_steps": 1, "save_strategy": "no"}
    trainer = OffloadTrainer(
        model=llama(), args=arguments(tmp_path, **fields), train_dataset=rows(), offload=tmp_path / "config.json"
    )
    trainer.train()
    with trainer.engine:
        assert trainer.engine.config.dtype == "bf16"


@pytest.mark.parametrize(("content", "said"), [("{", "is not JSON"), ('{"stage": 1, "stage": 2}', "given twice: stage")])
def test_a_file_that_is_no_config_is_named(tmp_path: Path, content: str, said: str) -> None:
    (tmp_path / "config.json").write_text(content)
    with refused(offload.ConfigError, "config.json", said):
        settings_of(tmp_path / "config.json")


def test_a_save_over_an_earlier_one_of_other_shards(trained: Any, tmp_path: Path) -> None:
    trained.engine.module.save_pretrained(tmp_path, max_shard_size="20KB")
    trained.save_model(str(tmp_path))
    assert [path.name for path in tmp_path.glob("model*")] == ["model.safetensors"]


def test_optimizers_that_cannot_be_are_named(tmp_path: Path) -> None:
    with refused(offload.ConfigError, "transformers.optimization.Adafactor", "torch.optim.AdamW"):
        offloaded(tmp_path, optim="adafactor").train()
    pytest.importorskip("bitsandbytes")
    with refused(offload.ConfigError, "bitsandbytes.optim", "8 bits", "state_format='8bit'"):
        offloaded(tmp_path, optim="adamw_bnb_8bit").train()
