"""Gradients between the backward that computes them and the update that consumes them.

Each gradient is copied, piece by piece, into the buffers of the chunks that hold its slot, and dropped. The sum of
squares of what is stored is taken in the same pass. From a device to the host it goes by `GradientTransit`, and what the
host does with it is done in a lane, so that backward waits for none of it. A chunk's buffer is in compute precision until
a second micro-batch adds to it; sums are kept in fp32 from then on.

Where the device is the CPU and gradients stay in its memory nothing is copied at all: the tensor that autograd computed is
kept as it is until its update, or until a second micro-batch adds to it.

Where the buffers lie is the store's matter: where it offers a view, a chunk's buffer is that view for good; where it
does not (NVMe), buffers are leased, and when the leases run out the chunk whose gradient arrived longest ago is written
to the store (it belongs to the last layers, whose update comes last) and read back for its update.
"""

from __future__ import annotations

import math
import threading
from collections import Counter
from collections.abc import Iterable, Iterator

import torch

from offload.device import kernels
from offload.device.accelerator import Accelerator
from offload.device.lane import HostLane
from offload.device.pending import Pending, Settled
from offload.layout import Extent, ExtentAllocator, Piece, Slot
from offload.runtime.chunk_gradient import ACCUMULATED, ChunkGradient
from offload.runtime.flats import ChunkOf, Flat, ParameterInfo
from offload.runtime.gradient_transit import SUMS, DeviceSums, GradientTransit, Landing, PackedPiece, joined, runs
from offload.runtime.guard import TakenGradient
from offload.runtime.places import StoreFactory
from offload.schedule.budget import SPARE_BUFFERS
from offload.tiers.io import Priority
from offload.tiers.staging import Lease, StagingPool
from offload.tiers.store import Store

RETAINED = "gradients"
RELOADED = "gradients read back"


