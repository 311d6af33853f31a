"""Gradients between the backward that computes them and the update that consumes them.

Each gradient is copied, piece by piece, into the buffers of the chunks that hold its slot, and dropped. The sum of
squares of what is stored is taken in the same pass. From a device to the host it goes by `GradientTransit`, and what the
host does with it is done in a lane, so that backward waits for none of it. A chunk's buffer is in compute precision until
a second micro-batch adds to it; sums are kept in fp32 from then on. The parts that one backward brings of a gradient (through
reentrant checkpoints of what is used twice) are added as PyTorch adds them.

Where the device is the CPU and gradients stay in its memory nothing is copied at all: the tensor that autograd computed is
kept as it is until its update, or until a second micro-batch adds to it.

Where the buffers lie, and what leaves them for the store when they run out, is `GradientBuffers`' matter.

An update that may have to be undone (`offload.step.speculation`) does not consume what it reads: `hold` keeps it, until
`drop_held` drops it or `take_back` makes it an ordinary gradient again.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable

import torch

from offload.device import kernels
from offload.device.accelerator import Accelerator
from offload.device.lane import HostLane
from offload.device.pending import Pending, Settled
from offload.layout import ExtentAllocator, Piece, Slot
from offload.model.chunk import Chunk, ChunkGradient
from offload.model.flat import ParameterInfo
from offload.model.taken_gradient import TakenGradient
from offload.planning.budget import Tier
from offload.planning.purposes import SUMS
from offload.planning.route import Memory
from offload.step.chunk_stores import StoreFactory
from offload.step.gradient_buffers import GradientBuffers
from offload.step.gradient_transit import Addition, DeviceSums, GradientTransit, Landing, PackedPiece, joined, runs
from offload.tiers.staging import StagingPool
from offload.tiers.store import Store


def _gradient_of(chunk: Chunk) -> ChunkGradient:
    assert chunk.gradient is not None, "a chunk that is not trained has no gradient"
    return chunk.gradient


def _cut(ordered: torch.Tensor, piece: Piece) -> torch.Tensor:
    """What of a parameter's gradient, [numel], lies in the piece."""
    slot = piece.slot
    return ordered if piece.numel == slot.numel else ordered[piece.start - slot.start : piece.stop - slot.start]


def _take_in(
    target: torch.Tensor,
    values: torch.Tensor,
    start_index: int,
    addition: Addition,
    dtype: torch.dtype,
    sums: torch.Tensor | None = None,
) -> torch.Tensor:
    """`kernels.ingest_async` of a gradient of a parameter in `dtype` into its place in a buffer, which may be wider."""
    if addition is not Addition.PART or target.dtype == dtype:
        return kernels.ingest_async(target, values, start_index, addition is not Addition.FIRST, sums)
    total = torch.empty(target.shape, dtype=dtype, device=target.device)
    kernels.convert(total, target)
    found = kernels.ingest_async(total, values, start_index, True, sums)
    kernels.convert(target, total)
    return found


