"""Gradients between the backward that computes them and the update that consumes them.

Each gradient is copied, piece by piece, into the buffers of the chunks that hold its slot, and dropped. The sum of
squares of what is stored is taken in the same pass. A chunk's buffer is in compute precision until a second
micro-batch adds to it; sums are kept in fp32 from then on.

Where the device is the CPU and gradients stay in its memory nothing is copied at all: the tensor that autograd computed is
kept as it is until its update, or until a second micro-batch adds to it.

Where the buffers lie is the store's matter: where it offers a view, a chunk's buffer is that view for good; where it
does not (NVMe), buffers are leased, and when the leases run out the chunk whose gradient arrived longest ago is written
to the store (it belongs to the last layers, whose update comes last) and read back for its update.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Iterable
from dataclasses import dataclass, field

import torch

from offload.device import kernels
from offload.device.accelerator import Accelerator
from offload.device.lane import HostLane
from offload.device.pending import Pending
from offload.layout import Extent, ExtentAllocator, Piece
from offload.runtime.flats import ChunkOf, Flat, ParameterInfo
from offload.runtime.guard import TakenGradient
from offload.runtime.places import StoreFactory
from offload.schedule.budget import SPARE_BUFFERS
from offload.tiers.io import Priority
from offload.tiers.staging import Lease, StagingPool
from offload.tiers.store import Store

RETAINED = "gradients"
RELOADED = "gradients read back"
LANDING = "gradients to add"


@dataclass(slots=True, eq=False)
class _ChunkGradient:
    chunk_of: ChunkOf
    narrow: Extent
    wide: Extent
    buffer: torch.Tensor | None = None
    lease: Lease | None = None
    spilled: torch.dtype | None = None
    live: set[int] = field(default_factory=set)
    kept: dict[int, torch.Tensor] = field(default_factory=dict)
    """By parameter index: pieces that lie in autograd's own tensors instead of the buffer."""
    jobs: list[Pending] = field(default_factory=list)
    transfer: Pending | None = None

    @property
    def trainable_count(self) -> int:
        return len(self.chunk_of.pieces())


