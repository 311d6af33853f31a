# SPDX-License-Identifier: Apache-2.0
"""What `initialize` would decide for a model, without making anything: the same functions, asked with the same inputs."""

from __future__ import annotations

import shutil
from contextlib import suppress
from dataclasses import replace
from types import TracebackType

import torch
from torch import nn

import offload
from offload.build.assembly import DTYPES, LEAST_UNIT_NUMEL, Known, choose_accelerator, lay_out
from offload.cli.arguments import check_is_folder
from offload.cli.text import format_nbytes
from offload.errors import BudgetError, ConfigError
from offload.layout import Layout
from offload.model.description import check_state_format, describe_parameters, parameter_specs
from offload.model.optimizer_kinds import moments_of
from offload.model.partition import fold_for_ranks, join_neighbours, partition, uses_of
from offload.model.quantized import PackedWeights
from offload.planning.budget import Tier
from offload.planning.deciding import Decision
from offload.planning.placement import Placement, RankGroup
from offload.planning.traffic import Traffic
from offload.planning.use_trace import Expected


def check_room(model: nn.Module, optimizer: torch.optim.Optimizer, config: offload.Config) -> None:
    """Before anything slow: raise `BudgetError` where the budgets cannot hold the model, `ConfigError` where the drives
    cannot."""
    with Outline(model, optimizer, config) as outline:
        placement = outline.placement()
    needed_nbytes, paths = placement.nvme_nbytes, [str(path) for path in config.nvme_paths]
    for path in paths:
        there = check_is_folder(path, "--nvme")
        if not needed_nbytes:
            continue
        free, share = shutil.disk_usage(there).free, needed_nbytes // len(paths)
        if share > free:
            raise ConfigError(
                f"--nvme {path!r}: {format_nbytes(share)} are to lie there and {format_nbytes(free)} are free: make room, "
                "name another drive, or several (a,b)."
            )


class Outline:
    """A model, its optimizer and a configuration, before `initialize`. A context manager: it opens the accelerator."""

    def __init__(
        self,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        config: offload.Config,
        rank_count: int = 1,
    ) -> None:
        """`rank_count`: of one node. What is said is then of the first rank, whose shards are as large as any."""
        self._config = config
        self._sharing = RankGroup(config.stage, rank_count, rank_count)
        self._laid_out: list[tuple[offload.Config, tuple[Layout, Placement]]] = []
        self._moments = moments_of(optimizer)
        self._accelerator = choose_accelerator()
        apart, packed = partition(model), PackedWeights(model)
        packed.complete(apart)
        ways = [fold_for_ranks(apart, LEAST_UNIT_NUMEL)] if rank_count > 1 else [join_neighbours(apart), apart]
        dtype = None if config.dtype is None else DTYPES[config.dtype]
        self._ways: dict[int, Known] = {}
        """By the number of units how they are divided: joined, and as they are where budgets hold no joined ones."""
        for units in ways:
            infos = describe_parameters(model, units, packed, optimizer, dtype)
            check_state_format(config, infos)
            members = [[info for info in infos if info.unit_index == index] for index in range(len(units))]
            specs = [(unit.name, parameter_specs(infos)) for unit, infos in zip(units, members, strict=True)]
            expected = Expected.of(0, uses_of(units))
            self._ways.setdefault(len(units), Known(self._accelerator, specs, expected, self._moments, self._sharing))
            self.parameter_numel = sum(info.numel for info in infos)

    def __enter__(self) -> Outline:
        return self

    def __exit__(self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None) -> None:
        self._accelerator.close()

    @property
    def unified(self) -> bool:
        """Whether the device computes on host memory, so that nothing moves between the two."""
        return self._accelerator.unified

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

    def traffic(self, placement: Placement, micro_batches: int, *, scheduled: bool = False) -> Traffic:
        """Bytes of a step with `micro_batches`, at most: every unit that does not stay is fetched twice for each of them, for
        forward and for backward. `scheduled`: as often as the schedule has it of a step that goes as expected."""
        problem = self._decision(self._lay_out(self._config)[0]).problem
        if scheduled:
            return Traffic.scheduled(problem, placement, micro_batches)
        return Traffic.of(problem, placement, [2 * micro_batches] * len(problem.footprint.units), micro_batches)

    def _decision(self, layout: Layout) -> Decision:
        known = (self._ways[len(layout.units)].expected, self._moments, self._sharing)
        return Decision(self._config, self._accelerator, layout, *known)

    def _fixed(self, parameters: Tier, optimizer_states: Tier) -> offload.Config:
        free = replace(self._config, cpu_memory=None, device_memory=None)
        if "nvme" in (parameters, optimizer_states) and free.nvme is None:
            free = replace(free, nvme=".")  # nothing is opened there
        return replace(free, parameters=parameters, optimizer_states=optimizer_states)

    def _lay_out(self, config: offload.Config) -> tuple[Layout, Placement]:
        for asked, made in self._laid_out:
            if asked == config:
                return made
        *first, last = self._ways.values()
        for known in first:
            with suppress(BudgetError):
                made = lay_out(config, known)
                break
        else:
            made = lay_out(config, last)
        self._laid_out.append((config, made))
        return made
