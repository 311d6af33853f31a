# SPDX-License-Identifier: Apache-2.0
"""A drop-in for DeepSpeed's training API: a script written for it runs with `import offload.deepspeed as deepspeed`.

What is computed is what DeepSpeed 0.19.8 computes (accumulation, clipping, schedules, skipped steps); where it lies and when it
moves is this package's. What is not here says so by name. See docs/deepspeed.md.

    python -m offload.deepspeed script.py ...      plain `import deepspeed` in the script is this drop-in
    offload.deepspeed.install()                    the same, at the top of a script
"""

from __future__ import annotations

from typing import Any

from offload.deepspeed import checkpointing, comm, ops, utils, zero
from offload.deepspeed.absent import WHOLE_LAYERS, absent
from offload.deepspeed.accelerator import get_accelerator
from offload.deepspeed.arguments import add_config_arguments
from offload.deepspeed.comm import init_distributed
from offload.deepspeed.engine import DeepSpeedEngine
from offload.deepspeed.initializing import initialize
from offload.deepspeed.installing import COMPARED_VERSION as __version__, install
from offload.deepspeed.names import make_modules
from offload.deepspeed.owners import ZeroParamStatus
from offload.deepspeed.refused import PipelineModule
from offload.deepspeed.settings import DeepSpeedConfig
from offload.deepspeed.utils import log_dist, logger
from offload.errors import ConfigError as DeepSpeedConfigError

__all__ = [
    "DeepSpeedConfig",
    "DeepSpeedConfigError",
    "DeepSpeedEngine",
    "PipelineModule",
    "ZeroParamStatus",
    "add_config_arguments",
    "checkpointing",
    "comm",
    "get_accelerator",
    "init_distributed",
    "initialize",
    "install",
    "log_dist",
    "logger",
    "ops",
    "utils",
    "zero",
]

__version_major__, __version_minor__, __version_patch__ = (int(part) for part in __version__.split("."))
__git_hash__ = __git_branch__ = "offload"
dist = comm
make_modules()

_INSTEAD = {
    "InferenceEngine": "offload.initialize(model) without an optimizer runs forward and generate()",
    "OnDevice": "build the model inside deepspeed.zero.Init()",
    "PipelineEngine": WHOLE_LAYERS,
    "init_inference": "offload.initialize(model) without an optimizer runs forward and generate()",
    "tp_model_init": WHOLE_LAYERS,
}


def __getattr__(name: str) -> Any:
    raise absent("deepspeed", name, __all__, _INSTEAD)
