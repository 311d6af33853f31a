# SPDX-License-Identifier: Apache-2.0
"""Modules whose forward backward computes again (activation checkpointing), as far as they can be told from outside: by the
attribute that transformers sets, and by the wrapper of `torch.distributed.algorithms._checkpoint`. A model whose own code calls
`torch.utils.checkpoint` does not tell."""

from __future__ import annotations

import sys
from itertools import islice

from torch import nn

_SWITCH = "gradient_checkpointing"
_WRAPPERS = "torch.distributed.algorithms._checkpoint.checkpoint_wrapper"


def recomputed_modules(model: nn.Module) -> set[int]:
    """Their ids, and those of what they hold. Where modules that have the switch hold others that have it, as a model holds
    its layers, it is the inner ones that are computed again."""
    wrappers = sys.modules.get(_WRAPPERS)  # who made none has not imported it
    wrapper: type | tuple[()] = getattr(wrappers, "CheckpointWrapper", ())
    found = set[int]()
    for module in model.modules():
        if isinstance(module, wrapper) or (_is_on(module) and not any(map(_is_on, islice(module.modules(), 1, None)))):
            found.update(map(id, module.modules()))
    return found


def _is_on(module: nn.Module) -> bool:
    return getattr(module, _SWITCH, False) is True
