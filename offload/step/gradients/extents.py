# SPDX-License-Identifier: Apache-2.0
"""Where the gradients of chunks have their extents: of one backward in compute precision, of several as fp32 sums."""

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
        """See `Gradients`."""
        self._chunks = chunks
        self._make_sums, is_wide = make_sums, reduced or make_sums is None
        narrow: dict[Tier, ExtentAllocator] = {}
        for chunk in chunks:
            itemsize = 4 if is_wide else chunk.flat.layout.itemsize
            extent = narrow.setdefault(chunk.route.gradients, ExtentAllocator()).take(chunk.numel * itemsize)
            chunk.gradient = ChunkGradient(chunk, extent, narrower=itemsize != 4)
        stores = {tier: make_store(tier, allocator.extents) for tier, allocator in narrow.items()}
        for chunk in chunks:
            gradient_of(chunk).store = stores[chunk.route.gradients]

    def take_room_for_sums(self) -> None:
        """Before the first sum of several micro-batches: make the store that fp32 sums lie in. Idempotent."""
        make_sums = self._make_sums
        if make_sums is None:
            return
        wide: dict[Tier, ExtentAllocator] = {}
        states = [gradient_of(chunk) for chunk in self._chunks if gradient_of(chunk).narrower]
        for state in states:
            state.wide = wide.setdefault(state.chunk.route.gradients, ExtentAllocator()).take(state.chunk.numel * 4)
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
