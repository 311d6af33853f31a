# SPDX-License-Identifier: Apache-2.0
"""Gradients of whole units on their way to the ranks that own their shards (reduce-scatter), where there are several ranks.

    arrive    each parameter's gradient is copied into the flat gradient buffer of its unit as backward computes it
    leave     backward left the unit (ZeRO stages 2 and 3): its reduction is asked for and runs beside the backward
    end       the end of backward: what is left (the root, units that were used in part, everything in stages 0 and 1)
    reduce    chunk by chunk: this rank's chunk from every rank, added in the order of the ranks in fp32, divided by their
              number, handed to `ChunkGradients`

The sum of an element never depends on stage, placement, chunk size or order of reductions: always rank 0 first, in fp32.
A parameter that got a gradient on some ranks counts zero on the others; one that got none on any is left alone. Inside
`no_sync()` buffers only accumulate (in fp32 from the second backward on).
"""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Callable, Iterable, Sequence

import torch
from torch import Tensor

from offload.errors import ConfigError
from offload.model.flat import Flat, ParameterInfo
from offload.model.unit import Unit
from offload.planning.budget import UNREDUCED_UNITS
from offload.ranks.averaging import HostReduction, averages_on_device
from offload.ranks.next_transfers import MeetingPoint
from offload.ranks.rendezvous import Rendezvous
from offload.ranks.transport import Ranks
from offload.step.foundation import Foundation
from offload.step.gradients.chunk_gradients import ChunkGradients
from offload.step.gradients.gradient_sync import GradientSync
from offload.step.gradients.norm import summed_over_ranks
from offload.tiers.memory import HostMemory

_DTYPES = (torch.float32, torch.bfloat16, torch.float16)


AVERAGE_VARIABLE = "OFFLOAD_AVERAGE"


def average_dtype() -> str:
    """What averages over ranks are kept in: "fp32", or (environment variable OFFLOAD_AVERAGE) "compute", the model's dtype."""
    chosen = os.environ.get(AVERAGE_VARIABLE, "") or "fp32"
    if chosen not in ("fp32", "compute"):
        raise ConfigError(f"{AVERAGE_VARIABLE}={chosen!r} is unknown: expected fp32 or compute.")
    return chosen


