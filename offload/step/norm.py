"""The global gradient norm: an exact sum, so that no order of summation, sharding or number of terms shows in it.

Sums of squares come as doubles, one per block of a gradient. `math.fsum` rounds their exact sum once. Across ranks each
sends its sum as an *expansion*, a few doubles whose exact sum it is (Shewchuk, 1997); the sum of all expansions, rounded
once, is what one rank with all blocks would get.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from itertools import chain

import numpy as np

from offload.ranks.transport import Ranks, pack, unpack

MAX_TERMS = 40
"""2**53 steps down from the largest double to the smallest: no expansion is longer."""


def expansion(values: Sequence[float]) -> list[float]:
    """A few doubles with exactly the sum of `values`, the largest first. One non-finite double if the sum is not finite."""
    terms: list[float] = []
    while len(terms) < MAX_TERMS:
        rest = math.fsum(chain(values, (-term for term in terms)))
        if rest == 0.0:
            break
        terms.append(rest)
        if not math.isfinite(rest):
            return [rest]
    return terms


def norm_of(squares: Sequence[float], scale: float) -> float:
    """The L2 norm of gradients with these sums of squares, which are `scale` times too large; NaN where it is not finite."""
    try:
        return math.sqrt(math.fsum(squares)) / scale
    except (OverflowError, ValueError):  # fsum of infinities of both signs, or beyond the largest double
        return math.nan


def clip_factor(norm: float, max_norm: float) -> float:
    """min(1, max_norm / (norm + 1e-6)) rounded to fp32, as torch.nn.utils.clip_grad_norm_ computes it."""
    return float(min(np.float32(1.0), np.float32(max_norm) / (np.float32(norm) + np.float32(1e-6))))


def exchanged(ranks: Ranks, partials: Callable[[], Sequence[float]], *, sharded: bool) -> list[float]:
    """Terms of the sum over all ranks. Runs at a rendezvous. `sharded`: each rank has the partials of its shard alone."""
    own = _finite_expansion(partials())
    terms = [unpack(data) for data in ranks.exchange_bytes(pack(*own))]
    return list(chain.from_iterable(terms[index] for index in ranks.shards)) if sharded else own


def _finite_expansion(values: Sequence[float]) -> list[float]:
    # fsum refuses inf - inf and raises on overflow; both mean what a NaN means here.
    if not all(map(math.isfinite, values)):
        return [math.nan]
    try:
        return expansion(values)
    except OverflowError:
        return [math.inf]
