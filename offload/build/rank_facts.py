# SPDX-License-Identifier: Apache-2.0
"""What must be the same on all ranks when an engine is initialized, and what the one with least memory decides for all."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from offload.config import Config
from offload.layout import Layout
from offload.model.flat import ParameterInfo
from offload.planning.budget import TIERS, Tier
from offload.planning.placement import Placement
from offload.ranks.group import Group

_MAY_DIFFER = ("nvme",)
"""Fields of `Config` that may name other things on other nodes."""


def config_facts(config: Config) -> dict[str, Any]:
    """What must be equal of a configuration."""
    fields = [field.name for field in dataclasses.fields(config) if field.name not in _MAY_DIFFER]
    return {f"config {name}": getattr(config, name) for name in fields} | {"config nvme": bool(config.nvme_paths)}


def parameter_facts(infos: Sequence[ParameterInfo]) -> dict[str, Any]:
    """What must be equal of a model's parameters."""
    described = {
        f"parameter {info.fqn!r}": [list(info.shape), list(info.stride), str(info.dtype), info.trainable, info.group_index]
        for info in infos
    }
    return {"the number of parameters": len(infos), **described}


@dataclass(frozen=True, slots=True)
class Least:
    """The smallest chunks, the least prefetch and the placement furthest from the device that any rank decided on. With the
    configuration they decide which units have a state on the device, and so what records consist of: the same on all."""

    chunk_numel: int
    prefetch: int
    parameters: Tier
    optimizer_states: Tier

    @staticmethod
    def of(layout: Layout, placement: Placement) -> Least:
        """One rank's own decision."""
        return Least(layout.chunk_numel, placement.prefetch, placement.parameters, placement.optimizer_states)


def agree_on_least(ranks: Group, own: Least) -> Least:
    """Ranks see different free memory: what all of them use is what the one with least can. Collective."""
    numbers = [own.chunk_numel, own.prefetch, TIERS.index(own.parameters), TIERS.index(own.optimizer_states)]
    said = torch.stack(ranks.exchange(torch.tensor(numbers, dtype=torch.int64, device="cpu")))
    chunk_numel, prefetch = said[:, :2].amin(0).tolist()
    parameters, states = said[:, 2:].amax(0).tolist()
    return Least(chunk_numel, prefetch, TIERS[parameters], TIERS[states])
