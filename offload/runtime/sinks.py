"""Where an update finds a chunk's parameter values and where it leaves the new ones: one sink per placement.

A sink's `begin` gives the values [chunk.numel] in the parameters' dtype, in memory that the update's kernel can
address; `commit` brings what the update wrote there to the parameters' home. Where the parameters are their own fp32
master the values are read and written; else they are only written, and only where a slot was updated.
"""

from __future__ import annotations

from abc import ABC, abstractmethod

import torch

from offload.device.accelerator import Accelerator
from offload.device.pending import Pending, Settled
from offload.layout import Piece
from offload.runtime.flats import ChunkOf
from offload.runtime.places import ParameterPlaces
from offload.tiers.staging import Lease, StagingPool

EMITTED = "updated parameters"


class ParameterSink(ABC):
    """See the module. One chunk is between `begin` and `commit` at a time, on the update's thread."""

    needs_residency = False
    """Whether the unit must be in device memory while it is updated."""

    @abstractmethod
    def begin(self, chunk_of: ChunkOf, *, keeps_old: bool) -> torch.Tensor:
        """The values. `keeps_old`: some of the old ones matter (they are the master, or not every slot is updated)."""

    @abstractmethod
    def commit(self, chunk_of: ChunkOf, values: torch.Tensor, pieces: list[Piece]) -> Pending:
        """Publish the values of `pieces`. Settles when device memory may be used or fetched again.

        Writes to a store are not part of that: `ParameterPlaces` orders every read after them.
        """


class InPlaceSink(ParameterSink):
    """The flat lies for good where the kernel can address it."""

    def begin(self, chunk_of: ChunkOf, *, keeps_old: bool) -> torch.Tensor:
        return chunk_of.flat.chunk_values(chunk_of.chunk)

    def commit(self, chunk_of: ChunkOf, values: torch.Tensor, pieces: list[Piece]) -> Pending:
        return Settled()


class ResidentSink(ParameterSink):
    """The unit is resident in memory that the kernel can address; its home is a store."""

    needs_residency = True

    def __init__(self, places: ParameterPlaces) -> None:
        self._places = places

    def begin(self, chunk_of: ChunkOf, *, keeps_old: bool) -> torch.Tensor:
        self._places.settle_fetch(chunk_of)
        return chunk_of.flat.chunk_values(chunk_of.chunk)

    def commit(self, chunk_of: ChunkOf, values: torch.Tensor, pieces: list[Piece]) -> Pending:
        self._places.write(chunk_of, chunk_of.flat.chunk_bytes(chunk_of.chunk))
        return Settled()


class StoreSink(ParameterSink):
    """The home is a store in host memory or behind it; device memory is out of the host kernel's reach."""

    def __init__(self, places: ParameterPlaces, pool: StagingPool) -> None:
        self._places = places
        self._pool = pool
        self._lease: Lease | None = None

    def begin(self, chunk_of: ChunkOf, *, keeps_old: bool) -> torch.Tensor:
        stored = self._places.view(chunk_of)
        if stored is None:
            self._lease = self._pool.lease(EMITTED)
            stored = self._lease.tensor[: chunk_of.chunk.numel * chunk_of.flat.layout.itemsize]
            if keeps_old:
                self._places.read(chunk_of, stored).wait()
        return stored[: chunk_of.chunk.numel * chunk_of.flat.layout.itemsize].view(chunk_of.flat.dtype)

    def commit(self, chunk_of: ChunkOf, values: torch.Tensor, pieces: list[Piece]) -> Pending:
        if self._lease is None:
            return Settled()
        lease, self._lease = self._lease, None
        lease.release(after=self._places.write(chunk_of, values.view(torch.uint8)))
        return Settled()


class CopyInSink(ParameterSink):
    """The home is device memory and the kernel runs on the host: new values go over by H2D, slot by slot."""

    def __init__(self, accelerator: Accelerator, pool: StagingPool) -> None:
        self._accelerator = accelerator
        self._pool = pool
        self._lease: Lease | None = None

    def begin(self, chunk_of: ChunkOf, *, keeps_old: bool) -> torch.Tensor:
        # Old values are never wanted: the master is in the record, and only updated slots are copied over.
        self._lease = self._pool.lease(EMITTED)
        return self._lease.tensor[: chunk_of.chunk.numel * chunk_of.flat.layout.itemsize].view(chunk_of.flat.dtype)

    def commit(self, chunk_of: ChunkOf, values: torch.Tensor, pieces: list[Piece]) -> Pending:
        assert self._lease is not None
        lease, self._lease = self._lease, None
        start = chunk_of.chunk.start
        last: Pending = Settled()
        for piece in pieces:
            target = chunk_of.flat.slice(piece.start, piece.stop)
            last = self._accelerator.copy_in(target, values[piece.start - start : piece.stop - start])
        lease.release(after=last)  # copies of one stream settle in order
        return last


class CopyOutSink(ParameterSink):
    """The kernel runs on the device, the home is a store of the host: new values go over by D2H."""

    def __init__(self, accelerator: Accelerator, places: ParameterPlaces, pool: StagingPool) -> None:
        self._accelerator = accelerator
        self._places = places
        self._pool = pool

    def begin(self, chunk_of: ChunkOf, *, keeps_old: bool) -> torch.Tensor:
        return torch.empty(chunk_of.chunk.numel, dtype=chunk_of.flat.dtype, device=self._accelerator.device)

    def commit(self, chunk_of: ChunkOf, values: torch.Tensor, pieces: list[Piece]) -> Pending:
        stored = self._places.view(chunk_of)
        lease = None
        nbytes = chunk_of.chunk.numel * chunk_of.flat.layout.itemsize
        if stored is None:
            lease = self._pool.lease(EMITTED)
            stored = lease.tensor[:nbytes]
            updated = sum(piece.numel for piece in pieces)
            if updated < chunk_of.chunk.numel:
                self._places.read(chunk_of, stored).wait()
        home = stored[:nbytes].view(chunk_of.flat.dtype)
        start = chunk_of.chunk.start
        last: Pending = Settled()
        for piece in pieces:
            low, high = piece.start - start, piece.stop - start
            last = self._accelerator.copy_out(home[low:high], values[low:high])
        last.wait()
        if lease is not None:
            lease.release(after=self._places.write(chunk_of, lease.tensor[:nbytes]))
        return Settled()
