"""The gradient of one chunk on the host: where it lies, and what is still on its way there."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch

from offload.device.pending import Pending
from offload.layout import Extent
from offload.model.flats import ChunkOf
from offload.tiers.staging import Lease

ACCUMULATED = "accumulated gradients"
"""The store of the fp32 sums of several micro-batches. Only the host touches it: it takes memory when it is first used."""


@dataclass(slots=True, eq=False)
class ChunkGradient:
    """Owned by `Gradients`, under its lock.

    narrow, wide   its places in the stores, in compute precision and in fp32 (None: that is the same)
    buffer         [chunk.numel] where it lies now; `lease` if that is a staging buffer
    spilled        the dtype in which it lies in the store alone
    live           indices of the parameters whose gradient is there, or coming
    kept           by parameter index: pieces that lie in autograd's own tensors instead of the buffer
    jobs           what the buffer waits for before it may be read
    transfer       its last transfer between buffer and store
    opened         an update is reading it
    held           its update may be undone, and must find it again then; `applied`: that update has read it
    """

    chunk_of: ChunkOf
    narrow: Extent
    wide: Extent | None
    buffer: torch.Tensor | None = None
    lease: Lease | None = None
    spilled: torch.dtype | None = None
    live: set[int] = field(default_factory=set)
    kept: dict[int, torch.Tensor] = field(default_factory=dict)
    jobs: list[Pending] = field(default_factory=list)
    transfer: Pending | None = None
    opened: bool = False
    held: bool = False
    applied: bool = False

    @property
    def trainable_count(self) -> int:
        """How many parameters have a piece in the chunk."""
        return len(self.chunk_of.pieces())

    @property
    def is_complete(self) -> bool:
        """Whether every parameter of the chunk has a gradient."""
        return len(self.live) == self.trainable_count

    def settle(self) -> None:
        """Wait until the buffer may be read. By the thread of the updates and that of the model, maybe at once: so both wait,
        and nothing is taken from the list before it is over."""
        for job in self.jobs:
            job.wait()
        self.jobs = []
