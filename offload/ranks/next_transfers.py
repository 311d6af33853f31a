# SPDX-License-Identifier: Apache-2.0
"""What several ranks do next, decided alike on each of them from what all of them announced. Pure.

Every rank announces which units it wants gathered, which units' gradients it has ready to be reduced, and what its
training thread is blocked on. From the same announcements every rank draws the same conclusion:

    1. what all ranks want is done: gathers, then reductions
    2. if nothing is wanted by all, and some rank still computes, it may want it yet: nothing is done for now
    3. if all are blocked, they have taken different ways (a mixture of experts, an evaluation of another length). Then the
       gathers that somebody is blocked on are done for those, the others only lending their shards; if nobody waits for one,
       reductions are done with what there is (the sum of a unit's gradients may be reduced in parts)
    4. if all are at the same point of the program, it is passed, after what was asked for ahead of use: behind it a rank that
       gives such a unit up would wait for others, who may be in a collective of the loop's own. At different points nobody
       can go on: an error

So no order of uses on any rank can make them wait for each other for ever.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from enum import IntEnum


class Blocked(IntEnum):
    """What the training thread of a rank waits for."""

    ON_NOTHING = 0
    ON_GATHER = 1
    ON_REDUCTION = 2
    AT_POINT = 3


class MeetingPoint(IntEnum):
    """Places of the program that all ranks pass together. `call`: what the user called; `arguments`: what is alike then."""

    NONE = 0, "nothing"
    END_OF_BACKWARD = 1, "the end of backward"
    STEP = 2, "optimizer.step()", "numbers in param_groups (a learning rate), norms to clip to, or loss scales"
    CLIPPING = 3, "clip_grad_norm_()"
    GATHERED = 4, "engine.gathered()"
    WRITTEN = 5, "the end of engine.gathered()"
    STATE_DICT = 6, "engine.state_dict()"
    LOADING_STATE_DICT = 7, "engine.load_state_dict()"
    SAVING = 8, "engine.save_checkpoint()"
    LOADING = 9, "engine.load_checkpoint()"
    EXPORTING = 10, "engine.export()"
    CLOSING = 11, "engine.close()"
    UNFREEZING = 12, "the first forward with newly trained parameters"
    PUTTING_ZEROS = 13, "zero_grad(set_to_none=False)"

    call: str
    arguments: str

    def __new__(cls, number: int, call: str = "", arguments: str = "arguments, or in different states") -> MeetingPoint:
        point = int.__new__(cls, number)  # looked up by its number alone
        point._value_, point.call, point.arguments = number, call, arguments
        return point


@dataclass(frozen=True, slots=True)
class Announcement:
    """One rank's. `argument`: the unit it is blocked on, or a digest of the point's arguments, equal on all ranks."""

    gathers: frozenset[int] = frozenset()
    reductions: frozenset[int] = frozenset()
    blocked: Blocked = Blocked.ON_NOTHING
    point: MeetingPoint = MeetingPoint.NONE
    argument: int = 0


@dataclass(frozen=True, slots=True)
class Decision:
    """What to do now, in this order. Member indices: who wants a gather, who has gradients for a reduction."""

    gathers: tuple[tuple[int, frozenset[int]], ...] = ()
    reductions: tuple[tuple[int, frozenset[int]], ...] = ()
    point: MeetingPoint = MeetingPoint.NONE
    mismatch: str = ""

    @property
    def is_nothing(self) -> bool:
        return not (self.gathers or self.reductions or self.point or self.mismatch)


def decide(announcements: Sequence[Announcement]) -> Decision:
    """See the module. `announcements` by member."""
    everybody = frozenset(range(len(announcements)))
    urgent = {said.argument for said in announcements if said.blocked is Blocked.ON_GATHER}
    gathers = frozenset.intersection(*(said.gathers for said in announcements))
    reductions = frozenset.intersection(*(said.reductions for said in announcements))
    if gathers or reductions:
        in_order = sorted(gathers, key=lambda unit: (unit not in urgent, unit))
        return Decision(
            tuple((unit, everybody) for unit in in_order),
            tuple((unit, everybody) for unit in sorted(reductions)),
        )
    if any(said.blocked is Blocked.ON_NOTHING for said in announcements):
        return Decision()
    if urgent:
        return Decision(gathers=_by_unit(urgent, [said.gathers for said in announcements]))
    ready = frozenset().union(*(said.reductions for said in announcements))
    if ready:
        return Decision(reductions=_by_unit(ready, [said.reductions for said in announcements]))
    return _pass_point(announcements)


def _by_unit(units: Iterable[int], asked_for: Sequence[frozenset[int]]) -> tuple[tuple[int, frozenset[int]], ...]:
    """Each with the members that ask for it; `asked_for`: by member."""
    return tuple((unit, frozenset(index for index, asked in enumerate(asked_for) if unit in asked)) for unit in sorted(units))


def _pass_point(announcements: Sequence[Announcement]) -> Decision:
    points = [said.point for said in announcements]
    if any(point is not points[0] for point in points):
        listed = ", ".join(f"{index} in {point.call}" for index, point in enumerate(points))
        return Decision(mismatch=f"the ranks are at different places: {listed}. All ranks must make the same calls.")
    if any(said.argument != announcements[0].argument for said in announcements):
        return Decision(
            mismatch=f"the ranks called {points[0].call} with different {points[0].arguments}. "
            "All ranks must make the same calls."
        )
    asked_for = [said.gathers for said in announcements]
    return Decision(gathers=_by_unit(frozenset().union(*asked_for), asked_for), point=points[0])
