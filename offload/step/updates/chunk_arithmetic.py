# SPDX-License-Identifier: Apache-2.0
"""What an update computes, once a chunk's record, gradient and values are at hand: by a table that the kernel is told once,
else slot by slot."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch
from torch import Tensor

from offload.device.arithmetic import optimizer_step
from offload.device.arithmetic.checksums import SummedMemory
from offload.device.arithmetic.flat import uses_native
from offload.device.arithmetic.records import Record
from offload.device.arithmetic.segment import MASTER, Segment
from offload.device.arithmetic.step_table import JoinedTable, Numbers, Place, Span, StepTable
from offload.model.chunk import Chunk
from offload.model.update import ChunkUpdate, PieceUpdate
from offload.step.chunk_stores import RecordStore
from offload.step.gradients.chunk_gradients import ChunkGradients

_ON_HOST = torch.empty(0, device="cpu")


class ChunkArithmetic:
    """See the module. Runs on the lane of the update."""

    def __init__(self, records: RecordStore, gradients: ChunkGradients) -> None:
        self._records, self._gradients = records, gradients
        self._joined: dict[tuple[Chunk, int], tuple[list[tuple[int, int, int]], JoinedTable]] = {}
        """By the first chunk of several that are updated at once, and where its record is written: where the records and the
        values of all of them lie, and the records that are read."""

    def takes_sums(self, update: ChunkUpdate) -> bool:
        """Whether `update` on the host takes checksums on the way."""
        return self.by_table(update, _ON_HOST)

    def update(self, update: ChunkUpdate, record: Tensor, values: Tensor, summed: Sequence[SummedMemory] = ()) -> None:
        """`record`: the memory that holds it. The chunk's gradient is open. `summed`: what checksums are taken of, where it
        `takes_sums`."""
        if self.by_table(update, values):
            self._by_table(update, record, values, summed)
            return
        assert not summed, "only the native kernel takes checksums"
        if update.source is not None:
            record.copy_(update.source)
        over = self._records.over(update.chunk, record)
        gradients = self._gradients.opened(update.chunk, update.only_pieces)
        pairs = zip(update.pieces, gradients, strict=True)
        optimizer_step.update([_segment(update, piece, over, gradient, values) for piece, gradient in pairs])

    def _by_table(self, update: ChunkUpdate, record: Tensor, values: Tensor, summed: Sequence[SummedMemory]) -> None:
        chunk = update.chunk
        gradients: Tensor | list[Tensor] | None = self._gradients.opened_whole(chunk)
        if gradients is None:
            gradients = self._gradients.opened(chunk, update.only_pieces)
        which = None
        if not update.updates_every_slot:
            updated = {one.info.index for one in update.some}
            which = [position for position, (info, _) in enumerate(chunk.pieces) if info.index in updated]
        table, numbers = self._table(chunk, values), numbers_of([update])
        table.update(which, Place(record, values, update.source), gradients, numbers, update.factor, summed)

    def update_at_once(self, updates: Sequence[ChunkUpdate], records: Sequence[Tensor], values: Sequence[Tensor]) -> None:
        """`update` of several chunks, every slot of them, in one call where the kernel makes them all."""
        if not all(map(self.by_table, updates, values)):
            for one, record, own in zip(updates, records, values, strict=True):
                self.update(one, record, own)
            return
        chunks, numbers = [one.chunk for one in updates], numbers_of(updates)
        sources = [one.source for one in updates]
        joined = self._joined_at(list(zip(chunks, map(Place, records, values, sources), strict=True)))
        whole = [self._gradients.opened_whole(chunk) for chunk in chunks]
        if any(gradient is None for gradient in whole):
            pieces = [piece for one in updates for piece in self._gradients.opened(one.chunk, one.only_pieces)]
            joined.update(pieces, numbers, updates[0].factor)
        else:
            joined.update_chunks([gradient for gradient in whole if gradient is not None], numbers, updates[0].factor)

    def _joined_at(self, placed: Sequence[tuple[Chunk, Place]]) -> JoinedTable:
        addresses = [place.addresses for _, place in placed]
        first = placed[0][0], addresses[0][0]
        known, joined = self._joined.get(first, (None, None))
        if joined is None or known != addresses:
            joined = self.joined(placed)
            self._joined[first] = addresses, joined
        return joined

    def forget(self, chunks: Iterable[Chunk]) -> None:
        """Let go of where these are updated: their records leave there."""
        gone = set(chunks)
        for key in list(self._joined):  # one call of C: the lane of the host's updates may be adding others
            if key[0] in gone:
                self._joined.pop(key, None)

    def close(self) -> None:
        """Let go of memory that is others'."""
        self._joined = {}

    def joined(self, placed: Iterable[tuple[Chunk, Place]]) -> JoinedTable:
        """One table for all of these, which lie where they are for good."""
        return JoinedTable([(self._table(chunk, place.values), place) for chunk, place in placed])

    def _table(self, chunk: Chunk, values: Tensor) -> StepTable:
        if chunk.step_table is None or chunk.step_table.device != values.device:
            form = self._records.format(chunk)
            chunk.step_table = StepTable(form, chunk.numel, values.dtype, _spans(chunk), values.device)
        return chunk.step_table

    def by_table(self, update: ChunkUpdate, values: Tensor) -> bool:
        """Whether the native kernel makes it, or a compiled one, rather than torch, or an optimizer with its own arithmetic."""
        hypers = [piece.hyper for piece in update.some] if update.numbers is None else [update.numbers[0]]
        if uses_native(values):
            return all(hyper.own is None for hyper in hypers)
        state_format = self._records.format(update.chunk).state_format
        return all(optimizer_step.has_compiled(values.device, hyper, state_format) for hyper in hypers)


def numbers_of(updates: Sequence[ChunkUpdate]) -> Numbers:
    """What the kernel is told of each slot; once, where that is the same for all."""
    first = updates[0].numbers
    if first is not None and all(one.numbers == first for one in updates):
        return first
    return [(piece.hyper, piece.step) for one in updates for piece in one.pieces]


def _spans(chunk: Chunk) -> list[Span]:
    return [
        Span(piece.start - chunk.start, piece.stop - chunk.start, piece.start - piece.slot.start, info.index)
        for info, piece in chunk.pieces
    ]


def _segment(update: ChunkUpdate, piece: PieceUpdate, record: Record, gradient: Tensor, values: Tensor) -> Segment:
    low, high = piece.piece.start - update.chunk.start, piece.piece.stop - update.chunk.start
    arrays, weights = record.part(low, high), values[low:high]
    state_format = record.format.state_format
    own_weights = not (state_format.is_split or MASTER in arrays)
    return Segment(
        grad=gradient,
        arrays={**arrays, MASTER: weights} if own_weights else arrays,
        values=None if own_weights else weights,
        hyper=piece.hyper,
        step=piece.step,
        grad_factor=update.factor,
        state_format=state_format,
        rounding_seed=piece.info.index,
        first_index=piece.piece.start - piece.piece.slot.start,
    )