class Reduction(GradientSync):
    """See the module. `reduce` runs in the communication thread, everything else in the training thread."""

    def __init__(self, foundation: Foundation, gradients: ChunkGradients, ranks: Ranks, rendezvous: Rendezvous) -> None:
        self._units, self._stage = foundation.units, foundation.layout.stage
        self._accelerator, self._ledger, self._timeline = foundation.accelerator, foundation.ledger, foundation.timeline
        self._landing: HostMemory | None = None
        self._rounds = average_dtype() == "compute"
        self._gradients, self._ranks, self._rendezvous = gradients, ranks, rendezvous
        self._in_flight: deque[Unit] = deque()
        self._free: dict[tuple[int, torch.dtype], list[Tensor]] = {}
        self.peak_nbytes = 0

    # ---- the training thread -------------------------------------------------------------------------------------

    def arrive(self, info: ParameterInfo, gradient: Tensor, *, owned: bool, is_part: bool) -> None:
        """Take in a gradient that this rank computed; add it where the unit has one of this parameter already, as PyTorch
        would where that is of this backward (`is_part`), else in fp32."""
        unit, flat = self._units[info.unit_index], info.flat
        state = unit.gradient
        self._reclaim(wait_for=unit)
        position = unit.flats.index(flat)
        slot = flat.slot_of(info)
        ordered = info.in_memory_order(gradient)
        buffer = state.buffers.get(position)
        if buffer is None:
            buffer = state.buffers[position] = self._buffer(unit, flat.layout.numel, flat.dtype)
        if info.index not in state.arrived:
            buffer[slot.start : slot.stop].copy_(ordered)
        elif is_part:
            there = buffer[slot.start : slot.stop]
            there.copy_(there.to(flat.dtype) + ordered)
        else:
            if buffer.dtype != torch.float32:
                buffer = state.buffers[position] = self._widened(buffer)
            buffer[slot.start : slot.stop].add_(ordered)
        state.arrived.add(info.index)
        self._gradients.expect(info)

    def drop(self, info: ParameterInfo) -> None:
        self._gradients.drop(info)
        unit = self._units[info.unit_index]
        state = unit.gradient
        if info.index in state.arrived:
            self._reclaim(wait_for=unit)
            state.arrived.discard(info.index)
        state.present.discard(info.index)
        state.told.discard(info.index)

    def remembered(self) -> list[ParameterInfo]:
        return [
            info
            for unit in self._units
            for info in unit.parameters
            if info.index in unit.gradient.arrived or info.index in unit.gradient.present
        ]

    def leave(self, unit: Unit) -> None:
        state = unit.gradient
        # The root waits for the end of backward: what units share may get a second gradient until then.
        if self._stage >= 2 and unit.index != 0 and state.arrived and state.asked is None:
            self._ask(unit)

    def _ask_rest(self) -> None:
        """Have everything reduced that has arrived and is not asked for."""
        self._reclaim()
        for unit in self._units:
            if unit.gradient.arrived and unit.gradient.asked is None:
                self._ask(unit)

    def settle(self) -> None:
        while self._in_flight:
            self._reclaim(wait_for=self._in_flight[0])

    def end(self) -> None:
        with self._timeline.waiting("reduction"):
            self._ask_rest()
            self._rendezvous.meet(MeetingPoint.END_OF_BACKWARD)
            self._reclaim()

    def newly_present(self) -> list[int]:
        found = [index for unit in self._units for index in unit.gradient.present - unit.gradient.told]
        for unit in self._units:
            unit.gradient.told |= unit.gradient.present
        return found

    def forget(self, infos: Iterable[ParameterInfo]) -> None:
        for info in infos:
            gradient = self._units[info.unit_index].gradient
            gradient.present.discard(info.index)
            gradient.told.discard(info.index)

    def end_step(self) -> None:
        self._reclaim()
        self._free.clear()

    def sum(self, point: MeetingPoint, squares: Callable[[], Sequence[Tensor]], argument: int = 0) -> int | None:
        self._ask_rest()
        found: int | None = self._rendezvous.meet(
            point, lambda: summed_over_ranks(self._ranks, squares, sharded=self._stage > 0), argument=argument
        )
        return found

    def _ask(self, unit: Unit) -> None:
        self._zero_absent(unit)
        unit.gradient.ready = self._accelerator.mark()
        unit.gradient.asked = self._rendezvous.ask_reduction(unit.index)
        self._in_flight.append(unit)

    def _zero_absent(self, unit: Unit) -> None:
        for position, buffer in unit.gradient.buffers.items():
            for slot in unit.flats[position].layout.slots:
                if slot.parameter_index not in unit.gradient.arrived:
                    buffer[slot.start : slot.stop].zero_()

    def _reclaim(self, wait_for: Unit | None = None) -> None:
        """Take back the buffers of reductions that are over; wait for that of one unit, if it has one."""
        if wait_for is not None and wait_for.gradient.asked is not None:
            wait_for.gradient.asked.wait()
        for unit in list(self._in_flight):
            state = unit.gradient
            if state.asked is None or not state.asked.settled:
                continue
            self._in_flight.remove(unit)
            state.asked = None
            state.arrived.clear()
            for buffer in state.buffers.values():
                self._free.setdefault((buffer.numel(), buffer.dtype), []).append(buffer)
            state.buffers = {}

    def _buffer(self, unit: Unit, numel: int, dtype: torch.dtype) -> Tensor:
        if unit.index != 0 and not unit.gradient.buffers:
            holding = [other for other in self._units[1:] if other.gradient.buffers]
            if self._stage >= 2 and len(holding) >= UNREDUCED_UNITS and self._in_flight:
                self._reclaim(wait_for=self._in_flight[0])
        free = self._free.get((numel, dtype))
        if free:
            return free.pop()
        self._free.clear()  # of other sizes: they would only add up
        return self._new(numel, dtype)

    def _new(self, numel: int, dtype: torch.dtype) -> Tensor:
        in_use = sum(buffer.nbytes for unit in self._units for buffer in unit.gradient.buffers.values())
        in_reserve = sum(buffer.nbytes for buffers in self._free.values() for buffer in buffers)
        self.peak_nbytes = max(self.peak_nbytes, in_use + in_reserve + numel * dtype.itemsize)
        return torch.zeros(numel, dtype=dtype, device=self._accelerator.device)

    def _widened(self, narrow: Tensor) -> Tensor:
        wide = self._new(narrow.numel(), torch.float32)
        wide.copy_(narrow)
        return wide

    # ---- the communication thread --------------------------------------------------------------------------------

    def reduce(self, unit_index: int, contributors: frozenset[int]) -> None:
        """Average the unit's gradients over all ranks, those that are no contributors counting zero."""
        unit = self._units[unit_index]
        state = unit.gradient
        contributes = self._ranks.index in contributors
        order = sorted(contributors)
        said = self._ranks.prefixes(self._prefix(unit) if contributes else None, order, 1 + len(unit.parameters))
        present = {
            info.index
            for position, info in enumerate(unit.parameters)
            if any(int(prefix[1 + position]) for prefix in said.values())
        }
        dtypes = {index: _DTYPES[int(prefix[0])] for index, prefix in said.items()}
        ready = state.ready if contributes else None
        with self._accelerator.communicating("reduce", unit, unit.layout.nbytes, ready):
            for position, flat in enumerate(unit.flats):
                if flat.layout.trainable and any(info.index in present for info in flat.parameters):
                    buffer = state.buffers.get(position) if contributes else None
                    self._reduce_flat(flat, buffer, present, dtypes)
            self._accelerator.mark().wait()  # the buffers are the training thread's again
        state.present |= present

    def _reduce_flat(self, flat: Flat, buffer: Tensor | None, present: set[int], dtypes: dict[int, torch.dtype]) -> None:
        on_device = self._ranks.has_devices and len(dtypes) == self._ranks.world_size and len(set(dtypes.values())) == 1
        dtype = dtypes.get(self._ranks.index)
        own = None
        if dtype is not None:
            # Zeros where this rank has gradients in other flats of the unit only.
            own = torch.zeros(flat.layout.numel, dtype=dtype, device=self._accelerator.device) if buffer is None else buffer
            own = (own if on_device else self._accelerator.on_host(own)).to(dtype)
        if on_device:
            assert own is not None
            averages = averages_on_device(self._ranks, flat.layout, own, self._stage)
        else:
            averages = HostReduction(self._ranks, flat.layout, dtypes).averages(own, self._stage)
        for chunk, values in averages:
            average = values.to(flat.dtype).float() if self._rounds else values
            if on_device and flat.route.gradients_leave_device:
                average = self._brought_out(average)
            self._gradients.add_reduced(flat.chunks[chunk.index], average, present)

    def _brought_out(self, values: Tensor) -> Tensor:
        """`values`, which lie on the device, in host memory (pinned, one chunk)."""
        if self._landing is None or self._landing.nbytes < values.nbytes:
            self._landing = HostMemory(values.nbytes, "reduced gradients", ledger=self._ledger, register=self._accelerator.pin)
        host = self._landing.tensor[: values.nbytes].view(torch.float32)
        self._accelerator.copy_out(host, values).wait()
        return host

    def _prefix(self, unit: Unit) -> Tensor:
        """[dtype code | one byte per parameter: has a gradient here], uint8."""
        buffers = unit.gradient.buffers.values()
        wide = any(buffer.dtype == torch.float32 for buffer in buffers)
        dtype = torch.float32 if wide else next(iter(buffers)).dtype
        flags = [info.index in unit.gradient.arrived for info in unit.parameters]
        return torch.tensor([_DTYPES.index(dtype), *flags], dtype=torch.uint8, device="cpu")
