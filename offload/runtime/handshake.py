"""What ranks tell each other while an engine is initialized: that all of them can, and that they are about the same thing."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
from torch import Tensor

from offload.config import Config
from offload.device.ranks import Ranks
from offload.errors import ConfigError, RankError
from offload.layout import Layout
from offload.runtime.flats import ParameterInfo
from offload.runtime.placement import Placement
from offload.schedule.budget import Tier

T = TypeVar("T")
_TIERS: tuple[Tier, ...] = ("device", "cpu", "nvme")
Facts = Mapping[str, Any]
"""JSON values by name; names say what differs when they do."""

_MAY_DIFFER = ("nvme",)
"""Fields of `Config` that may name other things on other nodes."""


def together(ranks: Ranks | None, step: Callable[[], T], facts: Callable[[T], Facts]) -> T:
    """Run `step` on every rank; if it fails on any, or its facts differ, it fails on all of them. Collective."""
    if ranks is None:
        return step()
    failure: Exception | None = None
    said: dict[str, Any] = {}
    try:
        value = step()
        said["facts"] = dict(facts(value))
    except Exception as error:
        failure = error
        said["failure"] = f"{type(error).__name__}: {error}"
    answers = [json.loads(data) for data in ranks.exchange_bytes(json.dumps(said).encode())]
    if failure is not None:
        raise failure
    for index, answer in enumerate(answers):
        if "failure" in answer:
            raise RankError(f"offload.initialize failed on rank {index}: {answer['failure']}")
    _require_equal(ranks, answers)
    return value


def _require_equal(ranks: Ranks, answers: Sequence[Mapping[str, Any]]) -> None:
    own = answers[ranks.index]["facts"]
    for index, answer in enumerate(answers):
        for name in dict.fromkeys([*own, *answer["facts"]]):
            here, there = own.get(name), answer["facts"].get(name)
            if here != there:
                raise ConfigError(
                    f"the ranks differ in {name}: {_short(here)} on rank {ranks.index}, {_short(there)} on rank {index}. "
                    "Call initialize with the same model, optimizer and config on all of them"
                    + (
                        "; seed them alike (torch.manual_seed) before the model is built, and load the same weights."
                        if name.startswith("the initial value")
                        else "."
                    )
                )


def _short(value: Any) -> str:
    text = "nothing" if value is None else json.dumps(value)
    return text if len(text) <= 120 else f"{text[:117]}..."


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
    """The smallest chunks, and the placement furthest from the device, that any rank decided on."""

    chunk_numel: int
    parameters: Tier
    optimizer_states: Tier

    def is_of(self, layout: Layout, placement: Placement) -> bool:
        """Whether they are those of this rank's own decision."""
        return self == Least(layout.chunk_numel, placement.parameters, placement.optimizer_states)


def agree_on_least(ranks: Ranks, layout: Layout, placement: Placement) -> Least:
    """Ranks see different free memory: what all of them use is what the one with least can. Collective."""
    own = [layout.chunk_numel, _TIERS.index(placement.parameters), _TIERS.index(placement.optimizer_states)]
    said = torch.stack(ranks.exchange(torch.tensor(own, dtype=torch.int64)))
    furthest = said[:, 1:].amax(0).tolist()
    return Least(int(said[:, 0].min()), _TIERS[furthest[0]], _TIERS[furthest[1]])


def checksum(value: Tensor) -> int:
    """A number that differs where the bits of two tensors of one shape do, but for a coincidence. Order matters little."""
    flat = value.detach().contiguous().view(-1)
    integers = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[flat.element_size()]
    bits = flat.view(integers)
    total = 0
    for part in bits.split(1 << 20):
        wide = part.to(torch.int64)
        weights = torch.arange(1, part.numel() + 1, dtype=torch.int64, device=wide.device)
        total = (total * 31 + int((wide * weights).sum())) & ((1 << 62) - 1)
    return total
