# SPDX-License-Identifier: Apache-2.0
"""Placements that no budget leads to: which units' states lie nearer than the others' is said here."""

from __future__ import annotations

from collections.abc import Iterator, Set
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import pytest

from offload.planning.deciding import Decision
from offload.planning.placement import Placement, place
from offload.planning.tier_choice import Near

NONE: frozenset[int] = frozenset()


@contextmanager
def choosing(
    *, parameters: Set[int] = NONE, gradients: Set[int] = NONE, records: Set[int] = NONE, **changes: Any
) -> Iterator[None]:
    """Inside, `initialize` makes engines with these units' states on the device, and other things of the choice changed."""
    near = Near(frozenset(parameters), frozenset(gradients), frozenset(records))
    decide = Decision.decide

    def decided(self: Decision, *, within_room: bool = False) -> Placement:
        choice = decide(self, within_room=within_room).choice
        return place(self.problem, replace(choice, near=near, **changes))

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Decision, "decide", decided)
        yield
