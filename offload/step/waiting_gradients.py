# SPDX-License-Identifier: Apache-2.0
"""Which gradients wait for each other in `p.grad`: PyTorch accumulates into it undisturbed, as the engine would.

They are taken over together: at the end of backward where the tensors that autograd made are kept, else when backward leaves
their unit, or reaches another one where nothing has to know of that. What waits for that takes no more memory than is worth a
word: of a unit with more the small ones wait. Of a shared parameter the engine adds the parts itself, and on several ranks none
waits.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import chain

import torch

from offload.model.flat import ParameterInfo
from offload.model.unit import Unit
from offload.step.components import Components
from offload.step.gradients.chunk_gradients import ChunkGradients
from offload.step.gradients.filling import Filling

_TOGETHER_NBYTES = 1 << 20
"""Of small gradients that may wait for each other."""


class WaitingGradients:
    """See the module: the parameters whose gradients do."""

    def __init__(self, parts: Components) -> None:
        self.by_unit: dict[int, list[ParameterInfo]] = {}
        self._of_part: dict[int | None, list[ParameterInfo]] = {}
        self._fillings: dict[tuple[int, int | None], Filling] = {}
        """By unit and id of a module, where that has a part of the unit to itself: those that wait, if they fill chunks."""
        gradients = parts.gradients
        self.until_the_end = parts.stays and parts.accelerator.unified
        """Whether they wait for the end of backward, until which PyTorch adds to them what the engine would."""
        if gradients is None or parts.ranks.world_size > 1:
            return
        for unit in parts.units:
            if not unit.shares_parameters and (infos := _waiting(unit, gradients, self.until_the_end)) is not None:
                self.by_unit[unit.index] = infos
                self._add_parts(unit, gradients)

    def _add_parts(self, unit: Unit, gradients: ChunkGradients) -> None:
        indices = {info.index for info in self.by_unit[unit.index]}
        for module_id in map(id, unit.modules) if unit.has_parts else (None,):
            of_part = [info for info in unit.part_of(module_id) if info.index in indices]
            if module_id is not None:
                self._of_part[module_id] = of_part
            if (filling := gradients.filling(of_part)) is not None:
                self._fillings[unit.index, module_id] = filling

    def of(self, unit: Unit, module_id: int | None = None) -> list[ParameterInfo]:
        """Those that a call of the module uses (`Unit.part_of`)."""
        return self._of_part.get(module_id, self.by_unit.get(unit.index, []))

    def all(self) -> list[ParameterInfo]:
        """Those of all units."""
        return list(chain.from_iterable(self.by_unit.values()))

    def filling(self, unit: Unit, module_id: int | None) -> Filling | None:
        """What `of` gives, if that fills chunks."""
        return self._fillings.get((unit.index, module_id if unit.has_parts else None))


def _waiting(unit: Unit, gradients: ChunkGradients, until_the_end: bool) -> list[ParameterInfo] | None:
    trained = [info for info in unit.parameters if info.trainable]
    if until_the_end:
        return [info for info in trained if gradients.adopts(info) and info.dtype == torch.float32]
    if max(sum(gradient_nbytes(info) for info in part if info.trainable) for part in unit.parts) <= _TOGETHER_NBYTES:
        return trained
    return _small_ones(trained) if not unit.has_parts else None


def _small_ones(infos: Sequence[ParameterInfo]) -> list[ParameterInfo]:
    """The smallest, as many as may wait for each other, in order."""
    total_nbytes, chosen = 0, set()
    for info in sorted(infos, key=gradient_nbytes):
        total_nbytes += gradient_nbytes(info)
        if total_nbytes > _TOGETHER_NBYTES:
            break
        chosen.add(info.index)
    return [info for info in infos if info.index in chosen]


def gradient_nbytes(info: ParameterInfo) -> int:
    """Of its gradient, as autograd computes it."""
    return info.numel * info.dtype.itemsize
