# SPDX-License-Identifier: Apache-2.0
"""The planner on every kind of trace: what always holds of a schedule."""

from __future__ import annotations

import pytest
from hypothesis import given, strategies as st

from offload.planning.schedule import (
    Op,
    Schedule,
    Verb,
    expected_nbytes,
    plan,
    required_nbytes,
    worthwhile_nbytes,
)
from offload.planning.use_trace import Edge, Expected, Use, UseEvent, UseRecorder, UseTrace, guess
from tests.planning.simulation import simulate

UNITS = 6
sizes = st.lists(st.integers(0, 20), min_size=UNITS, max_size=UNITS)


@st.composite
def traces(draw: st.DrawFn) -> UseTrace:
    """Any balanced sequence of uses: nested, overlapping, repeated."""
    open_units: list[int] = []
    events: list[UseEvent] = []
    for _ in range(draw(st.integers(0, 40))):
        if open_units and draw(st.booleans()):
            unit = open_units.pop(draw(st.integers(0, len(open_units) - 1)))
            events.append(UseEvent(Edge.END, unit))
        else:
            unit = draw(st.integers(0, UNITS - 1))
            open_units.append(unit)
            events.append(UseEvent(Edge.START, unit))
    events += [UseEvent(Edge.END, unit) for unit in reversed(open_units)]
    return UseTrace(tuple(events))


def fetches(schedule: Schedule) -> int:
    return sum(op.verb is Verb.FETCH for op in schedule.ops)


@given(traces(), sizes, st.integers(0, 4), st.integers(0, 60))
def test_any_schedule_keeps_the_rules(trace: UseTrace, unit_nbytes: list[int], prefetch: int, spare: int) -> None:
    """`simulate` checks: in budget at every prefix, resident while used, each fetch has one evict."""
    capacity = required_nbytes(trace, unit_nbytes, 0) + spare
    schedule = plan(trace, unit_nbytes, capacity, prefetch)
    assert simulate(schedule, unit_nbytes) <= capacity
    used = {event.unit_index for event in trace if event.edge is Edge.START}
    assert {op.unit_index for op in schedule.ops if op.verb is Verb.COMPUTE} == used


@given(traces(), sizes, st.integers(0, 4))
def test_with_room_for_everything_each_unit_is_fetched_once(trace: UseTrace, unit_nbytes: list[int], prefetch: int) -> None:
    schedule = plan(trace, unit_nbytes, sum(unit_nbytes), prefetch)
    used = {event.unit_index for event in trace if event.edge is Edge.START}
    assert fetches(schedule) == len(used)


@given(traces(), sizes)
def test_more_memory_never_fetches_more(trace: UseTrace, unit_nbytes: list[int]) -> None:
    """On demand (no prefetch) and with units of one size, evicting what is used last is optimal, so it is monotone."""
    same = [4] * UNITS
    least = required_nbytes(trace, same, 0)
    counts = [fetches(plan(trace, same, capacity, 0)) for capacity in range(least, 4 * UNITS + 1, 4)]
    assert counts == sorted(counts, reverse=True)


@given(st.integers(1, 8), st.integers(0, 4), st.booleans())
def test_required_capacity_lets_the_prefetch_run_ahead(count: int, prefetch: int, overlapping: bool) -> None:
    """In a plain forward and backward, with the capacity that a depth asks for, every unit but the first comes early."""
    trace = guess(0, [Use(unit) for unit in range(1, count + 1)], overlapping=overlapping)
    unit_nbytes = [3] + [2] * count
    schedule = plan(trace, unit_nbytes, required_nbytes(trace, unit_nbytes, prefetch), prefetch)
    late = [
        event
        for event, ops in zip(schedule.trace, schedule.at, strict=True)
        if event.edge is Edge.START and Op(Verb.FETCH, event.unit_index) in ops
    ]
    assert len(late) <= (1 if prefetch else len(trace))
    assert required_nbytes(trace, unit_nbytes, 1) == 3 + 2 * min(count, 2)


def test_a_capacity_that_is_too_small_is_refused() -> None:
    trace = guess(0, [Use(1), Use(2)])
    unit_nbytes = [3, 2, 2]
    with pytest.raises(AssertionError, match="cannot hold unit"):
        plan(trace, unit_nbytes, required_nbytes(trace, unit_nbytes, 0) - 1, 0)


