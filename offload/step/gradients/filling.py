# SPDX-License-Identifier: Apache-2.0
"""Parameters of a unit whose gradients wait for each other and fill whole chunks: what taking them over needs is put together
once.

Backward leaves the gradients of a unit's parameters in `p.grad`. Where each of them is the first of its parameter, and lies in
memory as the parameter does, they are taken over as one, by a few calls of C. Else each goes its own way.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from operator import attrgetter

import torch

from offload.model.chunk import Chunk
from offload.model.flat import ParameterInfo
from offload.model.taken_gradient import TakenGradient

_GRADIENT_OF, _KIND_OF = attrgetter("grad"), attrgetter("layout", "dtype", "requires_grad")
_NEW = {torch.Tensor}


@dataclass(frozen=True, slots=True, eq=False)
class FilledChunk:
    """`which`: the positions in the filling of the chunk's parameters, in its order; `indices`: theirs, with no sums yet."""

    chunk: Chunk
    which: slice
    indices: dict[int, torch.Tensor | None]


class Filling:
    """See the module. Owned by the thread that drives the model, and backward's, never both at once.

    tokens  those that last stood in `p.grad`, written by `TokenClipping`
    """

    def __init__(self, infos: Sequence[ParameterInfo]) -> None:
        """`infos` fill their chunks (`fill_chunks`)."""
        ordered = [info for chunk in _chunks_of(infos) for info, _ in chunk.pieces]
        self.infos = tuple(ordered)
        self.by_index = {info.index: info for info in ordered}
        self.unit_indices = {info.unit_index for info in ordered}
        self.parameters = [info.parameter for info in ordered]
        self.nbytes = sum(info.numel * info.dtype.itemsize for info in ordered)
        self.tokens: list[TakenGradient] = []
        self._strides = [info.stride for info in ordered]
        self._kinds = [(torch.strided, info.dtype, False) for info in ordered]
        self.chunks: list[FilledChunk] = []
        low = 0
        for chunk in _chunks_of(infos):
            indices = dict.fromkeys(info.index for info, _ in chunk.pieces)
            self.chunks.append(FilledChunk(chunk, slice(low, low + len(indices)), indices))
            low += len(indices)

    def gradients(self) -> list[torch.Tensor] | None:
        """What PyTorch left, in the order of `infos`; None unless that is a gradient of each, laid out as its parameter."""
        found = list(map(_GRADIENT_OF, self.parameters))
        if set(map(type, found)) != _NEW or list(map(_KIND_OF, found)) != self._kinds:
            return None
        return found if list(map(torch.Tensor.stride, found)) == self._strides else None


def fill_chunks(infos: Sequence[ParameterInfo]) -> bool:
    """Whether the parameters are all that lies in the chunks that they lie in, each whole in one."""
    indices = {info.index for info in infos}
    are_whole = all(len(info.pieces) == 1 and info.pieces[0][1].numel == info.numel > 0 for info in infos)
    return are_whole and bool(indices) and {info.index for one in _chunks_of(infos) for info, _ in one.pieces} == indices


def _chunks_of(infos: Sequence[ParameterInfo]) -> list[Chunk]:
    return list(dict.fromkeys(chunk for info in infos for chunk, _ in info.pieces))
