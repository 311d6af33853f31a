# SPDX-License-Identifier: Apache-2.0
"""What the parts of an engine stand on: there before any of them is made, and the same for all."""

from __future__ import annotations

from dataclasses import dataclass

from offload.device.accelerator import Accelerator
from offload.layout import Layout
from offload.model.unit import Unit
from offload.step.timeline import Timeline
from offload.tiers.memory import MemoryLedger


@dataclass(slots=True)
class Foundation:
    """One engine's."""

    accelerator: Accelerator
    layout: Layout
    units: list[Unit]
    ledger: MemoryLedger
    timeline: Timeline
