# SPDX-License-Identifier: Apache-2.0
"""LoRA by Hugging Face's Trainer on a checkpoint that is never in memory as a whole.

python examples/trainer_lora.py CHECKPOINT TEXT NVME_FOLDER OUT
"""

import sys
from pathlib import Path

from datasets import Dataset
from peft import LoraConfig, get_peft_model
from transformers import AutoModelForCausalLM, AutoTokenizer, DataCollatorForLanguageModeling, TrainingArguments

import offload
from offload.integrations.transformers import OffloadTrainer

checkpoint, text, nvme, out = sys.argv[1:5]

tokenizer = AutoTokenizer.from_pretrained(checkpoint)
lines = [line for line in Path(text).read_text().splitlines() if line.strip()]
data = Dataset.from_dict({"text": lines}).map(lambda row: tokenizer(row["text"], truncation=True, max_length=64))
with offload.deferred_init():  # nothing is read yet
    base = AutoModelForCausalLM.from_pretrained(checkpoint)
    model = get_peft_model(base, LoraConfig(r=8, target_modules=["q_proj", "v_proj"], task_type="CAUSAL_LM"))
trainer = OffloadTrainer(
    model=model,
    args=TrainingArguments(out, max_steps=4, per_device_train_batch_size=2, logging_steps=1, save_steps=2, report_to=[]),
    train_dataset=data.remove_columns("text"),
    data_collator=DataCollatorForLanguageModeling(tokenizer, mlm=False),
    offload={"parameters": "nvme", "optimizer_states": "nvme", "nvme": nvme},
)
trainer.train()
trainer.save_model()  # the adapter
