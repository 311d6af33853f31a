# SPDX-License-Identifier: Apache-2.0
"""What tests look at inside an engine where nothing public tells: the one place that knows where it lies."""

from __future__ import annotations

from offload.device.accelerator import Accelerator
from offload.engine import Engine
from offload.layout import Layout
from offload.model.unit import Unit
from offload.planning.placement import Placement
from offload.step.components import Components
from offload.step.gradients.sums_on_device import SumsOnDevice
from offload.step.residency.residency import Residency
from offload.step.updates.records_on_device import RecordsOnDevice


def parts_of(engine: Engine) -> Components:
    """All of it."""
    return engine._parts


def units_of(engine: Engine) -> list[Unit]:
    """The units, with their run-time state."""
    return parts_of(engine).units


def layout_of(engine: Engine) -> Layout:
    """How flats, slots and chunks are cut."""
    return parts_of(engine).layout


def placement_of(engine: Engine) -> Placement:
    """What was decided, with the route of each unit."""
    return parts_of(engine).placement


def accelerator_of(engine: Engine) -> Accelerator:
    """What it computes on."""
    return parts_of(engine).accelerator


def sums_on_device_of(engine: Engine) -> SumsOnDevice:
    """What stays there of several micro-batches."""
    gradients = parts_of(engine).gradients
    assert gradients is not None and gradients.sums_on_device is not None
    return gradients.sums_on_device


def records_on_device_of(engine: Engine) -> RecordsOnDevice:
    """What visits there."""
    updates = parts_of(engine).updates
    assert updates is not None and updates.visiting is not None
    return updates.visiting


def residency_of(engine: Engine) -> Residency:
    """Who fetches and evicts."""
    return parts_of(engine).residency


def finish_updates(engine: Engine) -> None:
    """Run what is enqueued of the last step's updates."""
    residency_of(engine).finish_updates()


def settle_writes(engine: Engine) -> None:
    """Wait for every write of parameters and records."""
    parts = parts_of(engine)
    parts.parameter_store.settle_writes()
    if parts.records is not None:
        parts.records.settle_writes()
