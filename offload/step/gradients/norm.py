# SPDX-License-Identifier: Apache-2.0
"""The global gradient norm: an exact sum, so that no order of summation, sharding or number of terms shows in it.

Sums of squares come as doubles, one per block of a gradient. Their sum is a whole number of the smallest doubles, which an int
holds exactly; ranks add theirs; one division rounds it, once.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import numpy as np
from torch import Tensor

from offload.device.arithmetic.kernels import exact_sum
from offload.ranks.transport import Ranks

_UNITS_PER_ONE = 1 << 1074


def norm_of(squares: int | None, scale: float) -> float:
    """The L2 norm of gradients with this sum of squares, in units of 2**-1074, which are `scale` times too large; NaN where it
    is not finite."""
    if squares is None:
        return math.nan
    try:
        return math.sqrt(squares / _UNITS_PER_ONE) / scale
    except OverflowError:  # beyond the largest double
        return math.nan


def clip_factor(norm: float, max_norm: float) -> float:
    """min(1, max_norm / (norm + 1e-6)) rounded to fp32, as torch.nn.utils.clip_grad_norm_ computes it."""
    return float(min(np.float32(1.0), np.float32(max_norm) / (np.float32(norm) + np.float32(1e-6))))


def summed_over_ranks(ranks: Ranks, sums: Callable[[], Sequence[Tensor]], *, sharded: bool) -> int | None:
    """The sum over all ranks. Runs at a meeting of them. `sharded`: each rank has the sums of its shard alone."""
    own = exact_sum(sums())
    data = b"" if own is None else own.to_bytes(own.bit_length() // 8 + 1, "little", signed=True)
    received = ranks.exchange_bytes(data)
    shards = [received[index] for index in ranks.shards] if sharded else [data]
    return sum(int.from_bytes(one, "little", signed=True) for one in shards) if all(shards) else None
