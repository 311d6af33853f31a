# SPDX-License-Identifier: Apache-2.0
"""One optimizer step of a unit on its way, from the moment when what it does is fixed until its new values are in place.

PieceUpdate  one parameter's part of a chunk
ChunkUpdate  the granule that the lane works on
UnitUpdate   what a forward of the unit waits for
EarlyUpdate  what is needed to undo an update that began before the norm was known
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence, Set
from dataclasses import dataclass, field
from operator import attrgetter

from torch import Tensor

from offload.device.arithmetic.checksums import SummedMemory
from offload.device.arithmetic.rules import Hyper
from offload.device.lane import Job
from offload.device.pending import Pending
from offload.layout import Piece
from offload.model.chunk import Chunk
from offload.model.flat import ParameterInfo
from offload.planning.route import Memory
from offload.ranks.rendezvous import Request
from offload.tiers.staging import Lease


@dataclass(slots=True, eq=False)
class PieceUpdate:
    """One slot's part in a chunk, with what its update needs to know. Nothing of it changes."""

    info: ParameterInfo
    piece: Piece
    hyper: Hyper
    step: int


@dataclass(slots=True, eq=False)
class ChunkUpdate:
    """One chunk's update. `factor` multiplies each gradient as it is read: un-scaling and clipping in one.

    Fixed when it is enqueued: chunk, factor, and either the numbers and the step of all its pieces (`numbers`) or else what is
    updated of it (`some`). Written by the lane:

    started    its record is read ahead, or need not be
    source     its record, where what the update makes of it is written to another place
    lease      the buffer of its record on the way from the store and back; `reading`: the transfer into it
    summed     of the record in hand, where the update takes the checksums of what was read and is written
    failure    of reading ahead: raised by the update that needs what was not read
    applied    record and values are updated; written to their stores after that

    Written by the thread that drives the model:

    early      it may have to be undone: the record that it finds stays as it is
    cancelled  the lane is to leave it out, if it is not at it yet
    """

    chunk: Chunk
    factor: float
    numbers: tuple[Hyper, int] | None
    some: list[PieceUpdate] = field(default_factory=list)
    started: bool = False
    early: bool = False
    cancelled: bool = False
    applied: bool = False
    source: Tensor | None = None
    lease: Lease | None = None
    reading: Pending | None = None
    summed: SummedMemory | None = None
    failure: Exception | None = None

    @property
    def updates_every_slot(self) -> bool:
        return self.numbers is not None or len(self.some) == len(self.chunk.pieces)

    @property
    def pieces(self) -> list[PieceUpdate]:
        """What is updated of it."""
        if self.numbers is None:
            return self.some
        return [PieceUpdate(info, piece, *self.numbers) for info, piece in self.chunk.pieces]

    @property
    def only_pieces(self) -> list[Piece]:
        """Where that lies."""
        return self.chunk.only_pieces if self.numbers is not None else [one.piece for one in self.some]

    def anew(self) -> ChunkUpdate:
        """The same, not begun."""
        return ChunkUpdate(self.chunk, self.factor, self.numbers, self.some)


@dataclass(slots=True, eq=False)
class UnitUpdate:
    """Written by `Updates` in the thread that drives the model; `published` by the lane, complete once `job` has settled.

    chunks     in order
    run        what the lane does for it
    memory     in which it computes: that of the unit's route, or the device's, where its records visit (`RecordsOnDevice`)
    job        settles when the lane is done with all of them; None: the lane does not have it yet
    published  what use of the new values waits for beyond that
    spreading  where parameters are whole on every rank and each updates its shard: brings the others'
    """

    chunks: Sequence[ChunkUpdate]
    run: Job
    memory: Memory
    job: Pending | None = None
    published: list[Pending] = field(default_factory=list)
    spreading: Request | None = None

    @property
    def is_running(self) -> bool:
        """Whether the lane has it and is not done with it."""
        return self.job is not None and not self.job.done()


@dataclass(frozen=True, slots=True, eq=False)
class EarlyUpdate:
    """`updated`: the parameters that had a gradient; the unit may have others."""

    updated: Sequence[ParameterInfo]
    updates: Sequence[ChunkUpdate]

    @property
    def chunks(self) -> list[Chunk]:
        return [update.chunk for update in self.updates]


_NUMBERS_OF = attrgetter("group_index", "step")


def chunk_updates(chunks: Sequence[Chunk], updated: Set[int], hypers: Mapping[int, Hyper], factor: float) -> list[ChunkUpdate]:
    """The update of the parameters with these indices, which have their new step, by chunks; `hypers`: the numbers of each
    group. `factor` as in `ChunkUpdate`."""
    updates = []
    for chunk in chunks:
        found = set(map(_NUMBERS_OF, chunk.infos)) if chunk.indices <= updated else set()
        if len(found) == 1:
            group_index, step = found.pop()
            updates.append(ChunkUpdate(chunk, factor, (hypers[group_index], step)))
            continue
        pieces = [(info, piece) for info, piece in chunk.pieces if info.index in updated]
        if pieces:
            some = [PieceUpdate(info, piece, hypers[info.group_index or 0], info.step) for info, piece in pieces]
            updates.append(ChunkUpdate(chunk, factor, None, some))
    return updates
