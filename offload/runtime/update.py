"""The optimizer step, chunk by chunk: read record k+1, Adam on k, write k-1, at once.

    enqueue   at step(): what every chunk will get (gradient pieces, hyper-parameters, step counts), in the order in
              which the next forward needs the units; nothing of it can change any more
    launch    hands one unit's chunks to the update lane; the lane reads ahead beyond them while buffers last
    finish    waits until a unit's new parameters are in place

A unit between `enqueue` and `finish` is in the shard state UPDATING (`offload.runtime.shard_state`).
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field

from torch import Tensor

from offload.device import kernels
from offload.device.accelerator import Accelerator
from offload.device.kernels import AdamHyper, AdamSegment
from offload.device.lane import InlineLane
from offload.device.pending import Pending
from offload.layout import Piece
from offload.runtime.flats import ChunkOf, ParameterInfo, Unit
from offload.runtime.gradients import Gradients
from offload.runtime.places import Record, RecordPlaces
from offload.runtime.sinks import ParameterSink
from offload.runtime.timeline import Timeline
from offload.tiers.staging import Lease, StagingPool

RECORDS = "optimizer records"
RECORDS_ON_DEMAND = "optimizer records out of order"


@dataclass(frozen=True, slots=True)
class PieceUpdate:
    """One slot's part in a chunk, with what its update needs to know."""

    info: ParameterInfo
    piece: Piece
    hyper: AdamHyper
    step: int


@dataclass(slots=True, eq=False)
class ChunkUpdate:
    """One chunk's update. `factor` multiplies each gradient as it is read: un-scaling and clipping in one."""

    chunk_of: ChunkOf
    pieces: list[PieceUpdate]
    factor: float
    started: bool = False
    lease: Lease | None = None
    reading: Pending | None = None
    failure: Exception | None = None

    @property
    def updates_every_slot(self) -> bool:
        return len(self.pieces) == len(self.chunk_of.pieces())


@dataclass(slots=True, eq=False)
class _UnitUpdate:
    unit: Unit
    chunks: list[ChunkUpdate]
    job: Pending | None = None
    published: list[Pending] = field(default_factory=list)


