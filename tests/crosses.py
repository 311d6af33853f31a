# SPDX-License-Identifier: Apache-2.0
"""Of the cross of some axes, which of their values a quick run tests together: the rest is slow, and `make soak` runs it all.

An axis is what a test is parametrized by. Two of its values that reach other code are tested beside each value of another axis
only where the two meet in code: that is what each use says.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from itertools import combinations, product
from typing import Any

import pytest

Row = tuple[int, ...]


def in_turn(*axes: Iterable[Any]) -> list[Any]:
    """Quick: each value of each axis, in one combination or more; a value of a longer axis goes with the next of a shorter."""
    known = [tuple(axis) for axis in axes]
    count = max(map(len, known))
    return crossed(known, {tuple(number % len(axis) for axis in known) for number in range(count)})


def in_pairs(*axes: Iterable[Any]) -> list[Any]:
    """Quick: every two values of two axes together, in as few combinations of all axes as are found."""
    known = [tuple(axis) for axis in axes]
    rows = list(product(*(range(len(axis)) for axis in known)))
    left = {pair for row in rows for pair in _pairs(row)}
    quick: set[Row] = set()
    used: Counter[tuple[int, int]] = Counter()
    while left:
        row = max(rows, key=lambda one: (len(left & _pairs(one)), -sum(used[value] for value in enumerate(one))))
        quick.add(row)
        used.update(enumerate(row))
        left -= _pairs(row)
    return crossed(known, quick)


def crossed(axes: Sequence[Sequence[Any]], quick: set[Row]) -> list[Any]:
    """`quick`: of each combination that is, the places of its values in their axes."""
    found = []
    for row in product(*(range(len(axis)) for axis in axes)):
        values = [axis[index] for axis, index in zip(axes, row, strict=True)]
        flat = [one for value in values for one in _flat(value)]
        names = filter(None, map(_name, values))
        found.append(pytest.param(*flat, id="-".join(names), marks=[] if row in quick else pytest.mark.slow))
    return found


def _pairs(row: Row) -> set[tuple[tuple[int, int], ...]]:
    return set(combinations(enumerate(row), 2))


def _flat(value: Any) -> tuple[Any, ...]:
    """A tuple, or what `pytest.param` makes, is of several arguments."""
    return getattr(value, "values", value) if isinstance(value, tuple) else (value,)


def _name(value: Any) -> str:
    if isinstance(value, tuple):
        return getattr(value, "id", None) or "-".join(filter(None, map(_name, value)))
    return str(getattr(value, "name", None) or getattr(value, "__name__", value)).strip("_")
