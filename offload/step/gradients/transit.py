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

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from enum import Enum
from operator import attrgetter
from typing import Protocol

import torch

from offload.device.accelerator import Accelerator
from offload.device.arithmetic import kernels
from offload.device.lane import HostLane
from offload.device.pending import Pending
from offload.layout import Piece, Slot
from offload.model.chunk import Chunk
from offload.planning.purposes import LANDING
from offload.step.gradients.squares_on_device import SquaresOnDevice
from offload.tiers.staging import StagingPool


class Addition(Enum):
    """What becomes of a gradient that comes. The same in every placement, and so are the bits."""

    FIRST = "stored: there is none of this parameter yet"
    PART = "added to what this backward brought before, in the parameter's dtype, as PyTorch adds it"
    SUM = "added to what an earlier backward brought, in fp32"


def take_in(
    target: torch.Tensor,
    values: torch.Tensor,
    start_index: int,
    addition: Addition,
    dtype: torch.dtype,
    squares: torch.Tensor | None = None,
    *,
    all_cores: bool = False,
) -> torch.Tensor:
    """`kernels.ingest_async` of a gradient of a parameter in `dtype` into its place in a buffer, which may be wider."""
    if addition is not Addition.PART or target.dtype == dtype:
        return kernels.ingest_async(target, values, start_index, addition is not Addition.FIRST, squares, all_cores=all_cores)
    total = torch.empty(target.shape, dtype=dtype, device=target.device)
    kernels.convert(total, target, all_cores=all_cores)
    found = kernels.ingest_async(total, values, start_index, True, squares, all_cores=all_cores)
    kernels.convert(target, total, all_cores=all_cores)
    return found


@dataclass(slots=True, eq=False)
class PackedPiece:
    """One piece in a device buffer, and what it is to what the host has of it."""

    piece: Piece
    addition: Addition

    @property
    def parameter_index(self) -> int:
        return self.piece.slot.parameter_index


@dataclass(slots=True, eq=False)
class _Packing:
    chunk: Chunk
    memory: torch.Tensor
    values: torch.Tensor
    """[chunk.numel] in the compute dtype, in `memory`."""
    pieces: dict[int, PackedPiece] = field(default_factory=dict)
    """By parameter index."""


_START_OF = attrgetter("piece.start")


class Receiver(Protocol):
    """The host's side. Each settles when the device values may be overwritten."""

    def receive_pieces(self, chunk: Chunk, pieces: list[PackedPiece], values: torch.Tensor) -> Pending:
        """Pieces of one chunk, from device values [chunk.numel]."""
        ...

    def receive_filled(self, chunk: Chunk, values: torch.Tensor) -> Pending:
        """The first gradients of all parameters of one chunk, from device values [chunk.numel]."""
        ...

    def receive_chunks(self, chunks: list[Chunk], slot: Slot, values: torch.Tensor, addition: Addition) -> Pending:
        """Chunks that lie side by side in one slot, from device values of all of them."""
        ...


