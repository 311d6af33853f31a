# SPDX-License-Identifier: Apache-2.0
"""Gradients as backward brings them: copied, converted or added into the buffers of their chunks.

The sum of squares of what is stored is taken in the same pass. From a device to the host a gradient goes by
`GradientTransit`, and what the host does with it is done in a lane, so that backward waits for none of it. A chunk's buffer
is in compute precision until a second micro-batch adds to it; sums are kept in fp32 from then on. The parts that one backward
brings of a gradient (through reentrant checkpoints of what is used twice) are added as PyTorch adds them.

Where the device is the CPU and gradients stay in its memory nothing is copied at all: the tensor that autograd computed is
adopted, until its update, or until a second micro-batch adds to it.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, suppress
from itertools import repeat
from operator import is_not

import torch

from offload.device.accelerator import Accelerator
from offload.device.arithmetic import kernels
from offload.layout import Piece
from offload.model.chunk import Chunk, ChunkGradient
from offload.model.flat import ParameterInfo
from offload.planning.purposes import SQUARES
from offload.planning.route import Memory
from offload.step.gradients.addition import Addition, cut, take_in
from offload.step.gradients.buffers import GradientBuffers
from offload.step.gradients.extents import gradient_of
from offload.step.gradients.filling import Filling
from offload.step.gradients.reception import Reception
from offload.step.gradients.squares_on_device import SquaresOnDevice
from offload.step.gradients.sums_on_device import SumsOnDevice
from offload.step.gradients.transit import GradientTransit
from offload.step.timeline import ROOM_FOR_GRADIENTS, Timeline
from offload.tiers.staging import StagingPool


def _packed_with_others(leaving: Sequence[Chunk]) -> set[int]:
    infos = [info for chunk in leaving for info in chunk.infos]
    return {info.index for info in infos if all(len(chunk.pieces) > 1 for chunk, _ in info.pieces)}


class GradientArrival:
    """See the module. Runs in whichever thread backward runs; what lands on the host afterwards in a lane of its own."""

    def __init__(
        self,
        chunks: Sequence[Chunk],
        pool: StagingPool,
        accelerator: Accelerator,
        timeline: Timeline,
        *,
        transit_buffer_count: int = 0,
        narrow_sums: bool = False,
    ) -> None:
        """`transit_buffer_count`: chunks that may lie on the device on their way to the host; 0: nothing goes that way.
        `narrow_sums`: micro-batches are summed in the parameters' dtype."""
        self._chunks, self._timeline, self._narrow_sums = chunks, timeline, narrow_sums
        self.lock = accelerator.lock()
        """Who looks at a chunk's buffer or changes it holds it."""
        self._lane = accelerator.host_lane("gradients", waits_for_io=False)
        spilling_count = sum(chunk.route.gradients_in is None for chunk in chunks)
        self.spills = spilling_count > 0
        """Whether gradients may leave for a store when buffers run out."""
        casting = self._lane if transit_buffer_count else None
        self.buffers = GradientBuffers(spilling_count, pool, accelerator, casting, self.leave_device)
        self._reception = Reception(accelerator, pool, self.buffers, self._lane, self.lock)
        self._unsummed: dict[int, None] = {}
        """Indices of parameters whose gradient was adopted, and its squares are not yet summed."""
        self._squares_on_device = SquaresOnDevice(accelerator, chunks, pool) if SQUARES in pool.stats.consumers else None
        self._transit: GradientTransit | None = None
        self._packed: set[int] = set()
        """Indices of parameters that leave the device in chunks which they share."""
        self._kept = {info.index for chunk in chunks if self._is_kept(chunk) for info in chunk.infos}
        """Indices of those whose gradients stay on the device."""
        self.sums_on_device: SumsOnDevice | None = None
        """Where sums may stay on the device that belong in host memory."""
        if transit_buffer_count:
            leaving = [chunk for chunk in chunks if chunk.route.gradients_in is not Memory.DEVICE]
            squares = self._squares_on_device
            assert squares is not None, "what leaves the device has its squares summed there"
            self._packed = _packed_with_others(leaving)
            self._transit = GradientTransit(
                accelerator,
                self._reception,
                squares,
                leaving,
                timeline,
                buffer_count=transit_buffer_count,
                spills=self.spills,
            )
            self.sums_on_device = SumsOnDevice(accelerator, self._reception, squares, narrow_sums=narrow_sums)

    @property
    def _packing_transit(self) -> GradientTransit | None:
        """By which first gradients leave the device at once; None where none leaves, or they are to be summed there."""
        return None if self.sums_on_device is not None and self.sums_on_device.expects_several else self._transit

    def _is_kept(self, chunk: Chunk) -> bool:
        """Whether its gradient stays on the device."""
        return self._squares_on_device is not None and chunk.route.gradients_in is Memory.DEVICE

    def adopts(self, chunk: Chunk) -> bool:
        """Whether autograd's own tensors are kept: they lie where gradients do."""
        return chunk.route.model_in is Memory.HOST and chunk.route.gradients_in is Memory.HOST

    def close(self) -> None:
        """Stop the lane, and let go of all gradients."""
        self._lane.close()
        self.buffers.close()
        for state in map(gradient_of, self._chunks):
            for pending in filter(None, (*state.jobs, state.transfer)):  # they write there
                with suppress(Exception):
                    pending.wait()
            state.buffer = state.lease = state.transfer = None
            state.adopted.clear()
            state.jobs.clear()
        for one in (self._transit, self.sums_on_device, self._squares_on_device):
            if one is not None:
                one.close()

    # ---- what backward has ---------------------------------------------------------------------------------------

    def arrive(self, info: ParameterInfo, gradient: torch.Tensor, addition: Addition, *, owned: bool) -> None:
        """See `ChunkGradients.add`."""
        ordered = info.in_memory_order(gradient)
        if self._transit is not None and info.flat.route.gradients_in is not Memory.DEVICE:
            self._send(self._transit, info, ordered, addition)
            return
        for chunk, piece in info.pieces:
            with self._room_for(chunk, wide=addition is Addition.SUM):
                gradient_of(chunk).live.add(info.index)
                if piece.numel:
                    self._place(info, gradient_of(chunk), piece, cut(ordered, piece), addition, owned=owned)

    def _room_for(self, chunk: Chunk, *, wide: bool = False) -> AbstractContextManager[object]:
        """The lock, to be taken now that buffers for the chunk can be had at once: they were waited for without it, so that
        updates went on meanwhile. `wide`: in fp32."""
        if self._reception.is_full:
            with self._timeline.waiting(ROOM_FOR_GRADIENTS):
                self._reception.wait_for_room()
        while self.spills:
            with self.lock:
                coming = self.buffers.room_for(gradient_of(chunk), wide=wide)
            if coming is None:
                break
            with self._timeline.waiting(ROOM_FOR_GRADIENTS):
                coming.wait()
        return self.lock

    def _send(self, transit: GradientTransit, info: ParameterInfo, ordered: torch.Tensor, addition: Addition) -> None:
        index = info.index
        sent: Sequence[Sequence[tuple[Chunk, Piece]]] = [info.pieces]
        with self.lock:
            for chunk, _ in info.pieces:
                state = gradient_of(chunk)
                state.live.add(index)
                if info.numel:
                    state.squares[index] = None
            if self.sums_on_device is not None:
                sent = self.sums_on_device.take(info.pieces, ordered, addition)
        for side_by_side in sent:
            # What may have to be spilled in between leaves chunk by chunk anyway.
            for pieces in [[one] for one in side_by_side] if self.spills else [side_by_side]:
                with self._room_for(pieces[0][0], wide=addition is Addition.SUM):
                    transit.arrive(pieces, ordered, addition)

    def _place(
        self,
        info: ParameterInfo,
        state: ChunkGradient,
        piece: Piece,
        source: torch.Tensor,
        addition: Addition,
        *,
        owned: bool,
    ) -> None:
        chunk = state.chunk
        if owned and addition is Addition.FIRST and self.adopts(chunk):
            state.adopted[info.index] = source
            state.squares[info.index] = kernels.ingest_async(None, source, piece.start, False)
            return
        buffer = self.buffers.for_adding(state, wide=addition is Addition.SUM)
        target = buffer[chunk.part(piece)]
        if info.index in state.adopted:
            self._unsummed.pop(info.index, None)
            kernels.convert(target, state.adopted.pop(info.index))
        on_device = self._squares_on_device.part(info.index, chunk.index) if self._squares_on_device is not None else None
        if piece.numel == chunk.numel:
            state.checksums = self.buffers.unknown_checksums(state)
        summed = take_in(target, source, piece.start, addition, info.flat.dtype, on_device, checksums=state.checksums)
        state.squares[info.index] = summed if on_device is None else None

    def arrive_together(self, found: Iterable[tuple[ParameterInfo, torch.Tensor]]) -> None:
        """`arrive` of several parameters' first gradients, those of one chunk in one pass."""
        if self._squares_on_device is not None:  # they are not computed where they are summed, or not on the host
            self._send_together(found)
            return
        moves: dict[Chunk, list[tuple[int, Piece, torch.Tensor]]] = {}
        for info, gradient in found:
            ordered = info.in_memory_order(gradient)
            for chunk, piece in info.pieces:
                moves.setdefault(chunk, []).append((info.index, piece, cut(ordered, piece)))
        for chunk, arriving in moves.items():
            with self._room_for(chunk):
                if self.adopts(chunk):
                    self._adopt(gradient_of(chunk), arriving)
                else:
                    self._copy(gradient_of(chunk), arriving)

    def _send_together(self, found: Iterable[tuple[ParameterInfo, torch.Tensor]]) -> None:
        transit = self._packing_transit
        together = self._kept if transit is None else self._kept | self._packed
        moves: dict[Chunk, list[tuple[Piece, torch.Tensor]]] = {}
        for info, gradient in found:
            if info.index not in together:
                self.arrive(info, gradient, Addition.FIRST, owned=True)
                continue
            ordered = info.in_memory_order(gradient)
            for chunk, piece in info.pieces:
                moves.setdefault(chunk, []).append((piece, cut(ordered, piece)))
        for chunk, arriving in moves.items():
            state, indices = gradient_of(chunk), [piece.slot.parameter_index for piece, _ in arriving]
            with self._room_for(chunk):
                state.live.update(indices)
                state.squares.update(dict.fromkeys(indices))
                if self._is_kept(chunk):
                    self._store(chunk, arriving)
                elif self.sums_on_device is None or not self.sums_on_device.take_together(chunk, arriving):
                    assert transit is not None
                    transit.pack(chunk, arriving, Addition.FIRST)

    def _store(self, chunk: Chunk, arriving: Sequence[tuple[Piece, torch.Tensor]]) -> None:
        """First gradients, which stay on the device."""
        assert self._squares_on_device is not None
        buffer = self.buffers.for_adding(gradient_of(chunk), wide=False)
        which = [chunk.positions[piece.slot.parameter_index] for piece, _ in arriving]
        self._squares_on_device.table_of(chunk).ingest_some(buffer, [source for _, source in arriving], which)

    def may_fill(self, infos: Iterable[ParameterInfo]) -> bool:
        """Whether first gradients of these parameters of one unit stay on the device, or go to the host in chunks that they
        share."""
        indices = {info.index for info in infos}
        return indices <= self._packed or indices <= self._kept

    def fill(self, filling: Filling, gradients: list[torch.Tensor]) -> bool:
        """`arrive_together` of gradients that fill whole chunks, unless they belong on the host and are to be summed on the
        device."""
        transit, are_kept, sums = self._packing_transit, self._is_kept(filling.chunks[0].chunk), self.sums_on_device
        if transit is None and not are_kept:
            return False
        for filled in filling.chunks:
            state = gradient_of(filled.chunk)
            with self._room_for(filled.chunk):
                state.live.update(filled.indices)
                state.squares.update(filled.indices)
                if are_kept:
                    self._store_all(filled.chunk, gradients[filled.which])
                elif sums is None or filled.chunk not in sums.kept or not sums.fill(filled.chunk, gradients[filled.which]):
                    assert transit is not None
                    transit.fill(filled.chunk, gradients[filled.which])
        return True

    def _store_all(self, chunk: Chunk, gradients: list[torch.Tensor]) -> None:
        """The first gradients of all of the chunk's parameters, which stay on the device."""
        assert self._squares_on_device is not None
        buffer, table = self.buffers.for_adding(gradient_of(chunk), wide=False), self._squares_on_device.table_of(chunk)
        if buffer.dtype == chunk.flat.dtype:
            table.ingest(buffer, gradients)
        else:
            table.ingest_some(buffer, gradients, range(len(gradients)))

    def _adopt(self, state: ChunkGradient, arriving: list[tuple[int, Piece, torch.Tensor]]) -> None:
        for index, piece, source in arriving:
            state.live.add(index)
            if piece.numel:
                state.adopted[index] = source
            self._unsummed[index] = None

    def _copy(self, state: ChunkGradient, arriving: list[tuple[int, Piece, torch.Tensor]]) -> None:
        state.live.update(index for index, _, _ in arriving)
        filled = [one for one in arriving if one[1].numel]
        if not filled:
            return
        buffer, chunk = self.buffers.for_adding(state, wide=False), state.chunk
        for index, piece, _ in filled:
            if index in state.adopted:
                kernels.convert(buffer[chunk.part(piece)], state.adopted.pop(index))
        parts = [(buffer[chunk.part(piece)], source, piece.start) for _, piece, source in filled]
        for (index, _, _), squares in zip(filled, kernels.ingest_all(parts), strict=True):
            state.squares[index] = squares

    def add_reduced(self, chunk: Chunk, values: torch.Tensor, present: set[int]) -> None:
        """See `ChunkGradients`."""
        state = gradient_of(chunk)
        with self._room_for(chunk, wide=True):
            for info, piece in chunk.pieces:
                if info.index not in present:
                    continue
                accumulate = info.index in state.live
                state.live.add(info.index)
                buffer = self.buffers.for_adding(state, wide=True)
                addition = Addition.FIRST
                if accumulate:
                    addition = Addition.PART if self._narrow_sums else Addition.SUM
                part = chunk.part(piece)
                state.squares[info.index] = take_in(
                    buffer[part], values[part].to(buffer.device), piece.start, addition, info.flat.dtype
                )

    def leave_device(self, chunk: Chunk) -> None:
        """Send what of the chunk's gradient is still on the device."""
        if self._transit is not None:
            self._transit.leave(chunk)
        if self.sums_on_device is not None:
            self.sums_on_device.leave(chunk)

    def keep_off(self, chunk: Chunk, parameter_index: int) -> None:
        """The parameter's gradient is dropped: what is still on the device of it is not to come any more."""
        if self.sums_on_device is not None:
            self.sums_on_device.forget(chunk, parameter_index)
        if self._transit is not None:
            self._transit.leave(chunk)

    # ---- sums of squares -----------------------------------------------------------------------------------------

    def settle(self, live: Mapping[int, ParameterInfo]) -> None:
        """Wait until all that has come is in the chunks' buffers, or on its way there from sums on the device, and its squares
        are summed. `live`: what counts."""
        if self._transit is not None:
            self._transit.leave_all()
        if self.sums_on_device is not None:
            self.sums_on_device.see_what_was_late()
        for chunk in self._chunks:
            gradient_of(chunk).settle()
        self._reception.settled()
        self._sum_up(live)
        if self._squares_on_device is not None:
            self._squares_on_device.read()
        if self.sums_on_device is not None:
            with self.lock:
                self.sums_on_device.leave_all(self._chunks)

    def _sum_up(self, live: Mapping[int, ParameterInfo]) -> None:
        """Take the sums of squares of what was adopted, in one pass over it."""
        unsummed, self._unsummed = self._unsummed, {}
        pieces = [
            (gradient_of(chunk), index, piece.start)
            for index in unsummed
            if index in live
            for chunk, piece in live[index].pieces
            if piece.numel
        ]
        gradients = [(None, state.adopted[index], start) for state, index, start in pieces]
        for (state, index, _), squares in zip(pieces, kernels.ingest_all(gradients), strict=True):
            state.squares[index] = squares

    def squares_in(self, chunk: Chunk, live: Mapping[int, ParameterInfo]) -> list[torch.Tensor]:
        """The sums of squares of what is `live` in the chunk, block by block: float64. After `settle`."""
        known = gradient_of(chunk).squares
        if not known:
            return []
        on_device = len(known) == len(chunk.pieces) and not any(map(is_not, known.values(), repeat(None)))
        if on_device and self._squares_on_device is not None and chunk.indices <= live.keys():
            return [self._squares_on_device.values_of(chunk)]
        return [one for index in known if index in live and (one := self._squares_of_piece(chunk, index)) is not None]

    def _squares_of_piece(self, chunk: Chunk, parameter_index: int) -> torch.Tensor | None:
        known = gradient_of(chunk).squares
        squares = known.get(parameter_index)
        if squares is None and parameter_index in known:
            assert self._squares_on_device is not None
            return self._squares_on_device.values(parameter_index, chunk.index)
        return squares

    def squares_of(self, info: ParameterInfo) -> list[torch.Tensor]:
        """The parameter's sums of squares, block by block: float64. After `settle`."""
        found = (self._squares_of_piece(chunk, info.index) for chunk, _ in info.pieces)
        return [squares for squares in found if squares is not None]

    def forget(self, info: ParameterInfo) -> None:
        """Its gradient is dropped: there is nothing to be summed."""
        self._unsummed.pop(info.index, None)
