# SPDX-License-Identifier: Apache-2.0
"""Supervised fine-tuning by TRL, everything on NVMe.

python examples/sft.py CHECKPOINT TEXT NVME_FOLDER OUT
"""

import sys
from pathlib import Path

from datasets import Dataset
from transformers import AutoModelForCausalLM, AutoTokenizer
from trl import SFTConfig, SFTTrainer

import offload
from offload.integrations.transformers import OffloadMixin

checkpoint, text, nvme, out = sys.argv[1:5]


class Trainer(OffloadMixin, SFTTrainer):
    pass


lines = [line for line in Path(text).read_text().splitlines() if line.strip()]
with offload.deferred_init():
    model = AutoModelForCausalLM.from_pretrained(checkpoint)
trainer = Trainer(
    model=model,
    args=SFTConfig(out, max_steps=4, per_device_train_batch_size=2, max_length=64, logging_steps=1, bf16=False, report_to=[]),
    train_dataset=Dataset.from_dict({"text": lines}),
    processing_class=AutoTokenizer.from_pretrained(checkpoint),
    offload={"parameters": "nvme", "optimizer_states": "nvme", "nvme": nvme},
)
trainer.train()
trainer.save_model()
