"""What the tests of trainers share: text, arguments, and runs that are made once."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from peft import LoraConfig, get_peft_model
from transformers import Trainer, TrainingArguments

from offload.integrations.transformers import OffloadTrainer

from ..acceptance.models import llama, source_text

ON_NVME = {"parameters": "nvme", "optimizer_states": "nvme"}
STEPS = 6


def rows(count: int = 40, length: int = 16) -> list[dict[str, torch.Tensor]]:
    """Bytes of text, with labels."""
    text = torch.frombuffer(bytearray(source_text()), dtype=torch.uint8).long()
    parts = text[: count * length].reshape(count, length)
    return [{"input_ids": part, "labels": part} for part in parts]


def arguments(folder: Path, **fields: Any) -> TrainingArguments:
    """Six steps of two micro-batches of two rows, clipped, with a falling learning rate; a save at every second."""
    given = {
        "per_device_train_batch_size": 2, "gradient_accumulation_steps": 2, "max_steps": STEPS, "learning_rate": 1e-2,
        "max_grad_norm": 0.5, "warmup_steps": 1, "logging_steps": 1, "save_steps": 2, "report_to": [], "use_cpu": True,
        "disable_tqdm": True, "dataloader_pin_memory": False,
    }  # fmt: skip
    return TrainingArguments(output_dir=str(folder), **{**given, **fields})


def adapted(model: Any = None) -> Any:
    torch.manual_seed(2)
    config = LoraConfig(r=4, target_modules=["q_proj", "v_proj"], lora_dropout=0.1, task_type="CAUSAL_LM")
    return get_peft_model(model if model is not None else llama(), config)


def plain(folder: Path, model: Any = None, **fields: Any) -> Trainer:
    return Trainer(
        model=model if model is not None else llama(),
        args=arguments(folder, **fields),
        train_dataset=rows(),
        eval_dataset=rows(6),
    )


def offloaded(folder: Path, model: Any = None, config: dict[str, Any] | None = None, **fields: Any) -> OffloadTrainer:
    return OffloadTrainer(
        model=model if model is not None else llama(),
        args=arguments(folder, **fields),
        train_dataset=rows(),
        eval_dataset=rows(6),
        offload={**ON_NVME, "nvme": str(folder / "nvme"), **(config or {})},
    )


def logged(trainer: Any, *names: str) -> list[Any]:
    return [[line[name] for name in names] for line in trainer.state.log_history if all(name in line for name in names)]
