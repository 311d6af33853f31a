# SPDX-License-Identifier: Apache-2.0
"""Sums of micro-batches that stay on the device as long as it has room, of gradients that belong in host memory.

    add      a micro-batch's gradient is stored or added on the device, in fp32: nothing moves, and the host adds nothing
    leave    the chunk's sum goes to the host in one copy: its update is about to begin, or somebody asks for its value
    limit    other things want the memory: sums leave until so much is left, the one begun first before the others

Of a gradient of which the host has a part nothing is kept here: what is added to what, and in which order, is the same in
every placement. What left is added to by the host from then on.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch

from offload.device.accelerator import Accelerator
from offload.device.pending import Pending
from offload.layout import Piece
from offload.model.chunk import Chunk
from offload.step.gradients.addition import Addition, cut, take_in
from offload.step.gradients.reception import PackedPiece, Reception
from offload.step.gradients.squares_on_device import SquaresOnDevice

_SUM_ITEMSIZE = 4
_Part = tuple[Chunk, Piece]


@dataclass(slots=True, eq=False)
class _Sum:
    memory: torch.Tensor
    pieces: dict[int, Piece] = field(default_factory=dict)
    """By parameter index."""

    @property
    def values(self) -> torch.Tensor:
        """fp32 [chunk.numel]."""
        return self.memory.view(torch.float32)


class SumsOnDevice:
    """See the module. Runs in the thread that runs backward or drives the model. The chunks' buffers to which sums
    leave are changed under the lock of `ChunkGradients`.

    expects_several  whether the coming step is expected to have several micro-batches: else nothing is kept
    nbytes           that it takes now; `peak_nbytes`: that it took at most
    """

    def __init__(self, accelerator: Accelerator, reception: Reception, squares: SquaresOnDevice) -> None:
        self._accelerator, self._reception, self._squares = accelerator, reception, squares
        self._sums: dict[Chunk, _Sum] = {}
        """The one begun first, first."""
        self._leaving: deque[tuple[torch.Tensor, Pending]] = deque()
        self._limit_nbytes = 0
        self.expects_several = False
        self.nbytes = self.peak_nbytes = 0

    def take(self, pieces: Sequence[_Part], source: torch.Tensor, addition: Addition) -> list[list[_Part]]:
        """Take in a gradient: `source` [numel], and what of it lies in each chunk. Returns what is not kept here, side by side
        in each list."""
        left: list[list[_Part]] = []
        last = None
        for chunk, piece in pieces:
            if self._add(chunk, piece, source, addition):
                continue
            if last is not None and last.stop == chunk.start:
                left[-1].append((chunk, piece))
            else:
                left.append([(chunk, piece)])
            last = chunk
        return left

    def _add(self, chunk: Chunk, piece: Piece, source: torch.Tensor, addition: Addition) -> bool:
        known, index = self._sums.get(chunk), piece.slot.parameter_index
        if known is None or index not in known.pieces:
            if addition is not Addition.FIRST or not self.expects_several:
                return False
            known = known or self._begun(chunk)
            if known is None:
                return False
        known.pieces[index] = piece
        if piece.numel:
            target, squares = known.values[chunk.part(piece)], self._squares.part(index, chunk.index)
            take_in(target, cut(source, piece), piece.start, addition, chunk.flat.dtype, squares)
        return True

    def _begun(self, chunk: Chunk) -> _Sum | None:
        nbytes = chunk.numel * _SUM_ITEMSIZE
        self._settle()
        if self.nbytes + nbytes > self._limit_nbytes:
            return None
        made = self._sums[chunk] = _Sum(self._accelerator.memory(nbytes))
        self.nbytes += nbytes
        self.peak_nbytes = max(self.peak_nbytes, self.nbytes)
        return made

    def forget(self, chunk: Chunk, parameter_index: int) -> None:
        """The gradient of that parameter is dropped."""
        known = self._sums.get(chunk)
        if known is not None and known.pieces.pop(parameter_index, None) is not None and not known.pieces:
            del self._sums[chunk]
            self.nbytes -= known.memory.nbytes

    def leave(self, chunk: Chunk) -> None:
        """Send what is kept of the chunk to the host."""
        known = self._sums.pop(chunk, None)
        if known is None:
            return
        ordered = sorted(known.pieces.values(), key=lambda piece: piece.start)
        pieces = [PackedPiece(piece, Addition.FIRST) for piece in ordered if piece.numel]
        self._leaving.append((known.memory, self._reception.take_pieces(chunk, pieces, known.values)))

    def leave_all(self, order: Sequence[Chunk]) -> None:
        """Everything that is kept, those of `order` in that order."""
        for chunk in order if self._sums else ():
            self.leave(chunk)
        self._settle()

    def limit(self, nbytes: int) -> None:
        """From now on so much may be taken, and what is beyond it leaves; its memory is free when this returns."""
        self._limit_nbytes = nbytes
        self._settle()
        while self._sums and self.nbytes > nbytes:
            self.leave(next(iter(self._sums)))
            self._settle(waits=self.nbytes > nbytes)

    def close(self) -> None:
        """Give the device memory back, whoever still has the engine."""
        self._sums.clear()
        self._leaving.clear()

    def _settle(self, *, waits: bool = False) -> None:
        """Let go of what has left; if it `waits`, of all that was sent."""
        while self._leaving and (waits or self._leaving[0][1].done()):
            memory, copied = self._leaving.popleft()
            copied.wait()
            self.nbytes -= memory.nbytes
