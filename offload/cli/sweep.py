"""Which block size and how many blocks in flight a drive wants: all settings briefly, the better ones again and longer.

The time of a round is dealt out in turns, so that a drive that slows down or speeds up meanwhile does so for all. A
setting's score in a round is the geometric mean, over reading, writing and both at once, of its rate as a share of the
round's best. Of those within `_TIE` of the best the one with the fewest bytes in flight is taken, because that is what
an urgent read waits behind, and of those the one with the largest blocks, because each costs processor time.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from offload.cli.rates import DIRECTIONS, Direction
from offload.tiers.io.tuning import IoSettings

KIB, MIB = 1024, 1024 * 1024
SETTINGS = tuple(
    IoSettings(block_nbytes, depth)
    for block_nbytes, depths in (
        (256 * KIB, (16, 64)),
        (512 * KIB, (8, 32, 128)),
        (1 * MIB, (8, 16, 32, 64)),
        (2 * MIB, (4, 8, 16, 32)),
        (4 * MIB, (4, 8, 16)),
        (8 * MIB, (4, 8)),
    )
    for depth in depths
)
_TIE = 0.03

Rates = dict[Direction, float]
MeasureRates = Callable[[IoSettings, float], Rates]
"""(settings, seconds for each direction) -> bytes per second by direction."""


@dataclass(frozen=True, slots=True)
class _Round:
    keep_count: int
    turn_count: int
    share: float
    """Of the time in all."""


_ROUNDS = (_Round(len(SETTINGS), 1, 0.4), _Round(6, 2, 0.3), _Round(3, 3, 0.3))


@dataclass(frozen=True, slots=True)
class Outcome:
    """`rates`: of every setting, medians of the last round that it was in. `best`: see the module."""

    rates: dict[IoSettings, Rates]
    best: IoSettings


def find_best(measure: MeasureRates, seconds: float, settings: Sequence[IoSettings]) -> Outcome:
    """Measure for about `seconds` in all."""
    rates: dict[IoSettings, Rates] = {}
    remaining = list(settings)
    scores: dict[IoSettings, float] = {}
    for part in _ROUNDS:
        remaining = sorted(remaining, key=lambda one: -scores.get(one, 0.0))[: part.keep_count]
        each_seconds = part.share * seconds / (part.turn_count * len(remaining) * len(DIRECTIONS))
        turns = [{one: measure(one, each_seconds) for one in remaining} for _ in range(part.turn_count)]
        medians = {
            one: {kind: statistics.median(turn[one][kind] for turn in turns) for kind in DIRECTIONS} for one in remaining
        }
        rates.update(medians)
        scores = _scores(medians)
    good = [one for one in remaining if scores[one] >= (1 - _TIE) * max(scores.values())]
    return Outcome(rates, min(good, key=lambda one: (one.block_nbytes * one.queue_depth, -one.block_nbytes)))


def _scores(rates: dict[IoSettings, Rates]) -> dict[IoSettings, float]:
    best = {kind: max(of[kind] for of in rates.values()) for kind in DIRECTIONS}
    return {one: math.prod(of[kind] / best[kind] for kind in DIRECTIONS) ** (1 / len(DIRECTIONS)) for one, of in rates.items()}
