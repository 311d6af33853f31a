# SPDX-License-Identifier: Apache-2.0
"""Gradients between the device's backward and host memory: packed by chunk, summed and cast in one pass, one D2H a chunk.

    arrive   a parameter's gradient is packed into device buffers: one kernel reads it, casts it to the compute dtype, stores it
             and adds its squares. The gradient itself is free again at once.
    leave    chunks that lie wholly in one parameter leave together, in one copy; a chunk that several share leaves when it
             has all its pieces, or piece by piece if it waits too long (its buffer is needed) or the next gradient comes
    norm     the sums of squares of the whole step stay on the device and come over in one copy when the norm is asked for

There is no un-scaling here: in 16 bits it would round. It is part of the one factor that Adam multiplies gradients with as it
reads them; the norm is divided by it. A sum of squares is finite exactly if its elements are: that is the finite check.

Why by parameter and not by unit: backward hands over one parameter at a time and wants its memory back, and a unit may be
gigabytes. What is fused is what would each be a pass over the gradient.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from operator import attrgetter

import torch

from offload.device.accelerator import Accelerator
from offload.device.arithmetic import kernels
from offload.device.pending import Pending
from offload.layout import Piece
from offload.model.chunk import Chunk
from offload.step.gradients.addition import Addition, cut
from offload.step.gradients.reception import PackedPiece, Reception
from offload.step.gradients.squares_on_device import SquaresOnDevice
from offload.step.timeline import ROOM_FOR_GRADIENTS, Timeline


@dataclass(slots=True, eq=False)
class _Packing:
    chunk: Chunk
    memory: torch.Tensor
    values: torch.Tensor
    """[chunk.numel] in the compute dtype, in `memory`."""
    pieces: dict[int, PackedPiece] = field(default_factory=dict)
    """By parameter index."""


_START_OF = attrgetter("piece.start")


class GradientTransit:
    """The device buffers. Everything runs in the thread that runs backward or drives the model."""

    def __init__(
        self,
        accelerator: Accelerator,
        reception: Reception,
        squares: SquaresOnDevice,
        leaving: Sequence[Chunk],
        timeline: Timeline,
        *,
        buffer_count: int,
        spills: bool,
    ) -> None:
        """`leaving`: the chunks whose gradients go this way, of which so many may lie on the device (`buffer_count`). `spills`:
        whether the host's buffers may run out."""
        self._accelerator, self._reception, self._squares = accelerator, reception, squares
        self._timeline = timeline
        nbytes = max(chunk.nbytes for chunk in leaving)
        shared = Counter(chunk.flat.layout.unit_index for chunk in leaving if len(chunk.pieces) > 1)
        # Chunks that leave together are received together, which buffers that may have to be spilled in between cannot do.
        count = buffer_count if spills else min(buffer_count, 2 * max(shared.values(), default=0) + 2)
        self._memory = accelerator.memory(count * nbytes)
        """Buffers of single chunks; `_ring`: for chunks that leave together."""
        self._free: deque[tuple[torch.Tensor, Pending | None]] = deque((one, None) for one in self._memory.view(count, nbytes))
        self._views: dict[tuple[int, int, torch.dtype], torch.Tensor] = {}
        """What `_values` gave."""
        self._open: dict[Chunk, _Packing] = {}
        self._ring_nbytes = (buffer_count - count) * nbytes
        self._ring = accelerator.memory(self._ring_nbytes)
        self._cursor_nbytes = 0
        self._leaving: deque[tuple[int, int, Pending]] = deque()
        """(first byte, byte behind the last, copy) of what lies in the ring: of the lap before from the cursor on, then of this
        one up to it. So what the next bytes overlap is in front."""

    def arrive(self, pieces: Sequence[tuple[Chunk, Piece]], source: torch.Tensor, addition: Addition) -> None:
        """Take in a gradient: `source` [numel], and what of it lies in each chunk."""
        together: list[tuple[Chunk, Piece]] = []
        for chunk, piece in pieces:
            is_whole = piece.numel == chunk.numel
            # Two of what leaves at once must fit, so that one may arrive while the other leaves.
            if together:
                nbytes = (chunk.stop - together[0][0].start) * chunk.flat.layout.itemsize
                if not is_whole or 2 * nbytes > self._ring_nbytes:
                    self._arrive_together(together, source, addition)
                    together = []
            if is_whole and 2 * chunk.nbytes <= self._ring_nbytes:
                together.append((chunk, piece))
            elif piece.numel:
                self.pack(chunk, [(piece, cut(source, piece))], addition)
        if together:
            self._arrive_together(together, source, addition)

    def _arrive_together(self, pieces: Sequence[tuple[Chunk, Piece]], source: torch.Tensor, addition: Addition) -> None:
        (first, piece), (last, _) = pieces[0], pieces[-1]
        slot, start, stop = piece.slot, first.start, last.stop
        nbytes = (stop - start) * first.flat.layout.itemsize
        low, memory = self._ring_part(nbytes)
        values = memory.view(first.flat.dtype)
        squares = self._squares.parts(slot.parameter_index, first.index, last.index)
        kernels.ingest_async(values, source[start - slot.start : stop - slot.start], start, False, squares)
        copied = self._reception.take_chunks(pieces, values, addition)
        self._leaving.append((low, low + nbytes, copied))

    def _ring_part(self, nbytes: int) -> tuple[int, torch.Tensor]:
        """The next bytes of the ring, and where they begin; compute waits until what was there has left."""
        leaving = self._leaving
        if self._cursor_nbytes + nbytes > self._ring_nbytes:
            while leaving and leaving[0][0] >= self._cursor_nbytes:
                self._join(leaving.popleft()[2])
            self._cursor_nbytes = 0
        low, high = self._cursor_nbytes, self._cursor_nbytes + nbytes
        while leaving and leaving[0][0] < high and low < leaving[0][1]:
            self._join(leaving.popleft()[2])
        self._cursor_nbytes = high
        return low, self._ring[low:high]

    def pack(self, chunk: Chunk, arriving: Sequence[tuple[Piece, torch.Tensor]], addition: Addition) -> None:
        """Take in pieces of gradients that lie in one chunk, all at once: each [piece.numel]."""
        packing = self._open.get(chunk)
        if packing is not None and any(piece.slot.parameter_index in packing.pieces for piece, _ in arriving):
            self.leave(chunk)
            packing = None
        if packing is None:
            memory = self._buffer()
            packing = self._open[chunk] = _Packing(chunk, memory, self._values(memory, chunk))
        which = [chunk.positions[piece.slot.parameter_index] for piece, _ in arriving]
        self._squares.table_of(chunk).ingest_some(packing.values, [source for _, source in arriving], which)
        packing.pieces.update((piece.slot.parameter_index, PackedPiece(piece, addition)) for piece, _ in arriving)
        if len(packing.pieces) == len(chunk.pieces):
            self.leave(chunk)

    def fill(self, chunk: Chunk, sources: Sequence[torch.Tensor]) -> None:
        """Take in the first gradients of all of the chunk's parameters (`FilledChunk`), which leave at once."""
        self.leave(chunk)
        memory = self._buffer()
        table, values = self._squares.table_of(chunk), self._values(memory, chunk)
        table.ingest(values, sources)
        self._free.append((memory, self._reception.take_filled(chunk, values)))

    def leave(self, chunk: Chunk) -> None:
        """Send what is packed of the chunk to the host."""
        packing = self._open.pop(chunk, None)
        if packing is not None:
            pieces = sorted(packing.pieces.values(), key=_START_OF)
            copied = self._reception.take_pieces(chunk, pieces, packing.values)
            self._free.append((packing.memory, copied))

    def leave_all(self) -> None:
        """Send everything that is packed."""
        for packing in list(self._open.values()):
            self.leave(packing.chunk)

    def close(self) -> None:
        """Give the device memory back, whoever still has the engine."""
        for own in (self._free, self._views, self._open, self._leaving):
            own.clear()
        self._memory = self._ring = self._memory[:0].clone()

    def _values(self, memory: torch.Tensor, chunk: Chunk) -> torch.Tensor:
        """The chunk's part of one of the buffers, whose tensors are there for good: [chunk.numel]."""
        key = id(memory), chunk.nbytes, chunk.flat.dtype
        found = self._views.get(key)
        if found is None:
            found = self._views[key] = chunk.values_in(memory)
        return found

    def _buffer(self) -> torch.Tensor:
        if not self._free:
            self.leave(next(iter(self._open.values())).chunk)
        memory, copied = self._free.popleft()
        if copied is not None:
            self._join(copied)
        return memory

    def _join(self, copied: Pending) -> None:
        """On the device: the host goes on."""
        if self._timeline.recorder.to is None:
            self._accelerator.join(copied)
        else:
            with self._timeline.joining(ROOM_FOR_GRADIENTS):
                self._accelerator.join(copied)
