# SPDX-License-Identifier: Apache-2.0
"""What else a Trainer does by its arguments, on an engine: as a plain one does it, within rounding."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from peft import PeftModel
from transformers import Seq2SeqTrainer, Seq2SeqTrainingArguments, T5Config, T5ForConditionalGeneration, Trainer

import offload
from offload.integrations.transformers import OffloadMixin, OffloadTrainer, enable

from ..acceptance.models import gpt2, llama
from ..acceptance.runs import assert_close, assert_same_bits, refused
from .test_trainer import settled
from .trainers import ON_NVME, adapted, arguments, logged, offloaded, plain, rows

__all__ = ["settled"]
pytestmark = pytest.mark.filterwarnings("ignore")
NEWEST = int(transformers.__version__.split(".")[0]) >= 5
BY_LENGTH = {"train_sampling_strategy": "group_by_length"} if NEWEST else {"group_by_length": True}


def both(tmp_path: Path, build: Callable[[], Any] = llama, **fields: Any) -> tuple[Any, Any]:
    """Each made and trained at once: making it seeds the random generators."""
    trainers = []
    for make in (offloaded, plain):
        trainers.append(make(tmp_path / make.__name__, build(), **{"save_strategy": "no", **fields}))
        trainers[-1].train()
    return trainers[0], trainers[1]


def assert_alike(ours: Any, theirs: Any) -> None:
    figures = [logged(one, "loss", "grad_norm", "learning_rate") for one in (ours, theirs)]
    assert len(figures[0]) == len(figures[1]) > 0
    assert_close(torch.tensor(figures[0]), torch.tensor(figures[1]), 1e-3)
    assert_close(ours.engine.state_dict(), dict(theirs.model.state_dict()), 1e-3)


@pytest.mark.parametrize(
    "fields",
    [
        {"label_smoothing_factor": 0.1, **BY_LENGTH, "eval_strategy": "steps", "eval_steps": 2, "eval_accumulation_steps": 1},
        {"neftune_noise_alpha": 5.0, "eval_on_start": True, "include_num_input_tokens_seen": True},
        {"optim": "sgd", "lr_scheduler_type": "reduce_lr_on_plateau", "eval_strategy": "steps", "eval_steps": 2},
    ],
    ids=["smoothed, by length", "noise in the embeddings", "a plateau"],
)
def test_arguments_do_what_they_do(tmp_path: Path, fields: dict[str, Any]) -> None:
    ours, theirs = both(tmp_path, max_steps=4, **fields)
    with ours.engine:
        assert_alike(ours, theirs)
        assert_close(torch.tensor(logged(ours, "eval_loss")), torch.tensor(logged(theirs, "eval_loss")), 1e-3)


def test_the_last_step_of_an_epoch_is_of_fewer_micro_batches(tmp_path: Path) -> None:
    """Twenty make six steps of three and one of two; it goes on within the second epoch to the bit."""
    fields: dict[str, Any] = {"gradient_accumulation_steps": 3, "max_steps": -1, "num_train_epochs": 2, "save_steps": 9}
    ours, theirs = both(tmp_path, save_strategy="steps", **fields)
    shutil.copytree(tmp_path / "offloaded" / "checkpoint-9", tmp_path / "again" / "checkpoint-9")
    again = offloaded(tmp_path / "again", **fields)
    again.train(resume_from_checkpoint=True)
    with ours.engine, again.engine:
        assert len(logged(ours, "loss")) == 14
        assert_alike(ours, theirs)
        assert logged(again, "loss", "grad_norm") == logged(ours, "loss", "grad_norm")
        assert_same_bits(again.engine.state_dict(), ours.engine.state_dict())


def test_the_scripts_own_optimizer_and_scheduler_and_a_second_train(tmp_path: Path) -> None:
    trainers: list[Any] = []
    for kind in (OffloadTrainer, Trainer):
        model: Any = llama()
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 0.7**step)
        folder = tmp_path / kind.__name__
        more: dict[str, Any] = {"offload": {**ON_NVME, "nvme": str(tmp_path / "nvme")}} if kind is OffloadTrainer else {}
        given = arguments(folder, max_steps=3, save_strategy="no")
        trainers.append(kind(model=model, args=given, train_dataset=rows(), optimizers=(optimizer, scheduler), **more))
        trainers[-1].train()
        trainers[-1].train()
    with trainers[0].engine:
        assert_alike(*trainers)


@pytest.mark.parametrize("evaluates_first", [False, True])
def test_a_class_that_makes_its_own_optimizer(tmp_path: Path, evaluates_first: bool) -> None:
    """As Trainer's documentation has it: without a call of the one above, and whether there is one already or not."""

    def of(kind: Any) -> Any:
        class Own(kind):  # type: ignore[misc]
            def create_optimizer(self, *_: Any) -> Any:
                self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.1, momentum=0.9)
                return self.optimizer

        return Own

    trainers: list[Any] = []
    for kind, more in ((of(OffloadTrainer), {"offload": {**ON_NVME, "nvme": str(tmp_path)}}), (of(Trainer), {})):
        args = arguments(tmp_path / kind.__mro__[1].__name__, save_strategy="no")
        trainers.append(kind(model=llama(), args=args, train_dataset=rows(), eval_dataset=rows(), **more))
        if evaluates_first:
            trainers[-1].evaluate()
        trainers[-1].train()
    ours, theirs = trainers
    assert ours.engine is not None
    with ours.engine:
        assert_alike(ours, theirs)


