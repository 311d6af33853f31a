# SPDX-License-Identifier: Apache-2.0
"""What is known of one chunk while the engine runs: where its states lie, and what is under way there.

    Chunk          the granule of I/O, of gradients and of the optimizer step
    Place          where one of its states (parameters, optimizer record) lies in a store
    ChunkGradient  its gradient between backward and update

The actors of `offload.step` do things to chunks and keep queues of them; what one of them has to remember of a chunk lies
here. Each class says who writes its fields.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import torch

from offload.device.arithmetic.step_table import StepTable
from offload.device.pending import AllOf, Pending
from offload.layout import ChunkLayout, Extent, Piece
from offload.planning.route import RecordPath, Route
from offload.tiers.staging import Lease, Released
from offload.tiers.store import Store

if TYPE_CHECKING:
    from offload.model.flat import Flat, ParameterInfo


@dataclass(eq=False, slots=True)
class Place:
    """Where one state of a chunk lies in its store. Written by the `ChunkStore` of that state, transfers under its lock.

    store    that of its tier, and
    extent   where it is read and written there; None: the state has no bytes, or no store
    other    the extent that is written next, where the last write must be undoable: the two take turns
    former   in memory: where what is overwritten in place is kept as long as that may have to be undone
    write    its last write, until somebody saw it end. Every read and every further write comes after it
    fetch    a read of it into its flat, until somebody saw it end
    copy     an H2D copy from where it lies in the store: who writes there in place waits for it
    behind   what it holds is newer on the device, and comes home as soon as somebody asks the store for it. Written by who has
             it there
    """

    store: Store | None = None
    extent: Extent | None = None
    other: Extent | None = None
    former: Extent | None = None
    write: Pending | None = None
    fetch: Pending | None = None
    copy: Pending | None = None
    behind: bool = False


@dataclass(slots=True, eq=False)
class ChunkGradient:
    """Owned by `ChunkGradients` and what is behind it, under its lock.

    extent         its extent in `store`, as one backward leaves it. It `is_narrow` where that is less than fp32, in which sums
                   are kept. Where several micro-batches are expected, and it does not spill, it is fp32 from the first one on
    wide_extents   those in `wide_store`, one after the other, in which sums are else: from the first second micro-batch on, or
                   where several are expected `extent` and what follows it
    buffer         [chunk.numel] where it lies now; `lease` if that is a staging buffer
    spilled        the dtype in which it lies in the store alone; `spilled_from`: the buffer that it left, where it may still be
    checksums      of the buffer's blocks, where they were taken as it was filled (`offload.device.arithmetic.checksums`)
    live           indices of the parameters whose gradient is there, or coming
    squares        by parameter index: the sums of squares of its piece; None: they are on the device. Written as pieces come,
                   also by the lane; dropped by the thread that drives the model
    adopted        by parameter index: pieces that lie in autograd's own tensors instead of the buffer
    jobs           what the buffer waits for before it may be read
    transfer       its last transfer between buffer and store
    opened         an update is reading it
    held           its update may be undone, and must find it again then; `applied`: that update has read it
    """

    chunk: Chunk
    extent: Extent
    is_narrow: bool
    wide_extents: tuple[Extent, ...] = ()
    store: Store | None = None
    wide_store: Store | None = None
    buffer: torch.Tensor | None = None
    lease: Lease | None = None
    spilled: torch.dtype | None = None
    spilled_from: Released | None = None
    checksums: torch.Tensor | None = None
    live: set[int] = field(default_factory=set)
    squares: dict[int, torch.Tensor | None] = field(default_factory=dict)
    adopted: dict[int, torch.Tensor] = field(default_factory=dict)
    jobs: list[Pending] = field(default_factory=list)
    transfer: Pending | None = None
    opened: bool = False
    held: bool = False
    applied: bool = False

    @property
    def is_complete(self) -> bool:
        """Whether every parameter of the chunk has a gradient."""
        return len(self.live) == len(self.chunk.pieces)

    @property
    def arriving(self) -> Pending | None:
        """What the buffer still waits for before it may be read."""
        jobs = [job for job in self.jobs if not job.done()]
        return AllOf(jobs) if jobs else None

    def settle(self) -> None:
        """Wait until the buffer may be read. By the thread of the updates and that of the model, maybe at once: so both wait,
        and nothing is taken from the list before it is over."""
        for job in self.jobs:
            job.wait()
        self.jobs = []


@dataclass(eq=False, slots=True)
class Chunk:
    """A chunk of a flat. Made once, with its flat; two of them are the same chunk only if they are the same object.

    gradient    None where the chunk is not trained
    visiting    its record, uint8, while that lies on the device. Written by `RecordsOnDevice`
    record_path how its update gets at its record. Written by the `RecordStore` when it is made
    step_table  what the native step of the chunk is told, made at its first. Written by `ChunkArithmetic` on the
                update's lane
    """

    flat: Flat
    layout: ChunkLayout
    pieces: tuple[tuple[ParameterInfo, Piece], ...]
    parameters: Place = field(default_factory=Place)
    record: Place = field(default_factory=Place)
    record_path: RecordPath = RecordPath.IN_PLACE
    gradient: ChunkGradient | None = None
    visiting: torch.Tensor | None = None
    step_table: StepTable | None = None
    index: int = field(init=False)
    """Among the chunks of its flat."""
    start: int = field(init=False)
    """In elements of the flat, as `stop`."""
    stop: int = field(init=False)
    numel: int = field(init=False)
    nbytes: int = field(init=False)
    """Of its parameters."""
    infos: list[ParameterInfo] = field(init=False)
    """The parameters that have a piece in it; `indices`: theirs."""
    only_pieces: list[Piece] = field(init=False)
    indices: frozenset[int] = field(init=False)
    positions: dict[int, int] = field(init=False)
    """Of its pieces, by the parameter's index."""

    def __post_init__(self) -> None:
        layout = self.layout
        self.index, self.start, self.stop, self.numel = layout.index, layout.start, layout.stop, layout.numel
        self.nbytes = self.numel * self.flat.layout.itemsize
        self.infos, self.only_pieces = [info for info, _ in self.pieces], [piece for _, piece in self.pieces]
        self.positions = {info.index: position for position, info in enumerate(self.infos)}
        self.indices = frozenset(self.positions)

    def __repr__(self) -> str:
        return f"<Chunk [{self.start}, {self.stop}) of parameters {', '.join(info.fqn for info, _ in self.pieces)}>"

    @property
    def route(self) -> Route:
        """Of its unit."""
        return self.flat.route

    @property
    def bytes(self) -> torch.Tensor:
        """Its parameters in the memory of the flat: uint8 [nbytes]."""
        itemsize = self.flat.layout.itemsize
        return self.flat.memory.flat[self.start * itemsize : self.stop * itemsize]

    @property
    def values(self) -> torch.Tensor:
        """The same in the parameters' dtype: [numel]."""
        return self.flat.values[self.start : self.stop]

    def values_in(self, memory: torch.Tensor) -> torch.Tensor:
        """Its parameters in memory (uint8) that begins with them: [numel] in their dtype."""
        return memory[: self.nbytes].view(self.flat.dtype)

    def part(self, piece: Piece) -> slice:
        """The piece's elements among the chunk's."""
        return slice(piece.start - self.start, piece.stop - self.start)
