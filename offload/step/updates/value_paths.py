# SPDX-License-Identifier: Apache-2.0
"""Where an update finds a chunk's parameter values and where it leaves the new ones: one way for each `ValuePath`.

`begin` gives the values [chunk.numel] in the parameters' dtype, in memory that the update's kernel can
address; `commit` brings what the update wrote there to the parameters' home. Where the parameters are (a part of) their
own master the values are read and written; else they are only written, and only where a slot was updated.

Least I/O with split states: the record leaves the bf16 parameter out, and the update takes it from its home. Where the unit
is resident for the next forward anyway (`ValuesResident`) that costs nothing; from a store it is one read of 2 bytes per
parameter, where a copy in the record would cost a read and a write of 2.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable
from enum import Enum
from functools import partial

import torch

from offload.device.accelerator import Accelerator
from offload.device.pending import Pending, Settled
from offload.layout import Piece
from offload.model.chunk import Chunk
from offload.planning.budget import READ_AHEAD
from offload.planning.purposes import UPDATED_PARAMETERS
from offload.planning.route import Memory, Route, ValuePath
from offload.step.chunk_stores import ParameterStore
from offload.step.updates.tools import UpdateTools
from offload.tiers.staging import Lease, StagingPool

_OVER = Settled()


class ValuesNeeded(Enum):
    """Which of a chunk's present values an update needs."""

    NONE = "none"
    """It overwrites every slot and reads none."""
    REST = "rest"
    """It reads none, but leaves some slots as they are."""
    ALL = "all"
    """It reads them."""


class ValueAccess(ABC):
    """See the module. One chunk is between `begin` and `commit` at a time, on the update's thread; more where it `stays`."""

    def is_at_hand(self, chunk: Chunk) -> bool:
        """Whether `begin` waits for nothing, as far as is known at once."""
        return False

    def stays(self, chunk: Chunk) -> bool:
        """Whether `begin` gives memory that is the chunk's alone, so that several may be between `begin` and `commit`."""
        return False

    def read_ahead(self, chunk: Chunk) -> bool:
        """Start reading values of which a later `begin` will need all, once. False where no buffer is free for them now."""
        return True

    def forget(self, chunk: Chunk) -> None:  # noqa: B027 - as above
        """There will be no `begin`: let go of what was read ahead."""

    @abstractmethod
    def begin(self, chunk: Chunk, old: ValuesNeeded) -> torch.Tensor:
        """The values; `old` says what of the present ones must be there."""

    def verified(self, chunk: Chunk, values: torch.Tensor) -> torch.Tensor | None:
        """What `commit` writes to a store that wants its checksums, uint8, where it does."""
        return None

    @abstractmethod
    def commit(self, chunk: Chunk, values: torch.Tensor, pieces: list[Piece], sums: torch.Tensor | None = None) -> Pending:
        """Publish the values of `pieces`. Settles when device memory may be used or fetched again. `sums`: of `verified`.

        Writes to a store are not part of that: `ParameterStore` orders every read after them.
        """

    def close(self) -> None:  # noqa: B027 - as above
        """Let go of memory that is others'."""


class ValuesInPlace(ValueAccess):
    """The flat lies for good where the kernel can address it."""

    def is_at_hand(self, chunk: Chunk) -> bool:
        return True

    def stays(self, chunk: Chunk) -> bool:
        return True

    def begin(self, chunk: Chunk, old: ValuesNeeded) -> torch.Tensor:
        return chunk.values

    def commit(self, chunk: Chunk, values: torch.Tensor, pieces: list[Piece], sums: torch.Tensor | None = None) -> Pending:
        return _OVER


class ValuesResident(ValueAccess):
    """The unit is resident in memory that the kernel can address; its home is a store."""

    def __init__(self, parameter_store: ParameterStore) -> None:
        self._parameter_store = parameter_store

    def begin(self, chunk: Chunk, old: ValuesNeeded) -> torch.Tensor:
        self._parameter_store.settle_fetch(chunk)
        self._parameter_store.settle_write(chunk)  # of the last update, from this very memory
        return chunk.values

    def verified(self, chunk: Chunk, values: torch.Tensor) -> torch.Tensor | None:
        return chunk.bytes if self._parameter_store.verifies(chunk) else None

    def commit(self, chunk: Chunk, values: torch.Tensor, pieces: list[Piece], sums: torch.Tensor | None = None) -> Pending:
        self._parameter_store.write(chunk, chunk.bytes, sums)
        return _OVER


