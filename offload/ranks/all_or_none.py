# SPDX-License-Identifier: Apache-2.0
"""Doing one thing on every rank or on none: a failure of one, or a difference between them, is known to all. Collective."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

import torch
from torch import Tensor

from offload.errors import ConfigError, RankError
from offload.ranks.group import Group

T = TypeVar("T")
Facts = Mapping[str, Any]
"""JSON values by name; names say what differs when they do."""


def together(
    ranks: Group, step: Callable[[], T], facts: Callable[[T], Facts] = lambda _: {}, *, call: str = "offload.initialize"
) -> T:
    """Run `step` on every rank; if it fails on any, or its facts differ, it fails on all of them. Collective. `call`: what
    the user called, or what it is for."""
    if ranks.world_size == 1:
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
            raise RankError(f"{call} failed on rank {index}: {answer['failure']}")
    _require_equal(ranks, answers)
    return value


def _require_equal(ranks: Group, answers: Sequence[Mapping[str, Any]]) -> None:
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


def checksum(value: Tensor) -> int:
    """A number that differs where the bits of two tensors of one shape do, but for a coincidence. Order matters little."""
    flat = value.detach().contiguous().view(-1)
    integers = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
    bits = flat.view(integers[min(flat.element_size(), 8)])
    total = 0
    for part in bits.split(1 << 20):
        wide = part.to(torch.int64)
        weights = torch.arange(1, part.numel() + 1, dtype=torch.int64, device=wide.device)
        total = (total * 31 + int((wide * weights).sum())) & ((1 << 62) - 1)
    return total
