# SPDX-License-Identifier: Apache-2.0
"""The optimizer's updates and the saves beside them: held up on the way, or made when the test says."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from offload.checkpoint.saving.idleness import Idleness
from offload.model.unit import Unit
from offload.step.updates.update import Updates


def before_each_update(patch: pytest.MonkeyPatch, before: Callable[[Unit, Any], object]) -> None:
    """On the lane, as a unit's update is begun there: with the unit and its update."""
    run = Updates._run

    def watched(updates: Updates, unit: Unit, update: Any) -> None:
        before(unit, update)
        run(updates, unit, update)

    patch.setattr(Updates, "_run", watched)


def training_rests(patch: pytest.MonkeyPatch, *, always: bool) -> None:
    """What a save thinks of the thread that drives the model: it makes updates in its place where that rests."""
    patch.setattr(Idleness, "_is_quiet", lambda _: always)