class ReadAhead:
    """Staging buffers into which the present values of chunks come before their update: of READ_AHEAD at once, whatever path
    they take, so that one is left for the chunk in hand. Owned by the lane of the host's updates."""

    def __init__(self, pool: StagingPool) -> None:
        self._pool = pool
        self._coming: dict[Chunk, tuple[Lease, Pending]] = {}
        self._in_hand: Lease | None = None

    def __len__(self) -> int:
        return len(self._coming)

    def start(self, chunk: Chunk, bring: Callable[[torch.Tensor], Pending]) -> bool:
        """Have `bring` fill a buffer, uint8 [chunk.nbytes]. False where none is left."""
        if chunk in self._coming:
            return True
        lease = self._pool.try_lease(UPDATED_PARAMETERS) if len(self._coming) < READ_AHEAD else None
        if lease is None:
            return False
        self._coming[chunk] = lease, bring(lease.tensor[: chunk.nbytes])
        return True

    def take(self, chunk: Chunk, bring: Callable[[torch.Tensor], Pending] | None) -> torch.Tensor:
        """The values that came, now; where they were not read ahead `bring` fills a buffer, if it is given. Until `release`."""
        lease, coming = self._coming.pop(chunk, (None, None))
        if lease is None:
            lease = self._pool.lease(UPDATED_PARAMETERS)
            coming = bring(lease.tensor[: chunk.nbytes]) if bring is not None else None
        if coming is not None:
            coming.wait()
        self._in_hand = lease
        return chunk.values_in(lease.tensor)

    def release(self, after: Pending) -> None:
        """The buffer that was taken is free when `after` has settled."""
        assert self._in_hand is not None
        lease, self._in_hand = self._in_hand, None
        lease.release(after=after)

    def forget(self, chunk: Chunk) -> None:
        """It will not be taken."""
        coming = self._coming.pop(chunk, None)
        if coming is not None:
            lease, reading = coming
            reading.wait()
            lease.release()


class ValuesInStore(ValueAccess):
    """The home is a store in host memory or behind it; device memory is out of the host kernel's reach."""

    def __init__(self, parameter_store: ParameterStore, ahead: ReadAhead) -> None:
        self._parameter_store, self._ahead = parameter_store, ahead
        self._views: dict[Chunk, tuple[torch.Tensor, torch.Tensor]] = {}
        """By chunk: its memory in the store, and its values there."""

    def is_at_hand(self, chunk: Chunk) -> bool:
        return chunk in self._views and self._parameter_store.is_copied(chunk)

    def stays(self, chunk: Chunk) -> bool:
        return self._parameter_store.view(chunk) is not None

    def read_ahead(self, chunk: Chunk) -> bool:
        return self._parameter_store.view(chunk) is not None or self._ahead.start(
            chunk, partial(self._parameter_store.read, chunk)
        )

    def forget(self, chunk: Chunk) -> None:
        self._ahead.forget(chunk)

    def begin(self, chunk: Chunk, old: ValuesNeeded) -> torch.Tensor:
        self._parameter_store.settle_copies(chunk)
        stored = self._parameter_store.view(chunk)
        if stored is None:
            reads = old is not ValuesNeeded.NONE
            return self._ahead.take(chunk, partial(self._parameter_store.read, chunk) if reads else None)
        known = self._views.get(chunk)
        if known is None or known[0] is not stored:
            known = self._views[chunk] = stored, chunk.values_in(stored)
        return known[1]

    def verified(self, chunk: Chunk, values: torch.Tensor) -> torch.Tensor | None:
        return values.view(torch.uint8) if chunk not in self._views and self._parameter_store.verifies(chunk) else None

    def commit(self, chunk: Chunk, values: torch.Tensor, pieces: list[Piece], sums: torch.Tensor | None = None) -> Pending:
        if chunk not in self._views:
            self._ahead.release(after=self._parameter_store.write(chunk, values.view(torch.uint8), sums))
        return _OVER

    def close(self) -> None:
        self._views = {}


class ValuesCopiedIn(ValueAccess):
    """The home is device memory and the kernel runs on the host: new values go over by H2D, slot by slot."""

    def __init__(self, accelerator: Accelerator, parameter_store: ParameterStore, ahead: ReadAhead) -> None:
        self._accelerator, self._parameter_store, self._ahead = accelerator, parameter_store, ahead

    def read_ahead(self, chunk: Chunk) -> bool:
        return self._ahead.start(chunk, partial(self._bring, chunk))

    def forget(self, chunk: Chunk) -> None:
        self._ahead.forget(chunk)

    def begin(self, chunk: Chunk, old: ValuesNeeded) -> torch.Tensor:
        # Of others than all of the old values none are wanted: only updated slots are copied over.
        return self._ahead.take(chunk, partial(self._bring, chunk) if old is ValuesNeeded.ALL else None)

    def _bring(self, chunk: Chunk, into: torch.Tensor) -> Pending:
        return self._accelerator.copy_out_beside_compute(into, self._home(chunk).view(torch.uint8))

    def commit(self, chunk: Chunk, values: torch.Tensor, pieces: list[Piece], sums: torch.Tensor | None = None) -> Pending:
        last = _copied(self._accelerator.copy_in, self._home(chunk), values, chunk, pieces)
        self._ahead.release(after=last)
        return last

    def _home(self, chunk: Chunk) -> torch.Tensor:
        stored = self._parameter_store.view(chunk)
        assert stored is not None
        return chunk.values_in(stored)


