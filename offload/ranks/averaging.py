# SPDX-License-Identifier: Apache-2.0
"""The sum of one flat's gradients over the ranks: each rank's part from every rank, added in the order of the ranks in fp32.

However it travels, the additions are the same, so the bits are: an element is rank 0's, plus rank 1's, ..., then divided.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import torch
from torch import Tensor

from offload.device.arithmetic import kernels
from offload.layout import ChunkLayout, FlatLayout
from offload.ranks.transport import DATA, Posted, Ranks


class HostReduction:
    """The reduction of one flat over the host."""

    def __init__(self, ranks: Ranks, layout: FlatLayout, dtypes: dict[int, torch.dtype]) -> None:
        """`dtypes`: of what each contributor sends, by member."""
        self._ranks, self._layout, self._dtypes = ranks, layout, dtypes
        self._contributors = [index for index in sorted(dtypes) if index in ranks.shards]
        self._average = np.float32(1.0 / ranks.world_size)
        self._memory = torch.device("cpu")
        """Where they are added."""

    def averages(self, own: Tensor | None, stage: int) -> Iterator[tuple[ChunkLayout, Tensor]]:
        """Every chunk of this rank with its averages, fp32 [chunk.numel], valid until the next one.

        `own`: this rank's gradients of the whole flat, host; None where it has none.
        """
        layout, ranks = self._layout, self._ranks
        sent = ranks.posted()
        if own is not None:
            self._memory = own.device
            for offset, numel in self._segments():
                for position, index in enumerate(ranks.shards):
                    if index != ranks.index:
                        start = position * layout.shard.numel + offset
                        ranks.send(sent, own[start : start + numel], index, DATA)
        ranks.count("reduce", layout.numel * max(dtype.itemsize for dtype in self._dtypes.values()))
        averages = self._averages(own)
        if stage == 0:
            yield from self._spread(averages)
        else:
            yield from zip(layout.chunks, averages, strict=True)
        ranks.settle(sent)

    def _segments(self) -> list[tuple[int, int]]:
        """(offset in the shard, numel) of each message: where there are shards, those of the chunks."""
        layout = self._layout
        numel = max(chunk.numel for chunk in layout.chunks)
        return [(offset, min(numel, layout.shard.numel - offset)) for offset in range(0, layout.shard.numel, numel)]

    def _averages(self, own: Tensor | None) -> Iterator[Tensor]:
        """This rank's shard segment by segment, fp32: the next is received while one is being added up."""
        segments = self._segments()
        coming = self._receive(segments[0][1])
        for position, (offset, numel) in enumerate(segments):
            posted, buffers = coming
            self._ranks.settle(posted)
            if position + 1 < len(segments):
                coming = self._receive(segments[position + 1][1])
            total = torch.zeros(numel, dtype=torch.float32, device=self._memory)
            for place, index in enumerate(self._contributors):
                if index == self._ranks.index:
                    assert own is not None
                    start = self._layout.shard.start + offset
                    part = own[start : start + numel]
                else:
                    part = buffers[index]
                kernels.ingest_async(total, part, 0, place > 0)
            self._ranks.add_replicas(total)
            kernels.scale(total, self._average)
            yield total

    def _receive(self, numel: int) -> tuple[Posted, dict[int, Tensor]]:
        posted = self._ranks.posted()
        buffers: dict[int, Tensor] = {}
        for index in self._contributors:
            if index != self._ranks.index:
                buffers[index] = torch.empty(numel, dtype=self._dtypes[index], device=self._memory)
                self._ranks.receive(posted, buffers[index], index, DATA)
        return posted, buffers

    def _spread(self, averages: Iterator[Tensor]) -> Iterator[tuple[ChunkLayout, Tensor]]:
        """Stage 0: everybody gets the averages of the whole flat."""
        layout, ranks = self._layout, self._ranks
        whole = torch.empty(layout.numel, dtype=torch.float32, device=self._memory)
        shard = whole[layout.shard.start : layout.shard.stop]
        for (offset, numel), values in zip(self._segments(), averages, strict=True):
            shard[offset : offset + numel].copy_(values)
        everybody = frozenset(range(ranks.world_size))
        ranks.gather(shard.view(torch.uint8), whole.view(torch.uint8), everybody, whole.nbytes)
        for chunk in layout.chunks:
            yield chunk, whole[chunk.start : chunk.stop]


def averages_on_device(ranks: Ranks, layout: FlatLayout, own: Tensor, stage: int) -> Iterator[tuple[ChunkLayout, Tensor]]:
    """As `HostReduction.averages`, between GPUs, in the order of the current stream; the same additions in the same order.

    `own`: [layout.numel] on the device, of one dtype on all ranks, all of which contribute.
    """
    parts = torch.empty_like(own)
    ranks.exchange_on_device(parts, own)
    numel = layout.shard.numel
    total = parts[:numel].to(torch.float32, copy=True)
    for position in range(1, ranks.shard_count):
        total.add_(parts[position * numel : (position + 1) * numel])
    ranks.add_replicas_on_device(total)
    total.mul_(torch.full((), 1.0 / ranks.world_size, dtype=torch.float32, device=own.device))
    if stage == 0:
        whole = torch.empty(layout.numel, dtype=torch.float32, device=own.device)
        whole[layout.shard.start : layout.shard.stop].copy_(total)
        ranks.gather_on_device(whole.view(torch.uint8), whole[layout.shard.start : layout.shard.stop].view(torch.uint8))
        yield from ((chunk, whole[chunk.start : chunk.stop]) for chunk in layout.chunks)
        return
    for chunk in layout.chunks:
        yield chunk, total[chunk.start - layout.shard.start : chunk.stop - layout.shard.start]
