"""The search for block size and depth finds the best of a known drive, in the time that it was given."""

from __future__ import annotations

import random

import pytest

from offload.cli.rates import DIRECTIONS
from offload.cli.sweep import SETTINGS, Rates, find_best
from offload.tiers.io.tuning import IoSettings


@pytest.mark.parametrize("seed", range(5))
def test_it_finds_the_best_in_the_time_given(seed: int) -> None:
    """A drive that wants one setting, and drifts by a third while it is measured."""
    draw = random.Random(seed)
    wanted = draw.choice(SETTINGS)
    spent = 0.0

    def measure(settings: IoSettings, seconds: float) -> Rates:
        nonlocal spent
        spent += seconds * len(DIRECTIONS)
        drift = 1 - spent / 30
        return {kind: 3e9 * drift * (1.0 if settings == wanted else draw.uniform(0.4, 0.6)) for kind in DIRECTIONS}

    outcome = find_best(measure, 10.0, SETTINGS)
    assert outcome.best == wanted
    assert set(outcome.rates) == set(SETTINGS)
    assert spent == pytest.approx(10.0)


def test_of_equals_the_one_with_the_fewest_bytes_in_flight_is_taken() -> None:
    settings = [IoSettings(1 << 20, 64), IoSettings(1 << 20, 8), IoSettings(1 << 22, 8)]
    rates = {settings[0]: 1.0, settings[1]: 0.99, settings[2]: 1.0}
    assert find_best(lambda one, _: dict.fromkeys(DIRECTIONS, rates[one]), 1.0, settings).best == settings[1]
