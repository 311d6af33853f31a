# SPDX-License-Identifier: Apache-2.0
"""What a step moves at least, in bytes per parameter, by the formula of how it trains; and its least time at measured rates."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from .model import SHAPES, flops_of_step

ADAM_NBYTES = {"fp32": 26.0, "split": 24.0}
"""Of host memory, beside the gradient: master and two moments read and written, the 16-bit weight written. Split: in the
master's place the weight and its remainder, both read and written."""


@dataclass(frozen=True)
class Traffic:
    """Bytes per parameter and step. `host`: through host memory, whoever moves them; `state_format`: of the CPU's update, None
    where the CPU updates nothing."""

    h2d: float
    d2h: float
    host: float
    state_format: str | None
    nvme_read: float = 0.0
    nvme_write: float = 0.0

    @staticmethod
    def of(parameters: str, states: str, state_format: str = "fp32", micro_batches: int = 1) -> Traffic | None:
        """offload's, on one rank; None where the device updates."""
        if states == "device":
            return None
        n = micro_batches
        # Parameters that lie elsewhere come twice for each micro-batch; on the device they come once, updated.
        h2d, d2h = (4.0 * n if parameters != "device" else 2.0), 2.0 * n
        # Adam reads a gradient in 16 bits. Several are added in fp32: the first is written, each other one reads and writes.
        gradients = 2.0 if n == 1 else 2.0 * n + 4.0 + 8.0 * (n - 1) + 4.0
        record = 12.0 if state_format == "fp32" else 10.0
        on_drive = (record if states == "nvme" else 0.0) + (2.0 if parameters == "nvme" else 0.0)
        read = (record if states == "nvme" else 0.0) + (4.0 * n if parameters == "nvme" else 0.0)
        host = h2d + d2h + ADAM_NBYTES[state_format] + gradients + read + on_drive
        return Traffic(h2d, d2h, host, state_format, read, on_drive)


def floor(cell: dict[str, Any], batch: dict[str, Any], rates: dict[str, Any]) -> dict[str, Any]:
    """Seconds that each part needs at least for one step; the largest is the floor.

    "host memory" is shared by all that use it: both links, the update, the drive. What was not measured has no term. Of units
    whose records visit the device nothing moves, and the device makes their updates.
    """
    shape = SHAPES[cell["model"]]
    tokens = batch["micro_batch"] * shape.sequence * cell.get("micro_batches_per_step", 1)
    # Under activation checkpointing the layers run forward once more in backward.
    factor = 8 if cell.get("recomputes", True) else 6
    terms = {"compute": flops_of_step(shape, tokens, factor=factor) / rates["matrix_flops"]}
    moved = cell.get("traffic")
    if moved is not None:
        links = rates["links"]
        seconds = {
            "h2d": (moved["h2d"], links["h2d"]),
            "d2h": (moved["d2h"], links["d2h"]),
            "both links": (moved["h2d"] + moved["d2h"], links["both"]),
            "host memory": (moved["host"], rates.get("host_memory")),
            "nvme read": (moved["nvme_read"], (rates.get("nvme") or {}).get("read")),
            "nvme write": (moved["nvme_write"], (rates.get("nvme") or {}).get("write")),
        }
        numel = shape.numel * (1.0 - batch.get("visiting_share", 0.0))
        terms |= {name: nbytes * numel / rate for name, (nbytes, rate) in seconds.items() if rate and nbytes}
        if moved["state_format"] is not None:
            terms["cpu adam"] = numel / rates["cpu_adam_numel"][moved["state_format"]]
    bound = max(terms, key=lambda name: terms[name])
    return {
        "floor_seconds": terms[bound],
        "bound_by": bound,
        "terms": terms,
        "share_of_floor": terms[bound] / batch["step_seconds"],
    }
