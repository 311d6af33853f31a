# SPDX-License-Identifier: Apache-2.0
"""What `Engine.stats` tells: counts, bytes planned and measured, seconds by phase, and what each link did."""

from __future__ import annotations

from typing import Any

from offload.errors import words_of
from offload.taken_model import TakenModel


def statistics(taken: TakenModel) -> dict[str, Any]:
    """See `Engine.stats`; the seconds and links since the last call."""
    parts, training = taken.parts, taken.training
    reading = taken.links.take()
    visiting = parts.updates.visiting if parts.updates is not None else None
    return {
        "steps": training.step_count,
        "skipped_steps": training.loss_scale.skipped_step_count,
        "speculated_steps": training.speculation.speculated_step_count,
        "undone_steps": training.speculation.undone_step_count,
        "placement": {
            "parameters": parts.placement.parameters,
            "optimizer_states": parts.placement.optimizer_states,
            "gradients": parts.placement.gradients,
        },
        "decision": parts.placement.verdict.as_json() if parts.placement.verdict is not None else None,
        "planned": [{"tier": line.tier, "purpose": line.purpose, "nbytes": line.nbytes} for line in parts.placement.plan.lines],
        "units": [
            {"name": unit.name, "nbytes": unit.layout.nbytes, "begins_early": unit.route.undoable} for unit in parts.units
        ],
        "pending_updates": len(parts.updates.coming()) if parts.updates is not None else 0,
        "failure": words_of(training.failure) if training.failure is not None else None,
        "host_nbytes": parts.ledger.by_purpose,
        "host_peak_nbytes": parts.ledger.peak_nbytes,
        "resident_capacity_nbytes": parts.residency.room.capacity_nbytes,
        "resident_peak_nbytes": parts.residency.room.peak_resident_nbytes,
        "visiting_nbytes": visiting.nbytes if visiting is not None else 0,
        "visiting_peak_nbytes": visiting.peak_nbytes if visiting is not None else 0,
        "device_peak_nbytes": parts.accelerator.peak_nbytes(),
        "io": reading.io,
        "io_backend": parts.backend.name if parts.backend is not None else None,
        "seconds": reading.seconds,
        "links": {
            name: {
                "busy_seconds": link.busy_seconds,
                "exposed_seconds": link.exposed_seconds,
                "hidden": link.hidden,
                "nbytes": link.nbytes,
            }
            for name, link in reading.links.items()
        },
        "ranks": parts.ranks.statistics(),
    }
