# SPDX-License-Identifier: Apache-2.0
"""What becomes of a gradient that comes: how it goes into its place in a buffer, wherever that lies."""

from __future__ import annotations

from enum import Enum

import torch

from offload.device.arithmetic import kernels
from offload.layout import Piece


class Addition(Enum):
    """What becomes of a gradient that comes. The same in every placement, and so are the bits."""

    FIRST = "stored: there is none of this parameter yet"
    PART = "added to what this backward brought before, in the parameter's dtype, as PyTorch adds it"
    SUM = "added to what an earlier backward brought, in fp32"


def take_in(
    target: torch.Tensor,
    values: torch.Tensor,
    start_index: int,
    addition: Addition,
    dtype: torch.dtype,
    squares: torch.Tensor | None = None,
    *,
    checksums: torch.Tensor | None = None,
    all_cores: bool = False,
) -> torch.Tensor:
    """`kernels.ingest_async` of a gradient of a parameter in `dtype` into its place in a buffer, which may be wider."""
    if addition is not Addition.PART or target.dtype == dtype:
        adds = addition is not Addition.FIRST
        return kernels.ingest_async(target, values, start_index, adds, squares, checksums=checksums, all_cores=all_cores)
    total = torch.empty(target.shape, dtype=dtype, device=target.device)
    kernels.convert(total, target, all_cores=all_cores)
    found = kernels.ingest_async(total, values, start_index, True, squares, all_cores=all_cores)
    kernels.convert(target, total, all_cores=all_cores)
    return found


def cut(ordered: torch.Tensor, piece: Piece) -> torch.Tensor:
    """What of a parameter's gradient, [numel], lies in the piece."""
    return ordered if piece.numel == piece.slot.numel else ordered[piece.in_parameter]
