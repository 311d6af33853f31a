# SPDX-License-Identifier: Apache-2.0
"""What would make a recorded step shorter, and by how much at most: each piece of advice follows from the trace's numbers."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from offload.device.recording import COLLECTIVES, D2H, H2D
from offload.planning.purposes import OPTIMIZER_STATES, ROOM_TO_UNDO
from offload.profiling.attribution import ADAM, DRIVE, HOST, OUTSIDE, SUMS, Attribution, Share
from offload.profiling.trace_events import Trace

WORTH = 0.02
"""Of a step: what saves less is not mentioned."""
_GIB = 2**30
_RECORD_NBYTES = {"fp32": 12.0, "split": 10.0, "bf16": 6.0, "8bit": 4.03}
"""Of a bf16 parameter's record, with Adam (docs/architecture.md)."""


@dataclass(frozen=True, slots=True)
class Advice:
    """`change`: what to do. `saves_seconds`: of a step, at most; None where that cannot be told from the trace."""

    change: str
    why: str
    saves_seconds: float | None


def _time(seconds: float) -> str:
    return f"{seconds:.2f} s" if seconds >= 1 else f"{seconds * 1e3:.1f} ms"


def _size(nbytes: float) -> str:
    return f"{nbytes / _GIB:.1f} GiB" if nbytes >= _GIB else f"{nbytes / 2**20:.1f} MiB"


def _both(first: Advice, second: Advice) -> Advice:
    """One change that helps for two reasons."""
    saved = [one.saves_seconds for one in (first, second) if one.saves_seconds is not None]
    why = first.why if first.why == second.why else f"{first.why}; {second.why}"
    return Advice(first.change, why, sum(saved) if saved else None)


