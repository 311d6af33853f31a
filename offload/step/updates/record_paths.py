# SPDX-License-Identifier: Apache-2.0
"""How an update gets at a chunk's record, and leaves the new one: one way for each `RecordPath`.

`begin` gives the record's bytes, uint8, in memory that the update's kernel can address; `commit` brings what the update wrote
there to the record's home. `reserve` and `read` may come long before: what is read ahead waits in the `ChunkUpdate`.
"""

from __future__ import annotations

from abc import ABC, abstractmethod

from torch import Tensor

from offload.device.arithmetic.checksums import SummedMemory
from offload.model.update import ChunkUpdate
from offload.planning.purposes import RECORDS, RECORDS_ON_DEMAND
from offload.planning.route import RecordPath
from offload.step.timeline import RECORD_WRITES
from offload.step.updates.tools import UpdateTools


class RecordAccess(ABC):
    """See the module. The lane's thread alone calls it."""

    reads_ahead = False
    """Whether there is anything to `reserve` and `read`."""

    def reserve(self, update: ChunkUpdate, *, now: bool) -> bool:
        """Take memory to read the record into. False: there is none; `now`: wait until there is."""
        return True

    def read(self, update: ChunkUpdate) -> None:  # noqa: B027 - most records are at hand
        """Start reading into what was reserved."""

    def forget(self, update: ChunkUpdate) -> None:  # noqa: B027 - as above
        """There will be no `begin`: let go of what was reserved."""

    @abstractmethod
    def begin(self, update: ChunkUpdate, *, sums: bool = False) -> Tensor:
        """The record, at least its bytes. Waits for what was read. `sums`: the update can take checksums (its `summed`)."""

    def commit(self, update: ChunkUpdate, record: Tensor) -> None:  # noqa: B027 - as above
        """The update wrote to what `begin` gave. Readers find it by `RecordStore`, which has them wait as long as they must."""


class RecordsInPlace(RecordAccess):
    """The kernel addresses the record where it lies. An update that may have to be undone writes to the second place, and reads
    in the first."""

    def __init__(self, tools: UpdateTools) -> None:
        self._records = tools.records

    def begin(self, update: ChunkUpdate, *, sums: bool = False) -> Tensor:
        record = self._records.view(update.chunk)
        assert record is not None, "a record in memory has its place there"
        other = self._records.second_view(update.chunk) if update.early else None
        if other is None:
            return record
        assert update.updates_every_slot, "what is not updated would not be in the second place"
        update.source = record
        return other

    def commit(self, update: ChunkUpdate, record: Tensor) -> None:
        if update.source is not None:
            update.source = None
            self._records.turn(update.chunk)


class RecordsFromFile(RecordAccess):
    """The record is read into a staging buffer, and written from there."""

    reads_ahead = True

    def __init__(self, tools: UpdateTools) -> None:
        self._records, self._pool, self._timeline = tools.records, tools.pool, tools.timeline

    def reserve(self, update: ChunkUpdate, *, now: bool) -> bool:
        update.lease = self._pool.try_lease(RECORDS)
        if update.lease is None and now:
            with self._timeline.lane_waiting(RECORD_WRITES):
                update.lease = self._pool.lease(RECORDS_ON_DEMAND)
        return update.lease is not None

    def read(self, update: ChunkUpdate) -> None:
        assert update.lease is not None
        chunk = update.chunk
        update.reading = self._records.read(chunk, update.lease.tensor[: self._records.nbytes(chunk)])

    def forget(self, update: ChunkUpdate) -> None:
        lease, update.lease = update.lease, None
        if lease is not None:
            if update.reading is not None:
                update.reading.wait()
            lease.release()

    def begin(self, update: ChunkUpdate, *, sums: bool = False) -> Tensor:
        lease, reading, chunk = update.lease, update.reading, update.chunk
        assert lease is not None
        if sums and self._records.verifies(chunk):
            update.summed = SummedMemory(lease.tensor[: self._records.nbytes(chunk)], reading, stored=True)
        elif reading is not None:
            reading.wait()
        return lease.tensor

    def commit(self, update: ChunkUpdate, record: Tensor) -> None:
        lease, update.lease = update.lease, None
        assert lease is not None
        summed, update.summed = update.summed, None
        written = record[: self._records.nbytes(update.chunk)]
        sums = summed.after if summed is not None else None
        lease.release(after=self._records.write(update.chunk, written, sums))


def record_accesses(tools: UpdateTools) -> dict[RecordPath, RecordAccess]:
    """One for each path."""
    return {RecordPath.IN_PLACE: RecordsInPlace(tools), RecordPath.FILE: RecordsFromFile(tools)}
