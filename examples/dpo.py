# SPDX-License-Identifier: Apache-2.0
"""Preferences (DPO) by TRL with LoRA: the reference is the policy without its adapter.

python examples/dpo.py CHECKPOINT TEXT NVME_FOLDER OUT
"""

import sys
from pathlib import Path

from datasets import Dataset
from peft import LoraConfig
from transformers import AutoModelForCausalLM, AutoTokenizer
from trl import DPOConfig, DPOTrainer

from offload.integrations.transformers import OffloadMixin

checkpoint, text, nvme, out = sys.argv[1:5]


class Trainer(OffloadMixin, DPOTrainer):
    pass


lines = [line for line in Path(text).read_text().splitlines() if len(line) > 20]
pairs = {
    "prompt": [line[:10] for line in lines],
    "chosen": [line[10:30] for line in lines],
    "rejected": [line[10:30][::-1] for line in lines],
}
trainer = Trainer(
    model=AutoModelForCausalLM.from_pretrained(checkpoint),
    args=DPOConfig(out, max_steps=3, per_device_train_batch_size=2, max_length=64, logging_steps=1, bf16=False, report_to=[]),
    train_dataset=Dataset.from_dict(pairs),
    processing_class=AutoTokenizer.from_pretrained(checkpoint),
    peft_config=LoraConfig(r=8, target_modules=["q_proj", "v_proj"]),
    offload={"parameters": "nvme", "optimizer_states": "nvme", "nvme": nvme},
)
trainer.train()
trainer.save_model()