class Adviser:
    """Everything by step, in seconds."""

    def __init__(self, trace: Trace, found: Attribution) -> None:
        self._trace, self._found = trace, found
        self._step = trace.duration_ns / 1e9 / trace.step_count
        self._settings: Mapping[str, Any] = trace.facts["settings"]
        self._updates_exposed = self._seconds(sum(ns for wait, ns in found.waits.items() if wait.what == "update"))

    def advice(self) -> list[Advice]:
        """What saves most comes first."""
        given = [*self._drive(), *self._links(), *self._adam(), *self._sums(), *self._of_the_loop(), *self._more_compute()]
        merged: dict[str, Advice] = {}
        for one in given:
            before = merged.get(one.change)
            merged[one.change] = one if before is None else _both(before, one)
        worth = [one for one in merged.values() if one.saves_seconds is None or one.saves_seconds > WORTH * self._step]
        return sorted(worth, key=lambda one: -(one.saves_seconds or 0.0))

    def _seconds(self, nanoseconds: int) -> float:
        return nanoseconds / 1e9 / self._trace.step_count

    def _share(self, name: str) -> Share:
        return self._found.shares.get(name, Share())

    def _exposed(self, name: str) -> float:
        return self._seconds(self._share(name).exposed_ns)

    def _matters(self, name: str) -> bool:
        return self._exposed(name) > WORTH * self._step

    def _planned(self, tier: str, *purposes: str) -> int:
        return sum(
            line["nbytes"] for line in self._trace.facts["planned"] if line["tier"] == tier and line["purpose"] in purposes
        )

    # ---- the drive -----------------------------------------------------------------------------------------------

    def _drive(self) -> Iterator[Advice]:
        share, exposed = self._share(DRIVE), self._exposed(DRIVE)
        if not self._matters(DRIVE) or share.rate is None:
            return
        states = self._planned("nvme", "optimizer states")
        lying = states + self._planned("nvme", "parameters")
        gained = 2 * _GIB / share.rate  # read once and written once a step
        wanted = min(lying / _GIB, exposed / gained)
        yield Advice(
            f"cpu_memory: {math.ceil(wanted * 10) / 10:.1f} GiB more",
            f"each GiB keeps as much of what lies on NVMe in memory, {_time(gained)} less of reading and writing",
            min(exposed, wanted * gained),
        )
        drives = max(1, len(self._settings["nvme"]))
        yield Advice(
            f"nvme: {drives + 1} drives instead of {drives}",
            f"they share what {drives} move{'s' if drives == 1 else ''} in {_time(self._seconds(share.busy_ns))}",
            min(exposed, self._seconds(share.busy_ns) / (drives + 1)),
        )
        yield from self._smaller_records(exposed, 2 * states / share.rate)
        yield from self._earlier_updates(DRIVE)

    def _smaller_records(self, exposed: float, seconds: float) -> Iterator[Advice]:
        """`seconds`: that a step takes to move the records there are."""
        current = str(self._settings["state_format"])
        for smaller, note in (("split", "the same numbers"), ("8bit", "changes numbers, within the noise of a seed")):
            share = 1 - _RECORD_NBYTES[smaller] / _RECORD_NBYTES[current]
            if "bfloat16" in self._trace.facts["dtypes"] and share > 0:
                yield Advice(
                    f'state_format="{smaller}"',
                    f"{share:.0%} fewer bytes of optimizer states; {note}",
                    min(exposed, share * seconds),
                )

    def _earlier_updates(self, name: str) -> Iterator[Advice]:
        idle = self._seconds(self._share(name).idle_backward_ns)
        why = f"{name} does nothing in {_time(idle)} of backward, and forward waits {_time(self._updates_exposed)} for updates"
        missing = self._missing_room(name)
        if self._settings["update"] != "step" and not missing:
            return
        if missing:
            why += f"; {missing}"
        yield Advice('update="backward"', why, min(idle, self._updates_exposed, self._exposed(name)))

    def _missing_room(self, name: str) -> str:
        """That without which updates of what lies there begin at the step; empty: nothing is missing."""
        if self._settings["update"] == "backward":
            return ""
        tier = "cpu" if name == ADAM else "nvme"
        states = self._planned(tier, OPTIMIZER_STATES.furthest, OPTIMIZER_STATES.kept)
        if not states or self._planned(tier, ROOM_TO_UNDO):
            return ""
        if name == ADAM and not self._trace.facts["unified"]:
            return f"to undo them takes up to {_size(states)} more of host memory, or a cpu_memory of so much more"
        if name == DRIVE and self._settings["update"] == "auto" and self._trace.facts["world_size"] == 1:
            return (
                f'to undo them takes {_size(states)} of the drive or more, which "auto" has left to two checkpoints: free so '
                "much there, or save them elsewhere"
            )
        return ""

    # ---- what else -----------------------------------------------------------------------------------------------

    def _links(self) -> Iterator[Advice]:
        for name in (H2D, D2H):
            share = self._share(name)
            if self._matters(name) and share.rate is not None:
                moved = share.nbytes / self._trace.step_count
                wanted = min(moved, self._exposed(name) * share.rate)
                yield Advice(
                    "device_memory: more, so that units stay on the device",
                    f"{name} moves {_size(moved)} a step; {_size(wanted)} of it are waited for",
                    self._exposed(name),
                )
        if self._matters(H2D) and self._seconds(self._share(H2D).busy_ns) < 0.8 * self._step:
            prefetch = int(self._settings["prefetch"])
            yield Advice(
                f"prefetch={prefetch + 1}",
                "the link is free for a part of the step, and units come late all the same",
                self._exposed(H2D),
            )

    def _adam(self) -> Iterator[Advice]:
        if self._matters(ADAM):
            exposed = self._exposed(ADAM)
            yield from self._smaller_records(exposed, self._seconds(self._share(ADAM).busy_ns))
            yield from self._earlier_updates(ADAM)
            if not self._trace.facts["unified"]:
                yield Advice(
                    "device_memory: more, so that states lie on the device and are updated there",
                    f"the CPU takes {_time(self._seconds(self._share(ADAM).busy_ns))} for its updates",
                    exposed,
                )

    def _sums(self) -> Iterator[Advice]:
        if self._matters(SUMS) and not self._trace.facts["unified"]:
            yield Advice(
                "device_memory: more, so that gradients are summed on the device",
                f"the CPU takes {_time(self._seconds(self._share(SUMS).busy_ns))} to take gradients and to add micro-batches",
                self._exposed(SUMS),
            )

    def _of_the_loop(self) -> Iterator[Advice]:
        if self._matters(OUTSIDE):
            yield Advice(
                "the loop: less between forward, backward and step",
                "nothing of the model or the engine runs then: loading of data, the loss, logging",
                self._exposed(OUTSIDE),
            )
        if self._matters(HOST):
            yield Advice(
                "a larger batch or sequence: the host does the same for more work of the device",
                "the engine's and PyTorch's own Python is waited for",
                None,
            )

    def _more_compute(self) -> Iterator[Advice]:
        compute = self._seconds(self._found.compute_ns)
        slowest = max((DRIVE, H2D, D2H, ADAM, SUMS, COLLECTIVES), key=lambda name: self._share(name).busy_ns)
        busy = self._seconds(self._share(slowest).busy_ns)
        if self._matters(slowest) and compute > 0 and busy > compute:
            yield Advice(
                f"a batch {math.ceil(busy / compute)} times as large, where memory has room for its activations",
                f"{slowest} works {_time(busy)} a step beside {_time(compute)} of compute, however large the batch",
                None,
            )
