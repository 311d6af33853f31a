# SPDX-License-Identifier: Apache-2.0
"""What `initialize` was told of a model and its optimizer, and whether that still holds: looked at before every step."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from itertools import chain
from operator import attrgetter, methodcaller
from typing import Any

from torch import nn

from offload.errors import UsageError
from offload.model.flat import ParameterInfo

_TABLES_OF, _values = attrgetter("_parameters", "_modules"), methodcaller("values")
Groups = Callable[[], Sequence[Mapping[str, Any]]]


class ModelFingerprint:
    """See the module. `groups()`: the optimizer's parameter groups as they are now."""

    def __init__(self, model: nn.Module, parameters: Sequence[ParameterInfo], groups: Groups) -> None:
        self._model, self._parameters, self._groups = model, parameters, groups
        in_model = {id(parameter) for parameter in model.parameters()}
        self._named = [info for info in parameters if id(info.parameter) in in_model]
        self._group_of = self._group_indices()
        self._untrained: list[ParameterInfo] = []
        """Those in the groups."""
        self._modules: list[nn.Module] = []
        self._seen: object = None
        """The model's modules when it was last gone through, and what was found: as long as that is the same all is."""

    def check(self) -> None:
        """A parameter added, removed, replaced or moved to another group since `initialize` is in no flat, and one that was
        added to the optimizer or unfrozen after the last forward has none with states yet: say so."""
        if self._looked_at() != self._seen or any(info.parameter.grad is not None for info in self._untrained):
            self._check()
            grouped = self._group_indices()
            self._untrained = [info for info in self._parameters if not info.trainable and id(info.parameter) in grouped]
            self._modules = list(self._model.modules())
            self._seen = self._looked_at()

    def _looked_at(self) -> tuple[list[int], list[list[int]]]:
        """What the model's modules and the groups hold, by a few calls of C."""
        tables = chain.from_iterable(map(_TABLES_OF, self._modules))
        held = list(map(id, chain.from_iterable(map(_values, tables))))
        return held, [list(map(id, group["params"])) for group in self._groups()]

    def _check(self) -> None:
        known = {id(info.parameter): info for info in self._named}
        for fqn, parameter in self._model.named_parameters():
            info = known.pop(id(parameter), None)
            if info is None:
                raise UsageError(
                    f"parameter {fqn!r} was added or replaced after initialize: close the engine and initialize again."
                )
        if known:
            gone = next(iter(known.values()))
            raise UsageError(
                f"parameter {gone.fqn!r} was removed from the model after initialize: close the engine and initialize again."
            )
        self._check_groups()

    def _group_indices(self) -> dict[int, int]:
        return {id(parameter): index for index, group in enumerate(self._groups()) for parameter in group["params"]}

    def _check_groups(self) -> None:
        now, before = self._group_indices(), self._group_of
        known = {id(info.parameter): info for info in self._parameters}
        moved = [known[key].fqn for key, group in before.items() if now.get(key) != group]
        moved += ["one unknown to the model" for key in now if key not in known]
        if moved:
            raise UsageError(
                f"optimizer.param_groups changed after initialize (parameter {', '.join(sorted(moved)[:5])}): a group may be "
                "added, of the model's own parameters, and numbers (lr, betas, ...) may change at any time. Else close the "
                "engine and initialize again."
            )
        for key in now:
            info = known[key]
            if not info.trainable and info.parameter.grad is not None:
                raise UsageError(
                    f"parameter {info.fqn!r} has a gradient, and was unfrozen or added to the optimizer after the last "
                    "forward, so that it has no states yet: do that between optimizer.step() and the next forward."
                )
