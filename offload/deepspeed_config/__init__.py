# SPDX-License-Identifier: Apache-2.0
"""DeepSpeed's config keys: what of them is done here, and how. Pure translation; nothing of DeepSpeed is imported."""

from offload.deepspeed_config.optimizers import Maker, make_optimizer
from offload.deepspeed_config.settings import read_settings, speaks_deepspeed
from offload.deepspeed_config.translation import Batch, Half, Translation, beginning_rounded, translate

__all__ = [
    "Batch",
    "Half",
    "Maker",
    "Translation",
    "beginning_rounded",
    "make_optimizer",
    "read_settings",
    "speaks_deepspeed",
    "translate",
]
