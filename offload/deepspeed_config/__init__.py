# SPDX-License-Identifier: Apache-2.0
"""DeepSpeed's config keys: what of them is done here, and how. Pure translation; nothing of DeepSpeed is imported."""

from offload.deepspeed_config.optimizers import Maker, make_optimizer
from offload.deepspeed_config.settings import read_settings, speaks_deepspeed
from offload.deepspeed_config.translated import Batch, Half, Translation, as_there
from offload.deepspeed_config.translation import translate

__all__ = [
    "Batch",
    "Half",
    "Maker",
    "Translation",
    "as_there",
    "make_optimizer",
    "read_settings",
    "speaks_deepspeed",
    "translate",
]
