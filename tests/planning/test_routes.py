# SPDX-License-Identifier: Apache-2.0
"""What a route may say: what nothing executes is refused when it is made."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given, strategies as st

from offload.planning.route import FetchPath, Memory, Route, ValuePath, kept_first, routes_of
from offload.planning.sizes import RecordSizes, UnitSizes
from offload.planning.tier_choice import Choice, Kept, Near

GOOD: dict[str, Any] = {
    "parameters": "cpu", "gradients": "device", "records": "device", "model_in": Memory.DEVICE, "update_in": Memory.DEVICE,
    "fetch_path": FetchPath.COPIED, "value_path": ValuePath.COPY_OUT,
}  # fmt: skip
ON_HOST = {"parameters": "cpu", "gradients": "cpu", "records": "cpu", "update_in": Memory.HOST, "value_path": ValuePath.STORE}
NO_RECORDS = RecordSizes(chunks=(), read=(), nbytes=0)

UNIT = UnitSizes(
    index=0, whole=1, home=1, chunks=(1,), trained=(1,), trained_positions=(0,), beside=NO_RECORDS, across=NO_RECORDS,
    gradients=(1,), gradients_wide=(1,), gradients_nbytes=1, gradients_kept=1, sums=0, open_chunk_count=1,
)  # fmt: skip


def test_where_records_lie_and_where_they_are_updated_are_two_things() -> None:
    assert (Route(**GOOD).records_in, Route(**GOOD).update_in) == (Memory.DEVICE, Memory.DEVICE)
    assert Route(**{**GOOD, **ON_HOST}).records_in is Memory.HOST
    assert Route(**{**GOOD, **ON_HOST, "records": "nvme"}).records_in is Memory.HOST


@pytest.mark.parametrize(
    ("fields", "why"),
    [
        ({"model_in": Memory.HOST}, "no device memory beside the host's"),
        ({"update_in": Memory.HOST, "value_path": ValuePath.STORE}, "the host cannot address records"),
        ({"gradients": "cpu"}, "with gradients that it has"),
        ({**ON_HOST, "fetch_path": FetchPath.STAYS, "parameters": "device"}, "no store to be read from"),
        ({**ON_HOST, "value_path": ValuePath.COPY_IN}, "cross to the other memory"),
        ({"records": "nvme"}, "by way of host memory"),
    ],
)
def test_what_nothing_executes_is_refused(fields: dict[str, Any], why: str) -> None:
    with pytest.raises(AssertionError, match=why):
        Route(**{**GOOD, **fields})


@given(st.lists(st.integers(1, 5), min_size=1, max_size=40), st.integers(0, 120), st.sets(st.integers(0, 39)))
def test_records_are_kept_of_all_units_alike(chunk_counts: list[int], kept: int, near: set[int]) -> None:
    """As many as were asked for, the same share of each unit but for one chunk; none of what lies on the device."""
    units = [replace(UNIT, index=index, trained=(1,) * count) for index, count in enumerate(chunk_counts)]
    there = frozenset(near & set(range(len(units))))
    choice = Choice("cpu", "nvme", "cpu", kept=Kept(record_count=kept), near=Near(there, there, there))
    routes = routes_of(units, choice, unified=False, sharded=False)
    counts = [route.kept_records for route in routes]
    possible = sum(count for index, count in enumerate(chunk_counts) if index not in there)
    assert sum(counts) == min(kept, possible)
    for index, (route, count) in enumerate(zip(routes, counts, strict=True)):
        assert route.records == ("device" if index in there else "nvme")
        if index in there:
            assert not count
        else:
            assert abs(count - chunk_counts[index] * min(kept / possible, 1.0)) < 1.5


@given(st.lists(st.integers(1, 5), min_size=1, max_size=40), st.integers(0, 120))
def test_on_the_cpu_records_are_kept_of_one_unit_after_the_other(chunk_counts: list[int], kept: int) -> None:
    """So that those behind lie on NVMe as a whole, and their updates can be undone."""
    units = [replace(UNIT, index=index, trained=(1,) * count) for index, count in enumerate(chunk_counts)]
    choice = Choice("cpu", "nvme", "cpu", kept=Kept(record_count=kept))
    counts = [route.kept_records for route in routes_of(units, choice, unified=True, sharded=False)]
    assert sum(counts) == min(kept, sum(chunk_counts))
    parts = [count for count, of in zip(counts, chunk_counts, strict=True) if 0 < count < of]
    assert len(parts) <= 1 and [bool(count) for count in counts] == sorted((bool(count) for count in counts), reverse=True)


@pytest.mark.parametrize("count", [1, 2, 7, 40, 83])
def test_where_there_are_fewer_than_units_they_lie_evenly_among_them(count: int) -> None:
    """Units that have none are nowhere more in a row than three times what they are on average; the first has one."""
    units = [replace(UNIT, index=index, trained=(1,) * 3) for index in range(count)]
    for taken in range(1, count + 1):
        places = sorted(position for position, _ in kept_first(units, unified=False)[:taken])
        gaps = [later - earlier for earlier, later in pairwise([*places, count])]
        assert places[0] == 0 and max(gaps) <= 3 * count / taken
