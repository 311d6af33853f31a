"""A drop-in for DeepSpeed's training API: a script written for it runs with `import offload.deepspeed as deepspeed`.

What is computed is what DeepSpeed computes (accumulation, clipping, schedules, skipped steps); where it lies and when it moves
is this package's. What is not here says so by name. See docs/deepspeed.md.
"""

from __future__ import annotations

from typing import Any

from offload.deepspeed import comm, ops, runtime, utils, zero
from offload.deepspeed.absent import absent
from offload.deepspeed.arguments import add_config_arguments
from offload.deepspeed.comm import init_distributed
from offload.deepspeed.engine import DeepSpeedEngine
from offload.deepspeed.initializing import initialize
from offload.deepspeed.utils import log_dist, logger
from offload.errors import ConfigError as DeepSpeedConfigError

__all__ = [
    "DeepSpeedConfigError",
    "DeepSpeedEngine",
    "add_config_arguments",
    "comm",
    "init_distributed",
    "initialize",
    "log_dist",
    "logger",
    "ops",
    "runtime",
    "utils",
    "zero",
]

_INSTEAD = {
    "DeepSpeedConfig": "pass the mapping or the path to initialize(config=...)",
    "InferenceEngine": "offload.initialize(model) without an optimizer runs forward and generate()",
    "OnDevice": "build the model inside deepspeed.zero.Init()",
    "PipelineModule": "every rank computes whole layers; what does not fit goes to cpu or nvme",
    "checkpointing": "use torch.utils.checkpoint",
    "get_accelerator": "use torch.cuda, or engine.device",
    "init_inference": "offload.initialize(model) without an optimizer runs forward and generate()",
    "moe": "a mixture of experts is trained as any module: leave DeepSpeed's layers out",
    "pipe": "every rank computes whole layers; what does not fit goes to cpu or nvme",
    "tp_model_init": "every rank computes whole layers; what does not fit goes to cpu or nvme",
}


def __getattr__(name: str) -> Any:
    raise absent("deepspeed", name, __all__, _INSTEAD)