class GradientTransit:
    """The device buffers. Everything runs in the thread that runs backward or drives the model."""

    def __init__(
        self,
        accelerator: Accelerator,
        receiver: Receiver,
        squares: SquaresOnDevice,
        *,
        shared_nbytes: tuple[int, int],
        whole_nbytes: int,
    ) -> None:
        """`shared_nbytes`: (count, bytes) of the buffers for single chunks; `whole_nbytes`: for chunks that leave together."""
        self._accelerator, self._receiver, self._squares = accelerator, receiver, squares
        count, nbytes = shared_nbytes
        self._memory = accelerator.memory(count * nbytes)
        self._free: deque[tuple[torch.Tensor, Pending | None]] = deque((one, None) for one in self._memory.view(count, nbytes))
        self._views: dict[tuple[int, int, torch.dtype], torch.Tensor] = {}
        """What `_values` gave."""
        self._open: dict[Chunk, _Packing] = {}
        self._ring, self._ring_nbytes = accelerator.memory(whole_nbytes), whole_nbytes
        self._cursor_nbytes = 0
        self._leaving: deque[tuple[int, int, Pending]] = deque()
        """(first byte, byte behind the last, copy) of what lies in the ring: of the lap before from the cursor on, then of this
        one up to it. So what the next bytes overlap is in front."""

    def arrive(self, pieces: Sequence[tuple[Chunk, Piece]], source: torch.Tensor, addition: Addition) -> None:
        """Take in a gradient: `source` [numel], and what of it lies in each chunk."""
        together: list[Chunk] = []
        for chunk, piece in pieces:
            is_whole = piece.start == chunk.start and piece.stop == chunk.stop
            # Two of what leaves at once must fit, so that one may arrive while the other leaves.
            if together:
                nbytes = (chunk.stop - together[0].start) * chunk.flat.layout.itemsize
                if not is_whole or 2 * nbytes > self._ring_nbytes:
                    self._arrive_together(together, piece.slot, source, addition)
                    together = []
            if is_whole and 2 * chunk.nbytes <= self._ring_nbytes:
                together.append(chunk)
            elif piece.numel:
                whole = piece.numel == piece.slot.numel
                self.pack(chunk, [(piece, source if whole else source[piece.in_parameter])], addition)
        if together:
            self._arrive_together(together, pieces[0][1].slot, source, addition)

    def _arrive_together(self, chunks: list[Chunk], slot: Slot, source: torch.Tensor, addition: Addition) -> None:
        flat, start, stop = chunks[0].flat, chunks[0].start, chunks[-1].stop
        nbytes = (stop - start) * flat.layout.itemsize
        low, memory = self._ring_part(nbytes)
        values = memory.view(flat.dtype)
        squares = self._squares.parts(slot.parameter_index, chunks[0].index, chunks[-1].index)
        kernels.ingest_async(values, source[start - slot.start : stop - slot.start], start, False, squares)
        copied = self._receiver.receive_chunks(chunks, slot, values, addition)
        self._leaving.append((low, low + nbytes, copied))

    def _ring_part(self, nbytes: int) -> tuple[int, torch.Tensor]:
        """The next bytes of the ring, and where they begin; compute waits until what was there has left."""
        leaving = self._leaving
        if self._cursor_nbytes + nbytes > self._ring_nbytes:
            while leaving and leaving[0][0] >= self._cursor_nbytes:
                self._accelerator.join(leaving.popleft()[2])
            self._cursor_nbytes = 0
        low, high = self._cursor_nbytes, self._cursor_nbytes + nbytes
        while leaving and leaving[0][0] < high and low < leaving[0][1]:
            self._accelerator.join(leaving.popleft()[2])
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
        positions = {info.index: position for position, (info, _) in enumerate(chunk.pieces)}
        which = [positions[piece.slot.parameter_index] for piece, _ in arriving]
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
        self._free.append((memory, self._receiver.receive_filled(chunk, values)))

    def leave(self, chunk: Chunk) -> None:
        """Send what is packed of the chunk to the host."""
        packing = self._open.pop(chunk, None)
        if packing is not None:
            pieces = sorted(packing.pieces.values(), key=_START_OF)
            copied = self._receiver.receive_pieces(chunk, pieces, packing.values)
            self._free.append((packing.memory, copied))

    def leave_all(self) -> None:
        """Send everything that is packed."""
        for packing in list(self._open.values()):
            self.leave(packing.chunk)

    def _values(self, memory: torch.Tensor, chunk: Chunk) -> torch.Tensor:
        """The chunk's part of one of the buffers, whose tensors are there for good: [chunk.numel]."""
        key = id(memory), chunk.nbytes, chunk.flat.dtype
        found = self._views.get(key)
        if found is None:
            found = self._views[key] = memory[: chunk.nbytes].view(chunk.flat.dtype)
        return found

    def _buffer(self) -> torch.Tensor:
        if not self._free:
            self.leave(next(iter(self._open.values())).chunk)
        memory, copied = self._free.popleft()
        if copied is not None:
            self._accelerator.join(copied)  # on the device: the host goes on
        return memory


def runs(chunk: Chunk, pieces: list[PackedPiece]) -> list[list[PackedPiece]]:
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


def joined(tensors: list[torch.Tensor]) -> list[tuple[int, int, torch.Tensor]]:
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


class Landing:
    """Host buffers through which gradients pass that a lane adds to what the host has, or casts."""

    def __init__(self, accelerator: Accelerator, pool: StagingPool, lane: HostLane) -> None:
        self._accelerator, self._pool, self._lane = accelerator, pool, lane
        buffers = pool.stats.consumers.get(LANDING)
        self._count = buffers.count if buffers is not None else 0
        self._jobs: deque[Pending] = deque()
        """Those that may have a buffer, the oldest first."""

    def wait_for_room(self) -> None:
        """Until a buffer is free, if there are any."""
        while self._count and len(self._jobs) >= self._count:
            self._jobs.popleft().wait()

    def land(self, values: torch.Tensor, add: Callable[[torch.Tensor], None]) -> tuple[Pending, Pending]:
        """Bring device values over and have the lane call `add` with them. Settle: when the values may be overwritten, and
        when `add` ran."""
        self.wait_for_room()
        landing = self._pool.lease(LANDING)
        landed = landing.tensor[: values.nbytes].view(values.dtype)
        copied = self._accelerator.copy_out(landed, values)

        def settle() -> None:
            copied.wait()
            add(landed)
            landing.release()

        job = self._lane.submit(settle)
        self._jobs.append(job)
        return copied, job

    def settled(self) -> None:
        """Everything that landed was added."""
        self._jobs.clear()
