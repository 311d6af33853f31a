# SPDX-License-Identifier: Apache-2.0
"""What an engine is made of, and how it is taken down."""

from __future__ import annotations

import warnings
from dataclasses import dataclass, field
from typing import Protocol

from offload.model.flat import ParameterInfo
from offload.planning.placement import Placement
from offload.planning.use_trace import Expected
from offload.ranks.group import Group, Meeting
from offload.step.chunk_stores import ParameterStore, RecordStore
from offload.step.foundation import Foundation
from offload.step.gradients.chunk_gradients import ChunkGradients
from offload.step.gradients.gradient_sync import GradientSync
from offload.step.residency.fetching import Fetcher
from offload.step.residency.residency import Residency
from offload.step.updates.update import Updates
from offload.tiers.io import IoBackend
from offload.tiers.staging import StagingPool


class Closable(Protocol):
    """What holds something that must be given back."""

    def close(self) -> None: ...


def close_all(made: list[Closable], before: BaseException | None = None) -> None:
    """Close what was made, last first, emptying the list. One failure does not keep the rest open, nor does one interrupt;
    that, else the first failure, is raised. `before`: what was raised before this, and is the first."""
    failure = before if isinstance(before, Exception) else None
    interrupt = before if failure is None else None
    while made:
        try:
            made[-1].close()
        except Exception as error:
            failure = failure or error
        except BaseException as error:
            if interrupt is not None:
                raise  # what is left stays in the list
            interrupt = error
            continue  # the same once more: a close that an interrupt ended goes on where it was
        made.pop()
    if (first := interrupt or failure) is not None:
        raise first


def give_back(made: list[Closable]) -> None:
    """`close_all` after a failure, which is the one to be raised: what fails here is a warning."""
    try:
        close_all(made)
    except Exception as error:
        warnings.warn(f"while what had been made was given back: {error}", RuntimeWarning, stacklevel=4)


@dataclass(slots=True)
class Components(Foundation):
    """What an engine is made of. Closed in the reverse of the order in which it was made."""

    placement: Placement
    parameters: list[ParameterInfo]
    pool: StagingPool
    fetcher: Fetcher
    residency: Residency
    expected: Expected
    ranks: Group
    meeting: Meeting
    gradient_sync: GradientSync
    parameter_store: ParameterStore
    records: RecordStore | None = None
    gradients: ChunkGradients | None = None
    updates: Updates | None = None
    backend: IoBackend | None = None
    made: list[Closable] = field(default_factory=list)

    @property
    def stays(self) -> bool:
        """Whether all parameters are where the model computes on them, for good and on one rank alone, and none are updated
        before the step: nothing has to know when a unit of them is used."""
        return self.ranks.world_size == 1 and not any(unit.residency.nbytes or unit.route.undoable for unit in self.units)

    def close(self, before: BaseException | None = None) -> None:
        """Stop and give back everything, last made first. Idempotent. Raises the first failure, after all of it; `before`: see
        `close_all`."""
        close_all(self.made, before)