class Gradients:
    """See the module. `add` runs in whichever thread backward runs; `open` and `close` in the update's; both lock."""

    def __init__(
        self,
        chunks: Iterable[Chunk],
        make_store: StoreFactory,
        make_sums: StoreFactory,
        pool: StagingPool,
        accelerator: Accelerator,
        *,
        reduced: bool = False,
        transit_buffer_count: int = 0,
    ) -> None:
        """`make_store`, `make_sums`: of the gradients of one backward, and of the fp32 sums of several.

        `reduced`: what arrives are averages over ranks, fp32, through `add_reduced` alone.

        `transit_buffer_count`: chunks that may lie on the device on their way to the host; 0: nothing goes that way.
        """
        self._accelerator = accelerator
        self._lane: HostLane = accelerator.host_lane("gradients", waits_for_io=False)
        self._lock = accelerator.lock()
        self._chunks, self._reduced = tuple(chunks), reduced
        self._made_states(make_store)
        self._make_sums: StoreFactory | None = make_sums
        spilling_count = sum(chunk.route.gradients_in is None for chunk in self._chunks)
        self.spills = spilling_count > 0
        """Whether gradients may leave for a store when buffers run out."""
        self.brings = any(chunk.route.brings_gradients for chunk in self._chunks)
        """Whether updates copy gradients over from the device."""
        self._buffers = GradientBuffers(spilling_count, pool, accelerator, self._leave_device)
        self._live: dict[int, ParameterInfo] = {}
        self._unsummed: dict[int, None] = {}
        """Indices of parameters whose gradient was adopted, and its squares are not yet summed."""
        self._device_sums = DeviceSums(accelerator, self._chunks, pool) if SUMS in pool.stats.consumers else None
        self._landing = Landing(accelerator, pool, self._lane)
        self._transit = self._made_transit(transit_buffer_count) if transit_buffer_count else None

    def _leave_device(self, chunk: Chunk) -> None:
        """Send what of the chunk's gradient is still packed on the device."""
        if self._transit is not None:
            self._transit.leave(chunk)

    def _made_states(self, make_store: StoreFactory) -> None:
        narrow: dict[Tier, ExtentAllocator] = {}
        for chunk in self._chunks:
            numel, itemsize = chunk.numel, 4 if self._reduced else chunk.flat.layout.itemsize
            extent = narrow.setdefault(chunk.route.gradients, ExtentAllocator()).take(numel * itemsize)
            chunk.gradient = ChunkGradient(chunk, extent, narrower=itemsize != 4)
        stores = {tier: make_store(tier, allocator.extents) for tier, allocator in narrow.items()}
        for chunk in self._chunks:
            _gradient_of(chunk).store = stores[chunk.route.gradients]

    def _made_transit(self, buffer_count: int) -> GradientTransit:
        assert self._device_sums is not None
        leaving = [chunk for chunk in self._chunks if chunk.route.gradients_in is not Memory.DEVICE]
        nbytes = max(chunk.nbytes for chunk in leaving)
        shared = Counter(one.flat.layout.unit_index for one in leaving if len(one.pieces) > 1)
        # Chunks that leave together are received together, which buffers that may have to be spilled in between cannot do.
        single_count = buffer_count if self.spills else min(buffer_count, 2 * max(shared.values(), default=0) + 2)
        return GradientTransit(
            self._accelerator,
            self,
            self._device_sums,
            shared_nbytes=(single_count, nbytes),
            whole_nbytes=(buffer_count - single_count) * nbytes,
        )

    # ---- arrival -------------------------------------------------------------------------------------------------

    def add(self, info: ParameterInfo, gradient: torch.Tensor, *, owned: bool, is_part: bool = False) -> None:
        """Take over `gradient` of parameter `info`; add it to what is there (`is_live` was asked before).

        `owned`: nobody else will write to the tensor, so that it may be kept. `is_part`: what is there is of this backward.
        """
        addition = Addition.FIRST
        if info.index in self._live:
            addition = Addition.PART if is_part else Addition.SUM
        ordered = info.in_memory_order(gradient)
        flat = info.flat
        slot = flat.slot_of(info)
        self._live[info.index] = info
        if self._transit is not None and flat.route.gradients_in is not Memory.DEVICE:
            chunks = flat.chunks_of(info)
            with self._lock:
                for chunk in chunks:
                    _gradient_of(chunk).live.add(info.index)
                    if slot.numel:
                        _gradient_of(chunk).sums[info.index] = None
                self._transit.arrive(chunks, slot, ordered, addition)
            return
        for chunk, piece in info.pieces:
            state = _gradient_of(chunk)
            source = _cut(ordered, piece)
            with self._lock:
                state.live.add(info.index)
                if piece.numel == 0:
                    continue
                if owned and addition is Addition.FIRST and self._adopts(chunk):
                    state.adopted[info.index] = source
                    state.sums[info.index] = kernels.ingest_async(None, source, piece.start, False)
                    continue
                buffer = self._buffer_for_adding(state, wide=addition is Addition.SUM)
                target = buffer[piece.start - chunk.start : piece.stop - chunk.start]
                if info.index in state.adopted:
                    self._unsummed.pop(info.index, None)
                    kernels.convert(target, state.adopted.pop(info.index))
                on_device = self._device_sums.part(info.index, chunk.index) if self._device_sums is not None else None
                summed = _take_in(target, source, piece.start, addition, flat.dtype, on_device)
                state.sums[info.index] = summed if on_device is None else None

    def adopts(self, info: ParameterInfo) -> bool:
        """Whether autograd's own tensor is kept as the parameter's first gradient of a step."""
        return all(self._adopts(chunk) for chunk, _ in info.pieces)

    @property
    def are_taken_together(self) -> bool:
        """Whether `take` may be called: gradients are computed where they are summed."""
        return not self._reduced and self._transit is None and self._device_sums is None

    def take(self, found: Iterable[tuple[ParameterInfo, torch.Tensor]]) -> None:
        """`add` of several parameters' gradients, in one pass: the first of a step, which nobody else will write to. What was
        there of these parameters before is dropped."""
        moves: dict[Chunk, list[tuple[int, Piece, torch.Tensor]]] = {}
        with self._lock:
            for info, gradient in found:
                if info.index in self._live:
                    self.drop(info)
                ordered = info.in_memory_order(gradient)
                self._live[info.index] = info
                for chunk, piece in info.pieces:
                    moves.setdefault(chunk, []).append((info.index, piece, _cut(ordered, piece)))
            for chunk, arriving in moves.items():
                if self._adopts(chunk):
                    self._adopt(_gradient_of(chunk), arriving)
                else:
                    self._copy(_gradient_of(chunk), arriving)

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
        buffer, start = self._buffer_for_adding(state, wide=False), state.chunk.start
        for index, piece, _ in filled:
            if index in state.adopted:
                kernels.convert(buffer[piece.start - start : piece.stop - start], state.adopted.pop(index))
        parts = [(buffer[piece.start - start : piece.stop - start], source, piece.start) for _, piece, source in filled]
        for (index, _, _), sums in zip(filled, kernels.ingest_all(parts), strict=True):
            state.sums[index] = sums

    def _sum_up(self) -> None:
        """Take the sums of squares of what was adopted, in one pass over it."""
        unsummed, self._unsummed = self._unsummed, {}
        pieces = [
            (_gradient_of(chunk), index, piece.start)
            for index in unsummed
            if index in self._live
            for chunk, piece in self._live[index].pieces
            if piece.numel
        ]
        gradients = [(None, state.adopted[index], start) for state, index, start in pieces]
        for (state, index, _), sums in zip(pieces, kernels.ingest_all(gradients), strict=True):
            state.sums[index] = sums

    def _adopts(self, chunk: Chunk) -> bool:
        """Whether autograd's own tensors are kept: they lie where gradients do."""
        return not self._reduced and chunk.route.model_in is Memory.HOST and chunk.route.gradients_in is Memory.HOST

    def receive_pieces(self, chunk: Chunk, pieces: list[PackedPiece], values: torch.Tensor) -> Pending:
        """See `Receiver`."""
        state = _gradient_of(chunk)
        copied: Pending = Settled()
        with self._lock:
            additions = {packed.addition for packed in pieces}
            buffer = self._buffer_for_adding(state, wide=Addition.SUM in additions)
            for run in runs(chunk, pieces):
                low, high = run[0].piece.start - chunk.start, run[-1].piece.stop - chunk.start
                if additions != {Addition.FIRST} or buffer.dtype != values.dtype:
                    copied = self._land(state, run, buffer[low:high], values[low:high])
                else:
                    copied = self._accelerator.copy_out(buffer[low:high], values[low:high])
                    state.jobs.append(copied)
        return copied  # copies of one stream settle in order

    def receive_chunks(self, chunks: list[Chunk], slot: Slot, values: torch.Tensor, addition: Addition) -> Pending:
        """See `Receiver`."""
        copied: Pending = Settled()
        states = [_gradient_of(chunk) for chunk in chunks]
        with self._lock:
            buffers = [self._buffer_for_adding(state, wide=addition is Addition.SUM) for state in states]
            if addition is Addition.FIRST and all(buffer.dtype == values.dtype for buffer in buffers):
                for first, last, target in joined(buffers):
                    low, high = (chunks[index] for index in (first, last))
                    start = chunks[0].start
                    copied = self._accelerator.copy_out(target, values[low.start - start : high.stop - start])
                    for state in states[first : last + 1]:
                        state.jobs.append(copied)
                return copied
            for state, buffer in zip(states, buffers, strict=True):
                chunk = state.chunk
                part = values[chunk.start - chunks[0].start : chunk.stop - chunks[0].start]
                copied = self._land(state, [PackedPiece(Piece(slot, chunk.start, chunk.stop), addition)], buffer, part)
        return copied

    def _land(self, state: ChunkGradient, run: list[PackedPiece], target: torch.Tensor, values: torch.Tensor) -> Pending:
        start = run[0].piece.start

        def add(landed: torch.Tensor) -> None:
            for packed in run:
                part = slice(packed.piece.start - start, packed.piece.stop - start)
                start_index, addition = packed.piece.start, packed.addition
                sums = _take_in(target[part], landed[part], start_index, addition, values.dtype)
                state.sums[packed.parameter_index] = sums

        copied, added = self._landing.land(values, add)
        state.jobs.append(added)
        return copied

    def add_reduced(self, chunk: Chunk, values: torch.Tensor, present: set[int]) -> None:
        """Take in averages over the ranks: fp32 [chunk.numel], host. `present`: parameters that have any.

        Adds to what an earlier backward left. Runs in the attendance's thread; `expect` then makes the gradient count.
        """
        state = _gradient_of(chunk)
        with self._lock:
            for info, piece in chunk.pieces:
                if info.index not in present:
                    continue
                accumulate = info.index in state.live
                state.live.add(info.index)
                buffer = self._buffer_for_adding(state, wide=True)
                low, high = piece.start - chunk.start, piece.stop - chunk.start
                source = values[low:high].to(buffer.device)
                state.sums[info.index] = kernels.ingest_async(buffer[low:high], source, piece.start, accumulate)

    def take_room_for_sums(self) -> None:
        """Before the first sum of several micro-batches: make the store that fp32 sums lie in. Idempotent."""
        make_sums, self._make_sums = self._make_sums, None
        if make_sums is None:
            return
        wide: dict[Tier, ExtentAllocator] = {}
        states = [_gradient_of(chunk) for chunk in self._chunks if _gradient_of(chunk).narrower]
        for state in states:
            state.wide = wide.setdefault(state.chunk.route.gradients, ExtentAllocator()).take(state.chunk.numel * 4)
        stores: dict[Tier, Store] = {}
        try:
            for tier, allocator in wide.items():
                stores[tier] = make_sums(tier, allocator.extents)
        except BaseException:
            self._make_sums = make_sums
            for store in stores.values():
                store.close()
            raise
        for state in states:
            state.wide_store = stores[state.chunk.route.gradients]

    def expect(self, info: ParameterInfo) -> None:
        """A gradient of `info` counts for the coming step, wherever it was computed and whether this rank's shard has any."""
        self._live[info.index] = info

    def is_live(self, info: ParameterInfo) -> bool:
        """Whether a gradient taken over earlier still counts: its token is still in `p.grad`."""
        if info.index not in self._live:
            return False
        if isinstance(info.parameter.grad, TakenGradient):
            return True
        self.drop(info)
        return False

    def live_parameters(self) -> list[ParameterInfo]:
        """The parameters whose gradients count for the coming step, in model order."""
        return [info for _, info in sorted(self._live.items()) if self.is_live(info)]

    def is_complete(self, chunk: Chunk) -> bool:
        """Whether every parameter of the chunk has a gradient."""
        return _gradient_of(chunk).is_complete

    def drop(self, info: ParameterInfo) -> None:
        """Forget the gradient of one parameter, unless an update has it; buffers that hold nothing else are given back."""
        if self._live.pop(info.index, None) is None:
            return
        self._unsummed.pop(info.index, None)
        with self._lock:
            for chunk in info.flat.chunks_of(info):
                state = _gradient_of(chunk)
                if info.index in state.live:
                    self._leave_device(chunk)
                    state.settle()  # what is still on its way must not land on what comes next
                    state.live.discard(info.index)
                    state.adopted.pop(info.index, None)
                    if not state.live:
                        self._buffers.give_back(state)
                state.sums.pop(info.index, None)

    # ---- norm ----------------------------------------------------------------------------------------------------

    def settle(self) -> None:
        """Wait until every gradient taken over has arrived in its buffer."""
        if self._transit is not None:
            self._transit.leave_all()
        for chunk in self._chunks:
            _gradient_of(chunk).settle()
        self._landing.settled()
        self._sum_up()
        if self._device_sums is not None:
            self._device_sums.read()

    def squares(self) -> list[torch.Tensor]:
        """Sums of squares, block by block, of all live gradients: float64. Call after `settle`."""
        return [sums for info in self._live.values() for sums in self._sums_of(info)]

    def non_finite_parameters(self) -> list[str]:
        """Names of the parameters whose gradient has an inf or NaN."""
        live = sorted(self._live.items())
        return [info.fqn for _, info in live if kernels.exact_sum(self._sums_of(info)) is None]

    def _sums_of(self, info: ParameterInfo) -> list[torch.Tensor]:
        found = []
        for chunk in info.flat.chunks_of(info):
            known = _gradient_of(chunk).sums
            sums = known.get(info.index)
            if sums is None and info.index in known:
                assert self._device_sums is not None
                sums = self._device_sums.values(info.index, chunk.index)
            if sums is not None:
                found.append(sums)
        return found

    # ---- consumption ---------------------------------------------------------------------------------------------

    def consume(self, info: ParameterInfo) -> None:
        """The gradient of `info` belongs to an update now: a later one starts anew."""
        self._live.pop(info.index, None)
        for chunk in info.flat.chunks_of(info):
            _gradient_of(chunk).sums.pop(info.index, None)

    def prefetch(self, chunk: Chunk) -> bool:
        """Start reading a spilled chunk back, if a buffer is free for it. False if none is.

        The last free buffer is left for `open`, where it finds one for a chunk that was not prefetched.
        """
        with self._lock:
            return self._buffers.prefetch(_gradient_of(chunk))

    def open(self, chunk: Chunk, pieces: Iterable[Piece]) -> list[torch.Tensor]:
        """The gradients of some pieces of the chunk, [piece.numel] each, where the update's kernel can address them, until
        `release`."""
        state = _gradient_of(chunk)
        state.settle()
        with self._lock:
            state.opened = True
            self._buffers.bring(state)
            transfer, state.transfer = state.transfer, None
        if transfer is not None:
            transfer.wait()
        return [self._piece(state, piece) for piece in pieces]

    def open_all(self, chunks: Iterable[Chunk]) -> list[torch.Tensor]:
        """`open` of all pieces of several chunks, which lie in host memory."""
        found = []
        with self._lock:
            for chunk in chunks:
                state = _gradient_of(chunk)
                state.settle()
                state.opened = True
                adopted = state.adopted
                found += [
                    adopted[info.index] if info.index in adopted else self._piece(state, piece) for info, piece in chunk.pieces
                ]
        return found

    def release_all(self, chunks: Iterable[Chunk]) -> None:
        """`release` of all of them."""
        with self._lock:
            for chunk in chunks:
                self.release(chunk)

    def read(self, chunk: Chunk, parameter_index: int, piece: Piece) -> torch.Tensor | None:
        """One piece as it lies in its buffer, which may be read back for it; None where there is none. After `settle`."""
        state = _gradient_of(chunk)
        if parameter_index not in state.live:
            return None
        (found,) = self.open(chunk, [piece])
        found = found.clone()
        with self._lock:
            state.opened = False
            self._buffers.put_back(state)
        return found

    def _piece(self, state: ChunkGradient, piece: Piece) -> torch.Tensor:
        adopted = state.adopted.get(piece.slot.parameter_index)
        if adopted is not None:
            return adopted
        assert state.buffer is not None, "an update was asked for on a chunk that has no gradient"
        start = state.chunk.start
        return state.buffer[piece.start - start : piece.stop - start]

    def release(self, chunk: Chunk) -> None:
        """The update has read the chunk's gradient: it is consumed or, where it is held, kept."""
        state = _gradient_of(chunk)
        with self._lock:
            state.opened = False
            if state.held:
                state.applied = True
                self._buffers.put_back(state)
            else:
                self._forget(state)

    def _forget(self, state: ChunkGradient) -> None:
        state.live.clear()
        state.adopted.clear()
        self._buffers.give_back(state)

    # ---- updates that may be undone ------------------------------------------------------------------------------

    def hold(self, chunks: Iterable[Chunk]) -> None:
        """An update that may be undone will read these chunks, which are complete: `release` is to keep them."""
        for chunk in chunks:
            with self._lock:
                self._leave_device(chunk)
                _gradient_of(chunk).held = True

    def drop_held(self, chunks: Iterable[Chunk]) -> None:
        """Those updates stay: drop what they have read. What they are yet to read they consume."""
        for chunk in chunks:
            state = _gradient_of(chunk)
            with self._lock:
                applied, state.held, state.applied = state.applied, False, False
                if applied:
                    self._forget(state)

    def take_back(self, chunks: Iterable[Chunk]) -> None:
        """Those updates were undone, or will never run: what was held counts as before."""
        for chunk in chunks:
            state = _gradient_of(chunk)
            with self._lock:
                state.held = state.applied = False
                self._buffers.put_back(state)

    def close(self) -> None:
        """Stop the lane. The store is closed by whoever made it."""
        self._lane.close()
        if self._device_sums is not None:
            self._device_sums.close()

    # ---- buffers (under the lock) --------------------------------------------------------------------------------

    def _buffer_for_adding(self, state: ChunkGradient, *, wide: bool) -> torch.Tensor:
        dtype = torch.float32 if wide else state.chunk.flat.dtype
        buffer = self._buffers.for_adding(state, dtype)
        if dtype == torch.float32 and buffer.dtype != torch.float32:
            self._widen(state)
        assert state.buffer is not None
        return state.buffer

    def _widen(self, state: ChunkGradient) -> None:
        narrow, narrow_lease, arriving = state.buffer, state.lease, state.jobs
        assert narrow is not None
        wide = self._buffers.take(state, torch.float32)

        def widen() -> None:
            for job in arriving:
                job.wait()
            kernels.convert(wide, narrow)

        if self._transit is None or state.chunk.route.gradients_in is Memory.DEVICE:
            widen()
            state.jobs = []
        else:
            state.jobs = [self._lane.submit(widen)]
        if narrow_lease is not None:
            narrow_lease.release(after=state.jobs[0] if state.jobs else None)
