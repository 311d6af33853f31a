# SPDX-License-Identifier: Apache-2.0
"""Gradients that stay on the device as long as it has room, though they belong in host memory: sums of micro-batches, and
those of chunks that are updated there all the same (`kept`), be they of one or of several.

    add      a micro-batch's gradient is stored or added on the device: nothing moves, and the host adds nothing
    leave    the chunk's sum goes to the host in one copy: the backward that is probably the step's last has brought all of it,
             its update is about to begin, or somebody asks for its value
    limit    other things want the memory: sums leave until so much is left, the one begun first before the others
    take_out the device updates the chunk: its kernel reads what is here

Of a gradient of which the host has a part nothing is kept here: what is added to what, and in which order, is the same in
every placement. What left is added to by the host from then on.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Sequence, Set
from dataclasses import dataclass, field

import torch

from offload.device.accelerator import Accelerator
from offload.device.pending import Pending
from offload.layout import Piece
from offload.model.chunk import Chunk
from offload.planning.route import Memory
from offload.step.gradients.addition import Addition, cut, take_in
from offload.step.gradients.reception import PackedPiece, Reception
from offload.step.gradients.squares_on_device import SquaresOnDevice

_TOLERATED = 1 / 16
"""Of what leaves under the last backward: what may be on its way yet when that is computed, and what more is tried if nothing
is."""
_Part = tuple[Chunk, Piece]


@dataclass(slots=True, eq=False)
class _Sum:
    memory: torch.Tensor
    dtype: torch.dtype
    pieces: dict[int, Piece] = field(default_factory=dict)
    """By parameter index."""
    last: set[int] = field(default_factory=set)
    """Indices of those of which the step's last gradient came, as far as is known."""

    @property
    def values(self) -> torch.Tensor:
        """[chunk.numel]."""
        return self.memory.view(self.dtype)


