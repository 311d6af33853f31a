# SPDX-License-Identifier: Apache-2.0
"""Where the gradients of chunks have their extents: of one backward in compute precision, of several as fp32 sums.

Where several are expected there is room for sums alone. What may spill begins in compute precision all the same, in the first
part of that room, so that half as much of the first micro-batch goes to the drive and back.
"""

from __future__ import annotations

from collections.abc import Sequence

from offload.layout import ExtentAllocator
from offload.model.chunk import Chunk, ChunkGradient
from offload.planning.budget import Tier
from offload.step.chunk_stores import StoreFactory
from offload.tiers.store import Store


def gradient_of(chunk: Chunk) -> ChunkGradient:
    """The gradient of a chunk that is trained."""
    assert chunk.gradient is not None, "a chunk that is not trained has no gradient"
    return chunk.gradient


class GradientExtents:
    """Makes the gradients of chunks, and the stores that they lie in. The stores are closed by whoever gave the factories."""

    def __init__(
        self, chunks: Sequence[Chunk], make_store: StoreFactory, make_sums: StoreFactory | None, *, reduced: bool
    ) -> None:
        """`make_store`, `make_sums`: of the gradients of one backward, and of the fp32 sums of several; None: there is room for
        sums alone, as several are expected. `reduced`: what arrives are averages over ranks, fp32."""
        self._chunks = chunks
        self._make_sums, holds_sums = make_sums, reduced or make_sums is None
        allocators: dict[Tier, ExtentAllocator] = {}
        for chunk in chunks:
            is_wide = holds_sums and (reduced or chunk.route.gradients_in is not None)
            itemsize = 4 if is_wide else chunk.flat.layout.itemsize
            allocator = allocators.setdefault(chunk.route.gradients, ExtentAllocator())
            extent = allocator.take(chunk.numel * itemsize)
            chunk.gradient = ChunkGradient(chunk, extent, is_narrow=itemsize != 4)
            if holds_sums and chunk.gradient.is_narrow:
                rest_nbytes = chunk.numel * 4 - extent.nbytes
                chunk.gradient.wide_extents = (extent, allocator.take(rest_nbytes))
        stores = {tier: make_store(tier, allocator.extents) for tier, allocator in allocators.items()}
        for chunk in chunks:
            state = gradient_of(chunk)
            state.store = stores[chunk.route.gradients]
            state.wide_store = state.store if state.wide_extents else None

    def take_room_for_sums(self) -> None:
        """Before the first sum of several micro-batches: make the store that fp32 sums lie in. Idempotent."""
        make_sums = self._make_sums
        if make_sums is None:
            return
        wide: dict[Tier, ExtentAllocator] = {}
        states = [gradient_of(chunk) for chunk in self._chunks if gradient_of(chunk).is_narrow]
        for state in states:
            state.wide_extents = (wide.setdefault(state.chunk.route.gradients, ExtentAllocator()).take(state.chunk.numel * 4),)
        stores: dict[Tier, Store] = {}
        try:
            for tier, allocator in wide.items():
                stores[tier] = make_sums(tier, allocator.extents)
            for state in states:
                state.wide_store = stores[state.chunk.route.gradients]
            self._make_sums = None
        except BaseException:
            for store in stores.values() if self._make_sums is not None else ():
                store.close()
            raise
