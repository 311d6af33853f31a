# SPDX-License-Identifier: Apache-2.0
"""TRL's trainers on tiny data: lines of source text, a tokenizer of bytes."""

from __future__ import annotations

import contextlib
from pathlib import Path
from typing import Any

import torch
from datasets import Dataset
from peft import LoraConfig
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification, PreTrainedTokenizerFast
from trl import DPOConfig, DPOTrainer, GRPOConfig, GRPOTrainer, RewardConfig, RewardTrainer, SFTConfig, SFTTrainer

import offload
from offload.integrations.transformers import OffloadMixin

from ..acceptance.models import llama, source_text
from .trainers import ON_NVME

LINES = [line for line in source_text().decode("utf-8", "ignore").splitlines() if len(line) > 20][:40]
PAIRS = {
    "prompt": [line[:8] for line in LINES],
    "chosen": [line[8:20] for line in LINES],
    "rejected": [line[8:20][::-1] for line in LINES],
}
FIELDS: dict[str, Any] = {
    "per_device_train_batch_size": 2, "max_steps": 3, "save_steps": 2, "logging_steps": 1, "learning_rate": 1e-2,
    "report_to": [], "use_cpu": True, "disable_tqdm": True, "dataloader_pin_memory": False, "bf16": False,
    "gradient_checkpointing": False,
}  # fmt: skip


def byte_tokenizer() -> PreTrainedTokenizerFast:
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE(vocab={character: number for number, character in enumerate(alphabet)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token=alphabet[-1], pad_token=alphabet[-2])


def save_model(folder: Path) -> None:
    llama().save_pretrained(folder)
    byte_tokenizer().save_pretrained(folder)


def _reward(completions: list[str], **_: Any) -> list[float]:
    return [float(sum(map(ord, completion)) % 7) for completion in completions]


def _sft(folder: Path, **fields: Any) -> dict[str, Any]:
    args = SFTConfig(str(folder), **{"max_length": 32, **FIELDS, **fields})
    return {"args": args, "train_dataset": Dataset.from_dict({"text": LINES})}


def _dpo(folder: Path, **fields: Any) -> dict[str, Any]:
    args = DPOConfig(str(folder), **{"max_length": 32, **FIELDS, **fields})
    return {"args": args, "train_dataset": Dataset.from_dict(PAIRS)}


def _rewards(folder: Path, **fields: Any) -> dict[str, Any]:
    args = RewardConfig(str(folder), **{"max_length": 32, **FIELDS, **fields})
    return {"args": args, "train_dataset": Dataset.from_dict(PAIRS)}


def _grpo(folder: Path, **fields: Any) -> dict[str, Any]:
    args = GRPOConfig(str(folder), **{"max_completion_length": 8, "num_generations": 2, **FIELDS, **fields})
    return {"args": args, "train_dataset": Dataset.from_dict({"prompt": PAIRS["prompt"]}), "reward_funcs": _reward}


KINDS: dict[str, tuple[Any, Any]] = {
    "sft": (SFTTrainer, _sft),
    "dpo": (DPOTrainer, _dpo),
    "reward": (RewardTrainer, _rewards),
    "grpo": (GRPOTrainer, _grpo),
}


def trainer(
    kind: str,
    folder: Path,
    model: Path,
    *,
    lora: bool,
    offloaded: bool,
    deferred: bool = False,
    settings: dict[str, Any] | None = None,
    **others: Any,
) -> Any:
    """A trainer of TRL's, plain or with everything on NVMe. `deferred`: the model never is in memory. `settings`: of its
    arguments. `others`: as the trainer takes them."""
    base, build = KINDS[kind]
    torch.manual_seed(3)
    with offload.deferred_init() if deferred else contextlib.nullcontext():
        if kind == "reward":
            policy = AutoModelForSequenceClassification.from_pretrained(model, num_labels=1)
        else:
            policy = AutoModelForCausalLM.from_pretrained(model)
    given = {"model": policy, "processing_class": byte_tokenizer(), **build(folder, **(settings or {})), **others}
    if lora:
        given["peft_config"] = LoraConfig(r=4, target_modules=["q_proj", "v_proj"])
    if not offloaded:
        return base(**given)
    mixed = type(f"Offload{base.__name__}", (OffloadMixin, base), {})
    return mixed(**given, offload={**ON_NVME, "nvme": str(folder / "nvme")})
