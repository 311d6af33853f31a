# SPDX-License-Identifier: Apache-2.0
"""`optimizer.optimizer.state`: the state of each trained parameter, read from the tiers when it is asked for."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import torch
from torch import nn

import offload


class OfParameter(Mapping[str, torch.Tensor]):
    """A parameter's step count and moments; a moment is a copy of the whole, on the CPU, in the dtype that it is kept in.
    Reading one is collective."""

    def __init__(self, engine: offload.Engine, parameter: nn.Parameter) -> None:
        self._engine, self._parameter = engine, parameter

    def __getitem__(self, name: str) -> torch.Tensor:
        if name not in list(self):
            raise KeyError(name)
        found = self._engine.read(self._parameter, name)
        assert found is not None, "what the optimizer keeps is there from the beginning"
        return found.to(torch.bfloat16) if name != "step" and self._engine.config.state_format == "bf16" else found

    def __iter__(self) -> Iterator[str]:
        return iter(("step", *self._engine.optimizer.moments))

    def __len__(self) -> int:
        return 1 + len(self._engine.optimizer.moments)


class States(Mapping[nn.Parameter, OfParameter]):
    """Empty before the first update, as torch's."""

    def __init__(self, engine: offload.Engine) -> None:
        self._engine = engine

    def _parameters(self) -> dict[int, nn.Parameter]:
        groups = self._engine.optimizer.param_groups if self._engine.stats()["steps"] else []
        return {id(one): one for group in groups for one in group["params"] if one.requires_grad}

    def __getitem__(self, parameter: nn.Parameter) -> OfParameter:
        if id(parameter) not in self._parameters():
            raise KeyError("the optimizer has no state of this parameter")
        return OfParameter(self._engine, parameter)

    def __contains__(self, parameter: object) -> bool:
        return id(parameter) in self._parameters()

    def __iter__(self) -> Iterator[nn.Parameter]:
        return iter(self._parameters().values())

    def __len__(self) -> int:
        return len(self._parameters())
