# SPDX-License-Identifier: Apache-2.0
"""What is remembered of a unit while the engine runs: two state machines, and what is under way.

    UnitResidency  whether it is in device memory
    Fetch          what brings it there
    UnitShard      whether its gradients or its update are under way
    UnitGradient   its gradients until the ranks have averaged them

Each says who writes it, in which thread.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum

import torch

from offload.device.pending import Pending
from offload.ranks.rendezvous import Request


class UnitState(Enum):
    """Where the values of a unit are.

    ABSENT    in their home only
    FETCHING  memory is filled, reads or copies (and perhaps an update) are on their way
    RESIDENT  in device memory
    """

    __hash__ = object.__hash__  # one of C: an enum's own is a call of Python

    ABSENT = "absent"
    FETCHING = "fetching"
    RESIDENT = "resident"


LEGAL: dict[UnitState, frozenset[UnitState]] = {
    UnitState.ABSENT: frozenset({UnitState.FETCHING}),
    UnitState.FETCHING: frozenset({UnitState.RESIDENT}),
    UnitState.RESIDENT: frozenset({UnitState.ABSENT}),
}


@dataclass(slots=True, eq=False)
class UnitResidency:
    """Written by `Residency` alone, in the thread that drives the model (backward's during backward, never both).

    nbytes      device memory that the unit takes while it is resident; 0: it is there for good
    persistent  it comes and goes, and is there between steps all the same, with the values of the last one
    """

    nbytes: int = 0
    persistent: bool = False
    state: UnitState = UnitState.RESIDENT

    def become(self, state: UnitState) -> None:
        if state not in LEGAL[self.state]:
            raise AssertionError(f"a unit cannot go from {self.state.value} to {state.value}")
        self.state = state


@dataclass(slots=True, eq=False)
class Fetch:
    """What brings a unit into device memory, between its start and the end that compute waits for.

    job     settles when every copy has been started
    copies  H2D copies, or reads straight into the unit's memory; complete once `job` has settled
    gather  the other ranks' shards (ZeRO stage 3)
    """

    job: Pending | None = None
    copies: list[Pending] = field(default_factory=list)
    gather: Request | None = None


class ShardState(Enum):
    """The state of a unit's shard between two steps.

    CLEAN      parameters and records are those of one version v; only now may the parameters be fetched
    REDUCING   gradients of version v are arriving
    UPDATING   an update to v + 1 is enqueued or running; its gradients can no longer be dropped, unless it is undone
    """

    __hash__ = object.__hash__  # as above

    CLEAN = "clean"
    REDUCING = "reducing"
    UPDATING = "updating"


_SHARD_STEPS: dict[ShardState, frozenset[ShardState]] = {
    ShardState.CLEAN: frozenset({ShardState.REDUCING}),
    # Back to CLEAN when the gradients are dropped: zero_grad, or a step that is skipped.
    ShardState.REDUCING: frozenset({ShardState.UPDATING, ShardState.CLEAN}),
    # Back to REDUCING when an update that came before the norm was known is undone.
    ShardState.UPDATING: frozenset({ShardState.CLEAN, ShardState.REDUCING}),
}


@dataclass(slots=True, eq=False)
class UnitShard:
    """Written in the thread that drives the model (and backward's, never both at once): by `ParameterGradients` as gradients
    come and go, by `UpdateMaker` and `Training` at the step, by `Speculation` as it undoes."""

    state: ShardState = ShardState.CLEAN

    def become(self, state: ShardState) -> None:
        """Change the state; the same state again is no change."""
        if state is not self.state and state not in _SHARD_STEPS[self.state]:
            raise AssertionError(f"a shard cannot go from {self.state.value} to {state.value}")
        self.state = state


@dataclass(slots=True, eq=False)
class UnitGradient:
    """Written by `Reduction` in the thread that drives the model (and backward's), `present` by the communication thread.

    buffers  by position in the unit's flats: [flat.numel], the flat's dtype, or fp32 once something was added. They are the
             communication thread's while `asked` is not settled
    arrived  parameters whose gradient this rank has put there since they were last reduced
    asked    their reduction; `ready`: when what compute does to the buffers is done
    present  parameters that got a gradient on some rank since the last step, as far as reduced
    told     those of `present` that count for the coming step already
    """

    buffers: dict[int, torch.Tensor] = field(default_factory=dict)
    arrived: set[int] = field(default_factory=set)
    asked: Request | None = None
    ready: Pending | None = None
    present: set[int] = field(default_factory=set)
    told: set[int] = field(default_factory=set)