class ValuesCopiedOut(ValueAccess):
    """The kernel runs on the device, the home is a store of the host: new values go over by D2H."""

    def __init__(self, accelerator: Accelerator, parameter_store: ParameterStore, pool: StagingPool) -> None:
        self._accelerator = accelerator
        self._parameter_store = parameter_store
        self._pool = pool
        self._leaving: Pending = _OVER
        """The last copy home, while the next values are updated."""

    def begin(self, chunk: Chunk, old: ValuesNeeded) -> torch.Tensor:
        values = torch.empty(chunk.numel, dtype=chunk.flat.dtype, device=self._accelerator.device)
        if old is ValuesNeeded.ALL:  # the rest is never wanted: only updated slots are copied home
            self._bring(chunk, values.view(torch.uint8))
        return values

    def _bring(self, chunk: Chunk, into: torch.Tensor) -> None:
        self._accelerator.copy_in_after_compute()  # which may still be using the memory that the allocator handed out
        stored = self._parameter_store.view(chunk)
        if stored is not None:
            self._accelerator.join(self._accelerator.copy_in(into, stored[: into.numel()]))
            return
        lease = self._pool.lease(UPDATED_PARAMETERS)
        content = lease.tensor[: into.numel()]
        self._parameter_store.read(chunk, content).wait()
        copied = self._accelerator.copy_in(into, content)
        lease.release(after=copied)
        self._accelerator.join(copied)

    def commit(self, chunk: Chunk, values: torch.Tensor, pieces: list[Piece], sums: torch.Tensor | None = None) -> Pending:
        self._parameter_store.settle_copies(chunk)
        stored = self._parameter_store.view(chunk)
        if stored is not None:
            last = _copied(self._accelerator.copy_out, chunk.values_in(stored), values, chunk, pieces)
            self._parameter_store.writing(chunk, last)
            before, self._leaving = self._leaving, last
            before.wait()
            return _OVER
        lease = self._pool.lease(UPDATED_PARAMETERS)
        content = lease.tensor[: chunk.nbytes]
        if sum(piece.numel for piece in pieces) < chunk.numel:
            self._parameter_store.read(chunk, content).wait()
        _copied(self._accelerator.copy_out, chunk.values_in(content), values, chunk, pieces).wait()
        lease.release(after=self._parameter_store.write(chunk, content))
        return _OVER

    def close(self) -> None:
        leaving, self._leaving = self._leaving, _OVER  # it keeps the memory
        leaving.wait()


class ValuesInUnit(ValuesInPlace):
    """The kernel runs on the device, and the unit is resident there, whatever its route says: the values stay where the next
    forward finds them. Their home, if it is elsewhere, is behind until somebody asks for them."""

    def commit(self, chunk: Chunk, values: torch.Tensor, pieces: list[Piece], sums: torch.Tensor | None = None) -> Pending:
        chunk.parameters.behind = chunk.route.has_store
        return _OVER


def _copied(
    copy: Callable[[torch.Tensor, torch.Tensor], Pending],
    target: torch.Tensor,
    source: torch.Tensor,
    chunk: Chunk,
    pieces: Iterable[Piece],
) -> Pending:
    """Pieces of the chunk's values, [chunk.numel], by `copy`, whose copies settle in order: the last one. What lies side by
    side goes in one copy."""
    runs: list[slice] = []
    for piece in pieces:
        part = chunk.part(piece)
        if runs and runs[-1].stop == part.start:
            part = slice(runs.pop().start, part.stop)
        runs.append(part)
    last: Pending = _OVER
    for run in runs:
        last = copy(target[run], source[run])
    return last


def value_accesses(tools: UpdateTools, routes: Iterable[Route]) -> dict[tuple[ValuePath, Memory], ValueAccess]:
    """One for each path of these routes, in each memory that their updates compute in."""
    accelerator, pool, parameter_store = tools.accelerator, tools.pool, tools.parameter_store
    ahead = ReadAhead(pool)
    made: dict[ValuePath, Callable[[], ValueAccess]] = {
        ValuePath.IN_PLACE: ValuesInPlace,
        ValuePath.RESIDENT: lambda: ValuesResident(parameter_store),
        ValuePath.STORE: lambda: ValuesInStore(parameter_store, ahead),
        ValuePath.COPY_IN: lambda: ValuesCopiedIn(accelerator, parameter_store, ahead),
        ValuePath.COPY_OUT: lambda: ValuesCopiedOut(accelerator, parameter_store, pool),
    }
    return {(path, memory): made[path]() for path, memory in {(route.value_path, route.update_in) for route in routes}}
