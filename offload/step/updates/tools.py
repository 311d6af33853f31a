# SPDX-License-Identifier: Apache-2.0
"""What records and values are brought to their update with: one object, so that another way changes no constructor."""

from __future__ import annotations

from dataclasses import dataclass

from offload.device.accelerator import Accelerator
from offload.step.chunk_stores import ParameterStore, RecordStore
from offload.step.timeline import Timeline
from offload.tiers.staging import StagingPool


@dataclass(frozen=True, slots=True)
class UpdateTools:
    """One engine's."""

    accelerator: Accelerator
    pool: StagingPool
    records: RecordStore
    parameter_store: ParameterStore
    timeline: Timeline
