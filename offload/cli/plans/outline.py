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
from offload.build.assembly import Described, Known, choose_accelerator, lay_out
from offload.cli.arguments import check_is_folder
from offload.cli.text import format_nbytes
from offload.errors import BudgetError, ConfigError
from offload.layout import Layout
from offload.model.optimizer_kinds import moments_of
from offload.planning.budget import Tier
from offload.planning.placement import Placement, RankGroup
from offload.planning.traffic import Traffic


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
        self._laid_out: list[tuple[offload.Config, tuple[Known, Layout, Placement]]] = []
        described = Described.of(model, optimizer, config, rank_count)
        ways = [described]
        if described.has_joined:
            ways.append(Described.of(model, optimizer, config, rank_count, joins=False))
        self.parameter_numel = sum(info.numel for info in described.infos)
        self._accelerator = choose_accelerator()
        sharing = RankGroup(config.stage, rank_count, rank_count)
        self._ways = [one.known(self._accelerator, moments_of(optimizer), sharing) for one in ways]
        """How units are divided: small ones joined, and as they are where budgets hold no joined ones."""

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
            return self._lay_out(self._config)[-1]
        return self._lay_out(self._fixed(parameters, optimizer_states))[-1]

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
        known, layout, _ = self._lay_out(self._config)
        problem = known.decision(self._config, layout).problem
        if scheduled:
            return Traffic.scheduled(problem, placement, micro_batches)
        return Traffic.of(problem, placement, [2 * micro_batches] * len(problem.footprint.units), micro_batches)

    def _fixed(self, parameters: Tier, optimizer_states: Tier) -> offload.Config:
        free = replace(self._config, cpu_memory=None, device_memory=None)
        if "nvme" in (parameters, optimizer_states) and free.nvme is None:
            free = replace(free, nvme=".")  # nothing is opened there
        return replace(free, parameters=parameters, optimizer_states=optimizer_states)

    def _lay_out(self, config: offload.Config) -> tuple[Known, Layout, Placement]:
        for asked, made in self._laid_out:
            if asked == config:
                return made
        *first, last = self._ways
        for known in first:
            with suppress(BudgetError):
                made = known, *lay_out(config, known)
                break
        else:
            made = last, *lay_out(config, last)
        self._laid_out.append((config, made))
        return made
