# SPDX-License-Identifier: Apache-2.0
"""What was decided, in five lines: said in the log as an engine is made."""

from __future__ import annotations

from offload.planning.budget import TIERS
from offload.planning.placement import Placement, Verdict

_LISTED = 3


def summary_of(placement: Placement) -> list[str]:
    """Where states lie, what that takes, how long a step takes at least, what else was weighed, by which rates."""
    verdict = placement.verdict
    if verdict is None:
        return []
    totals = {tier: placement.plan.total_nbytes(tier) for tier in TIERS}
    taken = ", ".join(f"{nbytes / 2**30:.2f} GiB on {tier}" for tier, nbytes in totals.items() if nbytes)
    cost = verdict.cost
    parts = [_seconds(max(part.values())) for part in cost.parts]
    between = f"{parts[1]} under the other micro-batches, " if any(cost.between.values()) else ""
    room = "" if verdict.has_room else "; sums of several micro-batches would find no room"
    return [
        f"placement: parameters on {placement.parameters}, optimizer states on {placement.optimizer_states}, gradients on "
        f"{placement.gradients}, {sum(route.parameters == 'device' for route in placement.routes)} of {len(placement.routes)} "
        f"units' parameters on the device, prefetch {placement.prefetch}",
        f"memory: {taken or 'nothing'}{room}",
        f"a step moves what takes {_seconds(cost.seconds)} at least ({cost.bound_by}): {parts[0]} under forward, "
        f"{between}{parts[2]} under backward; longer compute hides it",
        f"weighed: {_weighed(verdict)}",
        f"rates: {verdict.rates.source}",
    ]


def _weighed(verdict: Verdict) -> str:
    if not verdict.weighed:
        return "nothing, the configuration names the tiers"
    first = "; ".join(
        f"parameters on {parameters}, states on {states} {_seconds(seconds)}"
        for parameters, states, seconds in verdict.weighed[:_LISTED]
    )
    more = len(verdict.weighed) - _LISTED
    return f"{first}{f' and {more} more' if more > 0 else ''}"


def _seconds(seconds: float) -> str:
    return f"{seconds:.2f} s" if seconds >= 1 else f"{seconds * 1e3:.1f} ms"
