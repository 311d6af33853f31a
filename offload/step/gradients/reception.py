# SPDX-License-Identifier: Apache-2.0
"""Gradients that come over from the device: received in the buffers of their chunks in host memory.

The first of a step is copied straight into its buffer, if that has its dtype. What is added to others, or cast, is copied to
a landing buffer, and a lane adds it: so backward waits for none of it.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass

import torch

from offload.device.accelerator import Accelerator
from offload.device.lane import HostLane
from offload.device.pending import Pending, Settled
from offload.layout import Piece
from offload.model.chunk import Chunk, ChunkGradient
from offload.planning.purposes import LANDING
from offload.step.gradients.addition import Addition, take_in
from offload.step.gradients.buffers import GradientBuffers
from offload.step.gradients.extents import gradient_of
from offload.tiers.staging import StagingPool


@dataclass(slots=True, eq=False)
class PackedPiece:
    """One piece in a device buffer, and what it is to what the host has of it."""

    piece: Piece
    addition: Addition

    @property
    def parameter_index(self) -> int:
        return self.piece.slot.parameter_index


class Reception:
    """See the module. Runs in the thread that runs backward or drives the model. What it returns settles when the device values
    may be overwritten."""

    def __init__(
        self,
        accelerator: Accelerator,
        pool: StagingPool,
        buffers: GradientBuffers,
        lane: HostLane,
        lock: AbstractContextManager[object],
    ) -> None:
        """`lock`: of `ChunkGradients`."""
        self._accelerator, self._pool, self._buffers, self._lane, self._lock = accelerator, pool, buffers, lane, lock
        landing = pool.stats.consumers.get(LANDING)
        self._landing_count = landing.count if landing is not None else 0
        self._landings: deque[Pending] = deque()
        """When the landing buffers on lease are given back, the first one first."""

    @property
    def is_full(self) -> bool:
        """Whether no landing buffer, which what is taken next may need, is free yet, as far as is known."""
        return 0 < self._landing_count <= len(self._landings)

    def wait_for_room(self) -> None:
        """Until one is free. Its job is forgotten only when that is over: till then the buffer is on lease."""
        while self.is_full:
            self._landings[0].wait()
            self._landings.popleft()

    def take_pieces(self, chunk: Chunk, pieces: list[PackedPiece], values: torch.Tensor) -> Pending:
        """Pieces of one chunk, in order, from device values [chunk.numel]."""
        state = gradient_of(chunk)
        copied: Pending = Settled()
        with self._lock:
            added = [packed.addition for packed in pieces if packed.addition is not Addition.FIRST]
            is_sum = values.dtype == torch.float32
            buffer = self._buffers.for_adding(state, wide=is_sum or Addition.SUM in added, later=bool(added))
            if is_sum and state.jobs:
                state.settle()  # one of them may be widening all of the buffer
            for run in _runs(chunk, pieces):
                low, high = run[0].piece.start - chunk.start, run[-1].piece.stop - chunk.start
                if added or buffer.dtype != values.dtype:
                    copied = self._land(state, run, buffer[low:high], values[low:high])
                else:
                    copied = self._accelerator.copy_out(buffer[low:high], values[low:high])
                    state.jobs.append(copied)
        return copied  # copies of one stream settle in order

    def take_filled(self, chunk: Chunk, values: torch.Tensor) -> Pending:
        """The first gradients of all parameters of one chunk, from device values [chunk.numel]."""
        state = gradient_of(chunk)
        with self._lock:
            buffer = self._buffers.for_adding(state, wide=False)
            if buffer.dtype != values.dtype or state.jobs:
                pieces = [PackedPiece(piece, Addition.FIRST) for _, piece in chunk.pieces]
                return self.take_pieces(chunk, pieces, values)
            copied = self._accelerator.copy_out(buffer, values)
            state.jobs.append(copied)
        return copied

    def take_chunks(self, pieces: Sequence[tuple[Chunk, Piece]], values: torch.Tensor, addition: Addition) -> Pending:
        """Chunks that lie side by side in one slot, each with its piece of that, from device values of all of them."""
        copied: Pending = Settled()
        begin, wide, later = pieces[0][0].start, addition is Addition.SUM, addition is not Addition.FIRST
        states = [gradient_of(chunk) for chunk, _ in pieces]
        with self._lock:
            buffers = [self._buffers.for_adding(state, wide=wide, later=later) for state in states]
            if addition is Addition.FIRST and all(buffer.dtype == values.dtype for buffer in buffers):
                for first, last, target in _joined(buffers):
                    low, high = pieces[first][0].start - begin, pieces[last][0].stop - begin
                    copied = self._accelerator.copy_out(target, values[low:high])
                    for state in states[first : last + 1]:
                        state.jobs.append(copied)
                return copied
            for (chunk, piece), state, buffer in zip(pieces, states, buffers, strict=True):
                part = values[chunk.start - begin : chunk.stop - begin]
                copied = self._land(state, [PackedPiece(piece, addition)], buffer, part)
        return copied

    def _land(self, state: ChunkGradient, run: list[PackedPiece], target: torch.Tensor, values: torch.Tensor) -> Pending:
        """Have the lane take device values into `target`, both of all of the run."""
        self.wait_for_room()
        landing = self._pool.lease(LANDING)
        landed = landing.tensor[: values.nbytes].view(values.dtype)
        copied = self._accelerator.copy_out(landed, values)
        begin, before = run[0].piece.start, tuple(state.jobs)

        def add() -> None:
            try:
                for job in (copied, *before):
                    job.wait()
                for packed in run:
                    piece = packed.piece
                    part = slice(piece.start - begin, piece.stop - begin)
                    # The model computes on the device: the host's cores are free.
                    squares = take_in(target[part], landed[part], piece.start, packed.addition, values.dtype, all_cores=True)
                    state.squares[packed.parameter_index] = squares
            finally:
                landing.release()

        job = self._lane.submit(add)
        self._landings.append(job)
        state.jobs.append(job)
        return copied

    def settled(self) -> None:
        """All that landed was added."""
        self._landings.clear()


def _runs(chunk: Chunk, pieces: list[PackedPiece]) -> list[list[PackedPiece]]:
    """`pieces` (in order) cut where the chunk has another piece between two of them: what one copy may bring over."""
    if len(pieces) == len(chunk.pieces):
        return [pieces]
    positions = {piece.slot.parameter_index: position for position, (_, piece) in enumerate(chunk.pieces)}
    found: list[list[PackedPiece]] = []
    for packed in pieces:
        last = found[-1][-1] if found else None
        if last is not None and positions[packed.parameter_index] == positions[last.parameter_index] + 1:
            found[-1].append(packed)
        else:
            found.append([packed])
    return found


def _joined(tensors: list[torch.Tensor]) -> list[tuple[int, int, torch.Tensor]]:
    """Tensors [numel], made one wherever they lie side by side in memory: (index of the first, of the last, all of them)."""
    found: list[tuple[int, int, torch.Tensor]] = []
    for index, tensor in enumerate(tensors):
        if found:
            first, _, whole = found[-1]
            same = whole.untyped_storage().data_ptr() == tensor.untyped_storage().data_ptr()
            if same and whole.storage_offset() + whole.numel() == tensor.storage_offset():
                longer = whole.as_strided((whole.numel() + tensor.numel(),), (1,), whole.storage_offset())
                found[-1] = (first, index, longer)
                continue
        found.append((index, index, tensor))
    return found
