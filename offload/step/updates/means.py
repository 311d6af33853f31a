# SPDX-License-Identifier: Apache-2.0
"""What the ways of records and values work with: all that any of them may need, so that a new one is only written."""

from __future__ import annotations

from dataclasses import dataclass

from offload.device.accelerator import Accelerator
from offload.step.chunk_stores import ParameterStore, RecordStore
from offload.step.threads.timeline import Timeline
from offload.tiers.staging import StagingPool


@dataclass(frozen=True, slots=True)
class Means:
    """One engine's."""

    accelerator: Accelerator
    pool: StagingPool
    records: RecordStore
    parameter_store: ParameterStore
    timeline: Timeline
