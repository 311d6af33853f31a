# SPDX-License-Identifier: Apache-2.0
"""Exact sums: nothing is rounded, on either path, and cuts and order do not show."""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import nullcontext
from fractions import Fraction

import pytest
import torch
from hypothesis import given, settings, strategies as st

from offload import _native
from offload.device.arithmetic import kernels
from tests.native.paths import torch_form

UNITS_PER_ONE = 2**1074
FINITE = st.floats(allow_nan=False, allow_infinity=False)


@pytest.fixture(params=["native", "numpy"])
def path(request: pytest.FixtureRequest) -> Iterator[None]:
    with torch_form() if request.param == "numpy" else nullcontext():
        yield


def doubles(values: list[float]) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.float64)


def in_rationals(values: list[float]) -> int:
    total = sum((Fraction(value) for value in values), Fraction()) * UNITS_PER_ONE
    assert total.denominator == 1
    return total.numerator


@settings(max_examples=60, deadline=None)
@given(st.lists(st.lists(FINITE, max_size=8), max_size=5))
def test_sums_are_those_of_rational_numbers(cut: list[list[float]]) -> None:
    arrays = [doubles(values) for values in cut]
    expected = in_rationals([value for values in cut for value in values])
    assert kernels.exact_sum(arrays) == expected
    with torch_form():
        assert kernels.exact_sum(arrays) == expected


@pytest.mark.usefixtures("path")
def test_of_many_large_and_small_ones_nothing_is_lost() -> None:
    largest, least = torch.finfo(torch.float64).max, 5e-324
    values = [largest] * 1000 + [least] * 1000 + [-largest] * 999 + [1.0, -1.0, 0.0, -0.0, 2.3e-308]
    assert kernels.exact_sum([doubles(values)]) == in_rationals(values)
    assert kernels.exact_sum([doubles([largest] * 1000)]) == 1000 * in_rationals([largest])


@pytest.mark.usefixtures("path")
def test_random_sums_of_squares_round_as_fsum() -> None:
    values = torch.rand(100_000, dtype=torch.float64, generator=torch.Generator().manual_seed(1)).square()
    total = kernels.exact_sum([values])
    assert total is not None
    assert total / UNITS_PER_ONE == math.fsum(values.tolist())


@pytest.mark.usefixtures("path")
@pytest.mark.parametrize("value", [math.inf, -math.inf, math.nan])
def test_what_is_no_number_gives_none(value: float) -> None:
    assert kernels.exact_sum([doubles([1.0]), doubles([2.0, value])]) is None


def test_arguments_that_cannot_be_right_are_refused() -> None:
    with pytest.raises(AssertionError, match="contiguous float64"):
        kernels.exact_sum([torch.ones(3)])
    with pytest.raises(OSError, match="exact_sum of 1 arrays"):
        _native.exact_sum([(0, 1)])
    assert _native.exact_sum([(0, 0)]) == 0
