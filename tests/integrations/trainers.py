# SPDX-License-Identifier: Apache-2.0
"""What the tests of trainers share: text, arguments, and runs that are made once."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
import transformers
from peft import LoraConfig, get_peft_model
from transformers import Trainer, TrainingArguments

import offload
from offload.integrations.transformers import OffloadTrainer

from ..acceptance.models import llama, source_text

ON_NVME = {"parameters": "nvme", "optimizer_states": "nvme"}
IN_MEMORY = {"parameters": "device", "optimizer_states": "device"}
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


def as_logged(figure: float) -> float:
    """Before 5 transformers has losses with four digits in its logs."""
    return round(figure, 4) if int(transformers.__version__.split(".")[0]) < 5 else figure


def logged(trainer: Any, *names: str) -> list[Any]:
    return [[line[name] for name in names] for line in trainer.state.log_history if all(name in line for name in names)]


def own_loop(batches: Iterable[Any], *, share: float = 1.0, decay: float = 1.0) -> tuple[list[float], dict[str, torch.Tensor]]:
    """Losses and weights of an engine's own loop with everything in memory: steps of two micro-batches, clipped at 0.5. Each
    loss counts by `share`; each step's learning rate is that of the one before times `decay`."""
    model = llama()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    losses = []
    with offload.initialize(model, optimizer, IN_MEMORY) as engine:
        scheduler = torch.optim.lr_scheduler.LambdaLR(engine.optimizer, lambda step: decay**step)
        for number, batch in enumerate(batches):
            loss = model(**batch).loss
            (loss * share).backward()
            losses.append(loss.item())
            if number % 2:
                engine.clip_grad_norm_(0.5)
                engine.step()
                scheduler.step()
                engine.zero_grad()
        return losses, engine.state_dict()