def test_sequence_to_sequence_predicts_by_generating(tmp_path: Path) -> None:
    class Offloaded(OffloadMixin, Seq2SeqTrainer):
        pass

    trainers: list[Any] = []
    for kind in (Offloaded, Seq2SeqTrainer):
        torch.manual_seed(0)
        sizes = {"vocab_size": 256, "d_model": 32, "d_kv": 8, "d_ff": 48, "num_layers": 2, "num_heads": 4}
        model = T5ForConditionalGeneration(T5Config(**sizes, decoder_start_token_id=0, pad_token_id=0))
        fields: dict[str, Any] = {"per_device_train_batch_size": 2, "max_steps": 2, "use_cpu": True, "save_strategy": "no"}
        fields |= {"logging_steps": 1, "report_to": [], "disable_tqdm": True, "dataloader_pin_memory": False}
        args = Seq2SeqTrainingArguments(str(tmp_path), predict_with_generate=True, generation_max_length=6, **fields)
        more: dict[str, Any] = {"offload": {**ON_NVME, "nvme": str(tmp_path / "nvme")}} if kind is Offloaded else {}
        trainers.append(kind(model=model, args=args, train_dataset=rows(), **more))
        trainers[-1].train()
    with trainers[0].engine:
        assert_alike(*trainers)
        assert (trainers[0].predict(rows(4)).predictions == trainers[1].predict(rows(4)).predictions).all()


def test_the_hub_is_left_to_trainer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    trainer, pushed = offloaded(tmp_path, max_steps=2), list[str]()
    monkeypatch.setattr(trainer, "push_to_hub", lambda **keywords: pushed.append(keywords["commit_message"]))
    monkeypatch.setattr(trainer, "_push_from_checkpoint", lambda folder: pushed.append(Path(folder).name))
    trainer.args.push_to_hub = True
    trainer.train()
    trainer.save_model()
    trainer.engine.close()
    assert pushed == ["checkpoint-2", "Model save"]


@pytest.mark.parametrize("saved", [["lm_head"], ["wte"]], ids=["the head", "the embedding"])
def test_modules_to_save_that_were_tied(tmp_path: Path, saved: list[str]) -> None:
    from peft import LoraConfig, get_peft_model

    def build() -> Any:
        torch.manual_seed(2)
        config = LoraConfig(r=2, target_modules=["c_attn"], modules_to_save=saved, task_type="CAUSAL_LM")
        return get_peft_model(gpt2(), config)

    ours, theirs = both(tmp_path, build, max_steps=3)
    with ours.engine:
        assert_alike(ours, theirs)
        ours.save_model(str(tmp_path / "adapter"))
        loaded = PeftModel.from_pretrained(gpt2(), tmp_path / "adapter").state_dict()
        found = {name: value for name, value in ours.engine.state_dict().items() if "lora_" in name or "modules_to_" in name}
        assert_same_bits({name: loaded[name] for name in found}, found)


def test_checkpointed_blocks_under_adapters(tmp_path: Path) -> None:
    ours, theirs = both(tmp_path, adapted, gradient_checkpointing=True, max_steps=2)
    with ours.engine:
        assert_alike(ours, theirs)


@pytest.mark.skipif(not NEWEST, reason="transformers 4 has no checkpoints at SIGTERM")
def test_it_saves_where_it_is_ended(tmp_path: Path) -> None:
    """With gradients waiting for their step: behind it."""

    class Ended(OffloadTrainer):
        def compute_loss(self, *args: Any, **keywords: Any) -> Any:
            if self.state.global_step == 3:  # what its handler of SIGTERM does, some seconds later
                [callback] = [one for one in self.callback_handler.callbacks if type(one).__name__ == "JITCheckpointCallback"]
                callback.jit_manager.is_checkpoint_requested = True
            return super().compute_loss(*args, **keywords)

    config = {**ON_NVME, "nvme": str(tmp_path / "nvme")}
    given = arguments(tmp_path / "run", save_strategy="no", enable_jit_checkpoint=True)
    ended = Ended(model=llama(), args=given, train_dataset=rows(), offload=config)
    ended.train()
    ended.engine.close()
    assert ended.state.global_step == 4 and [one.name for one in (tmp_path / "run").glob("checkpoint-*")] == ["checkpoint-4"]
    again, whole = offloaded(tmp_path / "run", save_strategy="no"), offloaded(tmp_path / "whole", save_strategy="no")
    again.train(resume_from_checkpoint=True)
    whole.train()
    with again.engine, whole.engine:
        assert logged(again, "loss", "grad_norm")[-2:] == logged(whole, "loss", "grad_norm")[-2:]  # step 4 was saved unlogged
        assert_same_bits(again.engine.state_dict(), whole.engine.state_dict())


@pytest.mark.parametrize("made", ["mixin", "enabled"])
def test_a_process_that_sees_several_gpus_uses_one(tmp_path: Path, made: str) -> None:
    """Trainer would put `nn.DataParallel` around the model."""
    given = arguments(tmp_path, save_strategy="no", max_steps=2)
    given._n_gpu = 2
    config = {**ON_NVME, "nvme": str(tmp_path / "nvme")}
    if made == "mixin":
        trainer: Any = OffloadTrainer(model=llama(), args=given, train_dataset=rows(), offload=config)
    else:
        trainer = enable(Trainer(model=llama(), args=given, train_dataset=rows()), config)
    trainer.train()
    with trainer.engine:
        assert trainer.model_wrapped is trainer.model and trainer._train_batch_size == given.per_device_train_batch_size
        assert len(logged(trainer, "loss")) == 2


def test_what_else_would_partition_the_model_is_named(tmp_path: Path) -> None:
    trainer = plain(tmp_path)
    trainer.is_fsdp_enabled = True
    with refused(offload.UsageError, "FSDP and the engine", "Accelerate's configuration"):
        enable(trainer, ON_NVME)
