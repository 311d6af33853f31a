# SPDX-License-Identifier: Apache-2.0
"""A schedule run on numbers alone: the oracle of what always holds of one (`offload.planning.schedule`)."""

from __future__ import annotations

from collections.abc import Sequence

from offload.planning.schedule import Op, Schedule, Verb
from offload.planning.use_trace import Edge


def simulate(schedule: Schedule, unit_nbytes: Sequence[int]) -> int:
    """Run the schedule on numbers alone; return the peak of resident bytes. Raises AssertionError where a rule breaks."""
    resident: set[int] = set()
    in_use: dict[int, int] = {}
    used_nbytes = peak_nbytes = 0

    def apply(op: Op) -> None:
        nonlocal used_nbytes, peak_nbytes
        if op.verb is Verb.FETCH:
            assert op.unit_index not in resident, f"unit {op.unit_index} is fetched twice"
            resident.add(op.unit_index)
            used_nbytes += unit_nbytes[op.unit_index]
            peak_nbytes = max(peak_nbytes, used_nbytes)
        else:
            assert op.unit_index in resident, f"unit {op.unit_index} is evicted while absent"
            assert not in_use.get(op.unit_index), f"unit {op.unit_index} is evicted while in use"
            resident.remove(op.unit_index)
            used_nbytes -= unit_nbytes[op.unit_index]
        assert used_nbytes <= schedule.capacity_nbytes, "over budget"

    for event, ops in zip(schedule.trace, schedule.at, strict=True):
        if event.edge is Edge.END:
            in_use[event.unit_index] -= 1
        for op in ops:
            apply(op)
        if event.edge is Edge.START:
            assert event.unit_index in resident, f"unit {event.unit_index} is used while absent"
            in_use[event.unit_index] = in_use.get(event.unit_index, 0) + 1
    for op in schedule.closing:
        apply(op)
    assert not resident, f"units {sorted(resident)} are never evicted"
    return peak_nbytes
