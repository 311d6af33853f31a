# SPDX-License-Identifier: Apache-2.0
"""Group-relative policy optimization (GRPO) by TRL: the policy generates, a function rewards.

python examples/grpo.py CHECKPOINT TEXT NVME_FOLDER OUT
"""

import sys
from pathlib import Path

from datasets import Dataset
from transformers import AutoModelForCausalLM, AutoTokenizer
from trl import GRPOConfig, GRPOTrainer

from offload.integrations.transformers import OffloadMixin

checkpoint, text, nvme, out = sys.argv[1:5]


class Trainer(OffloadMixin, GRPOTrainer):
    pass


def reward(completions: list[str], **_: object) -> list[float]:
    return [float(completion.count("e")) for completion in completions]


lines = [line for line in Path(text).read_text().splitlines() if len(line) > 20]
trainer = Trainer(
    model=AutoModelForCausalLM.from_pretrained(checkpoint),
    reward_funcs=reward,
    args=GRPOConfig(
        out, max_steps=2, per_device_train_batch_size=2, num_generations=2, max_completion_length=8, bf16=False, report_to=[]
    ),
    train_dataset=Dataset.from_dict({"prompt": [line[:10] for line in lines]}),
    processing_class=AutoTokenizer.from_pretrained(checkpoint),
    offload={"parameters": "nvme", "optimizer_states": "nvme", "nvme": nvme},
)
trainer.train()
trainer.save_model()