class Updates:
    """The updates that are enqueued and not finished. The public methods belong to the thread that drives the model."""

    def __init__(
        self,
        records: RecordPlaces,
        gradients: Gradients,
        sink: ParameterSink,
        pool: StagingPool,
        accelerator: Accelerator,
        timeline: Timeline,
    ) -> None:
        self._records, self._gradients, self._sink, self._pool = records, gradients, sink, pool
        self._accelerator, self._timeline = accelerator, timeline
        # On the device an update is a launch in the order of compute, not work for a thread of the host.
        self._lane = InlineLane() if records.on_device else accelerator.host_lane("update", waits_for_io=not records.in_memory)
        self._units: dict[int, _UnitUpdate] = {}
        self._ahead: deque[ChunkUpdate] = deque()

    @property
    def needs_residency(self) -> bool:
        """Whether a unit must be resident before it is launched."""
        return self._sink.needs_residency

    @property
    def pending_units(self) -> list[int]:
        """Indices of the units whose parameters are not yet those of the last step, in the enqueued order."""
        return list(self._units)

    def is_pending(self, unit_index: int) -> bool:
        return unit_index in self._units

    def enqueue(self, unit: Unit, chunks: list[ChunkUpdate]) -> None:
        """Add a unit's update. Its gradients belong to the update from now on."""
        if unit.index in self._units:
            raise AssertionError(f"unit {unit.name} is updated twice at once")
        self._units[unit.index] = _UnitUpdate(unit, chunks)
        if not self._records.in_memory:
            self._ahead.extend(chunks)

    def read_ahead(self) -> None:
        """Start reading the first records before any unit is launched."""
        if self._ahead:
            self._lane.submit(self._read_ahead)

    def launch(self, unit_index: int) -> Pending:
        """Hand the unit's update to the lane, once; settles when its new parameters are in place."""
        update = self._units[unit_index]
        if update.job is None:
            update.job = self._lane.submit(lambda: self._run(update))
        return update.job

    def finish(self, unit_index: int) -> None:
        """Wait until the unit's update ran, if it has one; raise its failure."""
        if unit_index in self._units:
            job = self.launch(unit_index)
            with self._timeline.waiting("update"):
                job.wait()
            for pending in self._units.pop(unit_index).published:
                self._accelerator.join(pending)

    def close(self) -> None:
        self._lane.close()

    # ---- on the lane ---------------------------------------------------------------------------------------------

    def _run(self, update: _UnitUpdate) -> None:
        for chunk_update in update.chunks:
            if not chunk_update.started:
                self._start_reading(chunk_update, self._lease_now())
            self._read_ahead()
            update.published.append(self._apply(chunk_update))

    def _lease_now(self) -> Lease | None:
        if self._records.in_memory:
            return None
        return self._pool.try_lease(RECORDS) or self._pool.lease(RECORDS_ON_DEMAND)

    def _read_ahead(self) -> None:
        """Read what comes next in the enqueued order, as far as there are buffers."""
        while self._ahead:
            if not self._ahead[0].started:
                lease = self._pool.try_lease(RECORDS)
                if lease is None:
                    return
                self._start_reading(self._ahead[0], lease)
            self._ahead.popleft()

    def _start_reading(self, chunk_update: ChunkUpdate, lease: Lease | None) -> None:
        chunk_update.started = True
        chunk_update.lease = lease
        chunk_of = chunk_update.chunk_of
        try:
            if lease is not None:
                chunk_update.reading = self._records.read(chunk_of, lease.tensor[: self._records.nbytes(chunk_of)])
            self._gradients.prefetch(chunk_of)
        except Exception as error:
            # Reading ahead is nobody's errand: the failure waits for the update that needs what was not read.
            chunk_update.failure = error

    def _apply(self, chunk_update: ChunkUpdate) -> Pending:
        chunk_of, lease = chunk_update.chunk_of, chunk_update.lease
        if chunk_update.failure is not None:
            raise chunk_update.failure
        with self._timeline.lane_waiting("read records"):
            if chunk_update.reading is not None:
                chunk_update.reading.wait()
            gradients = self._gradients.open(chunk_of, [piece.piece for piece in chunk_update.pieces])
        has_master = self._records.has_master(chunk_of)
        with self._timeline.lane_waiting("read parameters"):
            values = self._sink.begin(chunk_of, keeps_old=not has_master or not chunk_update.updates_every_slot)
        buffer = lease.tensor if lease is not None else self._records.view(chunk_of)
        assert buffer is not None
        record = self._records.over(chunk_of, buffer)
        with self._timeline.lane_working("adam"):
            pairs = zip(chunk_update.pieces, gradients, strict=True)
            kernels.adam([_segment(chunk_update, piece, record, gradient, values) for piece, gradient in pairs])
        self._gradients.release(chunk_of)
        published = self._sink.commit(chunk_of, values, [piece.piece for piece in chunk_update.pieces])
        if lease is not None:
            chunk_update.lease = None
            lease.release(after=self._records.write(chunk_of, buffer[: self._records.nbytes(chunk_of)]))
        return published


def _segment(update: ChunkUpdate, piece: PieceUpdate, record: Record, gradient: Tensor, values: Tensor) -> AdamSegment:
    low, high = piece.piece.start - update.chunk_of.chunk.start, piece.piece.stop - update.chunk_of.chunk.start
    return AdamSegment(
        grad=gradient,
        master=values[low:high] if record.master is None else record.master[low:high],
        exp_avg=record.exp_avg[low:high],
        exp_avg_sq=record.exp_avg_sq[low:high],
        emit=None if record.master is None else values[low:high],
        hyper=piece.hyper,
        step=piece.step,
        grad_factor=update.factor,
    )