class Gradients:
    """See the module. `add` runs in whichever thread backward runs; `open` and `close` in the update's; both lock."""

    def __init__(
        self,
        chunks: Iterable[ChunkOf],
        make_store: StoreFactory,
        pool: StagingPool,
        accelerator: Accelerator,
        *,
        on_device: bool,
    ) -> None:
        self._pool = pool
        self._accelerator = accelerator
        self._on_host_copy = not (accelerator.unified or on_device)
        self._lane: HostLane = accelerator.host_lane("gradients", waits_for_io=False)
        self._lock = threading.RLock()
        allocator = ExtentAllocator()
        self._states: dict[tuple[int, int], _ChunkGradient] = {}
        for chunk_of in chunks:
            itemsize = chunk_of.flat.layout.itemsize
            narrow = allocator.take(chunk_of.chunk.numel * itemsize)
            wide = narrow if itemsize == 4 else allocator.take(chunk_of.chunk.numel * 4)
            self._states[chunk_of.key] = _ChunkGradient(chunk_of, narrow, wide)
        self._store: Store = make_store("gradients", allocator.extents)
        self._keeps_tensors = accelerator.unified and all(
            self._store.view(extent) is not None for extent in allocator.extents[:1]
        )
        buffers = pool.stats.consumers.get(RETAINED)
        has_one_for_each = buffers is None or buffers.count >= len(self._states)
        self._spare_count = 0 if has_one_for_each else SPARE_BUFFERS
        self._held: dict[tuple[int, int], None] = {}
        self._sums: dict[int, dict[int, list[float] | torch.Tensor]] = {}
        self._live: dict[int, ParameterInfo] = {}

    # ---- arrival -------------------------------------------------------------------------------------------------

    def add(self, info: ParameterInfo, flat: Flat, gradient: torch.Tensor, *, owned: bool) -> None:
        """Take over `gradient` of parameter `info`; add it to what is there (`is_live` was asked before).

        `owned`: nobody else will write to the tensor, so that it may be kept.
        """
        accumulate = info.index in self._live
        ordered = info.in_memory_order(gradient)
        slot = next(slot for slot in flat.layout.slots if slot.parameter_index == info.index)
        self._live[info.index] = info
        sums = self._sums.setdefault(info.index, {})
        for chunk in flat.layout.chunks_of(slot):
            state = self._states[ChunkOf(flat, chunk).key]
            piece = Piece(slot, max(slot.start, chunk.start), min(slot.stop, chunk.stop))
            source = ordered[piece.start - slot.start : piece.stop - slot.start]
            with self._lock:
                state.live.add(info.index)
                if owned and self._keeps_tensors and not accumulate:
                    state.kept[info.index] = source
                    sums[chunk.index] = kernels.ingest_async(None, source, piece.start, False)
                    continue
                buffer = self._buffer_for_adding(state, wide=accumulate)
                target = buffer[piece.start - chunk.start : piece.stop - chunk.start]
                if info.index in state.kept:
                    kernels.convert(target, state.kept.pop(info.index))
                self._ingest(state, target, source, piece, accumulate, sums)

    def _ingest(
        self,
        state: _ChunkGradient,
        target: torch.Tensor,
        source: torch.Tensor,
        piece: Piece,
        accumulate: bool,
        sums: dict[int, list[float] | torch.Tensor],
    ) -> None:
        chunk_index = state.chunk_of.chunk.index
        if not self._on_host_copy:
            sums[chunk_index] = kernels.ingest_async(target, source, piece.start, accumulate)
            return
        if accumulate:
            lease = self._pool.lease(LANDING)
            landing = lease.tensor[: source.nbytes].view(source.dtype)
        else:
            lease, landing = None, target
        copied = self._accelerator.copy_out(landing, source.to(landing.dtype))

        def settle() -> None:
            copied.wait()
            if lease is None:
                sums[chunk_index] = kernels.ingest_async(None, landing, piece.start, False)
            else:
                sums[chunk_index] = kernels.ingest_async(target, landing, piece.start, True)
                lease.release()

        job = self._lane.submit(settle)
        state.jobs.append(job)
        if lease is not None:
            job.wait()  # one landing buffer: the next addition needs it

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
        self._sums.pop(info.index, None)
        with self._lock:
            for state in self._states.values():
                if info.index in state.live:
                    state.live.discard(info.index)
                    state.kept.pop(info.index, None)
                    if not state.live:
                        self._give_back(state)

    # ---- norm ----------------------------------------------------------------------------------------------------

    def settle(self) -> None:
        """Wait until every gradient taken over has arrived in its buffer."""
        for state in self._states.values():
            jobs, state.jobs = state.jobs, []
            for job in jobs:
                job.wait()

    def sum_of_squares(self) -> float:
        """Over all live gradients, exactly rounded (so no order of summation shows). Call after `settle`."""
        return self.sum_of_squares_of(self._live.values())

    def sum_of_squares_of(self, parameters: Iterable[ParameterInfo]) -> float:
        """The same over some of the live gradients."""
        return math.fsum(
            partial for info in parameters for sums in self._sums[info.index].values() for partial in _as_floats(sums)
        )

    def non_finite_parameters(self) -> list[str]:
        """Names of the parameters whose gradient has an inf or NaN."""
        return [
            info.fqn
            for index, info in sorted(self._live.items())
            if not all(math.isfinite(partial) for sums in self._sums[index].values() for partial in _as_floats(sums))
        ]

    # ---- consumption ---------------------------------------------------------------------------------------------

    def consume(self, info: ParameterInfo) -> None:
        """The gradient of `info` belongs to an update now: a later one starts anew."""
        self._live.pop(info.index, None)
        self._sums.pop(info.index, None)

    def prefetch(self, chunk_of: ChunkOf) -> bool:
        """Start reading a spilled chunk back, if a buffer is free for it. False if none is."""
        state = self._states[chunk_of.key]
        with self._lock:
            if state.spilled is None or state.buffer is not None:
                return True
            lease = self._pool.try_lease(RELOADED)
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

    def _piece(self, state: _ChunkGradient, piece: Piece) -> torch.Tensor:
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

    # ---- buffers (under the lock) --------------------------------------------------------------------------------

    def _extent(self, state: _ChunkGradient, dtype: torch.dtype) -> Extent:
        return state.narrow if dtype == state.chunk_of.flat.dtype else state.wide

    def _new_buffer(self, state: _ChunkGradient, dtype: torch.dtype) -> torch.Tensor:
        numel = state.chunk_of.chunk.numel
        view = self._store.view(self._extent(state, dtype))
        if view is None:
            state.lease = self._retaining_lease(state)
            view = state.lease.tensor
        self._held[state.chunk_of.key] = None
        return view[: numel * dtype.itemsize].view(dtype)

    def _buffer_for_adding(self, state: _ChunkGradient, *, wide: bool) -> torch.Tensor:
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

    def _retaining_lease(self, state: _ChunkGradient) -> Lease:
        lease = self._pool.try_lease(RETAINED)
        if lease is None and not self._pool.free_count(RETAINED):
            self._spill_oldest(besides=state)
        lease = lease or self._pool.lease(RETAINED)
        # Spill before the buffers run out, so that the next gradient need not wait for a write.
        while self._pool.free_count(RETAINED) < self._spare_count and (coming := self._complete_chunk(besides=state)):
            self._spill(coming)
        return lease

    def _complete_chunk(self, besides: _ChunkGradient) -> _ChunkGradient | None:
        """The chunk that has all its gradients for the longest time and lies in a leased buffer."""
        for key in self._held:
            state = self._states[key]
            if state is not besides and state.lease is not None and len(state.live) == state.trainable_count:
                return state
        return None

    def _widen(self, state: _ChunkGradient) -> None:
        for job in state.jobs:
            job.wait()
        narrow, narrow_lease = state.buffer, state.lease
        assert narrow is not None
        state.lease = None
        wide = self._new_buffer(state, torch.float32)
        kernels.convert(wide, narrow)
        state.buffer = wide
        if narrow_lease is not None:
            narrow_lease.release()

    def _spill_oldest(self, besides: _ChunkGradient) -> None:
        for key in self._held:
            state = self._states[key]
            if state is not besides and state.lease is not None:
                break
        else:
            raise AssertionError("no gradient buffer can be spilled")
        self._spill(state)

    def _spill(self, state: _ChunkGradient) -> None:
        for job in state.jobs:
            job.wait()
        state.jobs = []
        assert state.buffer is not None and state.lease is not None
        if state.transfer is not None:
            state.transfer.wait()
        extent = self._extent(state, state.buffer.dtype)
        state.transfer = self._store.write(extent, state.lease.tensor[: extent.nbytes])
        state.lease.release(after=state.transfer)
        state.spilled, state.buffer, state.lease = state.buffer.dtype, None, None
        del self._held[state.chunk_of.key]

    def _read_back(self, state: _ChunkGradient, lease: Lease) -> None:
        assert state.spilled is not None, "a chunk without gradient was asked for"
        if state.transfer is not None:
            state.transfer.wait()
        extent = self._extent(state, state.spilled)
        state.transfer = self._store.read(extent, lease.tensor[: extent.nbytes], priority=Priority.STATE)
        numel = state.chunk_of.chunk.numel
        state.lease = lease
        state.buffer = lease.tensor[: numel * state.spilled.itemsize].view(state.spilled)
        state.spilled = None

    def _give_back(self, state: _ChunkGradient) -> None:
        for job in state.jobs:
            job.wait()
        state.jobs = []
        if state.lease is not None:
            state.lease.release(after=state.transfer)
        state.buffer, state.lease, state.spilled, state.transfer = None, None, None, None
        self._held.pop(state.chunk_of.key, None)


def _as_floats(sums: list[float] | torch.Tensor) -> list[float]:
    return sums if isinstance(sums, list) else [float(value) for value in sums.tolist()]
