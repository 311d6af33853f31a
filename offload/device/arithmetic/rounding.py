# SPDX-License-Identifier: Apache-2.0
"""Numbers into another dtype, bit for bit as the update's kernel rounds them."""

from __future__ import annotations

import torch

from offload.device.arithmetic import kernels

_CONVERTED = (torch.float32, torch.bfloat16, torch.float16)


def round_into(target: torch.Tensor, source: torch.Tensor) -> None:
    """target = source in target's dtype, as the update's kernel rounds."""
    if target.dtype in _CONVERTED and source.dtype in _CONVERTED:
        kernels.convert(target, source)
    else:
        target.copy_(source)