@pytest.mark.parametrize(
    "broken",
    [
        lambda schedule: schedule.at[:1] + ((),) * (len(schedule.at) - 1),  # fetches left out
        lambda schedule: (schedule.at[0] * 2, *schedule.at[1:]),  # fetched twice
    ],
)
def test_the_simulation_finds_broken_schedules(broken: object) -> None:
    trace = guess(0, [Use(1), Use(2), Use(3)])
    unit_nbytes = [1, 1, 1, 1]
    schedule = plan(trace, unit_nbytes, 3, 0)
    with pytest.raises(AssertionError):
        simulate(Schedule(schedule.trace, broken(schedule), schedule.closing, 3), unit_nbytes)  # type: ignore[operator]


def test_the_recorder_closes_what_is_open_and_ignores_what_it_did_not_see_start() -> None:
    recorder = UseRecorder()
    recorder.end(3)
    recorder.start(1)
    recorder.start(2)
    recorder.end(1)
    trace = recorder.take()
    assert trace.events == (UseEvent(Edge.START, 1), UseEvent(Edge.START, 2), UseEvent(Edge.END, 1), UseEvent(Edge.END, 2))
    assert len(recorder.take()) == 0


def test_a_trace_that_does_not_balance_is_refused() -> None:
    with pytest.raises(AssertionError, match="never end"):
        UseTrace((UseEvent(Edge.START, 0),))
    with pytest.raises(AssertionError, match="before it starts"):
        UseTrace((UseEvent(Edge.END, 0),))


def written(trace: UseTrace) -> str:
    return " ".join(("+" if event.edge is Edge.START else "-") + str(event.unit_index) for event in trace)


TIED = [Use(1, read_in_backward=False), Use(2), Use(3), Use(1)]
"""An embedding and its head around two blocks."""


def test_what_a_step_of_a_tied_model_probably_does() -> None:
    assert written(guess(0, TIED)) == "+0 +1 -1 +2 -2 +3 -3 +1 -1 -0 +0 +1 -1 +3 -3 +2 -2 -0"
    assert written(guess(0, TIED, overlapping=True)) == "+0 +1 -1 +2 -2 +3 -3 +1 -1 -0 +0 +1 +3 -1 +2 -3 -2 -0"
    assert Expected.of(0, TIED).late_units == {0, 1}


any_uses = st.lists(st.builds(Use, st.integers(1, UNITS - 1), st.booleans()), max_size=12)


@given(any_uses, sizes, st.integers(0, 3))
def test_the_expected_capacity_is_enough_however_uses_overlap(uses: list[Use], unit_nbytes: list[int], prefetch: int) -> None:
    expected = Expected.of(0, uses)
    capacity = expected_nbytes(expected, unit_nbytes, prefetch)
    for trace, ahead in ((expected.trace, prefetch), (expected.overlapping, 0)):
        assert simulate(plan(trace, unit_nbytes, capacity, ahead), unit_nbytes) <= capacity


@given(any_uses, sizes, st.integers(0, 3))
def test_memory_is_taken_unasked_only_where_it_saves_much(uses: list[Use], unit_nbytes: list[int], prefetch: int) -> None:
    """Counted by going through two steps in a row, which begins the second with what the first left."""
    expected = Expected.of(0, uses)
    least, taken = (needed(expected, unit_nbytes, prefetch) for needed in (expected_nbytes, worthwhile_nbytes))
    fetched = []
    for capacity in (least, taken):
        twice = plan(UseTrace(expected.trace.events * 2), unit_nbytes, capacity, prefetch)
        ops = [op for ops in twice.at[len(expected.trace) :] for op in ops]
        fetched.append(sum(unit_nbytes[op.unit_index] for op in ops if op.verb is Verb.FETCH))
    assert taken == least or fetched[0] - fetched[1] >= 6 * (taken - least) > 0


def test_a_large_embedding_stays_beside_small_blocks_and_not_beside_large_ones() -> None:
    uses = [TIED[0], *(Use(unit) for unit in range(2, 8)), TIED[-1]]
    expected = Expected.of(0, uses)
    small, large = [0, 50] + [10] * 6, [0, 50] + [25] * 6
    assert worthwhile_nbytes(expected, small, 1) == 50 + 2 * 10 > expected_nbytes(expected, small, 1)
    assert worthwhile_nbytes(expected, large, 1) == expected_nbytes(expected, large, 1) == 75


def test_what_the_next_step_needs_first_stays_at_the_end_of_one() -> None:
    uses = [TIED[0], *(Use(unit) for unit in range(2, 8)), TIED[-1]]
    schedule = plan(guess(0, uses), [0, 50] + [10] * 6, 80, 1)
    assert [op for op in schedule.ops if op == Op(Verb.EVICT, 1)] == [Op(Verb.EVICT, 1)], "it goes when the step is over"
    assert {op.unit_index for op in schedule.closing} == {0, 1, 2, 3, 4}
