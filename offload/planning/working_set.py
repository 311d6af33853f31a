"""What the host memory beyond the minimum is spent on: keeping a part of what lies on NVMe. For the order see `Kept`."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Protocol

from offload.planning.budget import Footprint, Kept, Placement, Tier, spilled_nbytes


class PlaceAgain(Protocol):
    """Makes a placement anew with some of its decisions changed."""

    def __call__(
        self, placement: Placement, *, gradients_in: Tier = ..., retained: int = ..., kept: Kept = ...
    ) -> Placement: ...


@dataclass(frozen=True, slots=True)
class WorkingSet:
    """`keeps_units`: parameters are kept by whole units, since the device computes where they lie."""

    footprint: Footprint
    again: PlaceAgain
    fits: Callable[[Placement], bool]
    keeps_units: bool

    def best(self, smallest: Placement) -> Placement:
        """Of the placements that fit, from the one given up, the one whose step moves least over NVMe.

        Buffers take memory too, so that of a small budget gradients in memory, which need none, may be the better use."""
        candidates = [self._keep_gradients(self._keep_records(self._keep_parameters(smallest)))]
        in_place = self.again(smallest, gradients_in="cpu", retained=0)
        if smallest.gradients == "nvme" and self.fits(in_place):
            candidates.append(self._keep_records(self._keep_parameters(in_place)))
        return min(candidates, key=self._moved_nbytes)

    def _moved_nbytes(self, placement: Placement) -> tuple[int, int]:
        """NVMe traffic of a step with one micro-batch: under the forward (with the updates), and in all."""
        on_nvme = {line.purpose: line.nbytes for line in placement.plan.lines if line.tier == "nvme"}
        parameters, records = on_nvme.get("parameters", 0), on_nvme.get("optimizer states", 0)
        spilled = 0
        if placement.gradients == "nvme":
            spilled = spilled_nbytes(self.footprint.gradient_chunks, placement.retained_gradient_buffers)
        under_forward = 2 * parameters + 2 * records + spilled
        return under_forward, under_forward + parameters + spilled

    def _most(self, count: int, place: Callable[[int], Placement]) -> Placement:
        """`place(n)` with the largest n <= `count` that fits. 0 fits; more takes more, save that the last may take less."""
        whole = place(count)
        if self.fits(whole):
            return whole
        low, high = 0, count
        while high - low > 1:
            middle = (low + high) // 2
            low, high = (middle, high) if self.fits(place(middle)) else (low, middle)
        return place(low)

    def _keep_parameters(self, placement: Placement) -> Placement:
        if placement.parameters != "nvme":
            return placement
        by_unit = self.footprint.parameter_chunks
        sizes = [nbytes for chunks in by_unit for nbytes in chunks]
        ends = [sum(map(len, by_unit[:count])) for count in range(len(by_unit) + 1)]

        def keep_units(count: int) -> Placement:
            return keep_chunks(ends[count], unit_count=count)

        def keep_chunks(count: int, unit_count: int = 0) -> Placement:
            kept = replace(placement.kept, unit_count=unit_count, parameter_count=count, parameter_nbytes=sum(sizes[:count]))
            return self.again(placement, kept=kept)

        return self._most(len(by_unit), keep_units) if self.keeps_units else self._most(len(sizes), keep_chunks)

    def _keep_records(self, placement: Placement) -> Placement:
        if placement.optimizer_states != "nvme":
            return placement
        sizes = self.footprint.record_chunks

        def keep(count: int) -> Placement:
            kept = replace(placement.kept, record_count=count, record_nbytes=sum(sizes[:count]))
            return self.again(placement, kept=kept)

        return self._most(len(sizes), keep)

    def _keep_gradients(self, placement: Placement) -> Placement:
        if placement.gradients != "nvme":
            return placement
        in_place = self.again(placement, gradients_in="cpu", retained=0)
        if self.fits(in_place):
            return in_place
        least = placement.retained_gradient_buffers
        more = max(self.footprint.chunk_count - least, 0)
        return self._most(more, lambda count: self.again(placement, retained=least + count))
