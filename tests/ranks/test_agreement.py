# SPDX-License-Identifier: Apache-2.0
"""The agreement alone, on simulated ranks: whatever ways they take, nobody waits for ever, and everybody gets what he asked."""

from __future__ import annotations

import random
from dataclasses import dataclass, field

import pytest
import torch
from hypothesis import given, settings, strategies as st

from offload.ranks.all_or_none import checksum
from offload.ranks.next_transfers import Announcement, Blocked, MeetingPoint, decide

UNITS = 5


@dataclass
class Simulated:
    """A rank's program: what its training thread does next, in order.

    ("gather", u): asks ahead and goes on; ("need", u): waits for it; ("reduce", u): asks and goes on; ("drain", u): waits
    for that reduction; ("point", p).
    """

    program: list[tuple[str, int]]
    gathers: set[int] = field(default_factory=set)
    reductions: set[int] = field(default_factory=set)
    have: set[int] = field(default_factory=set)
    position: int = 0

    @property
    def is_done(self) -> bool:
        return self.position >= len(self.program)

    def run(self, count: int) -> None:
        """At most `count` actions, as far as nothing blocks."""
        for _ in range(count):
            if self.is_done or self.blocked is not Blocked.ON_NOTHING:
                return
            kind, unit = self.program[self.position]
            if kind == "gather" and unit not in self.have:
                self.gathers.add(unit)
            elif kind == "reduce":
                self.reductions.add(unit)
            elif kind == "need":
                self.have.discard(unit)  # used, and evicted after use
            self.position += 1

    @property
    def blocked(self) -> Blocked:
        if self.is_done:
            return Blocked.AT_POINT
        kind, unit = self.program[self.position]
        if kind == "need" and unit not in self.have:
            self.gathers.add(unit)
            return Blocked.ON_GATHER
        if kind in ("drain", "reduce") and unit in self.reductions:
            return Blocked.ON_REDUCTION
        return Blocked.AT_POINT if kind == "point" else Blocked.ON_NOTHING

    def announce(self) -> Announcement:
        blocked = self.blocked
        argument, point = 0, MeetingPoint.NONE
        if blocked is Blocked.AT_POINT:
            point = MeetingPoint.CLOSING if self.is_done else MeetingPoint(self.program[self.position][1])
        elif blocked is not Blocked.ON_NOTHING:
            argument = self.program[self.position][1]
        return Announcement(frozenset(self.gathers), frozenset(self.reductions), blocked, point, argument)


units = st.integers(0, UNITS - 1)
action = st.one_of(
    st.tuples(st.just("gather"), units),
    st.tuples(st.just("need"), units),
    st.tuples(st.just("reduce"), units),
    st.tuples(st.just("drain"), units),
)
step = st.lists(action, max_size=8)


@settings(max_examples=400, deadline=None)
@given(st.integers(2, 4).flatmap(lambda ranks: st.lists(st.tuples(*[step] * ranks), min_size=1, max_size=3)), st.integers())
def test_no_ranks_wait_for_each_other(steps: list[tuple[list[tuple[str, int]], ...]], seed: int) -> None:
    """Steps of which each rank does what it likes, with common points at their ends, run at random speeds."""
    draw = random.Random(seed)
    points = (MeetingPoint.END_OF_BACKWARD, MeetingPoint.STEP)
    ranks = [
        Simulated([entry for one in steps for entry in (*one[index], *(("point", point) for point in points))])
        for index in range(len(steps[0]))
    ]
    reduced = [0] * len(ranks)
    idle_rounds = 0
    while not all(rank.is_done for rank in ranks):
        for rank in ranks:
            rank.run(draw.randrange(4) if idle_rounds < 20 else 1000)
        # A rank with nothing to announce is not at the rendezvous: the others wait for it.
        if not all(rank.gathers or rank.reductions or rank.blocked is Blocked.AT_POINT for rank in ranks):
            idle_rounds += 1
            assert idle_rounds < 1000
            continue
        decision = decide([rank.announce() for rank in ranks])
        assert not decision.mismatch
        everybody_blocked = all(rank.blocked is not Blocked.ON_NOTHING for rank in ranks)
        assert not (decision.is_nothing and everybody_blocked), "all ranks are blocked and nothing is done"
        idle_rounds = idle_rounds + 1 if decision.is_nothing else 0
        assert idle_rounds < 1000
        for unit, wanters in decision.gathers:
            assert wanters == {index for index, rank in enumerate(ranks) if unit in rank.gathers}
            for index in wanters:
                ranks[index].gathers.discard(unit)
                ranks[index].have.add(unit)
        for unit, contributors in decision.reductions:
            assert contributors == {index for index, rank in enumerate(ranks) if unit in rank.reductions}
            for index in contributors:
                ranks[index].reductions.discard(unit)
                reduced[index] += 1
        if decision.point is not MeetingPoint.NONE:
            assert not any(rank.reductions for rank in ranks), "a point was passed with gradients left behind"
            for rank in ranks:
                rank.position += 1
    expected = [sum(kind == "reduce" for one in steps for kind, _ in one[index]) for index in range(len(ranks))]
    assert reduced == expected


@given(st.permutations([MeetingPoint.STEP, MeetingPoint.STATE_DICT, MeetingPoint.CLOSING]))
def test_different_points_are_named(points: list[MeetingPoint]) -> None:
    said = [Announcement(blocked=Blocked.AT_POINT, point=point) for point in points]
    mismatch = decide(said).mismatch
    for index, point in enumerate(points):
        assert f"{index} in {point.call}" in mismatch


def test_different_arguments_are_named() -> None:
    said = [Announcement(blocked=Blocked.AT_POINT, point=MeetingPoint.GATHERED, argument=index) for index in range(2)]
    assert "engine.gathered() with different arguments" in decide(said).mismatch


def test_nothing_is_done_while_somebody_computes() -> None:
    """He may come to want the same yet: nothing is moved for some only."""
    waiting = Announcement(gathers=frozenset({1}), blocked=Blocked.ON_GATHER, argument=1)
    computing = Announcement(gathers=frozenset({2}))
    assert decide([waiting, computing]).is_nothing
    assert decide([waiting, waiting]).gathers == ((1, frozenset({0, 1})),)


@pytest.mark.parametrize("dtype", [torch.bool, torch.bfloat16, torch.float32, torch.int64, torch.complex64, torch.complex128])
def test_a_checksum_tells_values_of_any_dtype_apart(dtype: torch.dtype) -> None:
    values = torch.ones(5, 3, dtype=dtype)
    other = values.clone()
    other[4, 2] = 0
    assert checksum(values) == checksum(values.clone()) != checksum(other)
    assert checksum(values[:0]) == checksum(other[:0])
