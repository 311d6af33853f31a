# SPDX-License-Identifier: Apache-2.0
"""What records and values are brought to their update with: one object, so that another way changes no constructor."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from offload.device.accelerator import Accelerator
from offload.step.chunk_stores import ParameterStore, RecordStore
from offload.step.timeline import Timeline
from offload.tiers.staging import StagingPool

if TYPE_CHECKING:
    from offload.step.updates.records_on_device import RecordsOnDevice


@dataclass(frozen=True, slots=True)
class UpdateTools:
    """One engine's. `visiting`: where records may be on the device whatever the routes say."""

    accelerator: Accelerator
    pool: StagingPool
    records: RecordStore
    parameter_store: ParameterStore
    timeline: Timeline
    visiting: RecordsOnDevice | None = None
