# SPDX-License-Identifier: Apache-2.0
"""An engine's parts made anew for the same model: as they were (`rebuild`), or, between two steps, with other places.

    newly trained  room for the states of parameters that are trained only later: unfrozen, or added to the optimizer. What was
                   trained once keeps its states, frozen or not, so a freeze changes nothing here
    newly known    places for as many micro-batches as a step turned out to have

`Rebuilding` carries everything over through a checkpoint.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch

from offload.build.assembly import Known, lay_out, lay_out_together, open_accelerator, specs_of
from offload.build.building import Building
from offload.build.materialize import NoValues
from offload.config import Config
from offload.device.accelerator import Accelerator
from offload.layout import Layout
from offload.model.description import check_state_format, check_trainable
from offload.model.flat import ParameterInfo
from offload.model.optimizer_kinds import InitialState
from offload.planning.free_memory import FreeMemory
from offload.planning.placement import Placement
from offload.planning.route import Route
from offload.ranks.all_or_none import together
from offload.ranks.group import Group
from offload.step.components import Closable, Components, give_back

Groups = Callable[[], Sequence[Mapping[str, Any]]]


class NewlyTrained:
    """Which parameters are to be trained and have no states. `groups()`: the optimizer's, as they are now."""

    def __init__(self, parameters: Sequence[ParameterInfo], groups: Groups) -> None:
        self._parameters, self._groups = parameters, groups
        self._known_count = -1
        self._waiting: list[ParameterInfo] = []

    def find(self) -> list[ParameterInfo]:
        """Asked at every forward that is recorded."""
        with torch._C.DisableTorchFunctionSubclass():
            return [info for info in self.without_states() if info.parameter.requires_grad]

    def without_states(self) -> list[ParameterInfo]:
        """What the optimizer has and does not train yet."""
        count = sum(len(group["params"]) for group in self._groups())
        if count != self._known_count:
            group_of = group_indices(self._groups())
            self._waiting = [info for info in self._parameters if not info.trainable and id(info.parameter) in group_of]
            self._known_count = count  # last: an interrupt may come before
        return self._waiting


def group_indices(groups: Sequence[Mapping[str, Any]]) -> dict[int, int]:
    """The group of each parameter, by its id."""
    return {id(parameter): index for index, group in enumerate(groups) for parameter in group["params"]}


def rebuild(parts: Components, config: Config, moments: tuple[str, ...], ranks: Group) -> Components:
    """The like of these, which are closed, for the same model and as many ranks: parameters and states are zeros, to be loaded.
    Collective."""
    return _made_anew(parts, parts.parameters, config, moments, ranks, lambda _: (parts.layout, parts.placement))


def routes_for(parts: Components, config: Config, moments: tuple[str, ...]) -> tuple[Route, ...]:
    """Those that these units had by this configuration when the parts were made. On one rank. Raises `BudgetError`."""
    verdict = parts.placement.verdict
    free = verdict.free if verdict is not None else None
    known = _known(parts, parts.parameters, parts.accelerator, moments, free)
    return lay_out(config, known)[1].routes


def refitted(
    parts: Components,
    config: Config,
    moments: tuple[str, ...],
    groups: Sequence[Mapping[str, Any]],
    trained: Collection[int],
    ranks: Group,
    free: FreeMemory | None = None,
) -> Components:
    """The like of these, which are closed, for the same model and as many ranks, with states for the parameters of the indices
    `trained` too: values and states are zeros, to be loaded. `config` and `free` say where they lie. Collective. Raises
    `ConfigError`, also `BudgetError`."""
    group_of = group_indices(groups)
    infos = [
        replace(info, trainable=True, group_index=group_of[id(info.parameter)])
        if info.trainable or info.index in trained
        else replace(info)
        for info in parts.parameters
    ]
    check_trainable(infos)
    check_state_format(config, infos)

    def laid_out(accelerator: Accelerator) -> tuple[Layout, Placement]:
        return lay_out_together(ranks, config, _known(parts, infos, accelerator, moments, free))

    return _made_anew(parts, infos, config, moments, ranks, laid_out)


def _known(
    parts: Components,
    infos: Sequence[ParameterInfo],
    accelerator: Accelerator,
    moments: tuple[str, ...],
    free: FreeMemory | None,
) -> Known:
    specs = specs_of([unit.layout.name for unit in parts.units], infos)
    return Known(accelerator, specs, parts.expected, moments, free=free)


def _made_anew(
    parts: Components,
    infos: Sequence[ParameterInfo],
    config: Config,
    moments: tuple[str, ...],
    ranks: Group,
    laid_out: Callable[[Accelerator], tuple[Layout, Placement]],
) -> Components:
    """`infos`: the parameters. `laid_out`: where they and their states lie."""
    made: list[Closable] = []
    try:
        accelerator = open_accelerator(made)
        ranks.use_devices(accelerator.device)
        building = Building(made, accelerator, *laid_out(accelerator), config, ranks, moments)
        modules = [unit.modules for unit in parts.units]
        return together(
            ranks,
            lambda: building.finish(modules, infos, parts.expected, NoValues(), lambda _: InitialState({}, 0)),
            call="making the parts anew",
        )
    except BaseException:
        give_back(made)
        raise
