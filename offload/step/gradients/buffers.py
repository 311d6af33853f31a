# SPDX-License-Identifier: Apache-2.0
"""Where the gradients of chunks lie: in the store's own memory, or in buffers that the store takes over when they run out.

Where the store offers a view, a chunk's buffer is that view for good. Where it does not (NVMe), buffers are leased. Unless
several micro-batches are expected each has room for a gradient as one backward computes it; an fp32 sum takes as many of them
as it needs, side by side. When they run out, what is needed last is written to the store, and read back for its update, or to
be added to:

    1. what an update has read already that may have to be undone: it is most likely never read again
    2. of what is complete the chunk whose gradient arrived longest ago: it belongs to the last layers, whose update comes last
    3. what an update is about to read that began before the others, the last in its line first
    4. the oldest

An update that begins before the others reads soon what has just left. What still lies in its buffer, which nobody else had
meanwhile, has that again (`hold`). The store has it too, so it costs no second write if it leaves all the same.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial

import torch

from offload.device.accelerator import Accelerator
from offload.device.arithmetic import kernels
from offload.device.arithmetic.checksums import unknown_sums
from offload.device.lane import HostLane
from offload.device.pending import AllOf, Pending
from offload.layout import Extent
from offload.model.chunk import Chunk, ChunkGradient
from offload.planning.budget import spare_count
from offload.planning.purposes import GRADIENT_BUFFERS, RELOADED
from offload.planning.route import Memory
from offload.step.gradients.spill_order import SpillOrder
from offload.tiers.io import Priority
from offload.tiers.staging import Lease, StagingPool
from offload.tiers.store import Store


class GradientBuffers:
    """See the module. Everything runs under the lock of `ChunkGradients`, which updates need too. So what a buffer for a
    gradient that arrives would wait for (`room_for`) is waited for before the lock is taken."""

    def __init__(
        self,
        spilling_count: int,
        pool: StagingPool,
        accelerator: Accelerator,
        lane: HostLane | None,
        leave_device: Callable[[Chunk], None],
    ) -> None:
        """`spilling_count`: chunks whose buffers may run out. `lane`: casts what came from a device; None: nothing comes from
        one. `leave_device`: sends what of the chunk is still packed there."""
        self._pool, self._accelerator, self._lane, self._leave_device = pool, accelerator, lane, leave_device
        self._order = SpillOrder()
        """Of the chunks whose buffer is leased for what comes."""
        buffers = pool.stats.consumers.get(GRADIENT_BUFFERS)
        self._count, self._nbytes = (buffers.count, buffers.nbytes) if buffers is not None else (0, 1)
        """Of those buffers."""
        self._spilling_count = spilling_count
        self._stored: set[ChunkGradient] = set()
        """Those with a buffer that the store has as they are. The write may be going on, as their `transfer`."""
        self._views: dict[tuple[ChunkGradient, torch.dtype], tuple[torch.Tensor, torch.Tensor]] = {}
        """Of each chunk's memory in a store, and that in the dtype of what lies there: [chunk.numel]."""

    # ---- for gradients that arrive -------------------------------------------------------------------------------

    def room_for(self, state: ChunkGradient, *, wide: bool) -> Pending | None:
        """What `for_adding` would wait for first, to be asked again after that. Where all buffers are on lease one begins to be
        spilled for it. What is read back and widened, both in the second micro-batch, may still wait for the latter."""
        if state.chunk.route.gradients_in is not None:
            return None
        for width in self._wanted(state, _dtype(state, wide=wide)):
            while not self._pool.free_count(GRADIENT_BUFFERS, width):
                leaving = self._needed_last(state)
                if (arriving := self._arriving(leaving)) is not None:
                    return arriving
                self._spill(leaving)
            if (coming := self._pool.coming(GRADIENT_BUFFERS, width)) is not None:
                return coming
            if self._pool.free_count(GRADIENT_BUFFERS) - width < self._spare_count(width):
                leisurely = self._order.needed_last(state, at_leisure=True)
                if leisurely is not None and (arriving := self._arriving(leisurely)) is not None:
                    return arriving
        return None

    def _arriving(self, leaving: ChunkGradient) -> Pending | None:
        """What a chunk waits for that is to be spilled."""
        self._take_off_device(leaving)
        return leaving.arriving

    def _wanted(self, state: ChunkGradient, dtype: torch.dtype) -> Iterator[int]:
        """How many buffers side by side `for_adding` takes: for what is to be read back, then for what is in another dtype."""
        there = state.buffer.dtype if state.buffer is not None else state.spilled
        if state.buffer is None:
            yield self._width(state, there or dtype)
        if there is not None and dtype == torch.float32 != there:
            yield self._width(state, dtype)

    def for_adding(self, state: ChunkGradient, *, wide: bool, later: bool = False) -> torch.Tensor:
        """The chunk's buffer, and what is there; `wide`: in fp32. `later`: what is there may still be on its way, as
        one of the chunk's `jobs`."""
        dtype = _dtype(state, wide=wide)
        if state.buffer is None and state.spilled is not None:
            self._read_back(state, self._retaining_lease(state, state.spilled))
        if state.buffer is None:
            self.take(state, dtype)
        elif state.transfer is not None:
            transfer, state.transfer = state.transfer, None
            if later:
                state.jobs.append(transfer)
            else:
                transfer.wait()
        if state.lease is not None:
            self._order.put(state)
        self._stored.discard(state)  # what is added the store lacks
        state.checksums = None
        assert state.buffer is not None
        if dtype == torch.float32 and state.buffer.dtype != dtype:
            return self._widened(state, state.buffer)
        return state.buffer

    def _widened(self, state: ChunkGradient, narrow: torch.Tensor) -> torch.Tensor:
        narrow_lease, arriving = state.lease, state.jobs
        wide = self.take(state, torch.float32)

        def widen() -> None:
            for job in arriving:
                job.wait()
            kernels.convert(wide, narrow, all_cores=self._lane is not None)

        if self._lane is None or state.chunk.route.gradients_in is Memory.DEVICE:
            widen()
            state.jobs = []
        else:
            state.jobs = [self._lane.submit(widen)]
        if narrow_lease is not None:
            narrow_lease.release(after=state.jobs[0] if state.jobs else None)
        return wide

    def take(self, state: ChunkGradient, dtype: torch.dtype) -> torch.Tensor:
        """A new buffer for the chunk; the lease of an earlier one is the caller's to release."""
        store, extents = _place(state, dtype)
        freed_count = state.lease.width if state.lease is not None else 0
        self._leave_buffer(state)
        view = store.view(extents[0])
        if view is None:
            state.lease = self._retaining_lease(state, dtype, freed_count)
            view = state.lease.tensor
            self._order.put(state)
            state.buffer = _values_in(view, state, dtype)
            return state.buffer
        known = self._views.get((state, dtype))
        if known is None or known[0] is not view:
            known = self._views[state, dtype] = view, _values_in(view, state, dtype)
        state.buffer = known[1]
        return state.buffer

    @staticmethod
    def unknown_checksums(state: ChunkGradient) -> torch.Tensor | None:
        """To be taken of what is stored in the chunk's buffer next, for when it is spilled; None where nobody wants them."""
        assert state.buffer is not None
        store, extents = _place(state, state.buffer.dtype)
        return unknown_sums(extents[0].nbytes) if state.lease is not None and store.verifies and len(extents) == 1 else None

    def close(self) -> None:
        """Let go of the stores' memory."""
        self._views = {}

    def expect(self, state: ChunkGradient) -> None:
        """Something else is expected of the chunk than before: it is held, was applied, or is neither any more."""
        if state in self._order:
            self._order.put(state)

    def hold(self, state: ChunkGradient) -> None:
        """`expect` of what an update is about to read that began before the others."""
        lease = self._pool.take_again(state.spilled_from) if state.spilled_from is not None else None
        if lease is None:
            self.expect(state)
            return
        self._lies_in(state, lease)
        self._stored.add(state)
        self._order.put(state)

    # ---- for updates ---------------------------------------------------------------------------------------------

    def prefetch(self, state: ChunkGradient) -> bool:
        """See `ChunkGradients.prefetch`."""
        if not self._is_elsewhere(state):
            return True
        lease = self._pool.try_lease(RELOADED) if self._pool.free_count(RELOADED) > 1 else None
        if lease is None:
            return False
        self._bring(state, lease)
        return True

    def bring(self, state: ChunkGradient) -> None:
        """Begin to bring the chunk to where its update finds it, if it is not there."""
        if self._is_elsewhere(state):
            self._bring(state, self._pool.lease(RELOADED))

    def _is_elsewhere(self, state: ChunkGradient) -> bool:
        if state.chunk.route.brings_gradients:
            return state.lease is None
        return state.buffer is None and not state.adopted and state.spilled is not None

    def _bring(self, state: ChunkGradient, lease: Lease) -> None:
        if state.chunk.route.brings_gradients:
            self._copy_over(state, lease)
        else:
            self._read_back(state, lease)

    def _copy_over(self, state: ChunkGradient, lease: Lease) -> None:
        """From the device, where its buffer stays what it is for what comes next."""
        assert state.buffer is not None, "a chunk without gradient was asked for"
        there = state.buffer
        self._order.remove(state)  # nothing to be spilled
        state.buffer = lease.tensor[: there.nbytes].view(there.dtype)
        state.transfer, state.lease = self._accelerator.copy_out_beside_compute(state.buffer, there), lease

    @staticmethod
    def read_back(state: ChunkGradient) -> torch.Tensor:
        """What a chunk with a lease has of it, uint8: whole extents."""
        assert state.buffer is not None and state.lease is not None
        return state.lease.tensor[: sum(extent.nbytes for extent in _place(state, state.buffer.dtype)[1])]

    def put_back(self, state: ChunkGradient) -> None:
        """What was brought for an update stays a gradient: what lies in the store is still it."""
        if state.lease is None or state in self._order:
            return
        assert state.buffer is not None
        dtype = state.buffer.dtype
        self._release(state)
        if state.chunk.route.brings_gradients:
            self.take(state, dtype)  # on the device, as before it was copied
        else:
            state.spilled = dtype

    def give_back(self, state: ChunkGradient) -> None:
        """Nothing of the chunk is needed any more."""
        state.settle()
        self._release(state)
        state.spilled = state.spilled_from = None

    def _release(self, state: ChunkGradient) -> None:
        if state.lease is not None:
            transfer, state.transfer = state.transfer, None
            if transfer is not None:
                transfer.wait()  # now: what a read brought is compared with what was written while the buffer is still its own
            state.lease.release()
        # Without a lease a write may be going on: the next transfer of its extent waits for it.
        self._leave_buffer(state)

    def _leave_buffer(self, state: ChunkGradient) -> None:
        """The chunk has no buffer any more: none to be spilled, nor one with what the store has."""
        self._order.remove(state)
        self._stored.discard(state)
        state.buffer = state.lease = state.checksums = None

    # ---- spilling ------------------------------------------------------------------------------------------------

    def _width(self, state: ChunkGradient, dtype: torch.dtype) -> int:
        """How many buffers the chunk's gradient takes in that dtype."""
        return -(-state.chunk.numel * dtype.itemsize // self._nbytes)

    def _retaining_lease(self, state: ChunkGradient, dtype: torch.dtype, freed_count: int = 0) -> Lease:
        """`freed_count`: buffers that are given back as soon as this one is had."""
        width = self._width(state, dtype)
        lease = self._pool.try_lease(GRADIENT_BUFFERS, width)
        if lease is None:
            self._free(state, width)
            lease = self._pool.lease(GRADIENT_BUFFERS, width)
        # Spill before the buffers run out, so that the next gradient need not wait for a write.
        while self._pool.free_count(GRADIENT_BUFFERS) + freed_count < self._spare_count(width):
            coming = self._order.needed_last(state, at_leisure=True)
            if coming is None:
                break
            self._spill(coming)
        return lease

    def _spare_count(self, width: int) -> int:
        """Buffers that are to be free for the next gradient, which takes so many."""
        return spare_count(self._count // width, self._spilling_count) * width

    def _free(self, state: ChunkGradient, width: int) -> None:
        """Spill until so many buffers side by side are given back."""
        while not self._pool.free_count(GRADIENT_BUFFERS, width):
            self._spill(self._needed_last(state))

    def _needed_last(self, besides: ChunkGradient) -> ChunkGradient:
        found = self._order.needed_last(besides, at_leisure=False)
        assert found is not None, "no gradient buffer can be spilled"
        return found

    def _take_off_device(self, state: ChunkGradient) -> None:
        """Have what is still on the device come over, which may need a wider buffer. Where there is none it stays, and lands on
        what is read back."""
        assert state.buffer is not None
        if state.buffer.dtype == torch.float32 or self._pool.free_count(GRADIENT_BUFFERS, self._width(state, torch.float32)):
            self._leave_device(state.chunk)

    def _spill(self, state: ChunkGradient) -> None:
        self._take_off_device(state)
        state.settle()
        assert state.buffer is not None and state.lease is not None
        if state not in self._stored:
            if state.transfer is not None:
                state.transfer.wait()
            store, extents = _place(state, state.buffer.dtype)
            write = store.write if state.checksums is None else partial(store.write, sums=state.checksums)
            state.transfer = _moved(write, extents, state.lease.tensor)
        state.spilled_from = state.lease.release(after=state.transfer)
        state.spilled = state.buffer.dtype
        self._leave_buffer(state)

    def _read_back(self, state: ChunkGradient, lease: Lease) -> None:
        assert state.spilled is not None, "a chunk without gradient was asked for"
        if state.transfer is not None:
            state.transfer.wait()
        store, extents = _place(state, state.spilled)
        state.transfer = _moved(partial(store.read, priority=Priority.STATE), extents, lease.tensor)
        self._lies_in(state, lease)

    @staticmethod
    def _lies_in(state: ChunkGradient, lease: Lease) -> None:
        """What was spilled lies in that buffer again, or will."""
        assert state.spilled is not None, "a chunk that is not spilled was given a buffer for what was"
        state.buffer, state.lease = _values_in(lease.tensor, state, state.spilled), lease
        state.spilled = state.spilled_from = None


def _values_in(memory: torch.Tensor, state: ChunkGradient, dtype: torch.dtype) -> torch.Tensor:
    """[chunk.numel], at the begin of `memory`."""
    return memory[: state.chunk.numel * dtype.itemsize].view(dtype)


def _dtype(state: ChunkGradient, *, wide: bool) -> torch.dtype:
    """Of the buffer for what is added to the chunk."""
    return torch.float32 if wide or not state.is_narrow else state.chunk.flat.dtype


def _place(state: ChunkGradient, dtype: torch.dtype) -> tuple[Store, tuple[Extent, ...]]:
    """Several extents, one after the other, only of what is never in the store's own memory."""
    if not state.is_narrow or dtype != torch.float32:
        assert state.store is not None
        return state.store, (state.extent,)
    assert state.wide_store is not None and state.wide_extents, "sums of micro-batches came before their room"
    return state.wide_store, state.wide_extents


def _moved(transfer: Callable[[Extent, torch.Tensor], Pending], extents: Sequence[Extent], memory: torch.Tensor) -> Pending:
    """All of the extents, from or to the begin of `memory`."""
    parts, start = list[Pending](), 0
    try:
        for extent in extents:
            parts.append(transfer(extent, memory[start : start + extent.nbytes]))
            start += extent.nbytes
    except BaseException:
        AllOf(parts).wait()  # nothing may be in flight when the caller takes its memory back
        raise
    return parts[0] if len(parts) == 1 else AllOf(parts)