class Gradients:
    """See the module. `add` runs in whichever thread backward runs; `open` and `close` in the update's; both lock."""

    def __init__(
        self,
        chunks: Iterable[ChunkOf],
        make_store: StoreFactory,
        pool: StagingPool,
        accelerator: Accelerator,
        *,
        reduced: bool = False,
        transit_buffer_count: int = 0,
    ) -> None:
        """`reduced`: what arrives are averages over ranks, fp32, through `add_reduced` alone.

        `transit_buffer_count`: chunks that may lie on the device on their way to the host; 0: nothing goes that way.
        """
        self._pool = pool
        self._accelerator = accelerator
        self._lane: HostLane = accelerator.host_lane("gradients", waits_for_io=False)
        self._lock = threading.RLock()
        narrow, wide = ExtentAllocator(), ExtentAllocator()
        self._states: dict[tuple[int, int], ChunkGradient] = {}
        for chunk_of in chunks:
            numel, itemsize = chunk_of.chunk.numel, 4 if reduced else chunk_of.flat.layout.itemsize
            widened = wide.take(numel * 4) if itemsize != 4 else None
            self._states[chunk_of.key] = ChunkGradient(chunk_of, narrow.take(numel * itemsize), widened)
        self._store: Store = make_store("gradients", narrow.extents)
        self._wide_store = make_store(ACCUMULATED, wide.extents) if wide.extents else self._store
        self.spills = any(self._store.view(extent) is None for extent in narrow.extents[:1])
        """Whether gradients may leave for the store when buffers run out."""
        self._keeps_tensors = not reduced and accelerator.unified and not self.spills
        views = [self._store.view(extent) for extent in narrow.extents[:1]]
        self.on_device = any(view is not None and view.device.type != "cpu" for view in views)
        """Whether they stay in the memory of a GPU."""
        buffers = pool.stats.consumers.get(RETAINED)
        has_one_for_each = buffers is None or buffers.count >= len(self._states)
        self._spare_count = 0 if has_one_for_each else SPARE_BUFFERS
        self._held: dict[tuple[int, int], None] = {}
        self._sums: dict[int, dict[int, torch.Tensor | None]] = {}
        """By parameter and chunk index; None: on the device."""
        self._live: dict[int, ParameterInfo] = {}
        chunk_ofs = [state.chunk_of for state in self._states.values()]
        self._device_sums = DeviceSums(accelerator, chunk_ofs, pool) if SUMS in pool.stats.consumers else None
        self._landing = Landing(accelerator, pool, self._lane)
        self._transit = self._made_transit(chunk_ofs, transit_buffer_count) if transit_buffer_count else None

    def _made_transit(self, chunk_ofs: list[ChunkOf], buffer_count: int) -> GradientTransit:
        assert self._device_sums is not None
        nbytes = max(chunk_of.chunk.numel * chunk_of.flat.layout.itemsize for chunk_of in chunk_ofs)
        shared = Counter(one.flat.layout.unit_index for one in chunk_ofs if len(one.pieces()) > 1)
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

    def add(self, info: ParameterInfo, flat: Flat, gradient: torch.Tensor, *, owned: bool) -> None:
        """Take over `gradient` of parameter `info`; add it to what is there (`is_live` was asked before).

        `owned`: nobody else will write to the tensor, so that it may be kept.
        """
        accumulate = info.index in self._live
        ordered = info.in_memory_order(gradient)
        slot = flat.layout.slot_of(info.index)
        self._live[info.index] = info
        sums = self._sums.setdefault(info.index, {})
        if self._transit is not None:
            chunks = [ChunkOf(flat, chunk) for chunk in flat.layout.chunks_of(slot)]
            with self._lock:
                for chunk_of in chunks:
                    self._states[chunk_of.key].live.add(info.index)
                    if slot.numel:
                        sums[chunk_of.chunk.index] = None
                self._transit.arrive(chunks, slot, ordered, accumulate=accumulate)
            return
        for chunk in flat.layout.chunks_of(slot):
            state = self._states[ChunkOf(flat, chunk).key]
            piece = Piece(slot, max(slot.start, chunk.start), min(slot.stop, chunk.stop))
            source = ordered[piece.start - slot.start : piece.stop - slot.start]
            with self._lock:
                state.live.add(info.index)
                if piece.numel == 0:
                    continue
                if owned and self._keeps_tensors and not accumulate:
                    state.kept[info.index] = source
                    sums[chunk.index] = kernels.ingest_async(None, source, piece.start, False)
                    continue
                buffer = self._buffer_for_adding(state, wide=accumulate)
                target = buffer[piece.start - chunk.start : piece.stop - chunk.start]
                if info.index in state.kept:
                    kernels.convert(target, state.kept.pop(info.index))
                on_device = self._device_sums.part(info.index, chunk.index) if self._device_sums is not None else None
                summed = kernels.ingest_async(target, source, piece.start, accumulate, on_device)
                sums[chunk.index] = summed if on_device is None else None

    def receive_pieces(self, chunk_of: ChunkOf, pieces: list[PackedPiece], values: torch.Tensor) -> Pending:
        """See `Receiver`."""
        state = self._states[chunk_of.key]
        copied: Pending = Settled()
        with self._lock:
            accumulate = any(packed.accumulate for packed in pieces)
            buffer = self._buffer_for_adding(state, wide=accumulate)
            for run in runs(chunk_of, pieces):
                low, high = run[0].piece.start - chunk_of.chunk.start, run[-1].piece.stop - chunk_of.chunk.start
                if accumulate or buffer.dtype != values.dtype:
                    copied = self._land(state, run, buffer[low:high], values[low:high])
                else:
                    copied = self._accelerator.copy_out(buffer[low:high], values[low:high])
                    state.jobs.append(copied)
        return copied  # copies of one stream settle in order

    def receive_chunks(self, chunks: list[ChunkOf], slot: Slot, values: torch.Tensor, *, accumulate: bool) -> Pending:
        """See `Receiver`."""
        copied: Pending = Settled()
        states = [self._states[chunk_of.key] for chunk_of in chunks]
        with self._lock:
            buffers = [self._buffer_for_adding(state, wide=accumulate) for state in states]
            if not accumulate and all(buffer.dtype == values.dtype for buffer in buffers):
                for first, last, target in joined(buffers):
                    low, high = (chunks[index].chunk for index in (first, last))
                    start = chunks[0].chunk.start
                    copied = self._accelerator.copy_out(target, values[low.start - start : high.stop - start])
                    for state in states[first : last + 1]:
                        state.jobs.append(copied)
                return copied
            for state, buffer in zip(states, buffers, strict=True):
                chunk = state.chunk_of.chunk
                part = values[chunk.start - chunks[0].chunk.start : chunk.stop - chunks[0].chunk.start]
                copied = self._land(state, [PackedPiece(Piece(slot, chunk.start, chunk.stop), accumulate)], buffer, part)
        return copied

    def _land(self, state: ChunkGradient, run: list[PackedPiece], target: torch.Tensor, values: torch.Tensor) -> Pending:
        chunk_index, start = state.chunk_of.chunk.index, run[0].piece.start
        sums = [self._sums[packed.parameter_index] for packed in run]

        def add(landed: torch.Tensor) -> None:
            for packed, found in zip(run, sums, strict=True):
                part = slice(packed.piece.start - start, packed.piece.stop - start)
                found[chunk_index] = kernels.ingest_async(target[part], landed[part], packed.piece.start, packed.accumulate)

        copied, added = self._landing.land(values, add)
        state.jobs.append(added)
        return copied

    def add_reduced(self, chunk_of: ChunkOf, values: torch.Tensor, present: set[int]) -> None:
        """Take in averages over the ranks: fp32 [chunk.numel], host. `present`: parameters that have any.

        Adds to what an earlier backward left. Runs in the rendezvous' thread; `expect` then makes the gradient count.
        """
        chunk, state = chunk_of.chunk, self._states[chunk_of.key]
        with self._lock:
            for info, piece in chunk_of.pieces():
                if info.index not in present:
                    continue
                accumulate = info.index in state.live
                state.live.add(info.index)
                buffer = self._buffer_for_adding(state, wide=True)
                low, high = piece.start - chunk.start, piece.stop - chunk.start
                source = values[low:high].to(buffer.device)
                sums = self._sums.setdefault(info.index, {})
                sums[chunk.index] = kernels.ingest_async(buffer[low:high], source, piece.start, accumulate)

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

    def is_complete(self, chunk_of: ChunkOf) -> bool:
        """Whether every parameter of the chunk has a gradient."""
        state = self._states[chunk_of.key]
        return len(state.live) == state.trainable_count

    def drop(self, info: ParameterInfo) -> None:
        """Forget the gradient of one parameter, unless an update has it; buffers that hold nothing else are given back."""
        if self._live.pop(info.index, None) is None:
            return
        with self._lock:
            for state in self._states.values():
                if info.index in state.live:
                    if self._transit is not None:
                        self._transit.leave(state.chunk_of)
                    state.live.discard(info.index)
                    state.kept.pop(info.index, None)
                    if not state.live:
                        self._give_back(state)
        self._sums.pop(info.index, None)

    # ---- norm ----------------------------------------------------------------------------------------------------

    def settle(self) -> None:
        """Wait until every gradient taken over has arrived in its buffer."""
        if self._transit is not None:
            self._transit.leave_all()
        for state in self._states.values():
            jobs, state.jobs = state.jobs, []
            for job in jobs:
                job.wait()
        self._landing.settled()
        if self._device_sums is not None:
            self._device_sums.read()

    def squares(self) -> list[float]:
        """Sums of squares, block by block, of all live gradients. Call after `settle`."""
        return self.squares_of(self._live.values())

    def squares_of(self, parameters: Iterable[ParameterInfo]) -> list[float]:
        """The same of some of the live gradients."""
        return [partial for info in parameters for partial in self._sums_of(info.index)]

    def non_finite_parameters(self) -> list[str]:
        """Names of the parameters whose gradient has an inf or NaN."""
        live = sorted(self._live.items())
        return [info.fqn for index, info in live if not all(map(math.isfinite, self._sums_of(index)))]

    def _sums_of(self, parameter_index: int) -> Iterator[float]:
        for chunk_index, sums in self._sums.get(parameter_index, {}).items():
            if sums is not None:
                yield from sums.tolist()
            else:
                assert self._device_sums is not None
                yield from self._device_sums.values(parameter_index, chunk_index)

    # ---- consumption ---------------------------------------------------------------------------------------------

    def consume(self, info: ParameterInfo) -> None:
        """The gradient of `info` belongs to an update now: a later one starts anew."""
        self._live.pop(info.index, None)
        self._sums.pop(info.index, None)

    def prefetch(self, chunk_of: ChunkOf) -> bool:
        """Start reading a spilled chunk back, if a buffer is free for it. False if none is.

        The last free buffer is left for `open`, where it finds one for a chunk that was not prefetched.
        """
        state = self._states[chunk_of.key]
        with self._lock:
            if state.spilled is None or state.buffer is not None:
                return True
            lease = self._pool.try_lease(RELOADED) if self._pool.free_count(RELOADED) > 1 else None
            if lease is None:
                return False
            self._read_back(state, lease)
        return True

    def open(self, chunk_of: ChunkOf, pieces: Iterable[Piece]) -> list[torch.Tensor]:
        """The gradients of some pieces of the chunk, [piece.numel] each, where the update's kernel can address them."""
        state = self._states[chunk_of.key]
        for job in state.jobs:
            job.wait()
        state.jobs = []
        with self._lock:
            if state.buffer is None and not state.kept:
                self._read_back(state, self._pool.lease(RELOADED))
            transfer, state.transfer = state.transfer, None
        if transfer is not None:
            transfer.wait()
        return [self._piece(state, piece) for piece in pieces]

    def _piece(self, state: ChunkGradient, piece: Piece) -> torch.Tensor:
        kept = state.kept.get(piece.slot.parameter_index)
        if kept is not None:
            return kept
        assert state.buffer is not None, "an update was asked for on a chunk that has no gradient"
        start = state.chunk_of.chunk.start
        return state.buffer[piece.start - start : piece.stop - start]

    def release(self, chunk_of: ChunkOf) -> None:
        """The update consumed the chunk's gradient."""
        with self._lock:
            state = self._states[chunk_of.key]
            state.live.clear()
            state.kept.clear()
            self._give_back(state)

    def close(self) -> None:
        """Stop the lane. The store is closed by whoever made it."""
        self._lane.close()
        if self._device_sums is not None:
            self._device_sums.close()

    # ---- buffers (under the lock) --------------------------------------------------------------------------------

    def _place(self, state: ChunkGradient, dtype: torch.dtype) -> tuple[Store, Extent]:
        if state.wide is None or dtype != torch.float32:
            return self._store, state.narrow
        return self._wide_store, state.wide

    def _new_buffer(self, state: ChunkGradient, dtype: torch.dtype) -> torch.Tensor:
        numel = state.chunk_of.chunk.numel
        store, extent = self._place(state, dtype)
        view = store.view(extent)
        if view is None:
            state.lease = self._retaining_lease(state)
            view = state.lease.tensor
        self._held[state.chunk_of.key] = None
        return view[: numel * dtype.itemsize].view(dtype)

    def _buffer_for_adding(self, state: ChunkGradient, *, wide: bool) -> torch.Tensor:
        dtype = torch.float32 if wide else state.chunk_of.flat.dtype
        if state.buffer is None and state.spilled is not None:
            self._read_back(state, self._retaining_lease(state))
        if state.transfer is not None:
            transfer, state.transfer = state.transfer, None
            transfer.wait()
        if state.buffer is None:
            state.buffer = self._new_buffer(state, dtype)
        elif dtype == torch.float32 and state.buffer.dtype != torch.float32:
            self._widen(state)
        self._held[state.chunk_of.key] = self._held.pop(state.chunk_of.key, None)
        return state.buffer

    def _retaining_lease(self, state: ChunkGradient) -> Lease:
        lease = self._pool.try_lease(RETAINED)
        if lease is None and not self._pool.free_count(RETAINED):
            self._spill_oldest(besides=state)
        lease = lease or self._pool.lease(RETAINED)
        # Spill before the buffers run out, so that the next gradient need not wait for a write.
        while self._pool.free_count(RETAINED) < self._spare_count and (coming := self._complete_chunk(besides=state)):
            self._spill(coming)
        return lease

    def _complete_chunk(self, besides: ChunkGradient) -> ChunkGradient | None:
        """The chunk that has all its gradients for the longest time and lies in a leased buffer."""
        for key in self._held:
            state = self._states[key]
            if state is not besides and state.lease is not None and len(state.live) == state.trainable_count:
                return state
        return None

    def _widen(self, state: ChunkGradient) -> None:
        narrow, narrow_lease, arriving = state.buffer, state.lease, state.jobs
        assert narrow is not None
        state.lease = None
        wide = state.buffer = self._new_buffer(state, torch.float32)

        def widen() -> None:
            for job in arriving:
                job.wait()
            kernels.convert(wide, narrow)

        if self._transit is None:
            widen()
            state.jobs = []
        else:
            state.jobs = [self._lane.submit(widen)]
        if narrow_lease is not None:
            narrow_lease.release(after=state.jobs[0] if state.jobs else None)

    def _spill_oldest(self, besides: ChunkGradient) -> None:
        for key in self._held:
            state = self._states[key]
            if state is not besides and state.lease is not None:
                break
        else:
            raise AssertionError("no gradient buffer can be spilled")
        self._spill(state)

    def _spill(self, state: ChunkGradient) -> None:
        if self._transit is not None:
            self._transit.leave(state.chunk_of)
        for job in state.jobs:
            job.wait()
        state.jobs = []
        assert state.buffer is not None and state.lease is not None
        if state.transfer is not None:
            state.transfer.wait()
        store, extent = self._place(state, state.buffer.dtype)
        state.transfer = store.write(extent, state.lease.tensor[: extent.nbytes])
        state.lease.release(after=state.transfer)
        state.spilled, state.buffer, state.lease = state.buffer.dtype, None, None
        del self._held[state.chunk_of.key]

    def _read_back(self, state: ChunkGradient, lease: Lease) -> None:
        assert state.spilled is not None, "a chunk without gradient was asked for"
        if state.transfer is not None:
            state.transfer.wait()
        store, extent = self._place(state, state.spilled)
        state.transfer = store.read(extent, lease.tensor[: extent.nbytes], priority=Priority.STATE)
        state.lease = lease
        state.buffer = lease.tensor[: state.chunk_of.chunk.numel * state.spilled.itemsize].view(state.spilled)
        state.spilled = None

    def _give_back(self, state: ChunkGradient) -> None:
        for job in state.jobs:
            job.wait()
        state.jobs = []
        if state.lease is not None:
            state.lease.release(after=state.transfer)
        state.buffer, state.lease, state.spilled, state.transfer = None, None, None, None
        self._held.pop(state.chunk_of.key, None)
