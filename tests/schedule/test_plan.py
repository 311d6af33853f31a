"""The planner on every kind of trace: what always holds of a schedule."""

from __future__ import annotations

import pytest
from hypothesis import given, strategies as st

from offload.schedule.plan import Op, Schedule, Verb, plan, required_nbytes, simulate
from offload.schedule.trace import Edge, Event, Recorder, Trace, Use, guess

UNITS = 6
sizes = st.lists(st.integers(0, 20), min_size=UNITS, max_size=UNITS)


@st.composite
def traces(draw: st.DrawFn) -> Trace:
    """Any balanced sequence of uses: nested, overlapping, repeated."""
    open_units: list[int] = []
    events: list[Event] = []
    for _ in range(draw(st.integers(0, 40))):
        if open_units and draw(st.booleans()):
            unit = open_units.pop(draw(st.integers(0, len(open_units) - 1)))
            events.append(Event(Edge.END, unit))
        else:
            unit = draw(st.integers(0, UNITS - 1))
            open_units.append(unit)
            events.append(Event(Edge.START, unit))
    events += [Event(Edge.END, unit) for unit in reversed(open_units)]
    return Trace(tuple(events))


def fetches(schedule: Schedule) -> int:
    return sum(op.verb is Verb.FETCH for op in schedule.ops)


@given(traces(), sizes, st.integers(0, 4), st.integers(0, 60))
def test_any_schedule_keeps_the_rules(trace: Trace, unit_nbytes: list[int], prefetch: int, spare: int) -> None:
    """`simulate` checks: in budget at every prefix, resident while used, each fetch has one evict."""
    capacity = required_nbytes(trace, unit_nbytes, 0) + spare
    schedule = plan(trace, unit_nbytes, capacity, prefetch)
    assert simulate(schedule, unit_nbytes) <= capacity
    used = {event.unit_index for event in trace if event.edge is Edge.START}
    assert {op.unit_index for op in schedule.ops if op.verb is Verb.COMPUTE} == used


@given(traces(), sizes, st.integers(0, 4))
def test_with_room_for_everything_each_unit_is_fetched_once(trace: Trace, unit_nbytes: list[int], prefetch: int) -> None:
    schedule = plan(trace, unit_nbytes, sum(unit_nbytes), prefetch)
    used = {event.unit_index for event in trace if event.edge is Edge.START}
    assert fetches(schedule) == len(used)


@given(traces(), sizes)
def test_more_memory_never_fetches_more(trace: Trace, unit_nbytes: list[int]) -> None:
    """On demand (no prefetch) and with units of one size, evicting what is used last is optimal, so it is monotone."""
    same = [4] * UNITS
    least = required_nbytes(trace, same, 0)
    counts = [fetches(plan(trace, same, capacity, 0)) for capacity in range(least, 4 * UNITS + 1, 4)]
    assert counts == sorted(counts, reverse=True)


@given(st.integers(1, 8), st.integers(0, 4))
def test_required_capacity_lets_the_prefetch_run_ahead(count: int, prefetch: int) -> None:
    """In a plain forward and backward, with the capacity that a depth asks for, every unit but the first comes early."""
    trace = guess(0, [Use(unit) for unit in range(1, count + 1)])
    unit_nbytes = [3] + [2] * count
    schedule = plan(trace, unit_nbytes, required_nbytes(trace, unit_nbytes, prefetch), prefetch)
    late = [
        event
        for event, before in zip(schedule.trace, schedule.before, strict=True)
        if event.edge is Edge.START and Op(Verb.FETCH, event.unit_index) in before
    ]
    assert len(late) <= (1 if prefetch else len(trace))


def test_a_capacity_that_is_too_small_is_refused() -> None:
    trace = guess(0, [Use(1), Use(2)])
    unit_nbytes = [3, 2, 2]
    with pytest.raises(AssertionError, match="cannot hold unit"):
        plan(trace, unit_nbytes, required_nbytes(trace, unit_nbytes, 0) - 1, 0)


@pytest.mark.parametrize(
    "broken",
    [
        lambda schedule: schedule.before[:1] + ((),) * (len(schedule.before) - 1),  # fetches left out
        lambda schedule: (schedule.before[0] * 2, *schedule.before[1:]),  # fetched twice
    ],
)
def test_the_simulation_finds_broken_schedules(broken: object) -> None:
    trace = guess(0, [Use(1), Use(2), Use(3)])
    unit_nbytes = [1, 1, 1, 1]
    schedule = plan(trace, unit_nbytes, 3, 0)
    with pytest.raises(AssertionError):
        simulate(Schedule(schedule.trace, broken(schedule), schedule.closing, 3), unit_nbytes)  # type: ignore[operator]


def test_the_recorder_closes_what_is_open_and_ignores_what_it_did_not_see_start() -> None:
    recorder = Recorder()
    recorder.end(3)
    recorder.start(1)
    recorder.start(2)
    recorder.end(1)
    trace = recorder.take()
    assert trace.events == (Event(Edge.START, 1), Event(Edge.START, 2), Event(Edge.END, 1), Event(Edge.END, 2))
    assert len(recorder.take()) == 0


def test_a_trace_that_does_not_balance_is_refused() -> None:
    with pytest.raises(AssertionError, match="never end"):
        Trace((Event(Edge.START, 0),))
    with pytest.raises(AssertionError, match="before it starts"):
        Trace((Event(Edge.END, 0),))
