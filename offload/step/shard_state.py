"""The state of a unit's shard between two steps, and the only ways it may change.

CLEAN      parameters and records are those of one version v; only now may the parameters be fetched
REDUCING   gradients of version v are arriving
UPDATING   an update to v + 1 is enqueued or running; its gradients can no longer be dropped, unless it is undone
"""

from __future__ import annotations

from enum import Enum


class ShardState(Enum):
    """See the module."""

    CLEAN = "clean"
    REDUCING = "reducing"
    UPDATING = "updating"


LEGAL: dict[ShardState, frozenset[ShardState]] = {
    ShardState.CLEAN: frozenset({ShardState.REDUCING}),
    # Back to CLEAN when the gradients are dropped: zero_grad, or a step that is skipped.
    ShardState.REDUCING: frozenset({ShardState.UPDATING, ShardState.CLEAN}),
    # Back to REDUCING when an update that came before the norm was known is undone.
    ShardState.UPDATING: frozenset({ShardState.CLEAN, ShardState.REDUCING}),
}


class ShardStates:
    """The states of all units' shards. Owned by the thread that drives the model (and backward's, never both at once)."""

    def __init__(self, unit_count: int) -> None:
        self._states = [ShardState.CLEAN] * unit_count

    def __getitem__(self, unit_index: int) -> ShardState:
        return self._states[unit_index]

    def become(self, unit_index: int, state: ShardState) -> None:
        """Change the state; the same state again is no change."""
        before = self._states[unit_index]
        if state is not before and state not in LEGAL[before]:
            raise AssertionError(f"shard of unit {unit_index} cannot go from {before.value} to {state.value}")
        self._states[unit_index] = state
