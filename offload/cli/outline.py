"""What `initialize` would decide for a model, without making anything: the same functions, asked with the same inputs."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from types import TracebackType

import torch
from torch import nn

import offload
from offload.build.assembly import DTYPES, LEAST_UNIT_NUMEL, choose_accelerator, lay_out
from offload.errors import BudgetError
from offload.layout import FlatLayout, Layout
from offload.model.description import check_state_format, describe_parameters, parameter_specs
from offload.model.optimizer_kinds import moments_of
from offload.model.partition import fold_for_ranks, partition, uses_of
from offload.planning.budget import MASTER_ITEMSIZE, Footprint, Tier, spilled_nbytes
from offload.planning.placement import Placement, RankGroup, record_format
from offload.planning.trace import Expected


@dataclass(frozen=True, slots=True)
class Traffic:
    """Bytes of one step over each link, at most: what happens to stay resident is not moved again."""

    to_device_nbytes: int
    from_device_nbytes: int
    read_nbytes: int
    written_nbytes: int
    spilled_nbytes: int
    """Part of both: gradients that found no room in host memory."""


class Outline:
    """A model, its optimizer and a configuration, before `initialize`. A context manager: it opens the accelerator."""

    def __init__(
        self,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        config: offload.Config,
        rank_count: int = 1,
        *,
        accumulates: bool = False,
    ) -> None:
        """`rank_count`: of one node. What is said is then of the first rank, whose shards are as large as any.
        `accumulates`: with several micro-batches a step."""
        self._accumulates = accumulates
        self._config = config
        self._sharing = RankGroup(config.stage, rank_count, rank_count)
        units = partition(model)
        if rank_count > 1:
            units = fold_for_ranks(units, LEAST_UNIT_NUMEL)
        infos = describe_parameters(model, units, optimizer, None if config.dtype is None else DTYPES[config.dtype])
        check_state_format(config, infos)
        self._moments = moments_of(optimizer)
        members = [[info for info in infos if info.unit_index == index] for index in range(len(units))]
        self._specs = [(unit.name, parameter_specs(infos)) for unit, infos in zip(units, members, strict=True)]
        self._expected = Expected.of(0, uses_of(units))
        self._accelerator = choose_accelerator()
        self.parameter_numel = sum(info.numel for info in infos)
        self.unit_count = len(units)

    def __enter__(self) -> Outline:
        return self

    def __exit__(self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None) -> None:
        self._accelerator.close()

    @property
    def unified(self) -> bool:
        """Whether the device computes on host memory, so that nothing moves between the two."""
        return self._accelerator.unified

    @property
    def device_name(self) -> str:
        return self._accelerator.name

    def placement(self, parameters: Tier | None = None, optimizer_states: Tier | None = None) -> Placement:
        """What `initialize` would choose; or, for a given placement, what it takes without budgets.

        Raises `BudgetError` where the budgets cannot hold it, `ConfigError` where the stage has no room for it."""
        if parameters is None or optimizer_states is None:
            return self._lay_out(self._config)[1]
        return self._lay_out(self._fixed(parameters, optimizer_states))[1]

    def smallest_nbytes(self, placement: Placement, field: str) -> int | None:
        """The smallest `field` ("cpu_memory" or "device_memory") with which the placement works; None: it needs none.

        `cpu_memory` is the node's: what all of its ranks need."""
        if field == "device_memory" and self._accelerator.unified:
            return None  # one memory: cpu_memory says it
        one_byte = self._fixed(placement.parameters, placement.optimizer_states)
        one_byte = replace(one_byte, cpu_memory=1) if field == "cpu_memory" else replace(one_byte, device_memory=1)
        try:
            self._lay_out(one_byte)
        except BudgetError as error:
            return error.smallest_nbytes
        return None

    def traffic(self, placement: Placement, micro_batches: int) -> Traffic:
        """Bytes of a step with `micro_batches`: parameters go in twice for each (forward, backward), gradients come out
        once for each; updates read and write every record once, and bring the new parameters home."""
        layout, _ = self._lay_out(self._config)
        states_here = placement.optimizer_states
        unified = self._accelerator.unified
        formats = [
            record_format(self._accelerator, self._config, self._moments, placement.parameters, states_here, flat.dtype)
            for flat in layout.flats
        ]
        sizes = Footprint.of(layout, formats)
        trained = _trained_nbytes(layout)
        uses = 2 * micro_batches * sizes.parameters
        to_device = uses if placement.parameters != "device" else (trained if states_here != "device" else 0)
        from_device = micro_batches * sizes.gradients if states_here != "device" else 0
        if states_here == "device" and placement.parameters != "device":
            from_device += trained
        # Updates read the parameters that are the master, or a part of it.
        readers = {id(flat) for flat, one in zip(layout.flats, formats, strict=True) if one.needs_values}
        if (states_here == "device") != (placement.parameters == "device"):
            old = _trained_nbytes(layout, lambda flat: id(flat) in readers)
            to_device, from_device = (
                (to_device + old, from_device) if states_here == "device" else (to_device, from_device + old)
            )
        kept = placement.kept
        records = sizes.records - kept.record_nbytes if states_here == "nvme" else 0
        spilled = self._spilled_nbytes(placement, layout, micro_batches)
        fetched = written_home = read_back = 0
        if placement.parameters == "nvme":
            fetched = 2 * micro_batches * (sizes.parameters - kept.parameter_nbytes)
            written_home = _trained_nbytes(layout, besides_count=kept.parameter_count)
            if not unified:  # else they are where the update is, which is under their next use
                read_back = _trained_nbytes(layout, lambda flat: id(flat) in readers, kept.parameter_count)
        return Traffic(
            to_device_nbytes=0 if unified else to_device,
            from_device_nbytes=0 if unified else from_device,
            read_nbytes=fetched + read_back + records + spilled,
            written_nbytes=written_home + records + spilled,
            spilled_nbytes=spilled,
        )

    def _spilled_nbytes(self, placement: Placement, layout: Layout, micro_batches: int) -> int:
        """Gradients that find no buffer in host memory go to NVMe, and come back for the next addition or the update.

        Every backward goes over them in the same order and the oldest leave first, so that where some must leave,
        each micro-batch but the last makes all of them leave."""
        if placement.gradients != "nvme":
            return 0
        flats = [flat for flat in layout.flats if flat.trainable]
        wide = [MASTER_ITEMSIZE if micro_batches > 1 else flat.itemsize for flat in flats]
        chunks = [chunk.numel * size for flat, size in zip(flats, wide, strict=True) for chunk in flat.chunks]
        last = spilled_nbytes(chunks, placement.retained_gradient_buffers)
        return (micro_batches - 1) * sum(chunks) + last if last else 0

    def _fixed(self, parameters: Tier, optimizer_states: Tier) -> offload.Config:
        free = replace(self._config, cpu_memory=None, device_memory=None)
        if "nvme" in (parameters, optimizer_states) and free.nvme is None:
            free = replace(free, nvme=".")  # nothing is opened there
        return replace(free, parameters=parameters, optimizer_states=optimizer_states)

    def _lay_out(self, config: offload.Config) -> tuple[Layout, Placement]:
        known = (self._specs, self._expected, self._moments, self._sharing)
        return lay_out(config, self._accelerator, *known, accumulates=self._accumulates)


def _trained_nbytes(layout: Layout, counts: Callable[[FlatLayout], bool] = lambda _: True, besides_count: int = 0) -> int:
    """Bytes of the trained parameters in flats that count; the first `besides_count` chunks of all are left out."""
    chunks = [(flat, chunk) for flat in layout.flats for chunk in flat.chunks]
    return sum(chunk.numel * flat.itemsize for flat, chunk in chunks[besides_count:] if flat.trainable and counts(flat))