class SumsOnDevice:
    """See the module. Runs in the thread that runs backward or drives the model. The chunks' buffers to which sums
    leave are changed under the lock of `ChunkGradients`.

    expects_several  whether the coming step is expected to have several micro-batches: else only what is in `kept`
    in_last          whether the backward that runs is expected to be the step's last: what it completes leaves under it
    nbytes           that it takes now; `peak_nbytes`: that it took at most
    """

    def __init__(
        self, accelerator: Accelerator, reception: Reception, squares: SquaresOnDevice, *, narrow_sums: bool = False
    ) -> None:
        """`narrow_sums`: they are in the parameters' dtype, else in fp32."""
        self._accelerator, self._reception, self._squares = accelerator, reception, squares
        self._narrow_sums = narrow_sums
        self._sums: dict[Chunk, _Sum] = {}
        """The one begun first, first."""
        self._leaving: deque[tuple[torch.Tensor, Pending]] = deque()
        self._limit_nbytes = self._early_nbytes = 0
        """`_early_nbytes`: that left under the last backward."""
        self._in_time_nbytes = self._expected_in_time_nbytes = math.inf
        """As many may leave under that: what the link moves meanwhile, as it was last seen; what was told of it beforehand."""
        self.expects_several = self.in_last = False
        self.kept = set[Chunk]()
        """Those that the device updates: they stay for that, also of one micro-batch."""
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
            if addition is not Addition.FIRST or not (self.expects_several or chunk in self.kept):
                return False
            known = known or self._begun(chunk)
            if known is None:
                return False
        elif addition is Addition.SUM and known.dtype != self._dtype_of_sums(chunk):
            self.leave(chunk)  # nobody expected a second micro-batch
            return False
        known.pieces[index] = piece
        if piece.numel:
            target, squares = known.values[chunk.part(piece)], self._squares.part(index, chunk.index)
            take_in(target, cut(source, piece), piece.start, addition, chunk.flat.dtype, squares)
        if not self.in_last:
            self._early_nbytes = 0
            return True
        known.last.add(index)
        # What may be spilled waits for a buffer, which an update may have yet.
        leaves = chunk.route.gradients_in is Memory.HOST and chunk not in self.kept
        if leaves and len(known.last) == len(chunk.pieces):
            self._leave_early(chunk, known.memory.nbytes)
        return True

    def _leave_early(self, chunk: Chunk, nbytes: int) -> None:
        """Unless the link does not keep up. What stays leaves at the step in the order of the next forward, which does not wait
        for all of it then."""
        if not self._early_nbytes or self._early_nbytes + nbytes <= self._in_time_nbytes:
            self._early_nbytes += nbytes
            self.leave(chunk)

    def expect_in_time(self, nbytes: float) -> None:
        """The link moves so many while a backward is computed."""
        self._in_time_nbytes = self._expected_in_time_nbytes = nbytes

    def see_what_was_late(self) -> None:
        """Wait until the device has computed what it was given: what the link moved until then may leave early in the next
        step."""
        early, self._early_nbytes = self._early_nbytes, 0
        if not early:
            return
        self._accelerator.mark().wait()
        late = sum(memory.nbytes for memory, copied in self._leaving if not copied.done())
        if not late:
            chunk_nbytes = self._leaving[-1][0].nbytes if self._leaving else 0
            more = max(self._in_time_nbytes, early * (1 + _TOLERATED) + chunk_nbytes)
            self._in_time_nbytes = min(more, self._expected_in_time_nbytes)
        elif late > early * _TOLERATED:
            self._in_time_nbytes = early - late

    def take_together(self, chunk: Chunk, arriving: Sequence[tuple[Piece, torch.Tensor]]) -> bool:
        """Take in first gradients of a chunk that the device updates, each [piece.numel]. False: they do not stay here."""
        known = self._begun_to_keep(chunk)
        if known is None:
            return False
        known.pieces.update((piece.slot.parameter_index, piece) for piece, _ in arriving)
        which = [chunk.positions[piece.slot.parameter_index] for piece, _ in arriving]
        self._squares.table_of(chunk).ingest_some(known.values, [source for _, source in arriving], which)
        return True

    def fill(self, chunk: Chunk, gradients: Sequence[torch.Tensor]) -> bool:
        """The same of all of the chunk's parameters (`FilledChunk`)."""
        known = self._begun_to_keep(chunk)
        if known is None:
            return False
        known.pieces.update((piece.slot.parameter_index, piece) for _, piece in chunk.pieces)
        self._squares.table_of(chunk).ingest(known.values, gradients)
        return True

    def _begun_to_keep(self, chunk: Chunk) -> _Sum | None:
        if chunk not in self.kept or self.expects_several:
            return None
        return self._sums.get(chunk) or self._begun(chunk)

    def _dtype_of_sums(self, chunk: Chunk) -> torch.dtype:
        return chunk.flat.dtype if self._narrow_sums else torch.float32

    def _dtype(self, chunk: Chunk) -> torch.dtype:
        """In which it is begun."""
        return self._dtype_of_sums(chunk) if self.expects_several else chunk.flat.dtype

    def nbytes_of(self, chunk: Chunk) -> int:
        """That it takes here."""
        return chunk.numel * self._dtype(chunk).itemsize

    def _begun(self, chunk: Chunk) -> _Sum | None:
        dtype, nbytes = self._dtype(chunk), self.nbytes_of(chunk)
        self._settle()
        if self.nbytes + nbytes > self._limit_nbytes:
            return None
        made = self._sums[chunk] = _Sum(self._accelerator.memory(nbytes), dtype)
        self.nbytes += nbytes
        self.peak_nbytes = max(self.peak_nbytes, self.nbytes)
        return made

    def forget(self, chunk: Chunk, parameter_index: int) -> None:
        """The gradient of that parameter is dropped."""
        known = self._sums.get(chunk)
        if known is None or known.pieces.pop(parameter_index, None) is None:
            return
        known.last.discard(parameter_index)
        if not known.pieces:
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
        """Everything that the device does not update, in that order."""
        for chunk in order if self._sums else ():
            if chunk not in self.kept:
                self.leave(chunk)
        self._settle()

    def has(self, chunk: Chunk, parameter_indices: Set[int]) -> bool:
        """Whether the chunk's gradients of all these parameters are here."""
        known = self._sums.get(chunk)
        return known is not None and parameter_indices <= known.pieces.keys()

    def take_out(self, chunk: Chunk) -> torch.Tensor:
        """[chunk.numel], whose memory is the caller's from now on."""
        known = self._sums.pop(chunk)
        self.nbytes -= known.memory.nbytes
        return known.values

    def limit(self, nbytes: int) -> None:
        """From now on so much may be taken, and what is beyond it leaves; its memory is free when this returns."""
        self._limit_nbytes = nbytes
        self._settle()
        while self.nbytes > nbytes and (self._sums or self._leaving):
            if self._sums:
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
